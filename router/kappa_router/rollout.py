"""Rollout of our routing over real traffic: it watches, steers a share, or all. Pure.

`shadow`: ours decides and writes down what it would have done, the present balancer steers.
`canary:N`: ours steers N percent of the conversations, the present one the rest, with ours as a
shadow. `on`: ours steers. `kappa serve` and `kappa route` ask a `Rollout` about each request: the
present balancer is Ray Serve's rule in a cluster; before foreign servers one of `PRESENT` emulates
it, or a real one stands in front of the same servers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from kappa.checks import steered_percent
from kappa_router.decision import Choice, Estimates
from kappa_router.policy import Policy, Stateless, least

Arm = Literal["kappa", "ray", "present"]

_STEPS = 10_000


class Present(Policy, Protocol):
    """The rule of a present balancer."""

    # Its name in metrics and records.
    arm: Arm


@dataclass(frozen=True, slots=True)
class Rollout:
    """The mode of a rollout."""

    # Of the conversations that ours steers.
    percent: float
    # The rule that steers the others.
    present: Present
    # The url of a real balancer. Its answers tell its choices; until then its requests are thought
    # spread by `present`. Empty: `present` chooses itself.
    balancer: str = ""

    @classmethod
    def parse(cls, mode: str, present: str = "ray") -> Rollout:
        """Parse a mode, as `steered_percent`; ValueError for any other. present: `ray`, one of
        `PRESENT`, or the url of a real balancer."""
        known: dict[str, Callable[[], Present]] = {**PRESENT, "ray": RayServe}
        rule = known.get(present, LeastConnections)()
        return cls(steered_percent(mode), rule, "" if present in known else present)

    def arm(self, conversation: str) -> Arm:
        """The arm that steers: the same for all requests of a conversation, at every decider."""
        # A client may name it by half of a surrogate pair, which JSON can hold.
        named = conversation.encode(errors="surrogatepass")
        ours = _digest(named) % _STEPS < self.percent / 100 * _STEPS
        return "kappa" if ours else self.present.arm

    def other(self, conversation: str) -> Present | None:
        """The rule that steers a conversation; None where ours does."""
        return None if self.arm(conversation) == "kappa" else self.present


def _digest(named: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest())


class RoundRobin(Stateless):
    """One worker after the other, as nginx does by default."""

    name = "round-robin"
    arm: Arm = "present"

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
    arm: Arm = "present"

    def choose(self, estimates: Estimates) -> Choice:
        hashes = estimates.prefix_hashes
        key = estimates.session or str(hashes[0] if len(hashes) else "")
        named = (f"{worker} {key}".encode(errors="surrogatepass") for worker in estimates.workers)
        weights = [_digest(name) for name in named]
        return Choice(weights.index(max(weights)), "hash_of_prefix")


class RayServe(Stateless):
    """Ray Serve's rule: of two workers drawn at random, the one with fewer requests in flight.

    Over all workers of all pools, where Ray's own router sees those of one pool. The draw is made
    from the time of the decision, so that it can be repeated.
    """

    name = "ray"
    arm: Arm = "ray"

    def choose(self, estimates: Estimates) -> Choice:
        count, load = len(estimates), estimates.in_flight
        drawn = random.Random(repr(estimates.now_s)).sample(range(count), min(count, 2))
        return Choice(min(drawn, key=load.__getitem__), "shorter_of_two_queues")


PRESENT: dict[str, Callable[[], Present]] = {
    kind.name: kind for kind in (RoundRobin, LeastConnections, PrefixHash)
}
"""Emulated present balancers: name to a maker of a fresh one."""


@dataclass(frozen=True, slots=True)
class ShadowDecision:
    """Our decision about a request that the present balancer steered; real seconds."""

    chosen_worker: str
    chosen_node: str
    reason: str
    predicted_ttft_s: float
    # The balancer's choice, priced by the same forecast at the same moment.
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
