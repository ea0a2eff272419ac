"""`priced`: a request pays for the work that it makes and that nobody needed.

Least predicted TTFT is selfish: rather than wait for the node that holds its cache, a request
recomputes it elsewhere, and what it burns there is missing when others come, who then do the same.
The part of its work that it has to bring anyway is not the choice's doing; what it computes beyond
that, because it goes where less is held, is. A job of s seconds that joins a first-come queue of Q
seconds delays everybody who comes before that queue next runs empty, each by s; in a queue with
load rho and r arrivals a second these are r (Q + s) / (1 - rho) on average (Haviv and Ritov,
externalities in the M/G/1 queue). So s wasted seconds cost s r (Q + s) / (1 - rho): seconds of
others' waiting, which rise with load by themselves, and no constant to tune.

Decoding is shared work too: each token that a request will generate makes a step longer for all
that are in flight beside it. But a late token is no late first token: delays are weighed by what
the service objective allows of either, so a decode counts as so many of its tokens as the TTFT
objective is longer than the TPOT objective. Its own tokens are late, too, where the worker's memory
is so slow or so full that a step takes more than half of the TPOT objective; of that half counts.
These halves are measured, not derived (docs/adr/0005-price-wasted-work.md).

r, Q and rho are means over the fleet. A node's own figures mislead where sessions wait for their
answers before they ask again: a jammed node gets few requests, and would look cheap for it.
"""

from __future__ import annotations

import numpy as np

from kappa.compiled import compiled
from router.offers import Floats, Offers
from router.policy import Choice, Fetch, least, reason

# A busy period is not longer than what recent use can tell of.
_FULL = 0.95
_OWN_LATE = 0.5


class Priced:
    """Predicted TTFT, plus the price of wasted work and of decoding.

    fetches: KV may come from a peer first.
    """

    def __init__(self, name: str = "priced", *, fetches: bool = False) -> None:
        self.name = name
        self.fetches = fetches
        # Compiled now rather than while the first request waits.
        _score_s(*[np.ones(1)] * 9)

    def choose(self, offers: Offers) -> Choice:
        """Pick the least sum; ties by requests in flight."""
        score = _score_s(
            offers.ttft_s, offers.new_tokens, offers.work_s, offers.gpu_use, offers.prefills_per_s,
            offers.gpu_backlog_s, offers.in_flight, offers.decode_s, offers.own_late_s,
        )  # fmt: skip
        index = least(score, offers.in_flight, -offers.h2d_bytes_per_s)
        fetching = offers.fetching
        if fetching is None or fetching.fetch_s is None:
            return Choice(index, reason(offers, score, index))
        # It must gain the request itself more than the transfer takes of two cards: what is only
        # to spread those that decode, or saves little, fills the nodes that others fetch to.
        sooner = fetching.ttft_s + fetching.fetch_s < offers.ttft_s[index]
        crowd_s = fetching.in_flight * fetching.decode_s
        own_s = fetching.ttft_s + _OWN_LATE * fetching.own_late_s
        cost_s = own_s + fetch_toll_s(fetching) + crowd_s
        fetched = np.where(sooner, cost_s, np.inf)
        best = int(fetched.argmin())
        tokens = fetching.cached_tokens[best] - offers.cached_tokens[best]
        if tokens > 0 and fetched[best] < score[index]:
            return Choice(best, "peer_fetch", Fetch(fetching.fetch_from, int(tokens)))
        return Choice(index, reason(offers, score, index))

    def routed(self, offers: Offers, index: int) -> None:
        """Nothing to remember: what is needed is in the offers."""

    def left(self, worker: str) -> None:
        """Nothing is kept by worker."""


@compiled
def _score_s(
    ttft_s: Floats, new_tokens: Floats, work_s: Floats, gpu_use: Floats, prefills_per_s: Floats,
    gpu_backlog_s: Floats, in_flight: Floats, decode_s: Floats, own_late_s: Floats,
) -> Floats:  # fmt: skip
    """Own wait and decode, toll and crowd on each worker, in seconds; arrays as in `Offers`.

    The toll: others' waiting for computing more than the least that any worker would. The crowd:
    by how much the request's decode delays those in flight beside it.
    """
    workers = len(ttft_s)
    needed_tokens = new_tokens.min()
    use = min(gpu_use.sum() / workers, _FULL)
    price = prefills_per_s.sum() / workers / (1 - use)
    queue_s = gpu_backlog_s.sum() / workers
    out = np.empty(workers)
    for i in range(workers):
        wasted_s = (1 - needed_tokens / new_tokens[i]) * work_s[i]
        toll_s = wasted_s * (wasted_s + queue_s) * price
        crowd_s = in_flight[i] * decode_s[i]
        out[i] = ttft_s[i] + _OWN_LATE * own_late_s[i] + toll_s + crowd_s
    return out


def fetch_toll_s(offers: Offers) -> Floats:
    """Waiting that fetching and loading add to those who fetch and load after it, in seconds."""
    assert offers.fetch_s is not None
    # Where it would take for ever, its own TTFT says so.
    moved_s = np.where(np.isfinite(offers.fetch_s), offers.fetch_s, 0.0)
    loads_per_s = float(offers.loads_per_s.sum()) / len(offers)
    cost_s: Floats = moved_s * loads_per_s * (offers.net_backlog_s + moved_s)
    return cost_s
