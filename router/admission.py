"""Whether a request is let in: refused at once, rather than served too late for anyone to want it.

Past saturation a queue only grows, and work on requests whose clients have given up is lost to the
others. So a request that no worker is expected to serve within its objective (`kappa.slo`: TTFT
within a floor or a multiple of what an idle, typical node would take) is refused, with a time to
retry. What is expected is the prediction, corrected by what came of others of late
(`router.lateness`).

Engines serve first come, first served, so a prompt that computes for long makes late all who come
meanwhile and cannot wait as long. One that displaces more than one other so is refused, though it
would itself be in time, but for a small share of the workers' time. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from router.demand import Demand
from router.fleet import Fleet
from router.lateness import Lateness
from router.offers import Floats, Offers
from router.pricing import MOST_USE

# Longer prompts, in seconds of their own, are no flood yet when they come one at a time.
_LONG_PROMPT_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Which workers would miss a request's objective; arrays over the offers' workers.

    late_s: seconds by which a first token is expected after the limit; slow_s: the same of each
    token. Negative where there is room. token_s: expected seconds per token. full: no slot is free.
    idle: nothing is in flight there, so that nobody who is there gains if it waits. displaced: how
    many others its prompt would make late. repaid_s: seconds until one that displaces others may
    go. slack_s, work_s: the request's own, as in `router.demand.Asked`.
    """

    late_s: Floats
    slow_s: Floats
    token_s: Floats
    full: NDArray[np.bool_]
    idle: NDArray[np.bool_]
    displaced: Floats
    repaid_s: float
    slack_s: float
    work_s: float
    output_tokens: int

    @property
    def refused(self) -> NDArray[np.bool_]:
        """Workers that are busy and would miss one or the other, or make too many others miss."""
        missing = (self.late_s > 0) | (self.slow_s > 0) | self.full
        refused: NDArray[np.bool_] = missing & ~self.idle
        if self.repaid_s > 0:
            refused |= self.displaces
        return refused

    @property
    def displaces(self) -> NDArray[np.bool_]:
        """Workers where it would make more others late than it is itself."""
        displaces: NDArray[np.bool_] = self.displaced > 1
        return displaces

    def refusal(self) -> tuple[str, float]:
        """Why the soonest of them is too late, and seconds until it may be tried again.

        Where it is only late that is by how much, else when a typical request has ended.
        """
        ends_s = self.output_tokens * self.token_s
        wait_s = np.maximum(self.late_s, np.where((self.slow_s > 0) | self.full, ends_s, 0.0))
        wait_s = np.maximum(wait_s, np.where(self.displaces, self.repaid_s, 0.0))
        soonest = int(np.argmin(wait_s))
        if self.late_s[soonest] > 0:
            why = f"it would start {self.late_s[soonest]:.1f} s too late"
        elif self.full[soonest]:
            why = "as many run as may at a time"
        elif self.slow_s[soonest] <= 0:
            why = f"its prompt would make {self.displaced[soonest]:.0f} others late"
        else:
            why = f"each token would take {1e3 * self.slow_s[soonest]:.0f} ms too long"
        return why, float(wait_s[soonest])


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets in what is expected to start, and then to go on, within its objective.

    TTFT within max(floor_s, ttft_factor x idle), TPOT within tpot_factor x idle. The idle TTFT is
    the median over the workers of loading what the best holder has and computing the rest. The
    defaults are the objective itself. least: what the dearest requests may use at least of the
    slack between idle and limit, where many are refused (`router.demand`). So what is cheap goes on
    when not all can: by work, the cluster then serves the most requests, and an idle one anybody.
    displacing_share: of the workers' time, what goes to prompts that each make more than one other
    late; so that long ones are delayed, but never kept out for good.
    """

    floor_s: float = TTFT_FLOOR_S
    ttft_factor: float = TTFT_IDLE_FACTOR
    tpot_factor: float = TPOT_IDLE_FACTOR
    least: float = 0.2
    displacing_share: float = 0.05

    def __post_init__(self) -> None:
        """Refuse a share that would keep long prompts out for ever.

        Raises:
            ValueError: says what to give instead.
        """
        if not 0 < self.displacing_share <= 1:
            raise ValueError(
                f"displacing_share is {self.displacing_share}: give a share above 0, at most 1"
            )

    def idle_and_limit_s(self, fleet: Fleet, offers: Offers) -> tuple[float, float]:
        """TTFT on the median worker with nothing else to do, and the latest within the objective.

        In real seconds.
        """
        held = float((offers.device_tokens + offers.cached_tokens).max())
        each_s = fleet.idle_ttft_s(offers.slots, offers.prompt_tokens, held)
        idle_s = float(np.median(each_s))
        floor_s = self.floor_s * float(np.median(fleet.dilation(offers.slots)))
        return idle_s, max(floor_s, self.ttft_factor * idle_s)

    def tpot_limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Longest time per output token within the objective, in real seconds."""
        idle_s = fleet.idle_tpot_s(offers.slots, offers.prompt_tokens)
        return self.tpot_factor * float(np.median(idle_s))

    def judge(
        self,
        fleet: Fleet,
        offers: Offers,
        lateness: Lateness,
        demand: Demand,
        sequences: Floats,
    ) -> Judgement:
        """Each worker against the request's limits; `sequences`: how many each runs at a time."""
        now_s = offers.now_s
        late_s = np.array([lateness.late_s(worker, now_s) for worker in offers.workers])
        expected_s = _expected_token_s(fleet, offers, lateness)
        work_s = cost_s(offers)
        room = demand.room(work_s, self.least)
        idle_s, ttft_s = self.idle_and_limit_s(fleet, offers)
        tpot_s = _within(self.tpot_limit_s(fleet, offers), self.tpot_factor, room)
        return Judgement(
            late_s=offers.ttft_s + late_s - _within(ttft_s, self.ttft_factor, room),
            slow_s=expected_s - tpot_s,
            token_s=expected_s,
            # Without a free slot it waits until another ends, which no prediction has priced.
            full=offers.in_flight >= sequences,
            idle=offers.in_flight == 0,
            displaced=demand.displaced(now_s, offers.compute_s),
            repaid_s=demand.repaid_in_s(now_s, self.displacing_share * len(offers)),
            slack_s=max(ttft_s - idle_s, 0.0),
            work_s=work_s,
            output_tokens=offers.expected_output_tokens,
        )


