"""Admission control: a request that would be served too late to be wanted is shed at once.

Past saturation a queue only grows, and work for clients that have given up is lost to the
others. So a request that no worker is expected to serve within its objective (`kappa.slo`: TTFT
within a floor or a multiple of what an idle, typical node would take) is rejected, with a time to
retry. The expectation is the prediction, corrected by recent outcomes (`Lateness`). When not all
can be served, later classes of priority wait first, then tenants over their share, then costly
requests (`Standing`): that refuses new sessions rather than turns with cached prefixes.

Engines serve first come, first served, so a prompt that computes for long blocks all who come
meanwhile and cannot wait as long. One that makes more than one other late so is rejected, though it
would itself be in time, but for a small share of the workers' time (`Demand`). Pure; seconds are
real ones.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

from kappa.slo import ServiceObjective
from kappa_router.decision import Estimates, OverloadedError, RouteRequest
from kappa_router.fleet import Fleet, Flight
from kappa_router.ttft import MOST_USE, IdleMedians, bounded_s

# The least share of the slack between idle and limit that the costliest requests may use, where
# many are rejected. So cheap ones go on when not all can: by work, the cluster then serves the most
# requests, and an idle one serves all.
LEAST_SLACK = 0.2
# Of the workers' time, what goes to prompts that each make more than one other late; so that long
# ones are delayed, but never kept out for good.
BLOCKING_SHARE = 0.05
# Longer prompts, in seconds of their own, are no flood yet when they come one at a time.
_LONG_PROMPT_S = 0.25

_REQUESTS_KEPT = 128
# Refused clients are to come back one by one, each when the last has had time to be admitted; at
# most this much later than there may be room.
_MOST_SPREAD_S = 30.0

_OUTCOMES_KEPT = 16
_LATE_QUANTILE = 0.8
_SHORT_S, _LONG_S = 3.0, 12.0
# An outcome on a worker that is this old (in its dilated seconds) counts for a third.
_FADE_S = 0.5
_LEAST_SLOWDOWN, _MOST_SLOWDOWN = 0.6, 2.0


class Evaluation(NamedTuple):
    """Whether a worker would miss a request's objective."""

    # Seconds by which the first token is expected after the limit; negative where there is room.
    late_s: float
    # The same of each later token.
    slow_s: float
    # Expected seconds per token.
    token_s: float
    # No slot is free.
    full: bool
    # Nothing is in flight there, so that no request gains if this one waits.
    idle: bool
    # How many others its prompt would make late.
    blocked: float
    # Seconds until the budget allows one that blocks others.
    budget_wait_s: float
    # Seconds until a typical request has ended.
    ends_s: float

    @property
    def rejected(self) -> bool:
        """It is busy and would miss one or the other, or make too many others miss."""
        missing = self.late_s > 0 or self.slow_s > 0 or self.full
        return (missing and not self.idle) or (self.blocks and self.budget_wait_s > 0)

    @property
    def blocks(self) -> bool:
        """It would make more others late than it is itself."""
        return self.blocked > 1

    @property
    def wait_s(self) -> float:
        """Seconds until it may be tried again: where it is only late by how much, else when a
        typical request has ended."""
        ends_s = self.ends_s if self.slow_s > 0 or self.full else 0.0
        return max(self.late_s, ends_s, self.budget_wait_s if self.blocks else 0.0)

    @property
    def why(self) -> str:
        """The reason for which it is rejected."""
        if self.late_s > 0:
            return f"it would start {self.late_s:.1f} s too late"
        if self.full:
            return "as many run as may at a time"
        if self.slow_s <= 0:
            return f"its prompt would make {self.blocked:.0f} others late"
        return f"each token would take {1e3 * self.slow_s:.0f} ms too long"


class Standing(NamedTuple):
    """The place of a request when not all can be admitted; the least goes first."""

    # Its class.
    priority: int = 0
    # Its tenant has had more than its share.
    over_share: bool = False
    # Gpu seconds on the worker where it takes the fewest.
    work_s: float = 0.0

    @property
    def words(self) -> str:
        """The reasons that put it behind others, for the refused client."""
        found = [f"it is of class {self.priority}"] if self.priority else []
        found += ["its tenant has had more than its share"] if self.over_share else []
        return f" ({', '.join(found)})" if found else ""


class RequestLimits(NamedTuple):
    """The objective of one request, in seconds."""

    # TTFT on the median worker with nothing else to do.
    idle_s: float
    # The latest TTFT, and the longest time per output token, within the objective.
    ttft_s: float
    tpot_s: float
    # The same within the part of the objective that the request may use.
    usable_ttft_s: float
    usable_tpot_s: float

    @property
    def slack_s(self) -> float:
        """Seconds that the request could wait."""
        return max(self.ttft_s - self.idle_s, 0.0)


