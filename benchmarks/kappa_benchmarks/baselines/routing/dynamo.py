"""NVIDIA Dynamo's KV routers: one cost in blocks (its default, and JSEW), and its two tiers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kappa_benchmarks.baselines.routing.base import Baseline, first_least, random_least
from kappa_benchmarks.baselines.routing.run_tree import Roster, Run, RunTree, longest_of_each
from kappa_router.decision import Choice, Estimates, Floats
from kappa_router.index.prefix_hash import UInt64s


@dataclass(eq=False)
class Dynamo(Baseline):
    """Dynamo's cost with a constant credit for the host tier. Reimplemented.

        credit = device_credit · device blocks + host_credit · host blocks
        cost   = overlap_weight · max(0, raw prefill blocks − credit) + decode blocks

    Raw prefill blocks: the whole prompt of this request and, of those not yet prefilled there, what
    device and host_credit · host tokens left over. Decode blocks: different full blocks of the
    prompts active there, plus this one's, its last part included, that they do not have. The least
    cost wins, ties at random.

    The names in the original: overlap_score_credit, host_cache_hit_weight, prefill_load_scale
    (formerly kv_overlap_score_weight). Left out, as they are off by default: the credit's decay, a
    weight of active requests, a temperature, output blocks, taints; and the disk and shared tiers.
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
        # Of the requests in flight: worker, and tokens to prefill there that are not prefilled yet.
        self._sent: dict[str, tuple[str, float]] = {}
        self._prefill_tokens: defaultdict[str, float] = defaultdict(float)

    def choose(self, estimates: Estimates) -> Choice:
        return Choice(random_least(self.rng, self.cost(estimates)), "least_cost")

    def cost(self, estimates: Estimates) -> Floats:
        """Cost of each worker, in blocks."""
        return self.prefill_cost(estimates) + self._active.decode_blocks(estimates)

    def prefill_cost(self, estimates: Estimates) -> Floats:
        credit = self.device_credit * estimates.device_tokens
        credit = credit + self.host_credit * estimates.cached_tokens
        queued = np.array([self._prefill_tokens.get(worker, 0.0) for worker in estimates.workers])
        raw = queued + estimates.prompt_tokens
        cost: Floats = self.overlap_weight * np.maximum(raw - credit, 0.0) / estimates.block_tokens
        return cost

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        self.progressed(request_id, estimates.now_s, ended=True)
        self._active.add(estimates, index, request_id)
        held = estimates.device_tokens[index] + self.host_credit * estimates.cached_tokens[index]
        tokens = max(estimates.prompt_tokens - float(held), 0.0)
        worker = estimates.workers[index]
        self._sent[request_id] = worker, tokens
        self._prefill_tokens[worker] += tokens

    def progressed(self, request_id: str, now_s: float, *, ended: bool) -> None:
        worker, tokens = self._sent.pop(request_id, ("", 0.0))
        if worker:
            self._prefill_tokens[worker] -= tokens
            if not ended:
                self._sent[request_id] = worker, 0.0
        if ended:
            self._active.remove(request_id)

    def left(self, worker: str) -> None:
        self._active.left(worker)
        self._prefill_tokens.pop(worker, None)
        self._sent = {name: sent for name, sent in self._sent.items() if sent[0] != worker}


