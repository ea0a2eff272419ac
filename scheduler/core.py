"""What an engine computes next: events in, one iteration's work out.

Two rules. All changes of a request's place (waiting, loading, ready, running) happen in this file.
And it knows neither engine nor simulator: memory is asked through `Memory`, time is an argument.

`fcfs` is stock vLLM: running requests first, then the waiting ones in order of arrival, each
charged its new tokens against the step's budget, stopping at the first whose blocks do not fit.
`pack` goes on past one that does not fit and takes those behind it that do, within a window, and
counts how often each was passed. Blocks are taken when a request is admitted, its loads included.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

FCFS, PACK = "fcfs", "pack"
SCHEDULERS = (FCFS, PACK)
_PACK_WINDOW = 64


class Work:
    """One request inside an engine.

    total_tokens: what must be in the cache before it decodes: its prompt and, after a preemption,
    what it had generated. computed_tokens: how much of that is there, scheduled work included.
    skips: how often a later request was admitted before it.
    """

    __slots__ = ("arrival_s", "computed_tokens", "skips", "total_tokens")

    def __init__(self, total_tokens: int, arrival_s: float) -> None:
        self.total_tokens = total_tokens
        self.arrival_s = arrival_s
        self.computed_tokens = 0
        self.skips = 0


class Quote(NamedTuple):
    """What admitting a request would take now.

    blocks: of those available (unused or evictable), hits that were evictable included.
    device_tokens: found on the device; host_tokens: to be loaded behind them.
    """

    blocks: int
    device_tokens: int
    host_tokens: int


class Memory(Protocol):
    """Blocks on the device, as a scheduler sees them.

    version: rises whenever something may fit that did not before.
    """

    version: int

    def quote(self, work: Work) -> Quote | None:
        """What admitting `work` takes; None while blocks that it needs are being loaded."""
        ...

    def available(self) -> int:
        """Blocks unused or evictable."""
        ...

    def take(self, work: Work, quote: Quote) -> None:
        """Reserve what was quoted."""
        ...


class Step:
    """One iteration's work besides one token for each decoding request.

    chunks: (request, new tokens, context tokens before them). prefilled: those of them whose
    prompt is complete with it. loads: admitted now, to be loaded first (tokens in the quote).
    admitted: all admitted now, with their quotes.
    """

    __slots__ = ("admitted", "chunks", "loads", "prefilled")

    def __init__(self) -> None:
        self.chunks: list[tuple[Work, int, int]] = []
        self.prefilled: list[Work] = []
        self.loads: list[Work] = []
        self.admitted: list[tuple[Work, Quote]] = []


class Scheduler:
    """Plans iterations within a token budget, a number of running requests, and memory."""

    def __init__(
        self, memory: Memory, rule: str = FCFS, budget_tokens: int = 8192, max_running: int = 256
    ) -> None:
        if rule not in SCHEDULERS:
            raise ValueError(f"unknown scheduler {rule!r}: choose one of {', '.join(SCHEDULERS)}")
        self.memory = memory
        self.rule = rule
        self.budget_tokens = budget_tokens
        self.max_running = max_running
        self.waiting: deque[Work] = deque()
        self.running: dict[Work, None] = {}
        self.prefilling: list[Work] = []
        self.ready: deque[Work] = deque()
        self.loading: set[Work] = set()
        self._delayed: list[Work] = []
        self._window = 1 if rule == FCFS else _PACK_WINDOW
        # Memory's version when nothing in the window fitted, and how many had been looked at.
        self._blocked_version = -1
        self._looked_at = 0
        self.max_wait_s = 0.0
        self.max_skips = 0
        self.preemptions = 0
        self._fill = 0.0
        self._fill_steps = 0
        self._wanting = False

    # -- events -------------------------------------------------------------------------------

    def add(self, work: Work) -> bool:
        """A request arrived; whether the next step may have something for it."""
        waiting = self.waiting
        waiting.append(work)
        return len(waiting) <= self._window

    def loaded(self, work: Work) -> None:
        """Its host blocks are on the device: it goes first, as do those that waited for them."""
        self.loading.discard(work)
        self.ready.append(work)
        if self._delayed:
            self.waiting.extendleft(reversed(self._delayed))
            self._delayed.clear()
            self._blocked_version = -1

    def finish(self, work: Work) -> None:
        """It is done, and its blocks are released by whoever holds them."""
        del self.running[work]

    def abort(self, work: Work) -> None:
        """Its client left: forget it wherever it is."""
        self.running.pop(work, None)
        self.loading.discard(work)
        for queue in (self.waiting, self.prefilling, self.ready, self._delayed):
            if work in queue:
                queue.remove(work)
        self._blocked_version = -1

    def preempt(self, now_s: float) -> Work | None:
        """Out of blocks: the latest admitted gives up its own and is first to be recomputed."""
        if not self.running:
            return None
        work, _ = self.running.popitem()
        if work in self.prefilling:
            self.prefilling.remove(work)
        work.computed_tokens = 0
        work.arrival_s = now_s  # it waits anew
        self.waiting.appendleft(work)
        self.preemptions += 1
        self._blocked_version = -1
        return work

    # -- the next iteration -------------------------------------------------------------------

    def step(self, now_s: float, decoding: int, admit: bool = True) -> Step:
        """Plan an iteration in which `decoding` requests take a token each.

        admit: False after a preemption, when nobody new may take the blocks just freed.
        """
        step = Step()
        budget = self.budget_tokens - decoding
        if self.prefilling:
            budget = self._continue(step, budget)
        while self.ready and budget > 0 and len(self.running) < self.max_running:
            budget -= self._run(step, self.ready.popleft(), budget)
        if self.waiting and admit:
            budget = self._admit(step, budget, now_s)
        self._wanting = bool(step.chunks or self.waiting)
        if self._wanting:
            self._fill += (self.budget_tokens - budget) / self.budget_tokens
            self._fill_steps += 1
        return step

    def repeat(self, steps: int, decoding: int) -> None:
        """The last step's decoding went on alone for `steps` more iterations."""
        if self._wanting:
            self._fill += steps * decoding / self.budget_tokens
            self._fill_steps += steps

    @property
    def budget_fill(self) -> tuple[float, int]:
        """Sum of the shares of the budget used, and steps counted: those with work at hand."""
        return self._fill, self._fill_steps

    def _continue(self, step: Step, budget: int) -> int:
        for work in self.prefilling:
            if budget <= 0:
                break
            budget -= self._chunk(step, work, budget)
        if step.prefilled:
            self.prefilling = [w for w in self.prefilling if w.computed_tokens < w.total_tokens]
        return budget

    def _run(self, step: Step, work: Work, budget: int) -> int:
        self.running[work] = None
        tokens = self._chunk(step, work, budget)
        if work.computed_tokens < work.total_tokens:
            self.prefilling.append(work)
        return tokens

    def _chunk(self, step: Step, work: Work, budget: int) -> int:
        context = work.computed_tokens
        tokens = min(work.total_tokens - context, budget)
        step.chunks.append((work, tokens, context))
        work.computed_tokens = context + tokens
        if work.computed_tokens == work.total_tokens:
            step.prefilled.append(work)
        return tokens

    def _admit(self, step: Step, budget: int, now_s: float) -> int:
        memory, waiting, window = self.memory, self.waiting, self._window
        if self._blocked_version == memory.version:
            if self._looked_at >= min(len(waiting), window):
                return budget
            at = self._looked_at
        else:
            at = 0
        while at < window and at < len(waiting) and budget > 0:
            if len(self.running) >= self.max_running:
                return budget
            work = waiting[at]
            quote = memory.quote(work)
            if quote is None:
                del waiting[at]
                self._delayed.append(work)
                continue
            if quote.blocks > memory.available():
                at += 1
                continue
            memory.take(work, quote)
            self._passed(at)
            del waiting[at]
            self.max_wait_s = max(self.max_wait_s, now_s - work.arrival_s)
            step.admitted.append((work, quote))
            work.computed_tokens = quote.device_tokens + quote.host_tokens
            if quote.host_tokens:
                self.loading.add(work)
                step.loads.append(work)
            else:
                budget -= self._run(step, work, budget)
        if at:
            self._blocked_version, self._looked_at = memory.version, at
        return budget

    def _passed(self, ahead: int) -> None:
        for index in range(ahead):
            work = self.waiting[index]
            work.skips += 1
            self.max_skips = max(self.max_skips, work.skips)
