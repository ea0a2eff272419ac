"""A simulated node: one engine on its gpu, its link, its caches.

Iterations are planned by `scheduler.batching` and last what the node's true step constants say,
times noise. While requests only decode, the iterations between two events are one run in closed
form; an arrival or a landed load cuts it at the end of the iteration under way, as a real engine
would notice it. Under a rule that may change its mind with time, iterations are planned one by one
while somebody waits. Everything happens at the loop's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kappa.cost import batch_work, decode_work
from kappa.protocol import Samples
from kappa_scheduler.batching import Batcher, Step
from kappa_scheduler.catalogue import rule_named, step_limit
from kappa_simulator.cache import Ids
from kappa_simulator.clusters import NodeModel
from kappa_simulator.decode import DecodeRun, Decoding, TableRun
from kappa_simulator.job import SimulatedJob
from kappa_simulator.link import NodeLink
from kappa_simulator.loop import Loop, Noise
from kappa_simulator.memory import CacheListener, NodeMemory

_FOREVER = 1 << 60


@dataclass(slots=True)
class NodeTotals:
    """Totals of a node since the start, its failures included."""

    steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    held_block_s: float = 0.0
    busy_s: float = 0.0
    # Iterations before which a request waited, and their tokens.
    queued_steps: int = 0
    queued_tokens: int = 0
    # Sum of the budget's fill over iterations with work at hand, and their number.
    fill: float = 0.0
    fill_steps: int = 0
    max_wait_s: float = 0.0
    max_skips: int = 0
    preemptions: int = 0

    def add_steps(self, steps: int, tokens: int, seconds: float) -> None:
        self.steps += steps
        self.step_tokens += tokens
        self.step_s += seconds

    def add_scheduler(self, scheduler: Batcher) -> None:
        fill, steps = scheduler.budget_fill
        self.fill += fill
        self.fill_steps += steps
        self.max_wait_s = max(self.max_wait_s, scheduler.rule.max_wait_s)
        self.max_skips = max(self.max_skips, scheduler.rule.max_skips)
        self.preemptions += scheduler.preemptions


@dataclass(frozen=True, slots=True)
class JobEvents:
    """Callbacks for the progress of jobs."""

    first_token: Callable[[SimulatedJob], object]
    finished: Callable[[SimulatedJob], object]
    admitted: Callable[[SimulatedJob], object] | None = None


class Node:
    """One engine.

    Args:
        index: the node's number.
        model: its constants.
        loop: simulated time.
        noise: of the duration of an iteration or run, and of a transfer.
        events: called as a job progresses.
        listener: receives cache changes, where one is given.
    """

    def __init__(
        self,
        index: int,
        model: NodeModel,
        loop: Loop,
        noise: tuple[Noise, Noise],
        events: JobEvents,
        listener: CacheListener | None = None,
    ) -> None:
        self.index = index
        self.model = model
        self.totals, self.samples = NodeTotals(), Samples()
        self.slow = 1.0
        self.alive = True
        self.loads_fail = False
        self._loop = loop
        self._noise, link_noise = noise
        self._listener = listener
        self._events = events
        self.link = NodeLink(loop, link_noise, model, self._loaded, self._stored)
        self._version = 0
        self._reset()

    def _reset(self) -> None:
        model = self.model
        self.memory = NodeMemory(self.index, model, self._listener)
        rule = rule_named(model.rule, model.fair, model.link_rates)
        limit = step_limit(model.rule, model.fair, model.step)
        self.scheduler = Batcher(self.memory, rule, model.budget_tokens, model.max_running, limit)
        # Whether the rule may admit with time what it did not before, though nothing happened.
        self._timed: bool = getattr(rule, "timed", True)
        self.jobs: dict[SimulatedJob, None] = {}
        self._decoding = Decoding(model.block_tokens)
        self._step: Step | None = None
        self._run: DecodeRun | TableRun | None = None
        self._run_steps = 0
        self._run_factor = 1.0
        self._start_s = 0.0
        self._cut = False
        self._held_since_s = self._loop.now_s
        # Loads that landed during this iteration, and those known to have landed before it.
        self._landed: list[SimulatedJob] = []
        # A job that was alone when it was admitted loads by layers, for this many seconds.
        self._by_layer: tuple[SimulatedJob | None, float] = (None, 0.0)
        self._polled: list[SimulatedJob] = []
        self._version += 1

    # -- from outside -------------------------------------------------------------------------

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a request could ever be served here."""
        size = self.model.block_tokens
        return -(-(prompt_tokens + output_tokens) // size) <= self.model.device_blocks

    def submit(self, job: SimulatedJob) -> None:
        """A request arrives; it must fit."""
        self.jobs[job] = None
        # As engines bound an answer by the context they can hold.
        room = self.model.device_blocks * self.model.block_tokens - job.prompt_tokens
        job.max_tokens = min(job.max_tokens, room)
        self.memory.arrived(job)
        if self.scheduler.add(job, self._loop.now_s):
            self._poke()

    def leave(self, job: SimulatedJob) -> bool:
        """Drop a request whose client is gone, if it still waits; whether it did."""
        rule = self.scheduler
        if job not in self.jobs or job in rule.running or job in rule.loading or job in rule.ready:
            return False
        rule.abort(job, 0, self._loop.now_s)
        del self.jobs[job]
        return True

    def fail(self) -> list[SimulatedJob]:
        """The node dies: all it held is gone; returns the requests it had."""
        lost = list(self.jobs)
        self.totals.add_scheduler(self.scheduler)
        self.link.reset()
        self._reset()
        self.alive = False
        return lost

    def set_slow(self, factor: float) -> None:
        """Multiply the duration of steps and loads that begin from now on by `factor`."""
        self.slow = factor
        self.link.slow_down(factor)
        if self._run is not None:
            self._poke()

    def close(self) -> None:
        """Complete the totals at the end of the run."""
        self._account_held()
        self.totals.add_scheduler(self.scheduler)

    # -- iterations ---------------------------------------------------------------------------

    def _poke(self) -> None:
        """Plan at once if idle, else at the end of the current iteration: something may fit now."""
        if self._run is None:
            if self._step is None:
                self._plan()
            return
        if self._cut:
            return
        self._cut = True
        now_s = self._loop.now_s
        factor = self._run_factor
        ends = self._run.steps((now_s - self._start_s) / factor) + 1
        if ends < self._run_steps:
            self._run_steps = ends
            self._version += 1
            end_s = max(self._start_s + self._run.seconds(ends) * factor, now_s)
            self._loop.at(end_s, self._end_run, self._version)

    def _plan(self) -> None:
        """Plan the next iteration; an idle engine polls its loads until it knows of all."""
        self._learn_of_loads()
        self._plan_next()
        while self._polled and self._step is None and self._run is None:
            self._learn_of_loads()
            self._plan_next()

    def _plan_next(self) -> None:
        admit = self._grow_upto(self._decoding.count)
        scheduler = self.scheduler
        if scheduler.queued:
            self._account_held()
        decoding = self._decoding
        step = scheduler.step(self._loop.now_s, decoding.requests, admit, decoding.context_tokens)
        if step.admitted:
            self._start_admitted(step)
        if step.chunks:
            self._start_step(step)
        elif self._decoding.requests:
            # After a preemption the next iteration may admit again.
            self._start_run(_FOREVER if admit else 1)
        else:
            self._account_held()

    def _start_admitted(self, step: Step) -> None:
        size = self.model.block_tokens
        for work, quote in step.admitted:
            assert isinstance(work, SimulatedJob)
            if quote.host_tokens:
                self.link.load(work, quote.host_tokens // size)
                if self.model.overlap and len(self.jobs) == 1:
                    self._by_layer = work, self.model.link_rates.load_s(quote.host_tokens)
            if self._events.admitted is not None:
                self._events.admitted(work)

    def _start_step(self, step: Step) -> None:
        decoding, model = self._decoding, self.model
        chunks = [(new, context) for _, new, context in step.chunks]
        work = batch_work(chunks, decoding.requests, decoding.context_tokens)
        tokens = int(work.tokens)
        seconds = model.step_s(chunks, decoding.requests, decoding.context_tokens)
        seconds *= self._noise.factor() * self.slow
        self.totals.add_steps(1, tokens, seconds)
        self.samples.add_step(work, seconds)
        self._count_queued(1, tokens)
        self._step = step
        if self._by_layer[0] is step.chunks[0][0]:
            # Here it lands first, and its step then lasts for so much less (paper 001, Eq. 4).
            seconds -= model.overlap * min(self._by_layer[1], seconds)
            self._by_layer = None, 0.0
        now_s = self._loop.now_s
        self._start_s = now_s
        self._version += 1
        self._loop.at(now_s + seconds, self._end_step, self._version)

    def _end_step(self, version: int) -> None:
        if version != self._version:
            return
        step = self._step
        assert step is not None
        self._step = None
        totals = self.totals
        totals.busy_s += self._loop.now_s - self._start_s
        self.scheduler.ran(self._loop.now_s - self._start_s, 1, self._loop.now_s)
        if self._decoding.requests:
            self._decoding.advance(1)
        size, memory = self.model.block_tokens, self.memory
        for work, new, context in step.chunks:
            assert isinstance(work, SimulatedJob)
            blocks = (context + new) // size
            limit = len(work.ids)
            if blocks > limit:
                blocks = limit
            if blocks > work.hashed:
                memory.computed(work, blocks)
            if blocks > work.stored:
                self._store(work, blocks)
        for work in step.prefilled:
            assert isinstance(work, SimulatedJob)
            self._join(work)
        self._end_finished()
        self._plan()

    def _start_run(self, most: int) -> None:
        decoding = self._decoding
        model = self.model
        self._run = model.run(decoding.requests, decoding.context_tokens)
        self._run_steps = min(self._run_limit(), most)
        self._run_factor = self._noise.factor() * self.slow
        self._cut = False
        now_s = self._loop.now_s
        self._start_s = now_s
        self._version += 1
        seconds = self._run.seconds(self._run_steps) * self._run_factor
        self._loop.at(now_s + seconds, self._end_run, self._version)

    def _run_limit(self) -> int:
        """Iterations until something has to be looked at: a load, an end, a want of blocks."""
        if self._polled or (self._timed and self.scheduler.queued):
            return 1
        return self._decoding.steps_ahead(self.memory.available())

    def _end_run(self, version: int) -> None:
        if version != self._version:
            return
        run, steps, decoding = self._run, self._run_steps, self._decoding
        n = decoding.requests
        assert run is not None
        self._run = None
        nominal_s = run.seconds(steps)
        totals = self.totals
        totals.add_steps(steps, steps * n, nominal_s * self._run_factor)
        # The one in the middle, which lasts as long as all do on average.
        middle = decode_work(n, decoding.context_tokens + n * (steps - 1) // 2)
        self.samples.add_step(middle, nominal_s * self._run_factor / steps)
        self._count_queued(steps, steps * n)
        totals.busy_s += self._loop.now_s - self._start_s
        self.scheduler.repeat(steps - 1, n)
        self.scheduler.ran(self._loop.now_s - self._start_s, steps, self._loop.now_s)
        decoding.advance(steps)
        self._grow_upto(decoding.count - 1)
        self._end_finished()
        self._plan()

    # -- decoding requests --------------------------------------------------------------------

    def _join(self, job: SimulatedJob) -> None:
        """Begin to decode a job: its prompt is computed, and with it its next token."""
        if job.first_s < 0:
            job.first_s = self._loop.now_s
            self._events.first_token(job)
        job.generated += 1
        left = job.output_tokens - job.generated
        if left <= 0:
            self._end_job(job)
        else:
            self._decoding.join(job, left)

    def _end_finished(self) -> None:
        while (job := self._decoding.next_finished()) is not None:
            self._end_job(job)

    def _end_job(self, job: SimulatedJob) -> None:
        self._account_held()
        size = self.model.block_tokens
        # The last token is not computed, so its block is not complete with it.
        kept = min(len(job.ids), (job.prompt_tokens + job.output_tokens - 1) // size)
        if kept > job.hashed:
            self.memory.computed(job, kept)
        if kept > job.stored:
            self._store(job, kept)
        self.memory.release(job)
        self.scheduler.finish(job, job.output_tokens, self._loop.now_s)
        del self.jobs[job]
        self._events.finished(job)

    def _grow_upto(self, count: int) -> bool:
        """Allocate the blocks that jobs need for the steps up to `count`; False if one was
        preempted."""
        decoding, memory = self._decoding, self.memory
        preempted = False
        while (job := decoding.next_growing(count)) is not None:
            if memory.grow(job):
                decoding.grown(job)
            else:
                preempted = True
                self._preempt()
        return not preempted

    def _preempt(self) -> None:
        self._account_held()
        victim = self.scheduler.preempt(self._loop.now_s)
        assert isinstance(victim, SimulatedJob)
        if victim.finish_at >= 0:
            self._decoding.leave(victim)
            # It has to be computed again up to its latest token, which then gives the next.
            victim.total_tokens = victim.prompt_tokens + victim.generated
        self.memory.release(victim)

    # -- transfers ----------------------------------------------------------------------------

    def _store(self, job: SimulatedJob, blocks: int) -> None:
        """Write through what the host tier lacks of its first `blocks` blocks."""
        start = max(job.stored, self.memory.host.match(job.ids, blocks)[1])
        if start >= blocks or self.link.store(job.ids, start, blocks):
            job.stored = blocks

    def _loaded(self, job: SimulatedJob, seconds: float) -> None:
        """A load has landed; a busy engine polls for it as its next iteration starts."""
        disk_tokens = job.disk_blocks * self.model.block_tokens
        self.samples.add_load(job.cached_tokens, seconds, disk_tokens)
        self._landed.append(job)
        self._poke()

    def _learn_of_loads(self) -> None:
        """Between iterations, take note of the loads that had landed as the last one started.

        vLLM's connector polls its transfers while an iteration runs, and the scheduler knows of
        them with that iteration's output: what lands during one iteration runs after the next.
        """
        for job in self._polled:
            if self.loads_fail:
                self._by_layer = None, 0.0
                self.memory.load_failed(job)
            else:
                self.memory.landed(job)
            self.scheduler.landed(job, self._loop.now_s)
        self._polled, self._landed = self._landed, []

    def _stored(self, ids: Ids, start: int, stop: int) -> None:
        memory = self.memory
        # Useless without what comes before it, which may have been evicted meanwhile.
        if memory.host.match(ids, start)[1] == start:
            memory.put_in_host(ids, stop)

    # -- accounts -----------------------------------------------------------------------------

    def _count_queued(self, steps: int, tokens: int) -> None:
        if self.scheduler.was_queued:
            totals = self.totals
            totals.queued_steps += steps
            totals.queued_tokens += tokens

    def _account_held(self) -> None:
        """Integrate the blocks held over time; called before they change."""
        now_s = self._loop.now_s
        self.totals.held_block_s += self.memory.held * (now_s - self._held_since_s)
        self._held_since_s = now_s
