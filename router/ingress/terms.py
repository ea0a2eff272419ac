"""What one request is held to on its way: its tenant's cache, tokens and its own deadline.

Made from a request and its body before anything is decided, and found again wherever the request
goes. `router.ingress.request_path` and `router.ingress.delivery` ask it; the rules are
`router.access.isolation`'s, `router.access.limits`' and `router.access.deadline`'s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from router.access.deadline import HEADER, Deadline, deadline_of, late_workers
from router.access.isolation import cache_salt
from router.access.limits import Lease
from router.access.middleware import arrived_s, lease_of
from router.access.tenants import Tenant
from router.decision import RouteRequest
from router.live.live_router import LiveRouter

_CLOCK_SLACK_S = 0.005
_GIVEN_UP = ("client_gone", "deadline")


@dataclass(slots=True)
class Terms:
    """One request's terms. streamed: whether its answer has begun with its first token."""

    streamed: bool = True
    body_bytes: int = 0
    lease: Lease | None = None
    deadline: Deadline | None = None

    def tokenized(self, prompt_tokens: int, max_tokens: int) -> None:
        """The length of its prompts together is known, or bounded, and that of all its answers.

        Raises:
            ApiError: its tenant has no tokens left, or its deadline has passed.
        """
        now_s = time.monotonic()
        if self.deadline is not None:
            self.deadline.check(now_s)
        if self.lease is not None:
            self.lease.reserve(prompt_tokens, max_tokens, now_s)

    def narrowed(self, live: LiveRouter, routed: RouteRequest) -> RouteRequest:
        """The same request, kept from workers that are predicted to answer after its deadline.

        Raises:
            ApiError: that is all of them, or it has passed.
            NoWorkerError: there is none to ask.
        """
        if self.deadline is None:
            return routed
        now_s = time.monotonic()
        self.deadline.check(now_s)
        estimates = live.explain(routed).estimates
        if estimates is None or not routed.sized:
            return routed
        late = late_workers(self.deadline, estimates, now_s, streamed=self.streamed)
        return replace(routed, exclude=routed.exclude | late) if late else routed

    def patience_s(self, longest_s: float) -> float:
        """Seconds to wait for its first item: no longer than `longest_s`, nor past its deadline.

        Raises:
            ApiError: 504, it has passed.
        """
        if self.deadline is None:
            return longest_s
        now_s = time.monotonic()
        self.deadline.check(now_s)
        return min(longest_s, self.deadline.at_s - now_s)

    @property
    def expired(self) -> bool:
        """Whether its deadline has passed."""
        # A timer may fire a moment before the clock that it was set by says so.
        now_s = time.monotonic() + _CLOCK_SLACK_S
        return self.deadline is not None and now_s >= self.deadline.at_s

    def check(self) -> None:
        """Raises ApiError 504 if its deadline has passed."""
        if self.deadline is not None and self.expired:
            self.deadline.check(self.deadline.at_s)

    def over(self, end: str) -> None:
        """An attempt to serve it ended so; what was computed for a client that would not wait, it
        pays for."""
        if self.lease is not None and end in _GIVEN_UP:
            self.lease.worked = True

    def generated(self, tokens: int) -> None:
        """Output tokens went out to the client."""
        if self.lease is not None:
            self.lease.generated(tokens)


def set_terms(request: Request, body: Any, tenant: Tenant) -> Terms:
    """The terms of a request, kept with it; its body's `cache_salt` becomes its tenant's.

    Raises:
        ApiError: 400, its deadline is none.
    """
    isolate(body, tenant)
    state = request.scope.setdefault("state", {})
    terms = Terms(
        streamed=bool(getattr(body, "stream", False)),
        # As it was read: a body that comes in pieces declares no length.
        body_bytes=int(state.get("body_bytes", 0)),
        lease=lease_of(request),
        deadline=deadline_of(request.headers.get(HEADER, ""), arrived_s(request)),
    )
    state["terms"] = terms
    return terms


def terms_of(request: Request) -> Terms:
    """A request's terms; none to keep for one that was never given any."""
    terms: Terms = request.scope.get("state", {}).get("terms") or Terms()
    return terms


def isolate(body: Any, tenant: Tenant) -> None:
    """Make a body's `cache_salt` its tenant's own, for engine and router alike."""
    salt = cache_salt(tenant, getattr(body, "cache_salt", None))
    if salt is not None:
        body.cache_salt = salt
