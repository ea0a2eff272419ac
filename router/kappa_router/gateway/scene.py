"""What a decider decides about: the servers behind it, whoever runs them.

`kappa route` gives one of servers that exist (`kappa_router.front.scene`), `kappa serve` one of its
workers (`kappa_router.cluster.scene`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kappa_router.api.errors import ApiError
from kappa_router.api.tenants import Tenant
from kappa_router.decision import Decision, RouteRequest

if TYPE_CHECKING:
    from kappa_router.live.live_router import LiveRouter


class Asked(NamedTuple):
    """A request that somebody wants served; request_id: no other that is open has it; digest: names
    its content."""

    request_id: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    tenant: Tenant
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request as a decision needs it.

    max_generated: tokens that all of its answers may have, 0 if it bounds none; streamed: its
    answer comes in events; repeatable: it may be done twice.
    """

    request: RouteRequest
    max_generated: int = 0
    streamed: bool = False
    repeatable: bool = True


class Used(NamedTuple):
    """Tokens that a server says a request took; failed: its engine did while it answered."""

    prompt_tokens: int
    generated_tokens: int
    failed: bool = False


class SceneFlight(Protocol):
    """A request at a server. via: the balancer that chooses the server instead of us; empty: there
    is none."""

    @property
    def decision(self) -> Decision: ...
    @property
    def via(self) -> str: ...


F = TypeVar("F", bound=SceneFlight)


class Scene(Protocol[F]):
    """Servers, and how they differ from others."""

    @property
    def live(self) -> LiveRouter: ...

    @property
    def priced(self) -> Container[str]:
        """Paths that are decided by price; of all others only the load decides."""
        ...

    @property
    def passed(self) -> Container[str]:
        """Paths that are served besides."""
        ...

    async def read(self, asked: Asked) -> Reading:
        """Read a request; may wait. Raises ApiError."""
        ...

    def decide(self, request: RouteRequest, tenant: str) -> F:
        """Choose a server and reserve it; raises NoWorkerError. `ended` follows."""
        ...

    def refused(self, request: RouteRequest, error: ApiError) -> None:
        """It was read, and its client is refused: it is over."""
        ...

    def others(self, flight: F, request: RouteRequest) -> Sequence[str]:
        """Workers that may serve it instead, the best first; none if a balancer chooses."""
        ...

    def address(self, name: str) -> str:
        """Where Envoy reaches a worker or balancer; empty: nowhere."""
        ...

    def headers(self, flight: F) -> Mapping[str, str]:
        """For the server, besides the decider's own; they may differ at the next one."""
        ...

    def arrived(self, flight: F, request: RouteRequest, at: str) -> None:
        """It is at the server with that address, which need not be the one that was chosen; behind
        a balancer at the one that the answer names, if it names any."""
        ...

    def used(self, flight: F, tail: bytes) -> Used | None:
        """Learn from the end of an answer; what it says that it took."""
        ...

    def patience_s(self, flight: F) -> float:
        """For how long its client still waits for a first byte, by its own wish."""
        ...

    async def lives(self, worker: str) -> bool:
        """Find out whether a server that failed a request is alive; one that is not is taken for
        dead from now on."""
        ...

    def ended(self, flight: F, end: str) -> None:
        """It is over at its server (`LiveRouter.release`)."""
        ...

    def over(self, flight: F, end: str, status: int) -> None:
        """It is over for its client, who was answered with that status, 0 if with none."""
        ...
