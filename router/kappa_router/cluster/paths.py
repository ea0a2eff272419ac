"""The paths that a cluster's front door serves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kappa.protocol import DECIDED_PATHS, PASSED_PATHS

COUNTED = "/v1/messages/count_tokens"
# About which Envoy asks the decider: those of workers, and those of which it says why there are
# none.
ASKED = (*DECIDED_PATHS, *(path for path in PASSED_PATHS if path != COUNTED))


def own_paths(models: Iterable[str]) -> tuple[str, ...]:
    """Paths that the decider answers itself, as `GatewaySpec.own` has them; models: names,
    adapters' among them."""
    # A slash in a name makes it more than one segment.
    deep = (f"/v1/models/{name}" for name in models if "/" in name)
    return (
        "/", "/ready", "/metrics", "/v1/nodes", "/v1/nodes/profile", "/v1/tenants", "/v1/route",
        "/v1/decisions", "/v1/decisions/", COUNTED, "/v1/models", "/v1/models/",
        "/openapi.json", *deep,
    )  # fmt: skip
