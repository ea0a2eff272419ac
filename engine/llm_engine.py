"""The engine: requests in, tokens out, one iteration at a time.

`Engine.step` is admit, run, account. What is computed next is decided by `scheduler.batching` and
any of its rules over the real blocks (`engine.block_manager`); the model is behind
`engine.model_runner`; prefixes come back by load plans, complete blocks go to host memory
(`engine.host_store`). A load that fails is counted and its tokens are computed instead. One thread
may use an engine at a time: `engine.engine_thread` is for several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from dataclasses import asdict
from typing import Protocol

import torch

from engine.block_manager import BlockManager
from engine.forward import ServedModel
from engine.host_store import HostStore
from engine.model_runner import Chunk, ModelRunner
from engine.prefix_cache import CacheEvent
from engine.prefix_loads import PrefixLoads
from engine.sampling import sample
from engine.sequence import EngineRequest, FinishReason, Output, Sequence
from engine.settings import EngineOptions
from engine.sparse.forward import SparseForward
from engine.sparse.serving import SPARSE, SparseServing
from engine.stats import EngineStats
from kappa.plans.planners import Planning
from kappa.protocol import Charge
from scheduler.batching import Batcher, Step
from scheduler.catalogue import rule_named, step_limit
from scheduler.config import LinkRates
from scheduler.fair import Fair
from scheduler.work import Work

# How long a step without work waits for a copy to end.
REST_S = 0.002


class Observer(Protocol):
    """Follows what the engine does, on its thread; must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """A request got its blocks; its account says what was found, its `load` what comes."""

    def iterated(
        self, engine: Engine, seconds: float, chunks: Run[Chunk], prefilled: Run[Sequence]
    ) -> None:
        """An iteration ended that computed these chunks, and the last ones of these prompts."""


