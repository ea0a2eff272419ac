"""The rules that others use, to compare with: who waits goes in their order, and what does not fit.

Each class says what is its own, and where it is from; `scheduler.baseline_queue` has what they
share. What runs beyond the tokens that were to be computed at admission counts as generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from scheduler.baseline_queue import Queue
from scheduler.config import FairConfig
from scheduler.work import BUDGET, PENDING, SLOTS, VRAM, Memory, Plan, Quote, Room, Work

_HRRN_WAITING = 128
_QUANTUM_TOKENS = 4096
_INPUT_WEIGHT, _OUTPUT_WEIGHT = 1.0, 2.0
_HIGH_RATIO = 8.0


class Fcfs:
    """vLLM 0.29, policy "fcfs": strict order of arrival, stops at the first misfit.

    Those that need what is being loaded for another are put aside until a load lands, and then go
    first (vLLM's skipped requests). Costs nothing while the first in line does not fit and memory
    has not changed: what large simulations run on.
    """

    name = "fcfs"
    timed = False

    def __init__(self, config: FairConfig | None = None) -> None:
        self.max_skips = 0
        self.max_wait_s = 0.0
        self._waiting: deque[Work] = deque()
        self._delayed: list[Work] = []
        self._seq = 0
        self._stuck_version = -1

    def __len__(self) -> int:
        return len(self._waiting) + len(self._delayed)

    def add(self, work: Work, now_s: float) -> bool:
        """Only the first in line is looked at."""
        work.seq = self._seq
        self._seq += 1
        self._waiting.append(work)
        return len(self._waiting) == 1

    def plan(self, room: Room, now_s: float) -> Plan:
        """From the front of the queue, as long as it fits."""
        plan, memory, waiting = Plan(), room.memory, self._waiting
        if waiting and self._stuck_version != memory.version:
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
                self._stuck_version = memory.version
                plan.passed[VRAM] = 1
                return
            waiting.popleft()
            plan.admitted.append((work, taken))
            self.max_wait_s = max(self.max_wait_s, now_s - work.arrival_s)
            if not taken.host_tokens:
                slots -= 1
                budget -= work.total_tokens - taken.device_tokens

    def returned(self, work: Work, now_s: float) -> None:
        """First in line."""
        self._waiting.appendleft(work)
        self._stuck_version = -1

    def landed(self, work: Work, now_s: float) -> None:
        """Those that waited for it are first in line."""
        if self._delayed:
            self._waiting.extendleft(reversed(self._delayed))
            self._delayed.clear()
            self._stuck_version = -1

    def preempted(self, work: Work, now_s: float) -> None:
        """First in line; it waits anew."""
        work.arrival_s = now_s
        self.returned(work, now_s)

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        """Memory's version says so."""

    def aborted(self, work: Work, now_s: float) -> None:
        """Forget it."""
        for queue in (self._waiting, self._delayed):
            if work in queue:
                queue.remove(work)
        self._stuck_version = -1

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Nothing to be charged."""

    def victim(self, running: Sequence[Work]) -> Work:
        """The last admitted."""
        return running[-1]


class Priority(Queue):
    """vLLM 0.29, policy "priority": lower numbers first, ties by arrival; stops at a misfit.

    The victim is the running request of the highest number, the latest of them.
    """

    name = "priority"

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        return sorted(self._waiting, key=_rank)

    def victim(self, running: Sequence[Work]) -> Work:
        """Of the highest number, the latest to arrive."""
        return max(running, key=_rank)


def _rank(work: Work) -> tuple[int, int]:
    return work.priority, work.seq


class Vtc(Queue):
    """Virtual token counters (Sheng et al., Fairness in Serving LLMs, OSDI 2024), weighted.

    Tenant i has a counter c_i. The tenant with the lowest among those that wait goes first, its own
    in order of arrival; stops at a misfit. When admitted, c_i += w_p * input tokens / weight_i,
    cached ones included; per token generated c_i += w_q / weight_i; w_p = 1, w_q = 2 as there. A
    tenant that comes back while none of its requests waits is lifted to the lowest counter of
    those that wait (or, if none does, to that of the last to have left the queue).
    """

    name = "vtc"
    timed = True

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self.counters: dict[str, float] = {}
        self._queues: dict[str, dict[Work, None]] = {}
        self._last = ""
        # Input tokens charged at admission that have not run yet.
        self._prepaid: dict[str, int] = {}

    def weight(self, tenant: str) -> float:
        """A tenant's share."""
        return self.config.weights.get(tenant, self.config.default_weight)

    def add(self, work: Work, now_s: float) -> bool:
        """Lifts the counter of a tenant that comes back."""
        tenant = work.tenant
        if tenant not in self._queues:
            floor = min((self.counters[t] for t in self._queues), default=None)
            if floor is None:
                floor = self.counters.get(self._last, 0.0)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
        self._queues.setdefault(tenant, {})[work] = None
        return super().add(work, now_s)

    def _order(self, memory: Memory, now_s: float) -> Iterator[Work]:
        seen: set[Work] = set()
        while True:
            heads = {
                tenant: head
                for tenant, queue in self._queues.items()
                if (head := next((w for w in queue if w not in seen), None)) is not None
            }
            if not heads:
                return
            work = heads[min(heads, key=lambda t: (self.counters[t], heads[t].seq))]
            seen.add(work)
            yield work

    def _admitted(self, work: Work, quote: Quote) -> None:
        self._leave(work)
        self._charge(work.tenant, _INPUT_WEIGHT * work.total_tokens)
        new = work.total_tokens - quote.device_tokens - quote.host_tokens
        self._prepaid[work.tenant] = self._prepaid.get(work.tenant, 0) + new

    def _leave(self, work: Work) -> None:
        queue = self._queues.get(work.tenant)
        if queue is None:
            return
        queue.pop(work, None)
        if not queue:
            del self._queues[work.tenant]
            self._last = work.tenant

    def _charge(self, tenant: str, tokens: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / self.weight(tenant)

    def returned(self, work: Work, now_s: float) -> None:
        """First of its tenant's."""
        self._queues[work.tenant] = {work: None, **self._queues.get(work.tenant, {})}
        super().returned(work, now_s)

    def preempted(self, work: Work, now_s: float) -> None:
        """It paid for its input already, and for what it will not compute before it waits."""
        self._charge(work.tenant, -_INPUT_WEIGHT * work.total_tokens)
        super().preempted(work, now_s)

    def aborted(self, work: Work, now_s: float) -> None:
        """Forget it."""
        self._leave(work)
        super().aborted(work, now_s)

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Charges what was generated: what ran beyond the input charged at admission."""
        for tenant, count in tokens.items():
            prepaid = min(count, self._prepaid.get(tenant, 0))
            if prepaid:
                self._prepaid[tenant] -= prepaid
            self._charge(tenant, _OUTPUT_WEIGHT * (count - prepaid))


class Dlpm(Queue):
    """Deficit longest prefix match (Cao et al., Locality-aware Fair Scheduling, 2501.14312).

    The longest cached prefix first, among tenants whose deficit counter q_i is above zero; stops at
    a misfit. When admitted, q_i -= w_e * tokens to compute / weight_i; per token generated,
    q_i -= w_q / weight_i; cached tokens are free. When no tenant that waits is above zero, each of
    them gets a quantum (assumed: 4096 tokens; w_e = 1, w_q = 2).
    """

    name = "dlpm"
    timed = True

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self.deficits: dict[str, float] = {}
        self._prepaid: dict[str, int] = {}

    def _order(self, memory: Memory, now_s: float) -> Iterator[Work]:
        found: dict[Work, int] = {}
        for work in islice(self._waiting, self.config.window):
            quote = memory.quote(work)
            found[work] = 0 if quote is None else quote.device_tokens + quote.host_tokens
        left = sorted(found, key=lambda w: (-found[w], w.seq))
        while left:
            while not any(self.deficits.get(w.tenant, 0.0) > 0 for w in left):
                for tenant in {w.tenant for w in left}:
                    self.deficits[tenant] = self.deficits.get(tenant, 0.0) + _QUANTUM_TOKENS
            work = next(w for w in left if self.deficits.get(w.tenant, 0.0) > 0)
            left.remove(work)
            yield work

    def _admitted(self, work: Work, quote: Quote) -> None:
        new = work.total_tokens - quote.device_tokens - quote.host_tokens
        self._charge(work.tenant, _INPUT_WEIGHT * new)
        self._prepaid[work.tenant] = self._prepaid.get(work.tenant, 0) + new

    def _charge(self, tenant: str, tokens: float) -> None:
        weight = self.config.weights.get(tenant, self.config.default_weight)
        self.deficits[tenant] = self.deficits.get(tenant, 0.0) - tokens / weight

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Charges what was generated."""
        for tenant, count in tokens.items():
            prepaid = min(count, self._prepaid.get(tenant, 0))
            if prepaid:
                self._prepaid[tenant] -= prepaid
            self._charge(tenant, _OUTPUT_WEIGHT * (count - prepaid))


class Hrrn(Queue):
    """SGLang's "hrrn": highest response ratio next, aged by tokens.

    Ratio = 1 + (tokens that the engine ran since it began to wait) / (its uncached tokens): highest
    first, ties by arrival; stops at a misfit. Above 128 waiting it is first come first served. A
    request with next to nothing to compute goes first, however much VRAM it holds.
    """

    name = "hrrn"
    timed = True

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self._ran_tokens = 0
        # Of those that wait: the count when they did so at the start of an iteration, or None.
        self._began: dict[Work, int | None] = {}

    def add(self, work: Work, now_s: float) -> bool:
        """Its waiting begins with the next iteration."""
        self._began[work] = None
        return super().add(work, now_s)

    def returned(self, work: Work, now_s: float) -> None:
        """Its waiting begins anew."""
        self._began[work] = None
        super().returned(work, now_s)

    def aborted(self, work: Work, now_s: float) -> None:
        """Forget it."""
        self._began.pop(work, None)
        super().aborted(work, now_s)

    def _admitted(self, work: Work, quote: Quote) -> None:
        del self._began[work]

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        for work in reversed(self._began):
            if self._began[work] is not None:
                break
            self._began[work] = self._ran_tokens
        if len(self._waiting) > _HRRN_WAITING:
            return super()._order(memory, now_s)
        ratios: dict[Work, float] = {}
        for work in self._waiting:
            quote = memory.quote(work)
            cached = 0 if quote is None else quote.device_tokens + quote.host_tokens
            waited = self._ran_tokens - (self._began[work] or 0)
            ratios[work] = waited / max(work.total_tokens - cached, 1)
        return sorted(ratios, key=lambda w: (-ratios[w], w.seq))

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """All who wait age by what ran."""
        self._ran_tokens += sum(tokens.values())


class Cap1(Queue):
    """Goes past what does not fit, with one high-ratio request in the engine at most.

    Order of arrival. High ratio: it has something to load, or cached at least 8 times what it
    computes. The fixed cap tried on vLLM: it frees the others and halves the link's use.
    """

    name = "cap1"
    strict = False

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self._high: set[Work] = set()

    def _capped(self, work: Work, quote: Quote) -> bool:
        return bool(self._high) and _high_ratio(work, quote)

    def _admitted(self, work: Work, quote: Quote) -> None:
        if _high_ratio(work, quote):
            self._high.add(work)

    def returned(self, work: Work, now_s: float) -> None:
        """It is not in the engine."""
        self._high.discard(work)
        super().returned(work, now_s)

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        """The next may come."""
        self._high.discard(work)
        super().finished(work, output_tokens, now_s)


def _high_ratio(work: Work, quote: Quote) -> bool:
    cached = quote.device_tokens + quote.host_tokens
    return quote.host_tokens > 0 or cached >= _HIGH_RATIO * (work.total_tokens - cached)


class Greedy(Queue):
    """Fills VRAM, smallest footprint first (proposed for vLLM, issue 16969); starves the large.

    Blocks it would take now, fewest first, ties by arrival, until one does not fit.
    """

    name = "greedy"

    def _order(self, memory: Memory, now_s: float) -> Iterable[Work]:
        blocks: dict[Work, int] = {}
        for work in self._waiting:
            quote = memory.quote(work)
            blocks[work] = 0 if quote is None else quote.blocks
        return sorted(blocks, key=lambda w: (blocks[w], w.seq))


BASELINES: dict[str, Callable[[FairConfig | None], Queue | Fcfs]] = {
    rule.name: rule for rule in (Fcfs, Priority, Vtc, Dlpm, Hrrn, Cap1, Greedy)
}
