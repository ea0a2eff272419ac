"""The engine: requests in, tokens out, one iteration at a time.

`Engine.step` is admit, run, account. What is computed next is decided by `scheduler.batching` and
any of its rules over the real blocks (`engine.memory`); the model is behind `engine.computing`;
prefixes come back by load plans, complete blocks go to host memory (`engine.store`). A load that
fails is counted and its tokens are computed instead. One thread may use an engine at a time:
`engine.runner` is for several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from typing import Protocol

from engine.computing import Computer, sample_each
from engine.forward import Forward
from engine.loads import Loads
from engine.memory import EngineMemory
from engine.prefill import Row
from engine.prefix import CacheEvent
from engine.sampling import GREEDY, Sampling
from engine.sequence import FinishReason, Output, Sequence, refuse
from engine.settings import EngineSettings, link_rates
from engine.sparse.forward import SparseForward
from engine.sparse.serving import SparseServing, check_asked
from engine.stats import EngineStats
from engine.store import HostStore, Keeper
from kappa.plans.planners import Planner, Planning
from kappa.protocol import Charge
from scheduler.batching import Batcher, Step
from scheduler.catalogue import rule_named
from scheduler.fair import Fair
from scheduler.work import Work


class Observer(Protocol):
    """Told what the engine does, on its thread; must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """A request got its blocks; its account says what was found, its `load` what comes."""
        ...

    def iterated(
        self, engine: Engine, seconds: float, tokens: int, prefilled: Run[Sequence]
    ) -> None:
        """An iteration of so many tokens ended, and with it the prompts of `prefilled`."""
        ...


