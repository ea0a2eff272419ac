"""The servers that a decider decides about, ours or others'.

`kappa route` gives one of servers that exist (`kappa_router.front.scene`), `kappa serve` one of its
workers (`kappa_router.cluster.scene`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kappa_router.api.errors import ApiError
from kappa_router.api.tenants import Tenant
from kappa_router.decision import Decision, RouteRequest

if TYPE_CHECKING:
    from kappa_router.live.live_router import LiveRouter


@dataclass(frozen=True, slots=True)
class DeciderRule:
    """The bounds to which a decider holds requests."""

    # Requests open at a time.
    max_queue: int = 4096
    # A streamed answer that has not begun by then is sought elsewhere, another within `answer_s`.
    first_byte_s: float = 60.0
    answer_s: float = 600.0
    # A request is over when Envoy has said nothing about it for this long.
    unheard_s: float = 180.0
    # The servers tell nothing, so Envoy tells how answers end.
    foreign: bool = True
    # Envoy asks about an answer of our own workers that has not begun by then, which goes on.
    late_s: float = 5.0


class Asked(NamedTuple):
    """A request that a client wants served."""

    # No other that is open has it.
    request_id: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    tenant: Tenant
    # Names its content.
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request as a decision needs it."""

    request: RouteRequest
    # Tokens that all its answers may have; 0: no bound.
    max_generated: int = 0
    # Its answer comes in events.
    streamed: bool = False
    # It may be done twice.
    repeatable: bool = True


class Used(NamedTuple):
    """Tokens that a server says a request took."""

    prompt_tokens: int
    generated_tokens: int
    # Its engine failed while it answered.
    failed: bool = False


class SceneFlight(Protocol):
    """A request at a server."""

    decision: Decision
    # The balancer that chooses the server instead of us; empty: there is none.
    via: str


F = TypeVar("F", bound=SceneFlight)


class Scene(Protocol[F]):
    """Servers, and how they differ from others."""

    live: LiveRouter
    # Paths that are decided by price; of all others only the load decides.
    priced: frozenset[str]
    # Paths that are served besides.
    passed: frozenset[str]

    async def read(self, asked: Asked) -> Reading:
        """Read a request; may wait. Raises ApiError."""

    def decide(self, request: RouteRequest) -> F:
        """Choose a server and reserve it; raises NoWorkerError. `ended` follows."""

    def refused(self, request: RouteRequest, error: ApiError) -> None:
        """It was read, and its client is refused: it is over."""

    def others(self, flight: F, request: RouteRequest) -> Sequence[str]:
        """Workers that may serve it instead, the best first; none if a balancer chooses."""

    def address(self, name: str) -> str:
        """The address of a worker or balancer; empty if Envoy cannot reach it."""

    def headers(self, flight: F) -> Mapping[str, str]:
        """Headers for the server, besides the decider's own; they may differ at the next one."""

    def arrived(self, flight: F, request: RouteRequest, at: str) -> None:
        """It is at the server with that address, which need not be the one that was chosen; behind
        a balancer at the one that the answer names, if it names any."""

    def used(self, flight: F, tail: bytes) -> Used | None:
        """Learn from the end of an answer; what it says that it took."""

    def patience_s(self, flight: F) -> float:
        """Seconds that its client still waits for a first byte, by its own wish."""

    async def lives(self, worker: str) -> bool:
        """Find out whether a server that failed a request is alive; one that is not is taken for
        dead from now on."""

    def ended(self, flight: F, end: str) -> None:
        """It is over at its server (`LiveRouter.release`)."""

    def over(self, flight: F, end: str, status: int) -> None:
        """It is over for its client, who was answered with that status, 0 if with none."""
