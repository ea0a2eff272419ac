"""`priced`: a request pays for the link- and gpu-seconds that it takes from others.

Least predicted TTFT is selfish: rather than wait for the node that holds its cache, a request
recomputes it elsewhere, and what it burns there is missing when others come. Here a second of a
resource costs what it adds to the waiting of those who share it. A job of s seconds that joins a
first-come queue of Q seconds delays everybody who comes before that queue next runs empty, each by
s; in a queue with load rho and r arrivals a second these are r (Q + s) / (1 - rho) on average
(Haviv and Ritov, externalities in the M/G/1 queue). So its price is s r (Q + s) / (1 - rho): per
node and resource, in seconds of others' waiting, without a constant to tune.
"""

from __future__ import annotations

import numpy as np

from router.offers import Floats, Offers
from router.policy import Choice, Fetch, Stateless, least, reason

# A busy period is not longer than what recent use can tell of.
_FULL = 0.95


class Priced(Stateless):
    """Predicted TTFT plus the price of what the request takes."""

    name = "priced"

    def choose(self, offers: Offers) -> Choice:
        """Pick the least sum; ties by requests in flight."""
        score = offers.ttft_s + toll_s(offers)
        index = least(score, offers.in_flight, -offers.h2d_bytes_per_s)
        fetching = offers.fetching
        if fetching is not None:
            fetched = fetching.ttft_s + toll_s(fetching)
            best = int(fetched.argmin())
            tokens = fetching.cached_tokens[best] - offers.cached_tokens[best]
            if tokens > 0 and fetched[best] < score[index]:
                fetch = Fetch(offers.fetch_from, int(tokens))
                return Choice(best, "peer_fetch", fetch)
        return Choice(index, reason(offers, score, index))


def toll_s(offers: Offers) -> Floats:
    """Seconds that a request's work on each worker is expected to cost others."""
    link = _externality_s(offers.load_s, offers.link_backlog_s, offers.link_use, offers.loads_per_s)
    gpu = _externality_s(offers.work_s, offers.gpu_backlog_s, offers.gpu_use, offers.prefills_per_s)
    return link + gpu


def _externality_s(job_s: Floats, queue_s: Floats, use: Floats, arrivals_per_s: Floats) -> Floats:
    """Waiting that a job adds to those after it, in one first-come queue."""
    delayed = arrivals_per_s * (queue_s + job_s) / (1 - np.minimum(use, _FULL))
    cost_s: Floats = job_s * delayed
    return cost_s