class Engine:
    """Continuous batching with chunked prefill over one model.

    Args:
        forward: the model, with its blocks and its mover, which the engine does not stop.
        settings: how to run.
        planning: the planners; those that need no rates, if not given.
        clock: seconds.
        observer: told what happens.
        sparse: the model over lanes, for requests that may be answered approximately; None: none.

    Raises:
        ValueError: a planner that there is none of; activations to store, and no blocks for them.
    """

    def __init__(
        self,
        forward: Forward,
        settings: EngineSettings | None = None,
        planning: Planning | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        sparse: SparseForward | None = None,
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        self.arena = arena = forward.arena
        self.mover = mover = forward.mover
        self.planning = planning or Planning(arena.block_tokens)
        self.planning.check(settings.planner)
        self.memory = EngineMemory(
            arena, self.planning, settings.planner, settings.budget_tokens, self._load_over,
            settings.cpu_room_share,
        )  # fmt: skip
        self.store = HostStore(arena, mover, self.memory.host, settings.max_pending_stores)
        self.keeper = Keeper(self.memory, self.store, arena.pools["act", "device"], settings)
        if settings.act_share and not (arena.size.act_host and arena.size.act_device):
            raise ValueError(
                f"EngineSettings.act_share is {settings.act_share}, but the arena has "
                f"{arena.size.act_device} device and {arena.size.act_host} host blocks of "
                "activations: give both, or act_share=0"
            )
        link = settings.link or link_rates(self.planning)
        rule = rule_named(settings.scheduler, settings.fair, link)
        self.batcher = Batcher(self.memory, rule, settings.budget_tokens, settings.max_running)
        self._stats = EngineStats()
        self._loads = Loads(arena, mover, self.memory, self._stats, settings)
        self._config = forward.config
        self._computer = Computer(forward, self._loads, self._row, settings.budget_tokens)
        self._clock = clock
        self._observer = observer
        self.sparse = None if sparse is None else self._lanes(sparse)
        self._computer.sparse = self.sparse
        self._live: dict[int, Sequence] = {}
        self._decoding: dict[Sequence, None] = {}
        self._outputs: list[Output] = []

    def _lanes(self, sparse: SparseForward) -> SparseServing:
        """Known to the memory, and told of what is stored."""
        memory, store = self.memory, self.store
        made = SparseServing(
            sparse, memory.device, memory.host["kv"], lambda key: not store.wants("kv", key)
        )
        memory.sparse, store.copied = made, made.store
        return made

    # -- from outside -------------------------------------------------------------------------

    def submit(
        self,
        tokens: Run[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        tenant: str = "",
        priority: int = 0,
        planner: str | Planner | None = None,
        salt: str = "",
        name: str = "",
        approx: bool = False,
    ) -> Sequence:
        """A request; its tokens come with the outputs of `step` under its `request_id`.

        Args:
            tokens: of the prompt.
            max_tokens: of the answer at most; fewer where the context ends.
            sampling: how tokens are chosen.
            tenant, priority: for the scheduling rule.
            planner: of its load plan, instead of the engine's.
            salt: requests of different salts share no blocks.
            name: the caller's, for whoever observes.
            approx: it may be computed sparsely, which changes the answer.

        Raises:
            RequestRefused: no token, one outside the vocabulary, or more than can ever fit.
            ValueError: there is no such planner, or no lane for approximate answers.
        """
        check_asked(approx, planner, self.sparse is not None, self.planning)
        most = min(self._config.max_tokens, self.memory.capacity_blocks * self.arena.block_tokens)
        refuse(tokens, max_tokens, most, self._config.vocab)
        sequence = Sequence(
            self._stats.requests, tokens, self._clock(), min(max_tokens, most - len(tokens)),
            sampling, block_tokens=self.arena.block_tokens, tenant=tenant, priority=priority,
            planner=planner, salt=salt, name=name, approx=approx,
        )  # fmt: skip
        self._stats.requests += 1
        self._live[sequence.request_id] = sequence
        self.memory.arrived(sequence)
        self.batcher.add(sequence, sequence.arrival_s)
        return sequence

    def abort(self, request_id: int) -> bool:
        """Forget a request wherever it is; False if it is over already.

        Its blocks are free at once, or, if a load into them is under way, when that ends.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        sequence.finish_reason = "abort"
        self._stats.aborted += 1
        self._outputs.append(Output(request_id, [], "abort", sequence.account))
        if sequence not in self._loads:
            self._leave(sequence, self._clock())
        return True

    def heard(self, elsewhere: Mapping[str, Charge], weights: Mapping[str, float]) -> None:
        """What other engines charged each tenant so far, and their weights, if the rule cares."""
        if isinstance(rule := self.batcher.rule, Fair):
            rule.charged_elsewhere(elsewhere, weights, self._clock())

    @property
    def busy(self) -> bool:
        """Whether there is anything to do for a request, or to tell of one."""
        return bool(self._live or len(self._loads) or self._outputs)

    def step(self) -> list[Output]:
        """One iteration; what requests got by it. Waits a moment if all wait for copies."""
        now_s = self._clock()
        self._poll(now_s)
        admit = self._grow(now_s)
        step = self.batcher.step(now_s, len(self._decoding), admit)
        self._admitted(step, now_s)
        if step.chunks or self._decoding:
            self._iterate(step)
        elif self._live and not self.batcher.ready:
            wait_s = self.settings.rest_s
            if not (self._loads.rest(wait_s) or self.store.rest(wait_s)):
                time.sleep(wait_s)
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """What was done so far. The same object each time."""
        self.mover.settle()
        self._stats.crossed(self.mover.counters)
        self._stats.kept(self.store, self.keeper, self.memory, self.arena)
        self._stats.preemptions = self.batcher.preemptions
        if self.sparse is not None:
            self._stats.sparse = self.sparse.to_dict()
        return self._stats

    def events(self) -> list[CacheEvent]:
        """What became findable where, and what left, since last asked."""
        return self.memory.log.take()

    def check(self) -> None:
        """Raise unless the books are right; with nothing to do, nobody holds a block."""
        self.memory.check()
        if not self.busy and not len(self.store):
            for cache in (self.memory.device, *self.memory.host.values()):
                assert cache.pool.used == cache.idle == len(cache), "a block is held by nobody"
            assert not self.arena.pools["act", "device"].used, "a captured block is held by nobody"

    # -- an iteration -------------------------------------------------------------------------

    def _poll(self, now_s: float) -> None:
        """What was copied beside the last iterations."""
        self.store.poll()
        for sequence in self._loads.landed(now_s):
            self.batcher.landed(sequence, now_s)
            if sequence.finish_reason is not None:
                self._leave(sequence, now_s)

    def _grow(self, now_s: float) -> bool:
        """A block for each that needs one to decode; False if others had to give up theirs."""
        calm = True
        for sequence in list(self._decoding):
            while sequence in self._decoding and self._short(sequence):
                if self.memory.grow(sequence):
                    continue
                calm = False
                self._preempted(_sequence(self.batcher.preempt(now_s)))
        return calm

    def _short(self, sequence: Sequence) -> bool:
        """Whether it lacks a device block for its latest token."""
        return sequence.table.room_tokens < len(sequence.tokens) and not self._in_lane(sequence)

    def _in_lane(self, sequence: Sequence) -> bool:
        return self.sparse is not None and sequence in self.sparse

    def _preempted(self, victim: Sequence) -> None:
        """It is to be computed again up to its latest token, which then gives the next."""
        self._decoding.pop(victim, None)
        victim.total_tokens = len(victim.tokens)
        victim.account.preemptions += 1
        self._free(victim)

    def _admitted(self, step: Step, now_s: float) -> None:
        others = bool(step.chunks or self._decoding)
        for work, quote in step.admitted:
            sequence = _sequence(work)
            if others and self.settings.load_ahead:
                self.memory.spare_others(sequence)
            account, load = sequence.account, sequence.load
            at, there = sequence.kept or load, quote.device_tokens
            if not account.preemptions:
                account.found(sequence, there, now_s - sequence.submitted_s)
            nothing = self.planning.without_load(sequence.total_tokens - there, there)
            account.predicted(at.plan if at is not None else nothing)
            if self._observer is not None:
                self._observer.admitted(sequence)
            if load is not None:
                self._loads.start(sequence, now_s, others)
        # One iteration's, and no more before it has begun.
        for sequence in [] if self.batcher.ready else self._loads.due():
            self.batcher.landed(sequence, now_s)

    def _iterate(self, step: Step) -> None:
        begin_s = self._clock()
        decoding = list(self._decoding)
        rows = {s: self._row(s, len(s.tokens) - 1, 1) for s in decoding}
        rows |= {_sequence(w): self._row(_sequence(w), start, n) for w, n, start in step.chunks}
        logits = self._computer.compute(rows)
        prefilled = [_sequence(work) for work in step.prefilled]
        sampled = [s for s in (*decoding, *prefilled) if s in logits]
        tokens = sample_each(logits, sampled)
        self.mover.mark().block()
        end_s = self._clock()
        self._stats.iterated(step, len(decoding), end_s - begin_s)
        self.batcher.ran(end_s - begin_s, 1, end_s)
        for sequence, row in rows.items():
            if not self._in_lane(sequence):
                self.keeper.computed(sequence, row.stop)
        for sequence, token in zip(sampled, tokens, strict=True):
            self._append(sequence, token, end_s)
        if self.sparse is not None:
            self._change_lanes(self.sparse, end_s)
        if self._observer is not None:
            count = sum(row.new_tokens for row in rows.values())
            done = [s for s in prefilled if s in logits]
            self._observer.iterated(self, end_s - begin_s, count, done)

    def _change_lanes(self, sparse: SparseServing, now_s: float) -> None:
        """Who lost a lane is computed again, exactly; who may be computed sparsely gets one."""
        for sequence in [one for one in self._computer.lost if one.finish_reason is None]:
            if sequence.load is not None:
                self._loads.failed(sequence)
            sparse.expel(sequence)
            self._preempted(_sequence(self.batcher.preempt(now_s, sequence)))
        for sequence in sparse.adopt_all(self._decoding):
            self.keeper.drop(sequence)

    def _row(self, sequence: Sequence, start: int, new: int) -> Row:
        stop = start + new
        act_blocks = {} if self._in_lane(sequence) else self.keeper.capture(sequence, start, stop)
        load = sequence.load
        first = start if load is None else load.start * load.block_tokens
        tokens = sequence.tokens[first:stop]
        return Row(tokens, start, sequence.table.device, load, act_blocks, sequence.kept)

    # -- what happened to a request -----------------------------------------------------------

    def _append(self, sequence: Sequence, token: int, now_s: float) -> None:
        """Its next token; it may be its last."""
        sequence.account.approximate_tokens += self._in_lane(sequence)
        if not sequence.output_tokens:
            sequence.account.ttft_s = now_s - sequence.submitted_s
        sequence.tokens.append(token)
        sequence.extend_keys()
        self._decoding[sequence] = None
        cut = sequence.output_tokens >= sequence.max_tokens
        stops = sequence.sampling.stop_tokens
        reason: FinishReason | None = "stop" if token in stops else "length" if cut else None
        account = sequence.account if reason else None
        self._outputs.append(Output(sequence.request_id, [token], reason, account))
        if reason is not None:
            sequence.finish_reason = reason
            del self._live[sequence.request_id]
            self._stats.finished += 1
            self._leave(sequence, now_s)

    def _leave(self, sequence: Sequence, now_s: float) -> None:
        """It is over: whatever holds it lets go."""
        self._decoding.pop(sequence, None)
        if sequence.finish_reason == "abort":
            self.batcher.abort(sequence, sequence.output_tokens, now_s)
        else:
            self.batcher.finish(sequence, sequence.output_tokens, now_s)
        self._free(sequence)
        sequence.account.total_s = now_s - sequence.submitted_s
        sequence.account.output_tokens = sequence.output_tokens
        self._stats.ended(sequence.account)

    def _load_over(self, sequence: Sequence) -> None:
        """Some rules look again at those that waited for a load only when one has landed."""
        self.batcher.rule.landed(sequence, self._clock())

    def _free(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
        self.keeper.drop(sequence)
        if self.sparse is not None:
            self.sparse.release(sequence)


def _sequence(work: Work | None) -> Sequence:
    assert isinstance(work, Sequence)
    return work
