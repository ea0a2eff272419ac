"""Whether a request is let in: refused at once, rather than served too late for anyone to want it.

Past saturation a queue only grows, and work on requests whose clients have given up is lost to the
others. So a request that no worker is expected to serve within its objective (`kappa.slo`: TTFT
within a floor or a multiple of what an idle, typical node would take) is refused, with a time to
retry. What is expected is the prediction, corrected by how wrong it was of late
(`router.lateness`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from router.fleet import Fleet
from router.lateness import Lateness
from router.offers import Offers
from router.pricing import MOST_USE

_LEAST_WINDOW_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Which workers would miss a request's objective; arrays over the offers' workers.

    late_s: seconds by which a first token is expected after the limit; slow_s: the same of each
    token. Negative where there is room.
    """

    late_s: NDArray[np.float64]
    slow_s: NDArray[np.float64]
    token_s: NDArray[np.float64]
    output_tokens: int

    @property
    def refused(self) -> NDArray[np.bool_]:
        """Workers that would miss one or the other."""
        refused: NDArray[np.bool_] = (self.late_s > 0) | (self.slow_s > 0)
        return refused

    def refusal(self) -> tuple[str, float]:
        """Why the soonest of them is too late, and seconds until it may be tried again.

        Where tokens alone come too slowly that is when a typical request has ended.
        """
        wait_s = np.where(self.late_s > 0, self.late_s, self.output_tokens * self.token_s)
        soonest = int(np.argmin(wait_s))
        if self.late_s[soonest] > 0:
            return f"it would start {self.late_s[soonest]:.1f} s too late", float(wait_s[soonest])
        slow_ms = 1e3 * float(self.slow_s[soonest])
        return f"each token would take {slow_ms:.0f} ms too long", float(wait_s[soonest])


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets in what is expected to start, and then to go on, within its objective.

    TTFT within max(floor_s, ttft_factor x idle), TPOT within tpot_factor x idle. The idle TTFT is
    the median over the workers of loading what the best holder has and computing the rest. The
    defaults are the objective itself.
    """

    floor_s: float = TTFT_FLOOR_S
    ttft_factor: float = TTFT_IDLE_FACTOR
    tpot_factor: float = TPOT_IDLE_FACTOR

    def ttft_limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Latest expected TTFT that is let in, in real seconds."""
        held = float((offers.device_tokens + offers.cached_tokens).max())
        idle_s = fleet.idle_ttft_s(offers.slots, offers.prompt_tokens, held)
        floor_s = self.floor_s * float(np.median(fleet.dilation(offers.slots)))
        return max(floor_s, self.ttft_factor * float(np.median(idle_s)))

    def tpot_limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Longest expected time per output token that is let in, in real seconds."""
        idle_s = fleet.idle_tpot_s(offers.slots, offers.prompt_tokens)
        return self.tpot_factor * float(np.median(idle_s))

    def judge(self, fleet: Fleet, offers: Offers, lateness: Lateness) -> Judgement:
        """Each worker against the request's limits."""
        now_s = offers.now_s
        late_s = np.array([lateness.late_s(worker, now_s) for worker in offers.workers])
        limit_s, tokens = self.tpot_limit_s(fleet, offers), offers.expected_output_tokens
        # A request decodes beside the prompts that come after it. If it takes as long as it may,
        # as many come as came within that time before it: their work is spread over its tokens.
        lateness.window_s = max(limit_s * tokens, _LEAST_WINDOW_S)
        prompts_s = np.array([lateness.prompts_s(worker, now_s) for worker in offers.workers])
        alone_s = offers.tpot_s * (1 - np.minimum(offers.gpu_use, MOST_USE))
        token_s = alone_s + prompts_s / tokens
        return Judgement(
            late_s=offers.ttft_s + late_s - self.ttft_limit_s(fleet, offers),
            slow_s=token_s - limit_s,
            token_s=token_s,
            output_tokens=tokens,
        )
