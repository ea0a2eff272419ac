"""The price of a worker, by hand: own wait, waste that others wait for, decoding beside others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router import prices
from router.prices import Priced
from tests.router.offering import offers

SHORT = {
    "ttft_s": 1.0, "new_tokens": 100, "work_s": 0.1, "gpu_use": 0.2, "prefills_per_s": 3.0,
    "gpu_backlog_s": 0.3, "in_flight": 2, "decode_s": 0.05, "own_late_s": 0.2,
}  # fmt: skip
LONG = {
    "ttft_s": 2.0, "new_tokens": 200, "work_s": 0.4, "gpu_use": 0.6, "prefills_per_s": 5.0,
    "gpu_backlog_s": 0.5, "in_flight": 3, "decode_s": 0.07, "own_late_s": 0.4,
}  # fmt: skip


def score(*workers):
    made = offers(*workers)
    return prices._score_s(*(getattr(made, name) for name in SHORT))


def test_wasted_work_costs_what_a_queue_of_that_load_makes_others_wait():
    # Means over both: use 0.4, 4 prompts a second, a queue of 0.4 s; a price of 4 / 0.6 = 6.667.
    # Short: computes no more than it must: 1 + 0.2 / 2 + 2 x 0.05 = 1.2.
    # Long: half of its 0.4 s is waste: 0.2 x (0.2 + 0.4) x 6.667 = 0.8; decoding beside 3 others
    # 3 x 0.07 = 0.21; 2 + 0.4 / 2 + 0.8 + 0.21 = 3.21.
    assert score(SHORT, LONG) == pytest.approx([1.2, 3.21])


def test_beyond_full_use_the_price_of_waste_rises_no_more():
    # Use of 0.95 at most: 4 / 0.05 = 80, so the waste costs 0.12 x 80 = 9.6 instead of 0.8.
    fuller = score({**SHORT, "gpu_use": 0.95}, {**LONG, "gpu_use": 0.95})
    assert fuller == pytest.approx([1.2, 3.21 - 0.8 + 9.6])
    assert score({**SHORT, "gpu_use": 3.0}, {**LONG, "gpu_use": 7.0}) == pytest.approx(fuller)


def test_a_transfer_costs_those_who_fetch_after_it():
    # 2 loads a second on average: 2 s moved behind 0.5 s of queue cost 2 x 2 x (0.5 + 2) = 10 s.
    made = offers(
        {"loads_per_s": 1.0, "net_backlog_s": 0.5}, {"loads_per_s": 3.0, "net_backlog_s": 9.0}
    )
    made.fetch_s = np.array([2.0, math.inf])
    assert prices.fetch_toll_s(made).tolist() == [10.0, 0.0], "one that is impossible costs nothing"


def fetching(tokens, ttft_s, fetch_s=0.1, **others):
    """Two workers; the second, dear by itself, could first fetch so many more of 500 tokens."""
    made = offers(SHORT, {**LONG, "cached_tokens": 500}, now_s=0.0)
    made.fetching = offers(
        SHORT, {**LONG, "ttft_s": ttft_s, "cached_tokens": 500 + tokens} | others
    )
    made.fetching.ttft_s[0] = math.inf
    made.fetching.fetch_s = np.array([fetch_s, fetch_s])
    made.fetching.fetch_from = "w0"
    return made


def test_a_fetch_that_is_cheaper_than_every_worker_without_one_is_chosen():
    # Without: 1.2 and 3.21. With: 0.5 + 0.4 / 2 + 3 x 0.07 = 0.91 and nobody else loads.
    chosen = Priced(fetches=True).choose(fetching(tokens=256, ttft_s=0.5))
    assert (chosen.index, chosen.reason) == (1, "peer_fetch")
    assert chosen.fetch is not None
    assert (chosen.fetch.source_worker, chosen.fetch.tokens) == ("w0", 256)


@pytest.mark.parametrize(
    "offered",
    [
        pytest.param(fetching(tokens=0, ttft_s=0.5), id="of nothing"),
        # 0.8 + 0.41 = 1.21, more than 1.2.
        pytest.param(fetching(tokens=256, ttft_s=0.8), id="that costs more in all"),
        # 0.5 + 0.6 s on the network: the request itself gains nothing.
        pytest.param(fetching(tokens=256, ttft_s=0.5, fetch_s=0.6), id="longer than what it saves"),
        # 2.05 loads a second: 0.41 + 0.5 + 0.2 x 2.05 x (0.5 + 0.2) = 1.197; at 2.1 it is 1.204.
        pytest.param(
            fetching(tokens=256, ttft_s=0.5, fetch_s=0.2, loads_per_s=4.2, net_backlog_s=0.5),
            id="that makes others wait",
        ),
    ],
)
def test_no_fetch(offered):
    chosen = Priced(fetches=True).choose(offered)
    assert chosen.index == 0 and chosen.fetch is None
