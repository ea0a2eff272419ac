"""vLLM production-stack's prefixaware and loadaware routing."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines.routing.base import Baseline, random_least
from benchmarks.baselines.routing.history import RouteHistory
from benchmarks.baselines.routing.ring import HashRing, hash_of
from router.decision import Choice, Estimates

_VARIANTS = ("prefixaware", "loadaware")
_VIRTUAL_NODES = 100


@dataclass(eq=False)
class ProductionStack(Baseline):
    """Where the longest prefix was sent, or cache benefit against load. Reimplemented.

    prefixaware: a trie of what was routed where; from the root on only endpoints that were sent
    every piece stay; a random one of those that stay longest (of all, if none was sent the first
    piece). No eviction, no load. The original's pieces are 128 characters, ours token blocks.

    loadaware: score = held tokens / prompt tokens − beta · (requests − mean) / max(1, mean); the
    highest wins, ties to the first. Held tokens are the index's (the original asks LMCache's
    controller). Nobody holds anything: hash ring on the session, or without one the fewest requests
    in flight (the original: lowest request rate).
    """

    name = "production_stack"
    source = (
        "vllm-project/production-stack: src/vllm_router/routers/routing_logic.py and "
        "prefix/hashtrie.py (commit 008a23b); loadaware: pull request 1035"
    )

    variant: str = "prefixaware"
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in _VARIANTS:
            names = ", ".join(_VARIANTS)
            raise ValueError(f"variant must be one of {names}, got {self.variant!r}")
        self._history = RouteHistory()
        self._ring = HashRing(_VIRTUAL_NODES)

    def choose(self, estimates: Estimates) -> Choice:
        return (
            self._by_load(estimates) if self.variant == "loadaware" else self._by_prefix(estimates)
        )

    def routed(self, estimates: Estimates, index: int) -> None:
        if self.variant == "prefixaware":
            self._history.routed(estimates, index)

    def left(self, worker: str) -> None:
        self._history.left(worker)
        self._ring.left(worker)

    def _by_prefix(self, estimates: Estimates) -> Choice:
        path = self._history.match(estimates)
        roster = self._history.roster
        staying = roster.mask
        for run, _ in path:
            sent = run.mask & staying
            if not sent:
                break
            staying = sent
        if staying == roster.mask:
            return Choice(self.rng.randrange(len(estimates)), "any")
        return Choice(self.rng.choice(roster.rows(staying)), "prefix_match")

    def _by_load(self, estimates: Estimates) -> Choice:
        held = estimates.device_tokens + estimates.cached_tokens
        if not held.any():
            return self._by_session(estimates)
        load = estimates.in_flight
        mean = float(load.mean())
        penalty = self.beta * (load - mean) / max(1.0, mean)
        return Choice(
            int((held / max(estimates.prompt_tokens, 1) - penalty).argmax()), "best_score"
        )

    def _by_session(self, estimates: Estimates) -> Choice:
        if not estimates.session:
            return Choice(random_least(self.rng, estimates.in_flight), "nothing_held")
        self._ring.read(estimates.workers)
        return Choice(next(self._ring.clockwise(hash_of(estimates.session))), "nothing_held")
