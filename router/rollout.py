"""How far our routing is trusted with real traffic: watching, a share, all of it. Pure.

`shadow`: ours decides and writes down what it would have done, the present balancer steers.
`canary:N`: ours steers N percent of the conversations, the present one the rest, with ours as a
shadow. `on`: ours steers. Consulted for every request: by a cluster's decider, where the present
balancer is Ray Serve's rule, and by `kappa route`, where it is emulated by one of `PRESENT` or is a
real one in front of the same servers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from router.decision import Choice, Estimates
from router.policy import Policy, Stateless, least

Mode = Literal["shadow", "canary", "on"]
Arm = Literal["kappa", "ray", "present"]

_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Rollout:
    """A mode, the percentage of conversations that ours steers, and who steers the others."""

    mode: Mode
    percent: float = 0.0
    other: Arm = "ray"

    @classmethod
    def parse(cls, text: str, other: Arm = "ray") -> Rollout:
        """Read `shadow`, `canary:N` (0 < N < 100) or `on`; ValueError for anything else."""
        match text:
            case "shadow":
                return cls("shadow", other=other)
            case "on":
                return cls("on", 100.0, other)
        name, _, share = text.partition(":")
        try:
            percent = float(share) if name == "canary" else -1.0
        except ValueError:
            percent = -1.0
        if not 0 < percent < 100:
            raise ValueError(
                f"mode {text!r}: give shadow, canary:N with 0 < N < 100 (percent), or on"
            )
        return cls("canary", percent, other)

    def arm(self, conversation: str) -> Arm:
        """Who steers; the same for all requests of a conversation, whichever decider it meets."""
        # A client may name it by half of a surrogate pair, which JSON can hold.
        named = conversation.encode(errors="surrogatepass")
        return "kappa" if _digest(named) % _STEPS < self.percent / 100 * _STEPS else self.other


def _digest(named: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest())


class RoundRobin(Stateless):
    """One worker after the other, as nginx does by default."""

    name = "round-robin"

    def __init__(self) -> None:
        self._count = -1

    def choose(self, estimates: Estimates) -> Choice:
        self._count += 1
        return Choice(self._count % len(estimates), "next_in_turn")


class LeastConnections(RoundRobin):
    """Fewest requests in flight; level ones in turn, as nginx' `least_conn`."""

    name = "least-connections"

    def choose(self, estimates: Estimates) -> Choice:
        first = super().choose(estimates).index
        in_turn = np.roll(np.arange(len(estimates), dtype=np.float64), first)
        return Choice(least(estimates.in_flight, in_turn), "fewest_in_flight")


class PrefixHash(Stateless):
    """The hash of the prompt's beginning decides, evenly over the workers that there are.

    Rendezvous hashing (Thaler and Ravishankar 1998): when a worker goes, only its prompts move, as
    on the ring of nginx' `hash ... consistent`. Beginning: of the conversation, which is
    `session`, else the first block.
    """

    name = "prefix-hash"

    def choose(self, estimates: Estimates) -> Choice:
        hashes = estimates.prefix_hashes
        key = estimates.session or str(hashes[0] if len(hashes) else "")
        named = (f"{worker} {key}".encode(errors="surrogatepass") for worker in estimates.workers)
        weights = [_digest(name) for name in named]
        return Choice(weights.index(max(weights)), "hash_of_prefix")


PRESENT: dict[str, Callable[[], Policy]] = {
    kind.name: kind for kind in (RoundRobin, LeastConnections, PrefixHash)
}
"""Emulated present balancers: name to a maker of a fresh one."""


@dataclass(frozen=True, slots=True)
class ShadowDecision:
    """What ours would have done with a request that the present balancer steered; real seconds.

    chosen_node, predicted_ttft_s: ours. present_node, present_predicted_ttft_s: what became of it,
    priced by the same forecast at the same moment.
    """

    chosen_worker: str
    chosen_node: str
    reason: str
    predicted_ttft_s: float
    present_worker: str
    present_node: str
    present_predicted_ttft_s: float

    @property
    def agreed(self) -> bool:
        """Whether both chose the same worker."""
        return self.chosen_worker == self.present_worker

    @property
    def saving_s(self) -> float:
        """Predicted TTFT that ours would have saved."""
        return self.present_predicted_ttft_s - self.predicted_ttft_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with what follows from it."""
        return {**asdict(self), "agreed": self.agreed, "saving_s": self.saving_s}


def ray_choice(workers: Sequence[str], in_flight: Callable[[str], int], request_id: str) -> str:
    """Where Ray Serve's rule sends a request: of two workers drawn at random, to the one with fewer
    requests in flight.

    Over all workers of all pools, where Ray's own router sees those of one pool. The draw is made
    from the request's id, so that it can be repeated. ValueError without workers.
    """
    if not workers:
        raise ValueError("no workers to draw from")
    digest = hashlib.blake2b(request_id.encode(), digest_size=16, person=b"ray choice").digest()
    first = int.from_bytes(digest[:8]) % len(workers)
    if len(workers) == 1:
        return workers[0]
    second = int.from_bytes(digest[8:]) % (len(workers) - 1)
    second += second >= first
    return min(workers[first], workers[second], key=in_flight)
