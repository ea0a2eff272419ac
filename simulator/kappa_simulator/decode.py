"""The requests that decode on a node, counted in steps, and how long runs of such steps last.

Each step gives each of them a token. So a request that joins at step c with k tokens left ends at
step c + k, and needs its next block at steps known in advance; both wait in heaps, and nothing is
done per request and step. Entries of requests that left early are skipped when they come up.

While the same requests decode, each step computes a token for each of them and their contexts grow
by one: GEMMs and weight reads last the same in each, the seconds of attention's computing and of
its KV reads are lines in the step's number of which the longer counts, and sums over steps are
quadratics with at most one crossing. Equal to going step by step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from kappa import step_seconds
from kappa.compiled import interpreted
from kappa.cost import StepModel, StepWork, decode_work
from kappa.silicon import SiliconTable
from kappa_simulator.job import SimulatedJob

_factor = interpreted(step_seconds.factor)


def factor_of(factors: tuple[float, ...], tokens: float) -> float:
    """What a step of `tokens` takes over what its constants say, by factors as
    `kappa_router.engine_fit.EngineSpeed` has them."""
    return _factor(factors, tokens) if factors else 1.0


class DecodeRun:
    """Steps in which `requests` decode together; `context_tokens` are in the cache at the start."""

    __slots__ = ("_cross", "_first", "_fixed_s", "_second")

    def __init__(
        self,
        step: StepModel,
        requests: int,
        context_tokens: int,
        factors: tuple[float, ...] = (),
    ) -> None:
        work, times = decode_work(requests, context_tokens), factor_of(factors, requests)
        self._fixed_s = times * step.work_s(StepWork(work.tokens, 0.0, 0.0))
        pair_s, token_s = times * step.pair_s, times * step.context_token_s
        compute = work.pairs * pair_s, requests * pair_s
        read = work.reads * token_s, requests * token_s
        # The line that is higher at the start, the other, and the first step at which it overtakes.
        self._first, self._second = (compute, read) if compute[0] >= read[0] else (read, compute)
        lead, gain = self._first[0] - self._second[0], self._second[1] - self._first[1]
        self._cross: float = math.floor(lead / gain) + 1 if gain > 0 else math.inf

    def seconds(self, steps: int) -> float:
        """Seconds that the first `steps` steps take."""
        base, slope = self._first
        cross = self._cross
        if steps <= cross:
            return steps * (self._fixed_s + base + slope * (steps - 1) * 0.5)
        other_base, other_slope = self._second
        rest = steps - cross
        return (
            cross * (base + slope * (cross - 1) * 0.5)
            + rest * (other_base + other_slope * (cross + (rest - 1) * 0.5))
            + steps * self._fixed_s
        )

    def steps(self, seconds: float) -> int:
        """How many steps have ended after `seconds`."""
        if seconds <= 0:
            return 0
        base, slope = self._first
        count = _solve(base + self._fixed_s, slope, seconds)
        cross = self._cross
        if count > cross:
            # From the crossing on the second line rules, counted from there.
            past = int(cross)
            base, slope = self._second
            rest = seconds - self.seconds(past)
            count = past + _solve(base + self._fixed_s + slope * past, slope, rest)
        # The root is exact up to rounding: settle it against the sum itself.
        while count > 0 and self.seconds(count) > seconds:
            count -= 1
        while self.seconds(count + 1) <= seconds:
            count += 1
        return count


class TableRun:
    """The same by a table of real GPUs: while contexts are between two of the table's, steps grow
    evenly."""

    def __init__(self, table: SiliconTable, requests: int, context_tokens: int) -> None:
        self._table, self._requests, self._context_tokens = table, requests, context_tokens
        each = context_tokens / requests
        ends = [math.ceil(context - each) for context in table.context.tolist() if context > each]
        self._ends: list[float] = [*ends, math.inf]

    def _lines(self) -> Iterator[tuple[float, float, float]]:
        """Steps that grow evenly: how many, the seconds of the first, and how much each grows."""
        first = 0.0
        for end in self._ends:
            start_s, next_s = self._step_s(first), self._step_s(first + 1)
            yield end - first, start_s, next_s - start_s if end - first > 1 else 0.0
            first = end

    def _step_s(self, number: float) -> float:
        context = self._context_tokens + number * self._requests
        return self._table.step_s((), self._requests, context)

    def seconds(self, steps: int) -> float:
        """Seconds that the first `steps` steps take."""
        total_s, left = 0.0, float(steps)
        for count, start_s, growth_s in self._lines():
            if left <= 0:
                break
            total_s += _line_s(min(left, count), start_s, growth_s)
            left -= count
        return total_s

    def steps(self, seconds: float) -> int:
        """How many steps have ended after `seconds`."""
        if seconds <= 0:
            return 0
        done = 0
        for count, start_s, growth_s in self._lines():
            if count < math.inf and _line_s(count, start_s, growth_s) <= seconds:
                seconds -= _line_s(count, start_s, growth_s)
                done += int(count)
                continue
            some = _solve(start_s, growth_s, seconds)
            while some > 0 and _line_s(some, start_s, growth_s) > seconds:
                some -= 1
            while _line_s(some + 1, start_s, growth_s) <= seconds:
                some += 1
            return done + some
        raise AssertionError("the last line never ends")


def _line_s(steps: float, start_s: float, growth_s: float) -> float:
    """Seconds of steps that grow evenly."""
    return steps * start_s + 0.5 * steps * (steps - 1) * growth_s


def _solve(base: float, slope: float, seconds: float) -> int:
    """Largest k with k·base + slope·k(k-1)/2 ≤ seconds, give or take one."""
    if slope <= 0.0:
        return int(seconds / base)
    linear = base - 0.5 * slope
    return int((math.sqrt(linear * linear + 2.0 * slope * seconds) - linear) / slope)


class Decoding:
    """`requests` decode, with `context_tokens` in the cache between them, at step `count`."""

    def __init__(self, block_tokens: int) -> None:
        self.requests = 0
        self.context_tokens = 0
        self.count = 0
        self._block_tokens = block_tokens
        self._order = 0
        self._finish: list[tuple[int, int, SimulatedJob]] = []
        self._grow: list[tuple[int, int, SimulatedJob]] = []

    def join(self, job: SimulatedJob, left: int) -> None:
        """Add a job with its prompt computed and `left` tokens to generate."""
        self._order += 1
        count, context = self.count, job.total_tokens
        job.joined_at = count
        job.finish_at = count + left
        heappush(self._finish, (job.finish_at, self._order, job))
        grow_in = -context % self._block_tokens
        if grow_in < left:
            job.grow_at = count + grow_in
            heappush(self._grow, (job.grow_at, self._order, job))
        self.requests += 1
        self.context_tokens += context

    def leave(self, job: SimulatedJob) -> None:
        """Remove a job, and note on it how many tokens it has generated."""
        steps = self.count - job.joined_at
        job.generated += steps
        self.requests -= 1
        self.context_tokens -= job.total_tokens + steps
        job.finish_at = job.grow_at = -1

    def advance(self, steps: int) -> None:
        """Count `steps` steps."""
        self.count += steps
        self.context_tokens += steps * self.requests

    def next_finished(self) -> SimulatedJob | None:
        """Remove and return a job that is done by now."""
        finish = self._finish
        while finish and finish[0][0] <= self.count:
            at, _, job = heappop(finish)
            if job.finish_at == at:
                self.leave(job)
                return job
        return None

    def next_growing(self, count: int) -> SimulatedJob | None:
        """A job that needs a block for the steps up to `count`; call `grown` when it has it."""
        grow = self._grow
        while grow and grow[0][0] <= count:
            at, _, job = grow[0]
            if job.grow_at == at:
                return job
            heappop(grow)
        return None

    def grown(self, job: SimulatedJob) -> None:
        """Note that the first in line got its block, and when it will need another."""
        at, order, _ = heappop(self._grow)
        following = at + self._block_tokens
        job.grow_at = following if following < job.finish_at else -1
        if job.grow_at >= 0:
            heappush(self._grow, (following, order, job))

    def steps_ahead(self, available_blocks: int) -> int:
        """Steps until one ends or, where blocks may not suffice, until one needs a block."""
        finish, grow = self._finish, self._grow
        while finish[0][2].finish_at != finish[0][0]:
            heappop(finish)
        steps = finish[0][0] - self.count
        while grow and grow[0][2].grow_at != grow[0][0]:
            heappop(grow)
        if not grow or grow[0][0] >= self.count + steps:
            return steps
        if self.requests * (steps // self._block_tokens + 1) <= available_blocks:
            return steps
        return max(grow[0][0] - self.count, 1)
