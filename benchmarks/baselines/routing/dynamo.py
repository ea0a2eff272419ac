"""NVIDIA Dynamo's KV router: one cost in blocks, lowest wins."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from benchmarks.baselines.routing.base import Baseline, random_least
from benchmarks.baselines.routing.run_tree import Roster, Run, RunTree, longest_of_each
from router.decision import Choice, Estimates, Floats
from router.index.prefix_hash import UInt64s


@dataclass(eq=False)
class Dynamo(Baseline):
    """Dynamo's cost with a constant credit for the host tier. Reimplemented.

        credit = device_credit · device blocks + host_credit · host blocks
        cost   = overlap_weight · max(0, raw prefill blocks − credit) + decode blocks

    Raw prefill blocks: the whole prompt of this request and, of those not yet prefilled there, what
    device and host_credit · host tokens left over. Decode blocks: different full blocks of the
    prompts active there, plus those of this one that they do not have. The least cost wins, ties at
    random.

    The names in the original: overlap_score_credit, host_cache_hit_weight, prefill_load_scale
    (formerly kv_overlap_score_weight). Left out, as they are off by default: the credit's decay, a
    weight of active requests, a temperature.

    A policy knows where requests go, not what becomes of them, so which of a worker's requests
    are active and which wait for their prefill is a guess: the latest routed, as many as there are
    in flight and waiting. The original's disk and shared tiers, output blocks (off by default) and
    taints are left out.
    """

    name = "dynamo"
    source = (
        "lib/kv-router/src/scheduling/selector/default.rs and mod.rs (ai-dynamo 1.6.1; "
        "commit 07a6c9c)"
    )

    host_credit: float = 0.75
    device_credit: float = 1.0
    overlap_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._active = ActiveBlocks()
        self._prefills = PrefillQueues()

    def choose(self, estimates: Estimates) -> Choice:
        return Choice(random_least(self.rng, self.cost(estimates)), "least_cost")

    def cost(self, estimates: Estimates) -> Floats:
        """Cost of each worker, in blocks."""
        block = estimates.block_tokens
        credit = self.device_credit * estimates.device_tokens
        credit = credit + self.host_credit * estimates.cached_tokens
        raw = self._prefills.tokens(estimates) + estimates.prompt_tokens
        cost: Floats = self.overlap_weight * np.maximum(raw - credit, 0.0) / block
        return cost + self._active.decode_blocks(estimates)

    def routed(self, estimates: Estimates, index: int) -> None:
        self._active.add(estimates, index)
        held = estimates.device_tokens[index] + self.host_credit * estimates.cached_tokens[index]
        tokens = max(estimates.prompt_tokens - float(held), 0.0)
        self._prefills.add(estimates.workers[index], tokens)

    def left(self, worker: str) -> None:
        self._active.left(worker)
        self._prefills.left(worker)


class PrefillQueues:
    """Tokens to prefill that were sent to each worker, of the latest as many as wait there."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, deque[float]] = defaultdict(deque)
        self._tokens: defaultdict[str, float] = defaultdict(float)

    def tokens(self, estimates: Estimates) -> Floats:
        for worker, waiting in zip(estimates.workers, estimates.waiting.tolist(), strict=True):
            sent = self._sent.get(worker)
            if sent and len(sent) > waiting:
                while len(sent) > waiting:
                    sent.popleft()
                self._tokens[worker] = sum(sent)
        return np.array([self._tokens.get(worker, 0.0) for worker in estimates.workers])

    def add(self, worker: str, tokens: float) -> None:
        """A prompt was sent to a worker, and this much of it is to be computed."""
        self._sent[worker].append(tokens)
        self._tokens[worker] += tokens

    def left(self, worker: str) -> None:
        self._sent.pop(worker, None)
        self._tokens.pop(worker, None)


class ActiveBlocks:
    """Blocks of the requests in flight on each worker; what several share counts once.

    The marks of the tree count the active requests that have the run.
    """

    def __init__(self) -> None:
        self._tree = RunTree()
        self._roster = Roster()
        self._sent: defaultdict[int, deque[UInt64s]] = defaultdict(deque)

    def decode_blocks(self, estimates: Estimates) -> Floats:
        """For each worker: different active blocks if this request went there."""
        roster, hashes = self._roster, estimates.prefix_hashes
        roster.read(estimates)
        for bit, in_flight in zip(roster.bits, estimates.in_flight.tolist(), strict=True):
            # The oldest have ended where more is remembered than is in flight.
            while len(self._sent[bit]) > in_flight:
                self._remove(bit, self._sent[bit].popleft())
        blocks = np.array([self._tree.size(bit) + len(hashes) for bit in roster.bits], float)
        for workers, shared in longest_of_each(self._tree.walk(hashes), roster.mask):
            if workers:
                blocks[roster.rows(workers)] -= shared
        return blocks

    def add(self, estimates: Estimates, index: int) -> None:
        """A request is active on row `index`."""
        self._roster.read(estimates)
        bit, hashes, depth = self._roster.bits[index], estimates.prefix_hashes, 0
        last: Run | None = None
        for run, depth in self._tree.walk(hashes):
            last = run if depth == run.end else self._tree.split(run, depth)
            self._tree.mark(last, bit, last.marks.get(bit, 0) + 1)
        if depth < len(hashes):
            self._tree.mark(self._tree.append(last, hashes, depth, first=bit), bit, 1)
        self._sent[bit].append(hashes)

    def left(self, worker: str) -> None:
        bit = self._roster.left(worker)
        if bit is not None and bit in self._sent:
            del self._sent[bit]
            self._tree.forget(bit)

    def _remove(self, bit: int, hashes: UInt64s) -> None:
        for run, _ in self._tree.walk(hashes):
            count = run.marks[bit] - 1
            if count:
                run.marks[bit] = count
            else:
                self._tree.unmark(run, bit)