@dataclass(eq=False)
class DynamoJsew(Dynamo):
    """Join the shortest expected work: Dynamo's cost with its decode blocks bent. Reimplemented.

        unshared = decode blocks · active requests ^ share_exponent
        charged  = unshared · (unshared / mean of the workers) ^ (load_exponent − 1)
        decode   = (footprint_weight + work_scale · expected / blocks of the prompt) · charged

    Expected: a moving average of the prompts' blocks that the best device cache left over. The
    original's exponent of that ratio is left out (it is 1). Defaults are its authors', tuned on one
    agents' trace; it is in Dynamo's repository, and not in 1.6.1.
    """

    name = "dynamo_jsew"
    source = "lib/router-plugins/builtin/src/jsew.rs (ai-dynamo/dynamo, commit 6345a80)"

    work_scale: float = 17.601
    footprint_weight: float = 1.526
    ema_alpha: float = 0.01737
    load_exponent: float = 1.2
    share_exponent: float = 0.13

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uncached_tokens: float | None = None

    def choose(self, estimates: Estimates) -> Choice:
        self._observe(estimates)
        return super().choose(estimates)

    def cost(self, estimates: Estimates) -> Floats:
        requests = np.maximum(estimates.in_flight, 1.0)
        unshared = self._active.decode_blocks(estimates) * requests**self.share_exponent
        mean = float(unshared.mean())
        charged = unshared * (unshared / mean) ** (self.load_exponent - 1) if mean else unshared
        blocks = max(-(-estimates.prompt_tokens // estimates.block_tokens), 1)
        expected = (self._uncached_tokens or 0.0) / estimates.block_tokens / blocks
        return self.prefill_cost(estimates) + (
            (self.footprint_weight + self.work_scale * expected) * charged
        )

    def _observe(self, estimates: Estimates) -> None:
        tokens = max(estimates.prompt_tokens - float(estimates.device_tokens.max()), 0.0)
        before = tokens if self._uncached_tokens is None else self._uncached_tokens
        self._uncached_tokens = self.ema_alpha * tokens + (1 - self.ema_alpha) * before


@dataclass(eq=False)
class DynamoTwoTier(Baseline):
    """Dynamo's two tiers, load before cache. Reimplemented.

    Where the requests in flight differ by more than balance_abs and the most are more than
    balance_rel times the fewest: the fewest. Else, where somebody has more than cache_threshold of
    the prompt's blocks on the device: of those that have most, the fewest. Else the fewest. The
    original leaves level ones to the order of its table; here the first. It sees no host tier.
    """

    name = "dynamo_two_tier"
    source = "lib/router-plugins/builtin/src/two_tier_cost_fn.rs (ai-dynamo 1.6.1)"

    cache_threshold: float = 0.5
    balance_abs: float = 32.0
    balance_rel: float = 1.1
    least: ClassVar = {"balance_rel": 1.0}

    def choose(self, estimates: Estimates) -> Choice:
        rows, reason = self.rows(estimates)
        return Choice(first_least(rows, estimates.in_flight), reason)

    def rows(self, estimates: Estimates) -> tuple[list[int], str]:
        """Workers among which the fewest requests decide, and why these."""
        load, device = estimates.in_flight, estimates.device_tokens
        least, most = float(load.min()), float(load.max())
        everybody = list(range(len(load)))
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return everybody, "imbalanced"
        blocks = -(-estimates.prompt_tokens // estimates.block_tokens)
        if device.max() > self.cache_threshold * blocks * estimates.block_tokens:
            return np.flatnonzero(device == device.max()).tolist(), "prefix_match"
        return everybody, "fewest_requests"


class ActiveBlocks:
    """Blocks of the requests in flight on each worker; what several share counts once.

    The marks of the tree count the active requests that have the run.
    """

    def __init__(self) -> None:
        self._tree = RunTree()
        self._roster = Roster()
        self._sent: dict[str, tuple[int, UInt64s]] = {}

    def decode_blocks(self, estimates: Estimates) -> Floats:
        """For each worker: different active blocks if this request went there."""
        roster, hashes = self._roster, estimates.prefix_hashes
        roster.read(estimates)
        own = -(-estimates.prompt_tokens // estimates.block_tokens)
        blocks = np.array([self._tree.size(bit) + own for bit in roster.bits], float)
        for workers, shared in longest_of_each(self._tree.walk(hashes), roster.mask):
            if workers:
                blocks[roster.rows(workers)] -= shared
        return blocks

    def add(self, estimates: Estimates, index: int, request_id: str) -> None:
        """A request is active on row `index`."""
        self._roster.read(estimates)
        bit, hashes, depth = self._roster.bits[index], estimates.prefix_hashes, 0
        last: Run | None = None
        for run, depth in self._tree.walk(hashes):
            last = run if depth == run.end else self._tree.split(run, depth)
            self._tree.mark(last, bit, last.marks.get(bit, 0) + 1)
        if depth < len(hashes):
            self._tree.mark(self._tree.append(last, hashes, depth, first=bit), bit, 1)
        self._sent[request_id] = bit, hashes

    def remove(self, request_id: str) -> None:
        """A request ended, if it is known."""
        bit, hashes = self._sent.pop(request_id, (-1, None))
        for run, _ in self._tree.walk(hashes) if hashes is not None else ():
            count = run.marks[bit] - 1
            if count:
                run.marks[bit] = count
            else:
                self._tree.unmark(run, bit)

    def left(self, worker: str) -> None:
        bit = self._roster.left(worker)
        if bit is not None:
            self._sent = {name: sent for name, sent in self._sent.items() if sent[0] != bit}
            self._tree.forget(bit)
