"""Whether a request is let in: refused at once, rather than served too late for anyone to want it.

Past saturation a queue only grows, and work on requests whose clients have given up is lost to the
others. So a request that is not expected to meet its objective (`kappa.slo`: TTFT within a
floor or a multiple of what an idle, typical node would take) is refused, with a time to retry.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.fleet import Fleet
from router.offers import Offers


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets in what is predicted to start within max(floor_s, factor x its idle TTFT).

    The idle TTFT is the median over the workers of loading what the best holder has and computing
    the rest. The defaults are the objective itself.
    """

    floor_s: float = 0.5
    factor: float = 5.0

    def limit_s(self, fleet: Fleet, offers: Offers) -> float:
        """Latest predicted TTFT that is let in, in real seconds."""
        held = float((offers.device_tokens + offers.cached_tokens).max())
        idle_s = fleet.idle_ttft_s(offers.slots, offers.prompt_tokens, held)
        floor_s = self.floor_s * float(np.median(fleet.dilation(offers.slots)))
        return max(floor_s, self.factor * float(np.median(idle_s)))

    def excess_s(self, fleet: Fleet, offers: Offers, index: int) -> float:
        """By how much row `index` would start too late; zero or less is in time."""
        return float(offers.ttft_s[index]) - self.limit_s(fleet, offers)
