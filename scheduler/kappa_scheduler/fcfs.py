"""First come, first served: what vLLM does by default."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import (
    BUDGET,
    IN_LINE,
    PENDING,
    SLOTS,
    VRAM,
    Plan,
    Room,
    Work,
    last_in_line,
)


class Fcfs:
    """vLLM 0.29's policy "fcfs": strict order of arrival, stopping at the first misfit. Requests of
    several classes go in the order in which they stand in line (`Work.join`).

    Requests that need blocks being loaded for another are put aside until a load lands, and then go
    first (vLLM's skipped requests). An iteration costs nothing while the first in line does not fit
    and memory has not changed, which large simulations depend on.
    """

    name = "fcfs"
    packs = False
    timed = False

    def __init__(self, config: FairConfig | None = None) -> None:
        self.max_skips, self.max_wait_s = 0, 0.0
        self._waiting: deque[Work] = deque()
        self._delayed: list[Work] = []
        self._seq, self._class_s = 0, (config or FairConfig()).class_s
        # Memory's version when the first in line did not fit; -1: look again.
        self._misfit_version = -1

    def __len__(self) -> int:
        return len(self._waiting) + len(self._delayed)

    def order(self, work: Work) -> tuple[float, ...]:
        """A request's sort key, constant while it waits; the least goes first."""
        place: tuple[float, ...] = IN_LINE(work)
        return place

    def add(self, work: Work, now_s: float) -> bool:
        work.join(self._seq, now_s, self._class_s)
        self._seq += 1
        at = len(self._waiting)
        while at and self.order(self._waiting[at - 1]) > self.order(work):
            at -= 1
        self._waiting.insert(at, work)
        if at == 0:
            self._misfit_version = -1
        return at == 0

    def plan(self, room: Room, now_s: float) -> Plan:
        plan, memory, waiting = Plan(), room.memory, self._waiting
        if waiting and self._misfit_version != memory.version:
            self._admit(plan, room, now_s)
        elif waiting:
            plan.passed[VRAM] = 1
        if self._delayed:
            plan.passed[PENDING] = len(self._delayed)
        return plan

    def _admit(self, plan: Plan, room: Room, now_s: float) -> None:
        memory, waiting = room.memory, self._waiting
        budget, slots = room.budget_tokens, room.slots
        while waiting:
            if budget <= 0 or slots <= 0:
                plan.passed[BUDGET if budget <= 0 else SLOTS] = 1
                return
            work = waiting[0]
            quote = memory.quote(work)
            if quote is None:
                self._delayed.append(waiting.popleft())
                continue
            taken = memory.take(work, quote) if quote.blocks <= memory.available() else None
            if taken is None:
                self._misfit_version = memory.version
                plan.passed[VRAM] = 1
                return
            waiting.popleft()
            plan.admitted.append((work, taken))
            self.max_wait_s = max(self.max_wait_s, now_s - work.arrival_s)
            if not taken.host_tokens:
                slots -= 1
                budget -= min(work.total_tokens - taken.device_tokens, room.prompt_tokens)

    def returned(self, work: Work, now_s: float) -> None:
        self._waiting.appendleft(work)
        self._misfit_version = -1

    def landed(self, work: Work, now_s: float) -> None:
        if self._delayed:
            self._waiting.extendleft(reversed(self._delayed))
            self._delayed.clear()
            self._misfit_version = -1

    def preempted(self, work: Work, now_s: float) -> None:
        work.arrival_s = now_s
        self.returned(work, now_s)

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        """Nothing to do: memory's version shows that blocks are free."""

    def aborted(self, work: Work, now_s: float) -> None:
        for queue in (self._waiting, self._delayed):
            if work in queue:
                queue.remove(work)
        self._misfit_version = -1

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Nothing to do: tenants are not charged."""

    def victim(self, running: Sequence[Work]) -> Work:
        return last_in_line(running)
