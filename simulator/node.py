"""A simulated node: one engine on its gpu, its link, its caches.

Iterations are planned by `scheduler.core` and last what the node's true step constants say, times
noise. While requests only decode, the iterations between two events are one stretch in closed form;
an arrival or a landed load cuts it at the end of the iteration under way, as a real engine would
notice it. Everything happens at the loop's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from kappa.step import StepModel
from scheduler.core import Scheduler, Step
from simulator.cache import Ids
from simulator.decode import Stretch
from simulator.job import Job
from simulator.link import Link
from simulator.loop import Loop
from simulator.memory import CacheListener, NodeMemory
from simulator.noise import Noise

_FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The true constants of a node, and the step constants that its announcement claims.

    load_block_s, store_block_s: link seconds a block; load_fixed_s: of each transfer besides.
    """

    step: StepModel
    announced_step: StepModel
    block_tokens: int
    device_blocks: int
    host_blocks: int
    load_block_s: float
    store_block_s: float
    load_fixed_s: float
    budget_tokens: int = 8192
    max_running: int = 256
    rule: str = "fcfs"


@dataclass(slots=True)
class NodeTotals:
    """What a node did since the start; survives its failures."""

    steps: int = 0
    step_s: float = 0.0
    step_predicted_s: float = 0.0
    step_tokens: int = 0
    held_block_s: float = 0.0
    busy_s: float = 0.0
    fill: float = 0.0
    fill_steps: int = 0
    max_wait_s: float = 0.0
    max_skips: int = 0
    preemptions: int = 0


