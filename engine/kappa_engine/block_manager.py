"""The block manager: `kappa_scheduler.work.Memory` over an engine's block pools and prefix caches.

A request takes its device blocks when it is admitted, and pins the blocks of its prefix: on the
device, and in host memory those that it will load. Its blocks stay private until their content is
there (`computed`); then other requests find them. The planner is asked here how a cached prefix
comes back, because a plan that recomputes loads less, and the scheduler must know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kappa.plans.load_plan import Kind, LoadPlan, Segment, bounded, from_runs, layout
from kappa.plans.planners import Cached, Planning, room_left
from kappa_engine.block_pool import BlockType, OutOfBlocks
from kappa_engine.host_residents import HostResidents
from kappa_engine.kv_cache import Arena
from kappa_engine.prefix_cache import EventLog, PrefixPool
from kappa_engine.sequence import HostResident, Load, Sequence
from kappa_engine.settings import EngineOptions
from kappa_scheduler.work import Quote, Work

LoadOver = Callable[[Sequence], None]


class Loading(NamedTuple):
    """A prefix in host memory."""

    # Blocks that host memory has, from the first on.
    stop: int
    # Of those among them that the device lacks, with its seconds.
    plan: LoadPlan


class BlockManager:
    """Device and host tiers of one engine.

    Args:
        settings: the planner, the token budget of an iteration (no plan recomputes more while it
            loads), and the share of the device that "auto" lets a request take.
        load_over: called for every load that ends, well or not: others may have waited for it.
    """

    def __init__(
        self, arena: Arena, planning: Planning, settings: EngineOptions, load_over: LoadOver
    ) -> None:
        # Rises whenever something may fit that did not before.
        self.version = 0
        self.block_tokens = arena.block_tokens
        # Changes of what the caches hold.
        self.log = EventLog(arena.block_tokens)
        self.device = PrefixPool(arena.pools["kv", "device"], self.log, self._changed)
        # A block may be held as KV, as activations, or as both.
        self.host: dict[BlockType, PrefixPool] = {
            "kv": PrefixPool(arena.pools["kv", "host"], self.log, self._changed),
            "act": PrefixPool(arena.pools["act", "host"], self.log, self._changed),
        }
        acts = arena.pools["act", "device"]
        self.residents = HostResidents(self.device, acts, self.host, settings)
        self.planning, self._arena, self._settings = planning, arena, settings
        self._load_over = load_over
        self._most_recompute = settings.budget_tokens // arena.block_tokens * arena.block_tokens
        self.room_tokens = int(settings.cpu_room_share * arena.size.kv_device) * arena.block_tokens
        # Blocks on their way to the device.
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
        """The cost of admitting a request; None while another request loads blocks that it needs.

        At least one token is computed, so a full hit gives its last block back.
        """
        return self.quoted(work, self.look)

    def quoted(self, work: Work, look: Callable[[Sequence], Quote | None]) -> Quote | None:
        """The quote that `look` gives of a request, kept until something may have changed."""
        assert isinstance(work, Sequence)
        state = (self.version, work.total_tokens)
        if work.quoted is None or work.quoted[0] != state:
            work.quoted = (state, look(work))
        quote: Quote | None = work.quoted[1]
        return quote

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """Reserve a request's blocks and pin its prefix; None if the blocks are gone by now."""
        assert isinstance(work, Sequence)
        work.host_stop, work.quoted = 0, None
        fresh = self.quote(work)
        if fresh is None:
            return None
        size = self.block_tokens
        if work.resides:
            stop = self._host_stop(work, 0, self._usable(work))
            stays = self.planning.named(work.resides)(self._cached(work, 0, stop))
            self.arrived(work)
            return self.residents.take(work, fresh, stop, stays)
        there = fresh.device_tokens // size
        plan, kept = work.keeps or (None, 0)
        found = there - kept
        held = self.device.hold(work.keys[:found])
        try:
            private = self.device.take(-(-work.total_tokens // size) - there)
        except OutOfBlocks:
            self.device.release(held)
            return None
        if plan is not None:
            stay = self.host["kv"].hold(work.keys[found:there])
            on_cpu = self.planning.on_cpu(kept * size)
            kv = np.array([*[-1] * found, *stay], np.int64)
            work.kept = HostResident(kv, np.full_like(kv, -1), plan, found * size + on_cpu)
        work.blocks = np.array([*held, *[-1] * kept, *private], np.int64)
        work.published = there
        if fresh.host_tokens:
            self._hold_load(work, there, there + fresh.host_tokens // size)
        else:
            self.arrived(work)
        return fresh

    # -- what happens to a request ------------------------------------------------------------

    def arrived(self, sequence: Sequence) -> None:
        """Note that a waiting request wants its prefix in host memory: evict others first."""
        for cache in self.host.values():
            cache.touch(sequence.keys)

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Publish the full blocks of a request's first `tokens` tokens, which are computed."""
        start, stop = sequence.published, min(tokens // self.block_tokens, len(sequence.keys))
        if stop > start:
            self.device.publish(sequence.keys[start:stop], sequence.device_blocks(start, stop))
            sequence.published = stop

    def spare_others(self, sequence: Sequence) -> None:
        """Replace a plan of "auto" by plain KV, which loads beside others' iterations, if it would
        hold them up for longer than a full iteration does."""
        load, rates = sequence.load, self.planning.rates
        if load is None or rates is None or -1 in load.kv or not load.plan.exact:
            return
        if (sequence.request.planner or self._settings.planner) != "auto":
            return
        most_s = rates.prefill_s(self._settings.budget_tokens, 0)
        if load.plan.kind != "load" and load.plan.ttft_s > most_s:
            cached = self._cached(sequence, load.start, load.stop)
            why = f"{load.plan.kind} would hold up others for more than {most_s:.3g} s"
            load.plan = self.planning.priced(cached, layout(cached.cached), why)

    def grow(self, sequence: Sequence) -> bool:
        """Allocate one more block to a request that decodes; False if there is none."""
        if self.available() < 1:
            return False
        sequence.blocks = np.append(sequence.blocks, self.device.take(1))
        # If its context lies in host memory, another of its blocks leaves for this one.
        sequence.grown_blocks += not sequence.resides
        return True

    def end_load(self, sequence: Sequence) -> Load:
        """Take note that a load has ended, well or not, and release its host blocks."""
        load, sequence.load = sequence.load, None
        assert load is not None
        self._release_host(load)
        if load.plan.exact:
            loaded = sequence.keys[load.start : load.stop]
            self._loading.difference_update(key.digest for key in loaded)
        self._changed()
        self._load_over(sequence)
        return load

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a finished or preempted request; published ones stay cached."""
        if sequence.load is not None:
            self.end_load(sequence)
        self.device.release(sequence.blocks[sequence.blocks >= 0].tolist())
        if (kept := sequence.kept) is not None:
            self._release_host(kept)
            sequence.kept = None
            self.residents.release(sequence)
        sequence.blocks, sequence.published = np.empty(0, np.int64), 0

    def _release_host(self, held: Load | HostResident) -> None:
        self.host["kv"].release([int(block) for block in held.kv if block >= 0])
        self.host["act"].release([int(block) for block in held.act if block >= 0])

    # -- looking ------------------------------------------------------------------------------

    def look(self, sequence: Sequence) -> Quote | None:
        """The cost of admitting a request, looked up now."""
        size, keys, usable = self.block_tokens, sequence.keys, self._usable(sequence)
        if sequence.resides:
            return self.residents.quote(sequence, self._host_stop(sequence, 0, usable), usable)
        found, idle = self.device.prefix(keys, usable)
        blocks = -(-sequence.total_tokens // size) - found + idle
        stop = self._host_stop(sequence, found, usable)
        sequence.keeps, kept = None, 0
        if stop > found:
            room = room_left(self.room_tokens, found * size, sequence.total_tokens - stop * size)
            plan = self._plan(sequence, self._cached(sequence, found, stop)._replace(room=room))
            stop = found + loaded_tokens(plan) // size
            first = plan.segments[0] if plan.segments else None
            if first is not None and first.kind == "C":
                # Blocks that stay in host memory: those of C that it has as KV.
                wanted = keys[found : found + first.tokens // size]
                kept = self.host["kv"].prefix(wanted, len(wanted))[0]
            if kept:
                sequence.keeps, blocks = (plan, kept), blocks - kept
        there = found + kept
        if stop > there and keys[there].digest in self._loading:
            return None
        loaded = max(stop - there, 0) * size
        return Quote(blocks, there * size, loaded, found - idle, sequence.first_key, kept)

    def loading(self, sequence: Sequence) -> Loading | None:
        """The load of a request's prefix; None if the device has all that host memory has."""
        usable = self._usable(sequence)
        stop = self._host_stop(sequence, 0, usable)
        found, _ = self.device.prefix(sequence.keys, usable)
        if stop <= found:
            return None
        cached = self._cached(sequence, found, stop)
        # A plan that is cut at a budget has no seconds of its own.
        segments = self._plan(sequence, cached).segments
        return Loading(stop, self.planning.priced(cached, segments, ""))

    def _usable(self, sequence: Sequence) -> int:
        """Full blocks of a prefix that leave at least one token to compute."""
        return min((sequence.total_tokens - 1) // self.block_tokens, len(sequence.keys))

    def _host_stop(self, sequence: Sequence, start: int, usable: int) -> int:
        """The end of the run of blocks, from `start` on, that host memory has in some form.

        It runs in every iteration for every waiting request, so it begins where it ended last time
        if that block is still there: ends of prefixes are evicted first. `take` looks at all.
        """
        caches, keys = tuple(self.host.values()), sequence.keys
        index = min(sequence.host_stop, usable)
        if index <= start or all(cache.find(keys[index - 1]) is None for cache in caches):
            index = start
        while index < usable and any(cache.find(keys[index]) is not None for cache in caches):
            index += 1
        sequence.host_stop = index
        return index

    def _cached(self, sequence: Sequence, start: int, stop: int) -> Cached:
        """The planner's input for loading blocks [start, stop); all have room on the device."""
        size, wanted = self.block_tokens, sequence.keys[start:stop]
        held = self.host["act"].prefix(wanted, len(wanted))[0]
        new = sequence.total_tokens - stop * size
        return Cached((stop - start) * size, new, start * size, held * size)

    def _plan(self, sequence: Sequence, cached: Cached) -> LoadPlan:
        planner = sequence.planner or self._settings.planner
        plan = (self.planning.named(planner) if isinstance(planner, str) else planner)(cached)
        if plan.cached_tokens != cached.cached:
            raise ValueError(
                f"the planner covers {plan.cached_tokens} of {cached.cached} cached tokens: "
                "a plan must cover them all"
            )
        return bounded(plan, self._most_recompute)

    def _hold_load(self, sequence: Sequence, start: int, stop: int) -> None:
        keys = sequence.keys[start:stop]
        # Plan for all that host memory has; blocks beyond `stop` are computed like new tokens.
        end = self._host_stop(sequence, start, self._usable(sequence))
        plan = self._plan(sequence, self._cached(sequence, start, end))
        held = {type: cache.hold_found(keys) for type, cache in self.host.items()}
        segments = fit(plan, self.block_tokens, held["kv"], held["act"])
        fitted = self.planning.priced(self._cached(sequence, start, stop), segments, plan.why)
        sequence.load = Load(start, stop, fitted, held["kv"], held["act"])
        self._loading.update(key.digest for key in keys)
        self._changed()


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
        if kind == "A" and act[index] < 0:
            kind = "K"
        elif kind == "K" and kv[index] < 0:
            kind = "A"
        runs.append((kind, block_tokens))
    return from_runs(runs)
