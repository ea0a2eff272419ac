"""The paths that a cluster's front door serves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

DECIDED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
"""What engines do for clients: workers answer, the decider says which."""


def own_paths(models: Iterable[str]) -> tuple[str, ...]:
    """Paths that the decider answers itself, as `GatewaySpec.own` has them; models: names,
    adapters' among them."""
    # A slash in a name makes it more than one segment.
    deep = (f"/v1/models/{name}" for name in models if "/" in name)
    return (
        "/", "/ready", "/metrics", "/v1/nodes", "/v1/nodes/profile", "/v1/tenants", "/v1/route",
        "/v1/decisions", "/v1/decisions/", "/v1/messages/count_tokens", "/v1/models", "/v1/models/",
        "/openapi.json", *deep,
    )  # fmt: skip
