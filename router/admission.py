"""Whether a request is let in: refused at once, rather than served too late for anyone to want it.

Past saturation a queue only grows, and work on requests whose clients have given up is lost to the
others. So a request that is not expected to meet its objective (`kappa.slo`: TTFT within a
floor or a multiple of what an idle, typical node would take) is refused, with a time to retry.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from router.fleet import Fleet
from router.offers import Offers


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets in what is predicted to start, and then to go on, within its objective.

    TTFT within max(floor_s, ttft_factor x idle), TPOT within tpot_factor x idle. The idle TTFT is
    the median over the workers of loading what the best holder has and computing the rest. The
    defaults are the objective itself.
    """

    floor_s: float = TTFT_FLOOR_S
    ttft_factor: float = TTFT_IDLE_FACTOR
    tpot_factor: float = TPOT_IDLE_FACTOR

    def ttft_limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Latest predicted TTFT that is let in, in real seconds."""
        held = float((offers.device_tokens + offers.cached_tokens).max())
        idle_s = fleet.idle_ttft_s(offers.slots, offers.prompt_tokens, held)
        floor_s = self.floor_s * float(np.median(fleet.dilation(offers.slots)))
        return max(floor_s, self.ttft_factor * float(np.median(idle_s)))

    def tpot_limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Longest predicted time per output token that is let in, in real seconds."""
        idle_s = fleet.idle_tpot_s(offers.slots, offers.prompt_tokens)
        return self.tpot_factor * float(np.median(idle_s))

    def refusal(self, fleet: Fleet, offers: Offers, index: int) -> tuple[str, float] | None:
        """Why row `index` is refused, and seconds until it may be tried again; None if it is not.

        One that only decodes too slowly may try again when a typical request has ended.
        """
        late_s = float(offers.ttft_s[index]) - self.ttft_limit_s(fleet, offers)
        if late_s > 0:
            return f"it would start {late_s:.1f} s too late", late_s
        slow_s = float(offers.tpot_s[index]) - self.tpot_limit_s(fleet, offers)
        if slow_s > 0:
            wait_s = offers.expected_output_tokens * float(offers.tpot_s[index])
            return f"each token would take {1e3 * slow_s:.0f} ms too long", wait_s
        return None