def _expected_token_s(fleet: Fleet, offers: Offers, lateness: Lateness) -> Floats:
    """Seconds per token on each worker, as far as outcomes of late tell.

    Prompts delay the tokens of what decodes beside them: by how much of late, tells how much they
    will.
    """
    long = offers.work_s > _LONG_PROMPT_S * fleet.dilation(offers.slots)
    return np.array(
        [
            lateness.token_s(worker, offers.now_s, float(alone), long=bool(is_long))
            for worker, alone, is_long in zip(offers.workers, alone_s(offers), long, strict=True)
        ]
    )


def cost_s(offers: Offers) -> float:
    """Gpu seconds that the request takes where it takes the fewest."""
    return float(offers.work_s.min())


def _within(limit_s: float, factor: float, room: float) -> float:
    """A limit of `factor` times idle, for one that may use `room` of what is beyond idle."""
    slack_s = limit_s * (1 - 1 / max(factor, 1.0))
    return limit_s - (1 - room) * slack_s


def delay_s(offers: Offers) -> Floats:
    """Seconds by which the prompt delays each request that decodes beside it, on each worker.

    A step that reads the weights and the contexts has FLOPs to spare for it, unless prompts that
    are queued ahead take them: only what exceeds those counts.
    """
    spare_s = np.maximum(alone_s(offers) - offers.gpu_backlog_s, 0.0)
    delays: Floats = np.maximum(offers.work_s - spare_s, 0.0)
    return delays


def alone_s(offers: Offers) -> Floats:
    """Seconds per token beside all that are in flight, without prompts."""
    alone: Floats = offers.tpot_s * (1 - np.minimum(offers.gpu_use, MOST_USE))
    return alone
