"""The requests that decode on a node, counted in steps.

Each step gives each of them a token. So a request that joins at step c with k tokens left ends at
step c + k, and needs its next block at steps known in advance; both wait in heaps, and nothing is
done per request and step. Entries of requests that left early are skipped when they come up.
"""

from __future__ import annotations

from heapq import heappop, heappush

from simulator.job import Job


class Decoding:
    """`requests` decode, with `context_tokens` in the cache between them, at step `count`."""

    __slots__ = ("_block_tokens", "_finish", "_grow", "_order", "context_tokens", "count",
                 "requests")  # fmt: skip

    def __init__(self, block_tokens: int) -> None:
        self.requests = 0
        self.context_tokens = 0
        self.count = 0
        self._block_tokens = block_tokens
        self._order = 0
        self._finish: list[tuple[int, int, Job]] = []
        self._grow: list[tuple[int, int, Job]] = []

    def join(self, job: Job, left: int) -> None:
        """Its prompt is computed and `left` tokens are still to come."""
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

    def leave(self, job: Job) -> None:
        """It decodes no more; what it has generated is noted on it."""
        steps = self.count - job.joined_at
        job.generated += steps
        self.requests -= 1
        self.context_tokens -= job.total_tokens + steps
        job.finish_at = job.grow_at = -1

    def advance(self, steps: int) -> None:
        """So many steps have passed."""
        self.count += steps
        self.context_tokens += steps * self.requests

    def next_finished(self) -> Job | None:
        """One that is done by now; it has left."""
        finish = self._finish
        while finish and finish[0][0] <= self.count:
            at, _, job = heappop(finish)
            if job.finish_at == at:
                self.leave(job)
                return job
        return None

    def next_growing(self, count: int) -> Job | None:
        """One that needs a block for the steps up to `count`; `grown` says that it got it."""
        grow = self._grow
        while grow and grow[0][0] <= count:
            at, _, job = grow[0]
            if job.grow_at == at:
                return job
            heappop(grow)
        return None

    def grown(self, job: Job) -> None:
        """The first in line got its block, and will need another in so many steps."""
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