def limits(allowed: ServiceObjective, idle: IdleMedians, share: float = 1.0) -> RequestLimits:
    """The objective of one request, by the median over the workers of loading what the best holder
    has and computing the rest (`Fleet.idle_s`); it may use `share` of what lies between that and
    the limit."""
    limit_s = max(allowed.ttft_s * idle.dilation, allowed.ttft_idle_factor * idle.ttft_s)
    each_s = max(allowed.tpot_s * idle.dilation, allowed.tpot_idle_factor * idle.tpot_s)
    return RequestLimits(
        idle.ttft_s, limit_s, each_s,
        limit_s - (1 - share) * (limit_s * (1 - 1 / max(allowed.ttft_idle_factor, 1.0))),
        each_s - (1 - share) * max(each_s - idle.tpot_s, 0.0),
    )  # fmt: skip


def evaluate(
    fleet: Fleet, estimates: Estimates, at: int, lateness: Lateness, demand: Demand,
    limit: RequestLimits,
) -> Evaluation:  # fmt: skip
    """The worker in row `at` against the request's limits."""
    row, now_s, workers = estimates.row(at), estimates.now_s, len(estimates)
    outcomes = lateness.of(estimates.workers[at])
    long = row.work_s > _LONG_PROMPT_S * estimates.nodes[at].dilation
    # Prompts delay the tokens of what decodes beside them: by how much they did is how much they
    # will.
    slot = estimates.slots[at]
    most_s = bounded_s(fleet.records, slot)
    token_s = outcomes.token_s(now_s, alone_s(row), most_s, long=long)
    late_s = row.ttft_s + outcomes.late_s(now_s)
    return Evaluation(
        late_s - limit.usable_ttft_s,
        token_s - limit.usable_tpot_s,
        token_s,
        # Without a free slot it waits until another ends, however short that wait is predicted.
        row.in_flight >= float(fleet.records["max_sequences"][slot]),
        row.in_flight == 0,
        demand.blocked(now_s, row.compute_s, workers),
        demand.budget_wait_s(now_s, BLOCKING_SHARE * workers),
        estimates.expected_output_tokens * token_s,
    )


def delay_s(row: Any) -> float:
    """Seconds by which the prompt delays each request that decodes beside it, on a worker.

    Decode steps are memory-bound and leave spare FLOPs, unless prompts queued ahead take them. Only
    prefill work beyond that slack delays decoding.
    """
    spare_s = max(alone_s(row) - row.gpu_backlog_s, 0.0)
    delay_s: float = max(row.work_s - spare_s, 0.0)
    return delay_s


def alone_s(row: Any) -> float:
    """Seconds per token beside all that are in flight, without prompts."""
    alone_s: float = row.tpot_s * (1 - min(row.gpu_use, MOST_USE))
    return alone_s


# -- recent demand: who goes first when not all can -----------------------------------------------


def refuse(
    each: Sequence[Evaluation], demand: Demand, request: RouteRequest, standing: Standing,
    limit: RequestLimits, now_s: float,
) -> NoReturn:  # fmt: skip
    """Refuse a request that would be late wherever it went, as `each` has it.

    Raises:
        OverloadedError: with the seconds after which the client should come again.
    """
    demand.evaluated(now_s, request, standing, limit.slack_s, admitted=False)
    soonest = min(each, key=attrgetter("wait_s"))
    raise OverloadedError(
        f"the cluster is full: {soonest.why}{standing.words}",
        demand.come_back_s(now_s, soonest.wait_s),
    )


class _Evaluated(NamedTuple):
    at_s: float
    standing: Standing
    slack_s: float
    tenant: str
    weight: float
    admitted: bool


