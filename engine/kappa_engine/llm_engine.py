"""The engine: requests in, tokens out, one iteration at a time.

`Engine.step` admits, computes and accounts. `kappa_scheduler.batching` decides by one of its rules
which tokens come next, over the blocks of `block_manager`; `model_runner` computes them. Prefixes
come back by load plans (`prefix_loads`), full blocks go to host memory (`host_store`). A load that
fails is counted, and its tokens are computed instead. One thread may use an engine at a time;
`engine_thread` serves several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from itertools import count
from typing import NamedTuple, Protocol

import torch

from kappa.plans.planners import Planning
from kappa.protocol import Charge
from kappa_engine.approximate import ApproximateDecoder, MakeDecoder
from kappa_engine.block_manager import BlockManager
from kappa_engine.host_store import HostStore
from kappa_engine.model_runner import Chunk, Chunks, Logits, ModelRunner
from kappa_engine.prefix_cache import CacheEvent
from kappa_engine.prefix_loads import PrefixLoads
from kappa_engine.sampling import sample
from kappa_engine.sequence import EngineRequest, FinishReason, Output, Sequence
from kappa_engine.settings import EngineOptions
from kappa_engine.step import ServedModel
from kappa_scheduler.batching import Batcher, Step
from kappa_scheduler.catalogue import rule_named, step_limit
from kappa_scheduler.config import LinkRates
from kappa_scheduler.fair import Fair
from kappa_scheduler.work import Memory, Work

# How long a step without work waits for a copy to end.
REST_S = 0.002


class Observer(Protocol):
    """Follows what the engine does, on its thread; must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """A request got its blocks: its account says what was found, its `load` what comes."""

    def iterated(
        self, engine: Engine, seconds: float, chunks: Run[Chunk], prefilled: Run[Sequence]
    ) -> None:
        """An iteration ended that computed these chunks, and the last ones of these prompts."""


class _Iterated(NamedTuple):
    """The arguments of `Observer.iterated`."""

    seconds: float
    chunks: list[Chunk]
    # Requests that have the last chunk of their prompt.
    prefilled: list[Sequence]


