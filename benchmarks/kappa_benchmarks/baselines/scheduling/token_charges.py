"""Baselines that charge tenants by tokens: VTC, DLPM, and Equinox, which also charges seconds.

Input is charged at admission, output as it comes: what runs beyond the tokens that were to be
computed counts as generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from kappa_benchmarks.baselines.scheduling.queue import Queue
from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import Memory, Quote, Work

_QUANTUM_TOKENS = 4096
_INPUT_WEIGHT, _OUTPUT_WEIGHT = 1.0, 2.0


class TokenCharged(Queue):
    """The part that all share. balances: of tenants, in tokens over their weights; a charge adds to
    it, or takes from it where `sign` is below zero."""

    timed = True
    sign = 1.0

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self.balances: dict[str, float] = {}
        # Input tokens charged at admission that have not run yet.
        self._prepaid: dict[str, int] = {}

    def _charge(self, tenant: str, tokens: float) -> None:
        weight = self.config.weights.get(tenant, self.config.default_weight)
        self.balances[tenant] = self.balances.get(tenant, 0.0) + self.sign * tokens / weight

    def _prepay(self, work: Work, quote: Quote) -> int:
        """Note the tokens that it will compute, which are not charged as output; returns them."""
        new = work.total_tokens - quote.device_tokens - quote.host_tokens
        self._prepaid[work.tenant] = self._prepaid.get(work.tenant, 0) + new
        return new

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Charges what was generated: what ran beyond the input charged at admission."""
        for tenant, count in tokens.items():
            prepaid = min(count, self._prepaid.get(tenant, 0))
            if prepaid:
                self._prepaid[tenant] -= prepaid
            self._charge(tenant, _OUTPUT_WEIGHT * (count - prepaid))


class Vtc(TokenCharged):
    """Virtual token counters (Sheng et al., Fairness in Serving LLMs, OSDI 2024), weighted.

    Tenant i has a counter c_i. The tenant with the lowest among those that wait goes first, its own
    in order of arrival; stops at a misfit. When admitted, c_i += w_p * input tokens / weight_i,
    cached ones included; per token generated c_i += w_q / weight_i; w_p = 1, w_q = 2 as there. A
    tenant that comes back while none of its requests waits is lifted to the lowest counter of
    those that wait (or, if none does, to that of the last to have left the queue).
    """

    name = "vtc"

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self._queues: dict[str, dict[Work, None]] = {}
        self._last = ""

    def add(self, work: Work, now_s: float) -> bool:
        """Lifts the counter of a tenant that comes back."""
        tenant = work.tenant
        if tenant not in self._queues:
            waiting = self._queues or {self._last: {}}
            floor = min(self.balances.get(t, 0.0) for t in waiting)
            self.balances[tenant] = max(self.balances.get(tenant, 0.0), floor)
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
            work = heads[min(heads, key=lambda t: (self._score(t), heads[t].seq))]
            seen.add(work)
            yield work

    def _score(self, tenant: str) -> float:
        """The lowest goes first."""
        return self.balances[tenant]

    def _admitted(self, work: Work, quote: Quote) -> None:
        self._leave(work)
        self._charge(work.tenant, _INPUT_WEIGHT * work.total_tokens)
        self._prepay(work, quote)

    def _leave(self, work: Work) -> None:
        queue = self._queues.get(work.tenant)
        if queue is not None:
            queue.pop(work, None)
            if not queue:
                del self._queues[work.tenant]
                self._last = work.tenant

    def returned(self, work: Work, now_s: float) -> None:
        """First of its tenant's."""
        self._queues[work.tenant] = {work: None, **self._queues.get(work.tenant, {})}
        super().returned(work, now_s)

    def preempted(self, work: Work, now_s: float) -> None:
        """It paid for its input already, and for what it will not compute before it waits."""
        self._charge(work.tenant, -_INPUT_WEIGHT * work.total_tokens)
        super().preempted(work, now_s)

    def aborted(self, work: Work, now_s: float) -> None:
        self._leave(work)
        super().aborted(work, now_s)


class Equinox(Vtc):
    """Two counters a tenant, of tokens and of the engine's seconds. Reimplemented.

    In the manner of Wei et al., Equinox (2508.16646), of which the abstract was read: it weighs
    tokens with latency on the user's side, throughput and utilization on the operator's, and
    predicts both before it admits. Here nothing is predicted, and the forms are ours: a prompt is
    charged as by VTC, over 1 + the seconds that it waited; steps are charged by each tenant's share
    of their tokens. Each counter counts relative to the greatest; the lowest mean goes first.
    """

    name = "equinox"

    def __init__(self, config: FairConfig | None = None) -> None:
        super().__init__(config)
        self.engine_s: dict[str, float] = {}
        self._now_s = 0.0

    def _order(self, memory: Memory, now_s: float) -> Iterator[Work]:
        self._now_s = now_s
        return super()._order(memory, now_s)

    def _score(self, tenant: str) -> float:
        counters = (self.balances, self.engine_s)
        return sum(of.get(tenant, 0.0) / (max(of.values(), default=0.0) or 1.0) for of in counters)

    def _admitted(self, work: Work, quote: Quote) -> None:
        super()._admitted(work, quote)
        waited_s = max(self._now_s - work.arrival_s, 0.0)
        self._charge(work.tenant, -work.total_tokens * _INPUT_WEIGHT * waited_s / (1 + waited_s))

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Charges generated tokens, and each tenant's share of the seconds."""
        super().ran(seconds, tokens, now_s, iterations)
        total = sum(tokens.values()) or 1
        for tenant, count in tokens.items():
            weight = self.config.weights.get(tenant, self.config.default_weight)
            before = self.engine_s.get(tenant, 0.0)
            self.engine_s[tenant] = before + seconds * count / total / weight


class Dlpm(TokenCharged):
    """Deficit longest prefix match (Cao et al., Locality-aware Fair Scheduling, 2501.14312).

    The longest cached prefix first, among tenants with a deficit counter q_i above zero; stops at a
    misfit. When admitted, q_i -= w_e * tokens to compute / weight_i; per token generated,
    q_i -= w_q / weight_i; cached tokens are free. When no tenant that waits is above zero, each of
    them gets a quantum (assumed: 4096 tokens; w_e = 1, w_q = 2).
    """

    name = "dlpm"
    sign = -1.0

    def _order(self, memory: Memory, now_s: float) -> Iterator[Work]:
        found: dict[Work, int] = {}
        for work in islice(self._waiting, self.config.window):
            quote = memory.quote(work)
            found[work] = 0 if quote is None else quote.device_tokens + quote.host_tokens
        left = sorted(found, key=lambda w: (-found[w], w.seq))
        while left:
            while not any(self.balances.get(w.tenant, 0.0) > 0 for w in left):
                for tenant in {w.tenant for w in left}:
                    self.balances[tenant] = self.balances.get(tenant, 0.0) + _QUANTUM_TOKENS
            work = next(w for w in left if self.balances.get(w.tenant, 0.0) > 0)
            left.remove(work)
            yield work

    def _admitted(self, work: Work, quote: Quote) -> None:
        self._charge(work.tenant, _INPUT_WEIGHT * self._prepay(work, quote))
