"""The blocks of one engine as its scheduler sees them: `scheduler.work.Memory` over real pools.

A request's device blocks are taken when it is admitted; what it found is pinned, on the device and,
where it is to be loaded, in host memory. Its blocks stay private until their content is there
(`computed`), then others find them. How a cached prefix comes back is asked of the planner here,
because a plan that recomputes loads less, and the scheduler must know.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.arena import Arena
from engine.blocks import BlockType, OutOfBlocks
from engine.prefix import EventLog, PrefixPool
from engine.sequence import HostResident, Load, Sequence
from engine.settings import EngineOptions
from engine.sparse.serving import SPARSE, SparseServing
from kappa.plans.load_plan import Kind, LoadPlan, Segment, bounded, from_runs, layout
from kappa.plans.planners import Cached, Planning, room_left
from scheduler.work import Quote, Work


class TieredMemory:
    """Device and host tiers of one engine.

    Args:
        arena: blocks and their pools.
        planning: the planners.
        settings: of the engine: its planner, the budget of an iteration (more than which no plan
            recomputes while it loads), and what "auto" lets a request take of the device.
        load_over: called for every load that is over, however: others may have waited for it.

    `device` holds KV; `host` may hold KV, activations, or both of a block. `log` has the changes of
    what can be found. `version` rises whenever something may fit that did not before.
    """

    def __init__(
        self,
        arena: Arena,
        planning: Planning,
        settings: EngineOptions,
        load_over: Callable[[Sequence], None],
    ) -> None:
        self.version = 0
        self._arena = arena
        self.block_tokens = arena.block_tokens
        self.log = EventLog(arena.block_tokens)
        self.device = PrefixPool(arena.pools["kv", "device"], self.log, self._changed)
        self.host: dict[BlockType, PrefixPool] = {
            "kv": PrefixPool(arena.pools["kv", "host"], self.log, self._changed),
            "act": PrefixPool(arena.pools["act", "host"], self.log, self._changed),
        }
        self._planning = planning
        self._planner = settings.planner
        self._budget_tokens = settings.budget_tokens
        self._most_recompute = self._budget_tokens // arena.block_tokens * arena.block_tokens
        self._load_over = load_over
        self._room_tokens = int(settings.cpu_room_share * arena.size.kv_device) * arena.block_tokens
        # Slots of requests that may be computed sparsely, if the engine has any.
        self.sparse: SparseServing | None = None
        # Blocks on their way to the device, for somebody.
        self._loading: set[bytes] = set()

    def _changed(self) -> None:
        self.version += 1

    # -- the scheduler's view -----------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        """Blocks on the device."""
        return self.device.pool.count

    def available(self) -> int:
        """Device blocks unused or evictable."""
        return self.device.available()

    def quote(self, work: Work) -> Quote | None:
        """What admitting it takes; None while blocks that it needs are being loaded for another.

        At least one token is computed, so a full hit gives its last block back.
        """
        assert isinstance(work, Sequence)
        state = (self.version, work.total_tokens)
        if work.quoted is None or work.quoted[0] != state:
            work.quoted = (state, self._look(work))
        quote: Quote | None = work.quoted[1]
        return quote

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """Reserve its blocks and pin what it found; None if they are not there after all."""
        assert isinstance(work, Sequence)
        work.host_stop, work.quoted = 0, None
        sparse = self._sparse_plan(work)
        if sparse is not None:
            return self._take_sparse(work, sparse)
        fresh = self.quote(work)
        if fresh is None:
            return None
        size = self.block_tokens
        there = fresh.device_tokens // size
        plan, kept = work.keeps or (None, 0)
        found = there - kept
        held = self.device.hold(work.keys[:found])
        try:
            private = self.device.take(-(-work.total_tokens // size) - there)
        except OutOfBlocks:
            self.device.release(held)
            return None
        work.table.clear()
        work.table.append(held)
        if plan is not None:
            self._keep(work, found, kept, plan)
        work.table.append(private)
        work.published = there
        if fresh.host_tokens:
            self._hold_load(work, there, there + fresh.host_tokens // size)
        else:
            self._touch_host(work)
        return fresh

    # -- what happens to a request ------------------------------------------------------------

    def arrived(self, sequence: Sequence) -> None:
        """It waits: what the host tier holds of it is wanted, others are evicted first."""
        self._touch_host(sequence)

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Its first `tokens` tokens are on the device: others can find their full blocks."""
        table, size = sequence.table, self.block_tokens
        start, stop = sequence.published, min(tokens // size, len(sequence.keys))
        if stop > start:
            self.device.publish(sequence.keys[start:stop], table.blocks(start, stop))
            sequence.published = stop

    def spare_others(self, sequence: Sequence) -> None:
        """Others compute: load as KV alone what "auto" planned to compute while it loads, if that
        were to hold them up for longer than a full iteration does. Then they need not wait at all.
        """
        load, rates = sequence.load, self._planning.rates
        if load is None or rates is None or -1 in load.kv or self._slotted(sequence):
            return
        if (sequence.request.planner or self._planner) != "auto" or load.plan.kind == "load":
            return
        most_s = rates.prefill_s(self._budget_tokens, 0)
        if load.plan.ttft_s > most_s:
            asked = self._ask(sequence, load.start, load.stop)
            segments = layout(asked.cached)
            why = f"{load.plan.kind} would hold up others for more than {most_s:.3g} s"
            load.plan = self._planning.priced(asked, segments, why)

    def grow(self, sequence: Sequence) -> bool:
        """One more block for a request that decodes; False if there is none."""
        if self.available() < 1:
            return False
        sequence.table.append(self.device.take(1))
        sequence.grown_blocks += 1
        return True

    def end_load(self, sequence: Sequence) -> None:
        """Its load is over, well or not: the host blocks may be evicted, others may try."""
        load, sequence.load = sequence.load, None
        assert load is not None
        for type, blocks in (("kv", load.kv), ("act", load.act)):
            self._host(type).release([block for block in blocks if block >= 0])
        if not self._slotted(sequence):
            loaded = sequence.keys[load.start : load.stop]
            self._loading.difference_update(key.digest for key in loaded)
        self._changed()
        self._load_over(sequence)

    def release(self, sequence: Sequence) -> None:
        """It is done, or preempted: its private blocks are unused, the findable ones stay."""
        if sequence.load is not None:
            self.end_load(sequence)
        self.device.release(sequence.table.on_device())
        if sequence.kept is not None:
            self.host["kv"].release(sequence.kept.blocks)
            sequence.kept = None
        sequence.table.clear()
        sequence.published = 0

    def check(self) -> None:
        """Raise unless the books of all tiers are right."""
        self._arena.check()
        for cache in (self.device, *self.host.values()):
            cache.check()

    # -- looking ------------------------------------------------------------------------------

    def _look(self, sequence: Sequence) -> Quote | None:
        sparse = self._sparse_plan(sequence)
        if sparse is not None:
            return self._sparse_quote(sequence, sparse)
        size, keys, total = self.block_tokens, sequence.keys, sequence.total_tokens
        usable = min((total - 1) // size, len(keys))
        found, idle = self.device.prefix(keys, usable)
        blocks = -(-total // size) - found + idle
        first = int.from_bytes(keys[0].digest[:7]) + 1 if keys else 0
        stop = self._host_stop(sequence, found, usable)
        sequence.keeps, there = None, found
        if stop > found:
            plan = self._plan(sequence, self._ask(sequence, found, stop, bounded_room=True))
            stop = found + loaded_tokens(plan) // size
            kept = self._kept_blocks(sequence, found, plan)
            if kept:
                sequence.keeps = plan, kept
                there, blocks = found + kept, blocks - kept
        if stop <= there:
            return Quote(blocks, there * size, 0, found - idle, first, there - found)
        if keys[there].digest in self._loading:
            return None
        loaded = (stop - there) * size
        return Quote(blocks, there * size, loaded, found - idle, first, there - found)

    def _kept_blocks(self, sequence: Sequence, start: int, plan: LoadPlan) -> int:
        """How many blocks from `start` on stay in host memory: those of C that it has as KV."""
        first = plan.segments[0] if plan.segments else None
        if first is None or first.kind != "C":
            return 0
        stop = start + first.tokens // self.block_tokens
        index, cache = start, self.host["kv"]
        while index < stop and cache.find(sequence.keys[index]) is not None:
            index += 1
        return index - start

    def _keep(self, work: Sequence, start: int, count: int, plan: LoadPlan) -> None:
        """Hold host blocks where they are, instead of device blocks."""
        blocks = self.host["kv"].hold(work.keys[start : start + count])
        on_cpu = self._planning.on_cpu(count * self.block_tokens)
        work.kept = HostResident(start, blocks, plan, on_cpu)
        work.table.append([-1] * count)

    def _host_stop(self, sequence: Sequence, start: int, usable: int) -> int:
        """Where the run of blocks ends that host memory has in some form, from `start` on.

        Asked in every iteration for every request that waits, so it begins where it ended last
        time, if that block is still there: ends of prefixes are evicted first. `take` looks at all.
        """
        caches, keys = tuple(self.host.values()), sequence.keys
        index = min(sequence.host_stop, usable)
        if index <= start or all(cache.find(keys[index - 1]) is None for cache in caches):
            index = start
        while index < usable and any(cache.find(keys[index]) is not None for cache in caches):
            index += 1
        sequence.host_stop = index
        return index

    def _ask(
        self, sequence: Sequence, start: int, stop: int, *, bounded_room: bool = False
    ) -> Cached:
        """What a planner must know of loading blocks [start, stop).

        bounded_room: it may leave some of them in host memory.
        """
        size, act = self.block_tokens, self.host["act"]
        held = start
        while held < stop and act.find(sequence.keys[held]) is not None:
            held += 1
        new = sequence.total_tokens - stop * size
        room = room_left(self._room_tokens, start * size, new) if bounded_room else None
        return Cached((stop - start) * size, new, start * size, (held - start) * size, room)

    def _plan(self, sequence: Sequence, asked: Cached) -> LoadPlan:
        planner = sequence.request.planner or self._planner
        if planner == SPARSE:
            # It has to be loaded after all.
            planner = self._planner
        plan = (self._planning.named(planner) if isinstance(planner, str) else planner)(asked)
        if plan.cached_tokens != asked.cached:
            raise ValueError(
                f"the planner covers {plan.cached_tokens} of {asked.cached} cached tokens: "
                "a plan must cover them all"
            )
        return bounded(plan, self._most_recompute)

    def _hold_load(self, sequence: Sequence, start: int, stop: int) -> None:
        keys = sequence.keys[start:stop]
        # Planned for all that host memory has; what is beyond `stop` is computed like new tokens.
        usable = min((sequence.total_tokens - 1) // self.block_tokens, len(sequence.keys))
        asked = self._ask(sequence, start, self._host_stop(sequence, start, usable))
        plan = self._plan(sequence, asked)
        held: dict[BlockType, list[int]] = {}
        for type, cache in self.host.items():
            found = [key for key in keys if cache.find(key) is not None]
            blocks = dict(zip((k.digest for k in found), cache.hold(found), strict=True))
            held[type] = [blocks.get(key.digest, -1) for key in keys]
        segments = fit(plan, self.block_tokens, held["kv"], held["act"])
        fitted = self._planning.priced(self._ask(sequence, start, stop), segments, plan.why)
        sequence.load = Load(start, stop, fitted, held["kv"], held["act"], self.block_tokens)
        self._loading.update(key.digest for key in keys)
        self._changed()

    def _sparse_plan(self, sequence: Sequence) -> LoadPlan | None:
        """The plan that leaves a request's prefix in host memory, if that may be and should be."""
        if self.sparse is None or not sequence.approx:
            return None
        size, keys = self.block_tokens, sequence.keys
        usable = min((sequence.total_tokens - 1) // size, len(keys))
        stop = self._host_stop(sequence, 0, usable)
        found, _ = self.device.prefix(keys, usable)
        if stop <= found:
            return None
        ask = self._ask(sequence, found, stop)
        # As it would be executed: what is cut at a budget comes without its seconds.
        exact = self._planning.priced(ask, self._plan(sequence, ask).segments, "")
        asked = Cached(stop * size, sequence.total_tokens - stop * size)
        return self.sparse.plan(sequence, asked, exact, self._planning.rates)

    def _slotted(self, sequence: Sequence) -> bool:
        return self.sparse is not None and sequence in self.sparse

    def _sparse_quote(self, sequence: Sequence, plan: LoadPlan) -> Quote:
        first = int.from_bytes(sequence.keys[0].digest[:7]) + 1
        blocks = -(-sequence.total_tokens // self.block_tokens)
        return Quote(0, 0, plan.cached_tokens, 0, first, blocks)

    def _take_sparse(self, work: Sequence, plan: LoadPlan) -> Quote:
        """A slot instead of device blocks."""
        assert self.sparse is not None
        work.table.clear()
        work.published, work.keeps = 0, None
        work.load = self.sparse.reserve(work, plan)
        return self._sparse_quote(work, plan)

    def _touch_host(self, sequence: Sequence) -> None:
        for cache in self.host.values():
            cache.touch(sequence.keys)

    def _host(self, type: str) -> PrefixPool:
        return self.host["kv" if type == "kv" else "act"]


def loaded_tokens(plan: LoadPlan) -> int:
    """Cached tokens that come back before the new ones are computed: all but a recomputed tail.

    A tail, and a plan that recomputes all, are no load: the scheduler computes them like new
    tokens, in chunks that it counts.
    """
    if plan.segments and plan.segments[-1].kind == "R":
        return plan.segments[-1].start_tokens
    return plan.cached_tokens


def fit(plan: LoadPlan, block_tokens: int, kv: list[int], act: list[int]) -> tuple[Segment, ...]:
    """The plan's segments with every block in a form that host memory has, cut at blocks.

    Args:
        plan: of any planner; it may cover more tokens than there are blocks.
        kv, act: the host block of each, -1 where there is none; each block has one of them.
    """
    runs: list[tuple[Kind, int]] = []
    segments = iter(plan.segments)
    segment = next(segments)
    for index in range(len(kv)):
        while segment.end_tokens <= index * block_tokens:
            segment = next(segments)
        kind: Kind = segment.kind if segment.kind in ("A", "R") else "K"
        if kind != "R":
            wanted = act[index] if kind == "A" else kv[index]
            kind = kind if wanted >= 0 else ("K" if kind == "A" else "A")
        runs.append((kind, block_tokens))
    return from_runs(runs)