class Engine:
    """Continuous batching with chunked prefill over one model.

    Args:
        model: the model, with its blocks and its mover, which the engine does not stop.
        planning: the planners; by default those that need no rates.
        clock: returns seconds.
        approximate: makes the decoder of requests that may be answered approximately.

    Raises:
        ValueError: the settings name an unknown planner, or store activations without blocks.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: EngineOptions | None = None,
        planning: Planning | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        approximate: MakeDecoder | None = None,
    ) -> None:
        settings = settings or EngineOptions()
        self.arena, self.mover = model.arena, model.mover
        self.planning = planning or Planning(self.arena.block_tokens)
        self.planning.check(settings.planner)
        settings.check(self.arena.size)
        self.memory = memory = BlockManager(self.arena, self.planning, settings, self._load_over)
        self.store = store = HostStore(self.arena, self.mover, memory, settings)
        rates = self.planning.rates
        link = None if rates is None else LinkRates(rates.load_token_s, rates.load.fixed_s)
        rule = rule_named(settings.scheduler, settings.fair, link)
        step = None if rates is None else rates.served_step
        limit = step_limit(settings.scheduler, settings.fair, step)
        self.approximate = None if approximate is None else approximate(memory, store)
        seen: Memory = memory if self.approximate is None else self.approximate
        self.batcher = Batcher(seen, rule, settings.budget_tokens, settings.max_running, limit)
        self.loads = PrefixLoads(self.arena, self.mover, memory)
        self._model = model
        self._runner = ModelRunner(model, self.loads, store, self.planning, settings)
        self._settings = settings
        self._clock, self._observer = clock, observer
        self._ids = count()
        self._live: dict[int, Sequence] = {}
        self._decoding: dict[Sequence, None] = {}
        self._outputs: list[Output] = []

    # -- from outside -------------------------------------------------------------------------

    def check(self, request: EngineRequest) -> tuple[str, int]:
        """Check a request; may be called from any thread.

        Returns:
            The planner that keeps its context in host memory ("" if none does), and how many tokens
            it may have, answer included.

        Raises:
            RequestRefused: no token, one outside the vocabulary, or more than can ever fit.
            ValueError: there is no such planner, or no slot for approximate answers.
        """
        if request.approx and self.approximate is None:
            raise ValueError(
                "approximate answers were asked of an engine without slots for them: set "
                "engine.approx"
            )
        if not self._begins_in_slot(request):
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
        max_tokens = min(request.max_tokens, most - len(request.tokens))
        size = self.arena.block_tokens
        sequence = Sequence(next(self._ids), request, self._clock(), max_tokens, size)
        sequence.resides = resides
        if self._begins_in_slot(request):
            sequence.planner = None  # Of its prefix, should it have to be loaded after all.
        self._live[sequence.request_id] = sequence
        self.memory.arrived(sequence)
        self.batcher.add(sequence, sequence.arrival_s)
        return sequence

    def _begins_in_slot(self, request: EngineRequest) -> bool:
        """Whether a request names the plan that leaves its prefix in host memory, to a slot."""
        decoder = self.approximate
        return decoder is not None and request.approx and request.planner == decoder.planner

    def abort(self, request_id: int) -> bool:
        """Forget a request wherever it is; False if it is over already.

        Its blocks are free at once, or when a load into them has ended.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        sequence.finish_reason = "abort"
        self._outputs.append(Output(request_id, [], "abort", sequence.account))
        if sequence not in self.loads:
            self._leave(sequence, self._clock())
        return True

    def charge(self, elsewhere: Mapping[str, Charge], weights: Mapping[str, float]) -> None:
        """Tell a fair rule what other engines charged each tenant so far, and tenants' weights."""
        if isinstance(rule := self.batcher.rule, Fair):
            rule.charged_elsewhere(elsewhere, weights, self._clock())

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished, or an output not handed over."""
        return bool(self._live or len(self.loads) or self._outputs)

    def step(self) -> list[Output]:
        """Run one iteration and return its outputs; wait a moment if all wait for copies."""
        now_s = self._clock()
        self.store.poll()
        for sequence in self.loads.landed(now_s):
            self.batcher.landed(sequence, now_s)
            if sequence.finish_reason is not None:
                self._leave(sequence, now_s)
        admit = self._allocate_blocks(now_s)
        context_tokens = sum(len(sequence.tokens) for sequence in self._decoding)
        step = self.batcher.step(now_s, len(self._decoding), admit, context_tokens)
        self._admitted(step, now_s)
        iterated = None
        if step.chunks or self._decoding:
            iterated = self._iterate(step)
        elif self._live and not self.batcher.ready:
            waited = self.loads.rest(REST_S) or self.store.rest(REST_S)
            if not waited:
                time.sleep(REST_S)
        outputs, self._outputs = self._outputs, []
        # After the outputs are taken, so that an engine that has answered all is idle.
        if self._observer is not None and iterated is not None:
            self._observer.iterated(self, *iterated)
        return outputs

    def events(self) -> list[CacheEvent]:
        """Changes of the prefix caches since the last call."""
        return self.memory.log.take()

    # -- an iteration -------------------------------------------------------------------------

    def _allocate_blocks(self, now_s: float) -> bool:
        """Allocate the blocks that running requests need next; False if a request was preempted."""
        preempted = False
        if len(self.memory.residents) and self.store.behind:
            self.store.make_room(self._settings.capture_blocks(self.arena.block_tokens) // 2)
        for sequence in [*self._decoding, *map(_sequence, self.batcher.prefilling)]:
            while self._lacks_block(sequence):
                if self.memory.grow(sequence):
                    continue
                if len(self.memory.residents) and self.store.make_room():
                    continue
                preempted = True
                self._preempted(_sequence(self.batcher.preempt(now_s)))
        return not preempted

    def _lacks_block(self, sequence: Sequence) -> bool:
        """Whether a request needs a block for its latest token, or for its next chunk."""
        if sequence.slot is not None or sequence not in self.batcher.running:
            return False
        needed = len(sequence.tokens)
        if sequence not in self._decoding:
            next_tokens = sequence.computed_tokens + self.batcher.budget_tokens
            needed = min(sequence.total_tokens, next_tokens)
        return sequence.room_tokens < needed

    def _preempted(self, victim: Sequence) -> None:
        """Free a victim's blocks: it is computed again up to its latest token."""
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
                account.kept_tokens = kept.blocks * sequence.block_tokens if kept else 0
                account.device_tokens = there - account.kept_tokens
                account.new_tokens = sequence.total_tokens - there
            if (planned := kept or load) is not None:
                account.plan, account.why = planned.plan.kind, planned.plan.why
            if self._observer is not None:
                self._observer.admitted(sequence)
            if load is not None:
                self.loads.start(sequence, now_s, others)
        # Land at most one iteration's worth of them.
        if not self.batcher.ready:
            for sequence in self.loads.due(self.batcher.budget_tokens):
                self.batcher.landed(sequence, now_s)

    def _iterate(self, step: Step) -> _Iterated:
        """Compute a step, and append the tokens that it gives."""
        begin_s = self._clock()
        decoding = list(self._decoding)
        chunks = {s: Chunk(len(s.tokens) - 1, len(s.tokens)) for s in decoding}
        chunks |= {_sequence(work): Chunk(start, start + n) for work, n, start in step.chunks}
        logits, lost = self._compute(chunks)
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
        seconds = end_s - begin_s
        for work, _, _ in step.chunks:
            _sequence(work).account.compute_s += seconds
        self.batcher.ran(seconds, 1, end_s)
        for sequence, chunk in chunks.items():
            if sequence.slot is None:
                self.store.computed(sequence, chunk.stop)
        for sequence, token in zip(sampled, tokens, strict=True):
            self._append(sequence, token, end_s)
        if self.approximate is not None:
            self._change_slots(self.approximate, lost, end_s)
        return _Iterated(seconds, list(chunks.values()), prefilled)

    def _compute(self, chunks: Chunks) -> tuple[Logits, list[Sequence]]:
        """Logits of each chunk's last token, and the requests that lost their slot."""
        exact = {s: chunk for s, chunk in chunks.items() if s.slot is None}
        logits = self._runner.compute(exact) if exact else {}
        if self.approximate is None or len(exact) == len(chunks):
            return logits, []
        done = self.approximate.compute({s: c for s, c in chunks.items() if s.slot is not None})
        for sequence, seconds in done.begun.items():
            self.loads.arrived(sequence, seconds)
        return logits | done.logits, done.lost

    def _change_slots(
        self, decoder: ApproximateDecoder, lost: list[Sequence], now_s: float
    ) -> None:
        """Requests that lost their slot are computed again, exactly; others are moved into one."""
        for sequence in [one for one in lost if one.finish_reason is None]:
            if sequence.load is not None:
                self.loads.failed(sequence)
            decoder.expel(sequence)
            self._preempted(_sequence(self.batcher.preempt(now_s, sequence)))
        for sequence in [one for one in list(self._decoding) if decoder.promote(one)]:
            self.store.drop(sequence)

    # -- what happened to a request -----------------------------------------------------------

    def _append(self, sequence: Sequence, token: int, now_s: float) -> None:
        """Append a request's next token, and end the request if it is the last."""
        account = sequence.account
        account.approximate_tokens += sequence.slot is not None
        sequence.append(token)
        self._decoding[sequence] = None
        reason: FinishReason | None = None
        if token in sequence.request.sampling.stop_tokens:
            reason = "stop"
        elif sequence.output_tokens >= sequence.max_tokens:
            reason = "length"
        shown = account if reason or sequence.output_tokens == 1 else None
        self._outputs.append(Output(sequence.request_id, [token], reason, shown))
        if reason is not None:
            sequence.finish_reason = reason
            del self._live[sequence.request_id]
            self._leave(sequence, now_s)

    def _leave(self, sequence: Sequence, now_s: float) -> None:
        """Release everything that a finished or aborted request holds."""
        self._decoding.pop(sequence, None)
        end = self.batcher.abort if sequence.finish_reason == "abort" else self.batcher.finish
        end(sequence, sequence.output_tokens, now_s)
        self._free(sequence)

    def _load_over(self, sequence: Sequence) -> None:
        """Tell the rule: some look again at requests that wait for a load only when one lands."""
        self.batcher.rule.landed(sequence, self._clock())

    def _free(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
        self.store.drop(sequence)
        if self.approximate is not None:
            self.approximate.release(sequence)


def _sequence(work: Work | None) -> Sequence:
    assert isinstance(work, Sequence)
    return work
