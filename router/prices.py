"""`priced`: a request pays for the link- and gpu-seconds that it takes from others.

Least predicted TTFT is selfish: rather than wait for the node that holds its cache, a request
recomputes it elsewhere, and what it burns there is missing when others come. Here a second of a
resource costs what one more second of work adds to the waiting of all that share it: its backlog
(those queued now) and rho / (1 - rho) (those still to come, rho its recent use), a price per node
and resource that follows load without being set by anyone.
"""

from __future__ import annotations

import numpy as np

from router.offers import Floats, Offers
from router.policy import Choice, Stateless, least, reason

WEIGHT = 4.0
_FULL = 0.95


class Priced(Stateless):
    """Predicted TTFT plus the price of what the request takes."""

    name = "priced"

    def choose(self, offers: Offers) -> Choice:
        """Pick the least sum; ties by requests in flight."""
        score = offers.ttft_s + WEIGHT * toll_s(offers)
        index = least(score, offers.in_flight, -offers.h2d_bytes_per_s)
        return Choice(index, reason(offers, score, index))


def toll_s(offers: Offers) -> Floats:
    """Seconds that a request's work on each worker is expected to cost others."""
    gpu_use = np.minimum(offers.gpu_use, _FULL)
    link_use = np.minimum(offers.link_use, _FULL)
    gpu = offers.compute_s * (gpu_use / (1 - gpu_use) + offers.gpu_backlog_s)
    link = offers.load_s * (link_use / (1 - link_use) + offers.link_backlog_s)
    return gpu + link
