"""`priced`: a request pays for the link- and gpu-seconds that it takes from others.

Least predicted TTFT is selfish: rather than wait for the node that holds its cache, a request
recomputes it elsewhere, and what it burns there is missing when others come. Here a second of a
resource costs what it adds to the waiting of those who share it. A job of s seconds that joins a
first-come queue of Q seconds delays everybody who comes before that queue next runs empty, each by
s; in a queue with load rho and r arrivals a second these are r (Q + s) / (1 - rho) on average
(Haviv and Ritov, externalities in the M/G/1 queue). So its price is s r (Q + s) / (1 - rho): per
node and resource, in seconds of others' waiting, without a constant to tune.

KV stays where it was made, so the choice also decides what follow-ups will cost: each of those
still expected (`router.reuse`) will load the prompt back from the best of the nodes that hold it,
the chosen one now among them, and pay the price of that link.
"""

from __future__ import annotations

import numpy as np

from router.offers import Floats, Offers
from router.policy import Choice, Fetch, least, reason
from router.reuse import ReuseForecast

# A busy period is not longer than what recent use can tell of.
_FULL = 0.95


class Priced:
    """Predicted TTFT, plus the price of what the request takes, plus what its follow-ups will pay.

    placement: whether follow-ups count.
    """

    name = "priced"

    def __init__(self, *, placement: bool = True) -> None:
        self._placement = placement
        self._reuse = ReuseForecast()

    def choose(self, offers: Offers) -> Choice:
        """Pick the least sum; ties by requests in flight."""
        future = future_s(offers, self._reuse.expected(offers.prompt_tokens))
        if not self._placement:
            future = np.zeros(len(offers))
        score = offers.ttft_s + toll_s(offers) + future
        index = least(score, offers.in_flight, -offers.h2d_bytes_per_s)
        fetching = offers.fetching
        if fetching is not None:
            fetched = fetching.ttft_s + toll_s(fetching) + future
            best = int(fetched.argmin())
            tokens = fetching.cached_tokens[best] - offers.cached_tokens[best]
            if tokens > 0 and fetched[best] < score[index]:
                return Choice(best, "peer_fetch", Fetch(offers.fetch_from, int(tokens)))
        return Choice(index, reason(offers, score, index))

    def routed(self, offers: Offers, index: int) -> None:
        """Learn whether this was a reuse."""
        held = offers.device_tokens + offers.cached_tokens
        self._reuse.saw(offers.prompt_tokens, float(held.max()))

    def left(self, worker: str) -> None:
        """Nothing is kept by worker."""


def toll_s(offers: Offers) -> Floats:
    """Seconds that a request's work on each worker is expected to cost others."""
    link = externality_s(offers.load_s, offers.link_backlog_s, offers.link_use, offers.loads_per_s)
    gpu = externality_s(offers.work_s, offers.gpu_backlog_s, offers.gpu_use, offers.prefills_per_s)
    return link + gpu


def future_s(offers: Offers, follow_ups: float) -> Floats:
    """Seconds that `follow_ups` reloads of this prompt will cost, if it is also held on each.

    They come later, so they meet a typical queue and not the present one.
    """
    empty = np.zeros(len(offers))
    each = offers.reload_s + externality_s(
        offers.reload_s, empty, offers.link_use, offers.loads_per_s
    )
    held = offers.device_tokens + offers.cached_tokens >= 0.5 * offers.prompt_tokens
    if held.any():
        each = np.minimum(each, each[held].min())
    cost_s: Floats = follow_ups * each
    return cost_s


def externality_s(job_s: Floats, queue_s: Floats, use: Floats, arrivals_per_s: Floats) -> Floats:
    """Waiting that a job adds to those after it, in one first-come queue."""
    delayed = arrivals_per_s * (queue_s + job_s) / (1 - np.minimum(use, _FULL))
    cost_s: Floats = job_s * delayed
    return cost_s
