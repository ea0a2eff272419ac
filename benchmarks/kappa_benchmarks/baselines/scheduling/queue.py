"""The part that all baselines share: a queue, and one pass over it in each rule's order.

A request takes blocks for its whole prompt when it is admitted, loads included; the iteration's
budget is charged for what it computes; nothing is admitted to an empty budget. Skips are counted
alike in all: how often one that arrived later was admitted before a request that waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import BUDGET, CAP, PENDING, SLOTS, VRAM, Memory, Plan, Quote, Room, Work


class Queue:
    """A rule but for its order, `_order`, and what else it overrides.

    strict: stop at the first that does not fit, as engines do; else go on to those that do.
    timed: the order changes with time or with what runs, so that an iteration may admit what the
    one before could not though nothing happened in between.
    """

    name = ""
    packs = False
    strict = True
    timed = False

    def __init__(self, config: FairConfig | None = None) -> None:
        self.config = config or FairConfig()
        self.max_skips = 0
        self.max_wait_s = 0.0
        self._waiting: dict[Work, None] = {}
        self._seq = 0
        # Memory's version when nothing that was looked at fitted, and why.
        self._stuck_version = -1
        self._stuck: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    # -- what a rule defines -------------------------------------------------------------------

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        """The requests to look at, in order; admissions happen between them."""
        return list(islice(self._waiting, self.config.window))

    def _capped(self, work: Work, quote: Quote) -> bool:
        return False

    def _admitted(self, work: Work, quote: Quote) -> None:
        """It was admitted."""

    # -- Rule ---------------------------------------------------------------------------------

    def add(self, work: Work, now_s: float) -> bool:
        work.seq = self._seq
        self._seq += 1
        self._waiting[work] = None
        self._stuck_version = -1
        return True

    def plan(self, room: Room, now_s: float) -> Plan:
        """One pass over the queue."""
        plan, memory = Plan(), room.memory
        if self._stuck_version == memory.version and not self.timed:
            plan.passed.update(self._stuck)
            return plan
        budget, slots = room.budget_tokens, room.slots
        lacking: list[Work] = []
        why = ""
        for work in self._order(memory, now_s):
            why = BUDGET if budget <= 0 else SLOTS if slots <= 0 else ""
            if why:
                _count(plan, why)
                break
            quote = memory.quote(work)
            if quote is None:
                _count(plan, PENDING)
                continue
            if self._capped(work, quote):
                _count(plan, CAP)
                lacking.append(work)
                continue
            taken = memory.take(work, quote) if quote.blocks <= memory.available() else None
            if taken is None:
                _count(plan, VRAM)
                lacking.append(work)
                if self.strict:
                    break
                continue
            plan.admitted.append((work, taken))
            del self._waiting[work]
            self.max_wait_s = max(self.max_wait_s, now_s - work.arrival_s)
            if not taken.host_tokens:
                slots -= 1
                budget -= work.total_tokens - taken.device_tokens
            self._admitted(work, taken)
        if plan.admitted and self._waiting:
            self._overtaken(plan, lacking)
        if lacking and not why:
            self._stuck_version, self._stuck = memory.version, plan.passed
        return plan

    def _overtaken(self, plan: Plan, lacking: list[Work]) -> None:
        """Count later arrivals admitted before those that wait longest, or were looked at."""
        latest = max(work.seq for work, _ in plan.admitted)
        waiting = dict.fromkeys(islice(self._waiting, self.config.window))
        for work in {**waiting, **dict.fromkeys(lacking)}:
            if work.seq < latest:
                work.skips += sum(other.seq > work.seq for other, _ in plan.admitted)
                self.max_skips = max(self.max_skips, work.skips)

    def returned(self, work: Work, now_s: float) -> None:
        """First in the queue."""
        self._waiting = {work: None, **self._waiting}
        self._stuck_version = -1

    def landed(self, work: Work, now_s: float) -> None:
        """Look again: other requests may have waited for this load."""
        self._stuck_version = -1

    def preempted(self, work: Work, now_s: float) -> None:
        """First in the queue; its waiting begins again."""
        work.arrival_s = now_s
        self.returned(work, now_s)

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        self._stuck_version = -1

    def aborted(self, work: Work, now_s: float) -> None:
        self._waiting.pop(work, None)
        self._stuck_version = -1

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Nothing to be charged."""

    def victim(self, running: Sequence[Work]) -> Work:
        """The last admitted, as in vLLM."""
        return running[-1]


def _count(plan: Plan, why: str) -> None:
    plan.passed[why] = plan.passed.get(why, 0) + 1