class Engine:
    """Continuous batching with chunked prefill over one model.

    Args:
        model: with its blocks and its mover, which the engine does not stop.
        settings: how to run.
        planning: the planners; those that need no rates, if not given.
        clock: seconds.
        observer: follows what happens.
        sparse: the model over sparse-decode slots, for requests that may be answered approximately.

    Raises:
        ValueError: a planner that there is none of; activations to store, and no blocks for them.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: EngineOptions | None = None,
        planning: Planning | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        sparse: SparseForward | None = None,
    ) -> None:
        settings = settings or EngineOptions()
        self.arena, self.mover = model.arena, model.mover
        settings.check_arena(self.arena.size)
        self.planning = planning or Planning(self.arena.block_tokens)
        self.planning.check(settings.planner)
        settings.check_window(self.arena.size)
        self.memory = memory = BlockManager(self.arena, self.planning, settings, self._load_over)
        self.store = store = HostStore(self.arena, self.mover, memory, settings)
        rates = self.planning.rates
        link = None if rates is None else LinkRates(rates.load_token_s, rates.load.fixed_s)
        rule = rule_named(settings.scheduler, settings.fair, link)
        step = None if rates is None else rates.step
        limit = step_limit(settings.scheduler, settings.fair, step)
        self.batcher = Batcher(memory, rule, settings.budget_tokens, settings.max_running, limit)
        self._stats = EngineStats()
        self._loads = PrefixLoads(self.arena, self.mover, memory, self._stats)
        self._model = model
        self._runner = ModelRunner(model, self._loads, store, self.planning, settings)
        self._settings = settings
        self._clock, self._observer = clock, observer
        self._live: dict[int, Sequence] = {}
        self._decoding: dict[Sequence, None] = {}
        self._outputs: list[Output] = []
        self.sparse: SparseServing | None = None
        if sparse is not None:
            caches = memory.device, memory.host["kv"]
            made = SparseServing(sparse, *caches, lambda key: not store.wants("kv", key))
            self.sparse = memory.sparse = self._runner.sparse = made
            store.copied = made.store

    # -- from outside -------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> tuple[str, int]:
        """The planner by which the request's context is to lie in host memory ("": it is not), and
        tokens that it may have, answer included. Changes nothing: may be called from any thread.

        Raises:
            RequestRefused: no token, one outside the vocabulary, or more than can ever fit.
            ValueError: there is no such planner, or no slot for approximate answers.
        """
        if request.approx and self.sparse is None:
            raise ValueError(
                "approximate answers were asked of an engine without slots for them: set "
                "engine.approx"
            )
        if not (request.approx and request.planner == SPARSE):
            self.planning.check(request.planner)
        resides = self.planning.resides(
            request.planner or self._settings.planner, len(request.tokens), self.memory.room_tokens
        )
        blocks = self.memory.capacity_blocks
        if resides:
            blocks = self._settings.most_blocks(self.arena.size)
        most = min(self._model.max_tokens, blocks * self.arena.block_tokens)
        request.check(most, self._model.vocab)
        return resides, most

    def submit(self, request: EngineRequest) -> Sequence:
        """Queue a request; its tokens come with the outputs of `step` under its `request_id`.
        Raises as `check` does."""
        resides, most = self.check(request)
        max_tokens, size = (
            min(request.max_tokens, most - len(request.tokens)),
            self.arena.block_tokens,
        )
        sequence = Sequence(self._stats.requests, request, self._clock(), max_tokens, size)
        sequence.resides = resides
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

    def charge(self, elsewhere: Mapping[str, Charge], weights: Mapping[str, float]) -> None:
        """What other engines charged each tenant so far, and their weights, if the rule cares."""
        if isinstance(rule := self.batcher.rule, Fair):
            rule.charged_elsewhere(elsewhere, weights, self._clock())

    @property
    def busy(self) -> bool:
        """Whether there is anything to do for a request, or to output."""
        return bool(self._live or len(self._loads) or self._outputs)

    def step(self) -> list[Output]:
        """One iteration; what requests got by it. Waits a moment if all wait for copies."""
        now_s = self._clock()
        self.store.poll()
        for sequence in self._loads.landed(now_s):
            self.batcher.landed(sequence, now_s)
            if sequence.finish_reason is not None:
                self._leave(sequence, now_s)
        admit = self._grow(now_s)
        context_tokens = sum(len(sequence.tokens) for sequence in self._decoding)
        step = self.batcher.step(now_s, len(self._decoding), admit, context_tokens)
        self._admitted(step, now_s)
        iterated = None
        if step.chunks or self._decoding:
            iterated = self._iterate(step)
        elif self._live and not self.batcher.ready:
            waited = self._loads.rest(REST_S) or self.store.rest(REST_S)
            if not waited:
                time.sleep(REST_S)
        outputs, self._outputs = self._outputs, []
        # Only now: with the last outputs handed over, an engine that has answered all is idle.
        if self._observer is not None and iterated is not None:
            self._observer.iterated(self, *iterated)
        return outputs

    def stats(self) -> EngineStats:
        """What was done so far. The same object each time."""
        self.mover.settle()
        stats, memory = self._stats, self.memory
        for way, link in self.mover.counters.items():
            stats.link[f"{way}_bytes"] = link.copied_bytes
            stats.link[f"{way}_s"] = link.busy_s
            stats.link[f"{way}_failed"] = link.failed
        stats.blocks = {
            **asdict(self.store.counters),
            "evicted_device": memory.device.evicted,
            "evicted_host": sum(cache.evicted for cache in memory.host.values()),
            "misused": sum(pool.misused for pool in self.arena.pools.values()),
        }
        stats.preemptions = self.batcher.preemptions
        if self.sparse is not None:
            stats.sparse = self.sparse.to_dict()
        return stats

    def events(self) -> list[CacheEvent]:
        """What became findable where, and what left, since the last call."""
        return self.memory.log.take()

    # -- an iteration -------------------------------------------------------------------------

    def _grow(self, now_s: float) -> bool:
        """Blocks for each that needs some to decode, or for its next chunk; False if others had to
        give up theirs."""
        calm = True
        if len(self.memory.residents) and self.store.behind:
            self.store.make_room(self._settings.capture_blocks(self.arena.block_tokens) // 2)
        for sequence in [*self._decoding, *map(_sequence, self.batcher.prefilling)]:
            while self._lacks_block(sequence):
                if self.memory.grow(sequence):
                    continue
                if len(self.memory.residents) and self.store.make_room():
                    continue
                calm = False
                self._preempted(_sequence(self.batcher.preempt(now_s)))
        return calm

    def _lacks_block(self, sequence: Sequence) -> bool:
        """Whether the device has none for its latest token, or for all of its next chunk."""
        if sequence.slot is not None or sequence not in self.batcher.running:
            return False
        needed = len(sequence.tokens)
        if sequence not in self._decoding:
            next_tokens = sequence.computed_tokens + self.batcher.budget_tokens
            needed = min(sequence.total_tokens, next_tokens)
        return sequence.room_tokens < needed

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
            if others:
                self.memory.spare_others(sequence)
            account, load, kept = sequence.account, sequence.load, sequence.kept
            there = quote.device_tokens
            if not account.preemptions:
                account.queue_s = now_s - sequence.submitted_s
                account.kept_tokens = kept.blocks * sequence.block_tokens if kept else 0
                account.device_tokens = there - account.kept_tokens
                account.new_tokens = sequence.total_tokens - there
            planned = kept or load
            nothing = self.planning.without_load(sequence.total_tokens - there, there)
            account.predicted(nothing if planned is None else planned.plan)
            if self._observer is not None:
                self._observer.admitted(sequence)
            if load is not None:
                self._loads.start(sequence, now_s, others)
        # One iteration's, and no more before it has begun.
        if not self.batcher.ready:
            for sequence in self._loads.due(self.batcher.budget_tokens):
                self.batcher.landed(sequence, now_s)

    def _iterate(self, step: Step) -> tuple[float, list[Chunk], list[Sequence]]:
        """Compute a step; its seconds, its chunks, and the prompts that have their last one."""
        begin_s = self._clock()
        decoding = list(self._decoding)
        chunks = {s: Chunk(len(s.tokens) - 1, len(s.tokens)) for s in decoding}
        chunks |= {_sequence(work): Chunk(start, start + n) for work, n, start in step.chunks}
        logits = self._runner.compute(chunks)
        prefilled = [s for work in step.prefilled if (s := _sequence(work)) in logits]
        sampled = [*(s for s in decoding if s in logits), *prefilled]
        tokens: list[int] = []
        if sampled:
            together = torch.stack([logits[s] for s in sampled])
            tokens = sample(
                together, [s.request.sampling for s in sampled], [s.rng for s in sampled]
            )
        self.mover.mark().block()
        end_s = self._clock()
        seconds, stats = end_s - begin_s, self._stats
        stats.iterations += 1
        stats.gpu_s += seconds
        stats.decode_tokens += len(decoding)
        for work, new, _ in step.chunks:
            stats.prefill_tokens += new
            _sequence(work).account.compute_s += seconds
        self.batcher.ran(seconds, 1, end_s)
        for sequence, chunk in chunks.items():
            if sequence.slot is None:
                self.store.computed(sequence, chunk.stop)
        for sequence, token in zip(sampled, tokens, strict=True):
            self._append(sequence, token, end_s)
        if self.sparse is not None:
            self._change_slots(self.sparse, end_s)
        return seconds, list(chunks.values()), prefilled

    def _change_slots(self, sparse: SparseServing, now_s: float) -> None:
        """Who lost a slot is computed again, exactly; who may be computed sparsely gets one."""
        for sequence in [one for one in self._runner.lost if one.finish_reason is None]:
            if sequence.load is not None:
                self._loads.failed(sequence)
            sparse.expel(sequence)
            self._preempted(_sequence(self.batcher.preempt(now_s, sequence)))
        for sequence in [one for one in list(self._decoding) if sparse.promote(one)]:
            self.store.drop(sequence)

    # -- what happened to a request -----------------------------------------------------------

    def _append(self, sequence: Sequence, token: int, now_s: float) -> None:
        """Its next token; it may be its last."""
        account = sequence.account
        account.approximate_tokens += sequence.slot is not None
        if not sequence.output_tokens:
            account.ttft_s = now_s - sequence.submitted_s
        sequence.append(token)
        self._decoding[sequence] = None
        reason: FinishReason | None = None
        if token in sequence.request.sampling.stop_tokens:
            reason = "stop"
        elif sequence.output_tokens >= sequence.max_tokens:
            reason = "length"
        told = account if reason or sequence.output_tokens == 1 else None
        self._outputs.append(Output(sequence.request_id, [token], reason, told))
        if reason is not None:
            sequence.finish_reason = reason
            del self._live[sequence.request_id]
            self._stats.finished += 1
            self._leave(sequence, now_s)

    def _leave(self, sequence: Sequence, now_s: float) -> None:
        """It is over: whatever holds it lets go."""
        self._decoding.pop(sequence, None)
        end = self.batcher.abort if sequence.finish_reason == "abort" else self.batcher.finish
        end(sequence, sequence.output_tokens, now_s)
        self._free(sequence)
        sequence.account.total_s = now_s - sequence.submitted_s
        sequence.account.output_tokens = sequence.output_tokens
        self._stats.ended(sequence.account)

    def _load_over(self, sequence: Sequence) -> None:
        """Some rules look again at those that waited for a load only when one has landed."""
        self.batcher.rule.landed(sequence, self._clock())

    def _free(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
        self.store.drop(sequence)
        if self.sparse is not None:
            self.sparse.release(sequence)


def _sequence(work: Work | None) -> Sequence:
    assert isinstance(work, Sequence)
    return work