class Node:
    """One engine.

    Args:
        index: the node's number.
        model: its constants.
        loop: simulated time.
        noise: of an iteration's or stretch's duration; link_noise of a transfer's.
        listener: told of cache changes, if anybody wants to know.
        admitted, first_token, finished: told of a job's progress, with the time.
    """

    def __init__(
        self,
        index: int,
        model: NodeModel,
        loop: Loop,
        noise: Noise,
        link_noise: Noise,
        listener: CacheListener | None,
        *,
        admitted: Callable[[Job], None] | None,
        first_token: Callable[[Job], None],
        finished: Callable[[Job], None],
    ) -> None:
        self.index = index
        self.model = model
        self.totals = NodeTotals()
        self.slow = 1.0
        self.alive = True
        self._loop = loop
        self._noise = noise
        self._listener = listener
        self._admitted = admitted
        self._first_token = first_token
        self._finished = finished
        self._honest = model.step == model.announced_step
        self.link = Link(
            loop, link_noise, load_block_s=model.load_block_s, store_block_s=model.store_block_s,
            fixed_s=model.load_fixed_s, loaded=self._loaded, stored=self._stored,
        )  # fmt: skip
        self._version = 0
        self._told = (0, 0, 0)
        self._reset()

    def _reset(self) -> None:
        model = self.model
        self.memory = NodeMemory(
            self.index, model.block_tokens, model.device_blocks, model.host_blocks, self._listener
        )
        self.scheduler = Scheduler(self.memory, model.rule, model.budget_tokens, model.max_running)
        self.jobs: dict[Job, None] = {}
        self._decoding = 0
        self._context = 0
        self._count = 0
        self._order = 0
        self._finish: list[tuple[int, int, Job]] = []
        self._grow: list[tuple[int, int, Job]] = []
        self._step: Step | None = None
        self._stretch: Stretch | None = None
        self._stretch_steps = 0
        self._stretch_factor = 1.0
        self._start_s = 0.0
        self._cut = False
        self._held_since_s = self._loop.now_s
        # Loads that landed during this iteration, and those that it asked for and found landed.
        self._landed: list[Job] = []
        self._polled: list[Job] = []
        self._version += 1

    # -- from outside -------------------------------------------------------------------------

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a request could ever be served here."""
        size = self.model.block_tokens
        return -(-(prompt_tokens + output_tokens) // size) <= self.model.device_blocks

    def submit(self, job: Job) -> None:
        """A request arrives; it must fit."""
        self.jobs[job] = None
        if self.scheduler.add(job):
            self._poke()

    def fail(self) -> list[Job]:
        """The node dies: all it held is gone; returns the requests it had."""
        lost = list(self.jobs)
        self._account_scheduler()
        self.link.reset()
        self._reset()
        self.alive = False
        return lost

    def recover(self) -> None:
        """It is back, empty."""
        self.alive = True

    def set_slow(self, factor: float) -> None:
        """From now on everything takes `factor` times as long; what is under way does not."""
        self.slow = self.link.slow = factor
        if self._stretch is not None:
            self._poke()

    def changed(self) -> bool:
        """Whether there is anything to report since this was last asked."""
        done = (self.totals.steps, self.link.load_blocks, self.link.store_blocks)
        if done == self._told:
            return False
        self._told = done
        return True

    def close(self) -> None:
        """The run is over: complete the totals."""
        self._account_held()
        self._account_scheduler()

    # -- iterations ---------------------------------------------------------------------------

    def _poke(self) -> None:
        """Something may fit now: plan at once if idle, else at the end of the current iteration."""
        if self._stretch is None:
            if self._step is None:
                self._plan()
            return
        if self._cut:
            return
        self._cut = True
        now_s = self._loop.now_s
        factor = self._stretch_factor
        ends = self._stretch.steps((now_s - self._start_s) / factor) + 1
        if ends < self._stretch_steps:
            self._stretch_steps = ends
            self._version += 1
            end_s = max(self._start_s + self._stretch.seconds(ends) * factor, now_s)
            self._loop.at(end_s, self._end_stretch, self._version)

    def _plan(self) -> None:
        """The engine is between iterations: what next? An idle one polls until it knows all."""
        self._hear_of_loads()
        self._plan_next()
        while self._polled and self._step is None and self._stretch is None:
            self._hear_of_loads()
            self._plan_next()

    def _plan_next(self) -> None:
        admit = True
        if self._grow and self._grow[0][0] <= self._count:
            admit = self._grow_upto(self._count)
        scheduler = self.scheduler
        if scheduler.waiting:
            self._account_held()
        step = scheduler.step(self._loop.now_s, self._decoding, admit)
        if step.admitted:
            self._start_admitted(step)
        if step.chunks:
            self._start_step(step)
        elif self._decoding:
            # After a preemption the next iteration may admit again.
            self._start_stretch(_FOREVER if admit else 1)
        else:
            self._account_held()

    def _start_admitted(self, step: Step) -> None:
        size = self.model.block_tokens
        for work, quote in step.admitted:
            assert isinstance(work, Job)
            if quote.host_tokens:
                self.link.load(work, quote.host_tokens // size)
            if self._admitted is not None:
                self._admitted(work)

    def _start_step(self, step: Step) -> None:
        n, model = self._decoding, self.model
        pairs = self._context + 0.5 * n
        tokens, reads = n, self._context + n
        for _, new, context in step.chunks:
            tokens += new
            pairs += new * (context + 0.5 * new)
            reads += context + new
        nominal_s = _step_s(model.step, tokens, pairs, reads)
        seconds = nominal_s * self._noise.factor() * self.slow
        totals = self.totals
        totals.steps += 1
        totals.step_tokens += tokens
        totals.step_s += seconds
        totals.step_predicted_s += (
            nominal_s if self._honest else _step_s(model.announced_step, tokens, pairs, reads)
        )
        self._step = step
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
        if self._decoding:
            self._count += 1
            self._context += self._decoding
        size, memory = self.model.block_tokens, self.memory
        for work, new, context in step.chunks:
            assert isinstance(work, Job)
            blocks = (context + new) // size
            limit = len(work.ids)
            if blocks > limit:
                blocks = limit
            if blocks > work.hashed:
                memory.computed(work, blocks)
            if blocks > work.stored:
                self._store(work, blocks)
        for work in step.prefilled:
            assert isinstance(work, Job)
            self._join(work)
        self._end_finished()
        self._plan()

    def _start_stretch(self, most: int) -> None:
        model, n = self.model, self._decoding
        self._stretch = Stretch(model.step, n, self._context)
        self._stretch_steps = min(self._stretch_limit(), most)
        self._stretch_factor = self._noise.factor() * self.slow
        self._cut = False
        now_s = self._loop.now_s
        self._start_s = now_s
        self._version += 1
        seconds = self._stretch.seconds(self._stretch_steps) * self._stretch_factor
        self._loop.at(now_s + seconds, self._end_stretch, self._version)

    def _stretch_limit(self) -> int:
        """Steps until a request ends, a load is known or, where memory is short, one needs a block."""
        if self._polled:
            return 1
        finish = self._finish
        while finish[0][2].finish_at != finish[0][0]:
            heappop(finish)
        steps = finish[0][0] - self._count
        grow = self._grow
        while grow and grow[0][2].grow_at != grow[0][0]:
            heappop(grow)
        if not grow or grow[0][0] >= self._count + steps:
            return steps
        most = self._decoding * (steps // self.model.block_tokens + 1)
        if most <= self.memory.available():
            return steps
        return max(grow[0][0] - self._count, 1)

    def _end_stretch(self, version: int) -> None:
        if version != self._version:
            return
        stretch, steps, n = self._stretch, self._stretch_steps, self._decoding
        assert stretch is not None
        self._stretch = None
        nominal_s = stretch.seconds(steps)
        totals = self.totals
        totals.steps += steps
        totals.step_tokens += steps * n
        totals.step_s += nominal_s * self._stretch_factor
        totals.step_predicted_s += (
            nominal_s
            if self._honest
            else Stretch(self.model.announced_step, n, self._context).seconds(steps)
        )
        totals.busy_s += self._loop.now_s - self._start_s
        self.scheduler.repeat(steps - 1, n)
        self._count += steps
        self._context += steps * n
        if self._grow and self._grow[0][0] < self._count:
            self._grow_upto(self._count - 1)
        self._end_finished()
        self._plan()

    # -- decoding requests --------------------------------------------------------------------

    def _join(self, job: Job) -> None:
        """Its prompt is computed, and with it its next token."""
        first = job.first_s < 0
        if first:
            job.first_s = self._loop.now_s
            self._first_token(job)
        job.generated += 1
        left = job.output_tokens - job.generated
        if left <= 0:
            self._end_job(job)
            return
        self._order += 1
        count, context = self._count, job.total_tokens
        job.joined_at = count
        job.finish_at = count + left
        heappush(self._finish, (job.finish_at, self._order, job))
        grow_in = -context % self.model.block_tokens
        if grow_in < left:
            job.grow_at = count + grow_in
            heappush(self._grow, (job.grow_at, self._order, job))
        self._decoding += 1
        self._context += context

    def _end_finished(self) -> None:
        finish, count = self._finish, self._count
        while finish and finish[0][0] <= count:
            at, _, job = heappop(finish)
            if job.finish_at == at:
                self._leave(job)
                self._end_job(job)

    def _leave(self, job: Job) -> None:
        """It decodes no more."""
        steps = self._count - job.joined_at
        job.generated += steps
        self._decoding -= 1
        self._context -= job.total_tokens + steps
        job.finish_at = job.grow_at = -1

    def _end_job(self, job: Job) -> None:
        self._account_held()
        size = self.model.block_tokens
        # The last token is not computed, so its block is not complete with it.
        kept = min(job.kept, (job.prompt_tokens + job.output_tokens - 1) // size)
        if kept > job.hashed:
            self.memory.computed(job, kept)
        if kept > job.stored:
            self._store(job, kept)
        self.memory.release(job)
        self.scheduler.finish(job)
        del self.jobs[job]
        self._finished(job)

    def _grow_upto(self, count: int) -> bool:
        """Give blocks to those that need one for the steps up to `count`.

        Returns False if requests had to be preempted for it.
        """
        grow, size = self._grow, self.model.block_tokens
        calm = True
        while grow and grow[0][0] <= count:
            at, order, job = heappop(grow)
            if job.grow_at != at:
                continue
            while not self.memory.grow(job):
                calm = False
                victim = self._preempt()
                if victim is job:
                    break
            if job.grow_at != at:
                continue
            following = at + size
            if following < job.finish_at:
                job.grow_at = following
                heappush(grow, (following, order, job))
            else:
                job.grow_at = -1
        return calm

    def _preempt(self) -> Job:
        self._account_held()
        victim = self.scheduler.preempt(self._loop.now_s)
        assert isinstance(victim, Job)
        if victim.finish_at >= 0:
            self._leave(victim)
            # It has to be computed again up to its latest token, which then gives the next.
            victim.total_tokens = victim.prompt_tokens + victim.generated
        self.memory.release(victim)
        return victim

    # -- transfers ----------------------------------------------------------------------------

    def _store(self, job: Job, blocks: int) -> None:
        """Write through what the host tier lacks of its first `blocks` blocks."""
        start = max(job.stored, self.memory.host.match(job.ids, blocks)[1])
        if start >= blocks or self.link.store(job.ids, start, blocks):
            job.stored = blocks

    def _loaded(self, job: Job, seconds: float) -> None:
        """A load has landed; a busy engine asks for it as its next iteration starts."""
        self._landed.append(job)
        self._poke()

    def _hear_of_loads(self) -> None:
        """Between iterations: what was asked for as the last one started is known now.

        vLLM's connector polls its transfers while an iteration runs, and the scheduler hears of
        them with that iteration's output: what lands during one iteration runs after the next.
        """
        for job in self._polled:
            self.memory.landed(job)
            self.scheduler.loaded(job)
        self._polled, self._landed = self._landed, []

    def _stored(self, ids: Ids, start: int, stop: int) -> None:
        memory = self.memory
        # Useless without what comes before it, which may have been evicted meanwhile.
        if memory.host.match(ids, start)[1] == start:
            memory.put_in_host(ids, stop)

    # -- accounts -----------------------------------------------------------------------------

    def _account_held(self) -> None:
        """Integrate the blocks held over time; called before they change."""
        now_s = self._loop.now_s
        self.totals.held_block_s += self.memory.held * (now_s - self._held_since_s)
        self._held_since_s = now_s

    def _account_scheduler(self) -> None:
        scheduler, totals = self.scheduler, self.totals
        fill, steps = scheduler.budget_fill
        totals.fill += fill
        totals.fill_steps += steps
        totals.max_wait_s = max(totals.max_wait_s, scheduler.max_wait_s)
        totals.max_skips = max(totals.max_skips, scheduler.max_skips)
        totals.preemptions += scheduler.preemptions


def _step_s(step: StepModel, tokens: int, pairs: float, reads: int) -> float:
    """`StepModel.step_s` from the sums over a batch: new tokens, pairs, tokens read."""
    compute_s = tokens * step.token_s + pairs * step.pair_s
    read_s = step.weights_s + reads * step.context_token_s
    return (compute_s if compute_s > read_s else read_s) + step.fixed_s
