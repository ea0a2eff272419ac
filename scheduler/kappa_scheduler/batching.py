"""The next iteration of an engine: events in, one iteration's work out.

Running requests go first, then those with landed loads, then those that a `Rule` admits, all within
a token budget; a prompt beyond the rest of the budget is computed in chunks. An admitted request is
loading, ready or running here; waiting ones belong to the rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kappa.cost import StepLimit
from kappa_scheduler.work import PENDING, Memory, Quote, Room, Rule, StepBound, StepState, Work


@dataclass(slots=True, eq=False)
class Step:
    """One iteration's work besides one token for each decoding request."""

    # (request, new tokens, context tokens before them).
    chunks: list[tuple[Work, int, int]] = field(default_factory=list)
    # Requests that complete their prompt in this step.
    prefilled: list[Work] = field(default_factory=list)
    # Requests admitted now, with what each took.
    admitted: list[tuple[Work, Quote]] = field(default_factory=list)


class Batcher:
    """Plans iterations within a token budget, a number of running requests, and memory.

    Args:
        memory: the blocks.
        rule: owns the waiting requests and decides which to admit.
        budget_tokens: of an iteration, decoding requests included.
        max_running: requests that compute; loading ones are not counted, as in vLLM.
        limit: on the seconds of an iteration in which requests decode; None: no such limit.
    """

    def __init__(
        self, memory: Memory, rule: Rule, budget_tokens: int = 8192, max_running: int = 256,
        limit: StepLimit | None = None,
    ) -> None:  # fmt: skip
        self.memory, self.rule = memory, rule
        self.budget_tokens, self.max_running = budget_tokens, max_running
        self._limit = limit
        self._bound: Callable[[StepState], StepBound] | None = getattr(rule, "bound", None)
        # Most tokens of one prompt in the step that is planned.
        self._prompt_tokens = budget_tokens
        self.running: dict[Work, None] = {}
        self.prefilling: list[Work] = []
        self.ready: deque[Work] = deque()
        self.loading: dict[Work, None] = {}
        self.preemptions = 0
        # Of the last step: whether requests waited, and how many were bypassed, by reason.
        self.was_queued = False
        self.passed: Mapping[str, int] = {}
        # Over steps with work at hand: sum of the used shares of the budget, and their number.
        self.budget_fill = (0.0, 0)
        self._room = Room(memory, 0, 0, 0)
        # Waiting requests that need blocks being loaded for another.
        self._pending = 0
        self._decoding: set[Work] = set()
        self._decoding_of: dict[str, int] = {}
        self._step: Step | None = None
        self._wanting = False

    # -- events -------------------------------------------------------------------------------

    def add(self, work: Work, now_s: float) -> bool:
        """As `Rule.add`."""
        return self.rule.add(work, now_s)

    def landed(self, work: Work, now_s: float) -> None:
        """A load landed: its request goes first, as do those that waited for its blocks."""
        del self.loading[work]
        self.ready.append(work)
        self._pending = 0
        self.rule.landed(work, now_s)

    def finish(self, work: Work, output_tokens: int, now_s: float) -> None:
        del self.running[work]
        self._stop_decoding(work)
        self.rule.finished(work, output_tokens, now_s)

    def abort(self, work: Work, output_tokens: int, now_s: float) -> None:
        """A request's client left: forget the request in any state."""
        if work in self.running:
            self._remove_running(work)
        elif work in self.loading:
            del self.loading[work]
        elif work in self.ready:
            self.ready.remove(work)
        else:
            self.rule.aborted(work, now_s)
            return
        self.rule.finished(work, output_tokens, now_s)

    def preempt(self, now_s: float, work: Work | None = None) -> Work | None:
        """Take the blocks of a running request, which waits to be recomputed; None if none runs.

        work: a request that cannot go on; None: the rule's victim.
        """
        if not self.running:
            return None
        if work is None:
            work = self.rule.victim(list(self.running))
        self._remove_running(work)
        self.preemptions += 1
        self.rule.preempted(work, now_s)
        work.computed_tokens = 0
        return work

    def ran(self, seconds: float, steps: int, now_s: float) -> None:
        """The last step ended, with `steps` - 1 more in which its decoding went on alone.

        Call this before `finish` for the requests that ended with it.
        """
        step = self._step
        if step is None:
            return
        self._step = None
        tokens = {tenant: count * steps for tenant, count in self._decoding_of.items() if count}
        for work, new, _ in step.chunks:
            tokens[work.tenant] = tokens.get(work.tenant, 0) + new
        for work in step.prefilled:
            if work in self.running:
                self._decoding.add(work)
                self._decoding_of[work.tenant] = self._decoding_of.get(work.tenant, 0) + 1
        self.rule.ran(seconds, tokens, now_s, steps)

    def _remove_running(self, work: Work) -> None:
        del self.running[work]
        if work in self.prefilling:
            self.prefilling.remove(work)
        self._stop_decoding(work)

    def _stop_decoding(self, work: Work) -> None:
        if work in self._decoding:
            self._decoding.remove(work)
            self._decoding_of[work.tenant] -= 1

    # -- the next iteration -------------------------------------------------------------------

    def step(
        self, now_s: float, decoding: int, admit: bool = True, context_tokens: float = 0.0
    ) -> Step:
        """Plan an iteration in which `decoding` requests take a token each.

        context_tokens: of them together. admit: False after a preemption, when no new request may
        take the freed blocks.
        """
        step = self._step = Step()
        most = budget = self._most_tokens(now_s, decoding, context_tokens) - decoding
        for work in self.prefilling:
            if budget <= 0:
                break
            budget -= self._chunk(step, work, budget)
        if step.prefilled:
            self.prefilling = [w for w in self.prefilling if w.computed_tokens < w.total_tokens]
        while self.ready and budget > 0 and len(self.running) < self.max_running:
            budget -= self._run(step, self.ready.popleft(), budget)
        self.was_queued = len(self.rule) > 0
        self.passed = {}
        if admit and self.was_queued:
            budget = self._admit(step, budget, now_s)
        self._wanting = bool(step.chunks) or self.queued > 0
        self._count_fill(1, decoding + most - budget)
        return step

    def _most_tokens(self, now_s: float, decoding: int, context_tokens: float) -> int:
        """Tokens of an iteration: the budget, or fewer if decoding requests have no time for it."""
        if self._bound is not None:
            waiting = len(self.ready) + len(self.loading) + len(self.rule)
            state = StepState(self.budget_tokens, decoding, len(self.prefilling) + waiting)
            step_tokens, self._prompt_tokens = self._bound(state)
            return min(step_tokens, self.budget_tokens)
        if self._limit is None:
            return self.budget_tokens
        head = self.prefilling[0] if self.prefilling else self.ready[0] if self.ready else None
        prompt = (0, 0, 0.0)
        if head is not None:
            behind = head.computed_tokens
            prompt = behind, head.total_tokens - behind, now_s - head.arrival_s
        tokens = self._limit.tokens(decoding, context_tokens, *prompt)
        return int(min(tokens, self.budget_tokens))

    def repeat(self, steps: int, decoding: int) -> None:
        """The last step's decoding went on alone for `steps` more iterations."""
        self._count_fill(steps, decoding)

    def _count_fill(self, steps: int, tokens: int) -> None:
        if self._wanting:
            fill, counted = self.budget_fill
            self.budget_fill = (fill + steps * tokens / self.budget_tokens, counted + steps)

    @property
    def queued(self) -> int:
        """The number of requests that wait for room, not merely for another's load."""
        return len(self.rule) - self._pending

    def _run(self, step: Step, work: Work, budget: int) -> int:
        self.running[work] = None
        tokens = self._chunk(step, work, budget) if budget > 0 else 0
        if work.computed_tokens < work.total_tokens:
            self.prefilling.append(work)
        return tokens

    def _chunk(self, step: Step, work: Work, budget: int) -> int:
        context = work.computed_tokens
        tokens = min(work.total_tokens - context, budget, self._prompt_tokens)
        step.chunks.append((work, tokens, context))
        work.computed_tokens = context + tokens
        if work.computed_tokens == work.total_tokens:
            step.prefilled.append(work)
        return tokens

    def _admit(self, step: Step, budget: int, now_s: float) -> int:
        room = self._room
        running = len(self.running)
        room.budget_tokens, room.slots = budget, self.max_running - running
        room.prompt_tokens = self._prompt_tokens
        room.running = running + len(self.loading) + len(self.ready)
        plan = self.rule.plan(room, now_s)
        self.passed = plan.passed
        self._pending = plan.passed.get(PENDING, 0)
        step.admitted = plan.admitted
        for work, quote in plan.admitted:
            work.computed_tokens = quote.device_tokens + quote.host_tokens
            if quote.host_tokens:
                self.loading[work] = None
            else:
                budget -= self._run(step, work, budget)
        return budget