class Demand:
    """The last requests that admission evaluated: how each stood, and whether it was admitted."""

    def __init__(self) -> None:
        self._last: deque[_Evaluated] = deque()
        # Of these, sorted: each request's place among them is looked up.
        self._standings: list[Standing] = []
        self._slacks_s: list[float] = []
        self._rejected = 0
        self._owed_s = 0.0
        self._owed_at_s = 0.0
        self._next_s = -math.inf

    def standing(self, request: RouteRequest, work_s: float) -> Standing:
        """The standing of a request of `work_s` gpu seconds; shares count if some are rejected."""
        over = self._rejected > 0 and self._over_share(request, work_s)
        return Standing(request.priority, over, work_s)

    def _over_share(self, request: RouteRequest, work_s: float) -> bool:
        """Whether with this its tenant had more of what was admitted than its weight among those
        who came."""
        tenant, total_s, own_s = request.tenant, work_s, work_s
        weights = {other.tenant: other.weight for other in self._last}
        weights[tenant] = request.weight
        for other in self._last:
            if other.admitted:
                total_s += other.standing.work_s
                own_s += other.standing.work_s if other.tenant == tenant else 0.0
        return own_s * sum(weights.values()) > total_s * request.weight * (1 + 1e-9)

    def evaluated(
        self, now_s: float, request: RouteRequest, standing: Standing, slack_s: float, *,
        admitted: bool,
    ) -> None:  # fmt: skip
        """A request came that stands so and could wait for `slack_s`."""
        if len(self._last) == _REQUESTS_KEPT:
            first = self._last.popleft()
            self._rejected -= not first.admitted
            del self._standings[bisect_left(self._standings, first.standing)]
            del self._slacks_s[bisect_left(self._slacks_s, first.slack_s)]
        self._rejected += not admitted
        who = request.tenant, request.weight
        self._last.append(_Evaluated(now_s, standing, slack_s, *who, admitted))
        insort(self._standings, standing)
        insort(self._slacks_s, slack_s)

    def rank(self, standing: Standing) -> float:
        """The share of them that go before this one; those that stand the same count half."""
        before, behind = bisect_left(self._standings, standing), bisect(self._standings, standing)
        return 0.5 * (before + behind) / max(len(self._last), 1)

    def slack_share(self, standing: Standing) -> float:
        """The share of the slack between idle and its limit that a request may use, 0 to 1.

        While none is rejected, all of it, but for one that stands behind all the last. The fewer
        are admitted, the sooner it falls with the rank, down to `LEAST_SLACK` for the last: so the
        first are admitted, as many as there is room for. (A threshold at the share that is admitted
        would hold itself down; a power does not.)
        """
        if not self._rejected:
            behind = self._standings and self._standings[-1] < standing
            return LEAST_SLACK if behind else 1.0
        power = len(self._last) / self._rejected
        return 1.0 - (1.0 - LEAST_SLACK) * self.rank(standing) ** power

    def come_back_s(self, now_s: float, wait_s: float) -> float:
        """Seconds until one that is refused should come again, if there may be room in `wait_s`:
        all at once would be refused again, so each comes after the last."""
        room_s = now_s + wait_s
        at_s = max(room_s, min(self._next_s, room_s + _MOST_SPREAD_S))
        admitted = len(self._last) - self._rejected
        since_s = now_s - self._last[0].at_s if self._last else 0.0
        self._next_s = at_s + max(since_s, 0.0) / max(admitted, 1)
        return at_s - now_s

    def blocked(self, now_s: float, block_s: float, workers: int) -> float:
        """Requests that would be late for one that computes for `block_s` before them.

        They come as recently, evenly to the workers; who comes sooner than its slack before the end
        waits no longer than it may.
        """
        fewer = bisect_left(self._slacks_s, block_s)
        if not fewer:
            return 0.0
        over_s = fewer * block_s - sum(self._slacks_s[:fewer])
        # What came in less time than that shows a burst, not of what comes while it computes.
        return over_s / max(block_s, now_s - self._last[0].at_s) / workers

    def spend(self, work_s: float) -> None:
        """One that blocks others was admitted; `budget_wait_s` was called before, at that time."""
        self._owed_s += work_s

    def budget_wait_s(self, now_s: float, per_s: float) -> float:
        """Seconds until what was spent is refilled, at `per_s` seconds of work each second."""
        passed_s = max(now_s - self._owed_at_s, 0.0)
        self._owed_s = max(self._owed_s - per_s * passed_s, 0.0)
        self._owed_at_s = now_s
        return self._owed_s / per_s


# -- recent outcomes: how much later than predicted each worker answers ---------------------------


