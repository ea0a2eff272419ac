"""Whether a request is let in: refused at once, rather than served too late for anyone to want it.

Past saturation a queue only grows, and work on requests whose clients have given up is lost to the
others. So a request that no worker is expected to serve within its objective (`kappa.slo`: TTFT
within a floor or a multiple of what an idle, typical node would take) is refused, with a time to
retry. What is expected is the prediction, corrected by what came of others of late
(`router.lateness`). Pure.
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
    idle: nothing is in flight there, so that nobody gains if it waits.
    """

    late_s: Floats
    slow_s: Floats
    token_s: Floats
    full: NDArray[np.bool_]
    idle: NDArray[np.bool_]
    output_tokens: int

    @property
    def refused(self) -> NDArray[np.bool_]:
        """Workers that have something to do and would miss one or the other."""
        missing = (self.late_s > 0) | (self.slow_s > 0) | self.full
        refused: NDArray[np.bool_] = missing & ~self.idle
        return refused

    def refusal(self) -> tuple[str, float]:
        """Why the soonest of them is too late, and seconds until it may be tried again.

        Where it is only late that is by how much, else when a typical request has ended.
        """
        ends_s = self.output_tokens * self.token_s
        wait_s = np.maximum(self.late_s, np.where((self.slow_s > 0) | self.full, ends_s, 0.0))
        soonest = int(np.argmin(wait_s))
        if self.late_s[soonest] > 0:
            why = f"it would start {self.late_s[soonest]:.1f} s too late"
        elif self.full[soonest]:
            why = "as many run as may at a time"
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
    """

    floor_s: float = TTFT_FLOOR_S
    ttft_factor: float = TTFT_IDLE_FACTOR
    tpot_factor: float = TPOT_IDLE_FACTOR
    least: float = 0.2

    def ttft_limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Latest TTFT within the objective, in real seconds."""
        held = float((offers.device_tokens + offers.cached_tokens).max())
        idle_s = fleet.idle_ttft_s(offers.slots, offers.prompt_tokens, held)
        floor_s = self.floor_s * float(np.median(fleet.dilation(offers.slots)))
        return max(floor_s, self.ttft_factor * float(np.median(idle_s)))

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
        long = offers.work_s > _LONG_PROMPT_S * fleet.dilation(offers.slots)
        # Prompts delay the tokens of what decodes beside them: by how much of late, tells how much
        # they will.
        share = np.array(
            [
                lateness.share(worker, now_s, long=bool(is_long))
                for worker, is_long in zip(offers.workers, long, strict=True)
            ]
        )
        pace = np.array([lateness.pace(worker) for worker in offers.workers])
        expected_s = pace * token_s(offers, share)
        room = demand.room(cost_s(offers), self.least)
        ttft_s = _within(self.ttft_limit_s(fleet, offers), self.ttft_factor, room)
        tpot_s = _within(self.tpot_limit_s(fleet, offers), self.tpot_factor, room)
        return Judgement(
            late_s=offers.ttft_s + late_s - ttft_s,
            slow_s=expected_s - tpot_s,
            token_s=expected_s,
            # Without a free slot it waits until another ends, which no prediction has priced.
            full=offers.in_flight >= sequences,
            idle=offers.in_flight == 0,
            output_tokens=offers.expected_output_tokens,
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
    spare_s = np.maximum(_alone_s(offers) - offers.gpu_backlog_s, 0.0)
    delays: Floats = np.maximum(offers.work_s - spare_s, 0.0)
    return delays


def _alone_s(offers: Offers) -> Floats:
    """Seconds per token beside all that are in flight, without prompts."""
    alone_s: Floats = offers.tpot_s * (1 - np.minimum(offers.gpu_use, MOST_USE))
    return alone_s


def token_s(offers: Offers, share: Floats) -> Floats:
    """Seconds per token on each worker, where prompts delay it by this share of the time."""
    stretched_s: Floats = _alone_s(offers) / (1 - np.minimum(share, MOST_USE))
    return stretched_s