@dataclass(slots=True)
class Outcomes:
    """Recent outcomes of one worker: how late first tokens came, how slow later ones were, and the
    delay by prompts in seconds per second, of the last 3 s (`short`) and 12 s (`long`).

    slowdown: how many times longer than expected recent tokens took; 1 if there were none.
    """

    dilation: float = 1.0
    late: deque[float] = field(default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT))
    typical_late_s: float = 0.0
    late_at_s: float = -math.inf
    slowdowns: deque[float] = field(default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT))
    slowdown: float = 1.0
    short: float = 0.0
    long: float = 0.0
    sent_at_s: float = -math.inf
    # Seconds by which all prompts sent there delayed what decodes.
    delayed_s: float = 0.0
    # By request, in the order in which they were sent: the first one has waited longest.
    waiting: dict[str, Flight] = field(default_factory=dict)
    # Of each request that decodes, `delayed_s` at its first token.
    begun: dict[str, float] = field(default_factory=dict)

    def late_s(self, now_s: float) -> float:
        """Seconds by which a first token there comes after its prediction, at least 0.

        Four of five recent ones came no later; and no request has waited longer than this for
        nothing.
        """
        age_s = max(now_s - self.late_at_s, 0.0)
        learnt_s = self.typical_late_s * math.exp(-age_s / (_FADE_S * self.dilation))
        oldest = next(iter(self.waiting.values()), None)
        return max(learnt_s, 0.0 if oldest is None else _overdue_s(oldest, now_s), 0.0)

    def token_s(
        self, now_s: float, alone_s: float, bounded_s: float = math.inf, *, long: bool = False
    ) -> float:
        """Seconds per token to expect there, where it is `alone_s` without prompts in between, and
        no more than `bounded_s` with them."""
        share = self.prompt_share(now_s, long=long)
        alone_s *= self.slowdown
        beside_s = alone_s / (1 - min(share, MOST_USE))
        return _within_s(beside_s, alone_s, self.slowdown * bounded_s)

    def prompt_share(self, now_s: float, *, long: bool = False) -> float:
        """Delay by the prompts sent there, in seconds per second: of the last 3, or of the last 12.

        In the long view a prompt of a second is not yet a flood.
        """
        share, window_s = (self.long, _LONG_S) if long else (self.short, _SHORT_S)
        age_s = max(now_s - self.sent_at_s, 0.0)
        return share * math.exp(-age_s / (window_s * self.dilation))


_NONE = Outcomes()


class Lateness:
    """Outcomes against predictions, by worker.

    A prediction prices the known queue. Past saturation more happens to a request than
    that: slots run out, prompts that come after it slow its tokens. So each outcome is compared
    with what was predicted for it, and each request that should have begun by now with the clock.
    Every figure fades while there are no newer ones.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Outcomes] = {}

    def sent(self, flight: Flight, now_s: float, delay_s: float) -> None:
        """A request went out; it delays each token beside it by `delay_s` in all."""
        assert flight.chosen is not None
        worker, dilation = flight.worker, flight.chosen.node.dilation
        outcomes = self._workers.get(worker)
        if outcomes is None:
            outcomes = self._workers[worker] = Outcomes()
        outcomes.dilation = dilation
        outcomes.waiting[flight.request_id] = flight
        outcomes.short = outcomes.prompt_share(now_s) + delay_s / (_SHORT_S * dilation)
        outcomes.long = outcomes.prompt_share(now_s, long=True) + delay_s / (_LONG_S * dilation)
        outcomes.sent_at_s = now_s
        outcomes.delayed_s += delay_s

    def first_token(self, flight: Flight, now_s: float) -> None:
        outcomes = self._workers.get(flight.worker)
        if outcomes is not None and outcomes.waiting.pop(flight.request_id, None) is not None:
            outcomes.late.append(_overdue_s(flight, now_s))
            outcomes.typical_late_s = _quantile(outcomes.late, _LATE_QUANTILE)
            outcomes.late_at_s = now_s
            outcomes.begun[flight.request_id] = outcomes.delayed_s

    def ended(self, flight: Flight, now_s: float, tokens: int) -> None:
        """It is over, whole with `tokens` tokens; 0 if they give no measure."""
        outcomes = self._workers.get(flight.worker)
        if outcomes is None:
            return
        outcomes.waiting.pop(flight.request_id, None)
        begun_s = outcomes.begun.pop(flight.request_id, None)
        if tokens > 1 and flight.tpot_s > 0 and begun_s is not None:
            assert flight.first_token_s is not None
            # By the prompts that came while it decoded, those before it left out. Their recent
            # share says less: where few come it is mostly chance, which would then count twice.
            delay_s = (outcomes.delayed_s - begun_s) / (tokens - 1)
            expected_s = _within_s(flight.tpot_s + delay_s, flight.tpot_s, flight.bounded_s)
            measured_s = (now_s - flight.first_token_s) / (tokens - 1)
            outcomes.slowdowns.append(measured_s / expected_s)
            typical = _quantile(outcomes.slowdowns, 0.5)
            outcomes.slowdown = min(max(typical, _LEAST_SLOWDOWN), _MOST_SLOWDOWN)

    def left(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def of(self, worker: str) -> Outcomes:
        """Recent outcomes there."""
        return self._workers.get(worker, _NONE)


def _overdue_s(flight: Flight, now_s: float) -> float:
    """Seconds since a first token was predicted."""
    assert flight.chosen is not None
    return now_s - flight.sent_s - flight.chosen.ttft_s


def _within_s(token_s: float, alone_s: float, bounded_s: float) -> float:
    """Seconds per token beside prompts, where steps with a prompt last no longer than a bound."""
    return min(token_s, max(alone_s, bounded_s))


def _quantile(samples: deque[float], share: float) -> float:
    return sorted(samples)[int(share * len(samples))]
