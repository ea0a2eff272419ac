"""Mini-batches: complete, within the buffers, and no more out of balance than they must be."""

from __future__ import annotations

import math

import pytest
from numpy.random import default_rng

from kappa.plans.hybridserve import Blocks, imbalance, pack
from kappa.plans.rates import LineFit

PROJECT, LOAD = LineFit("KV projection", 2.0), LineFit("load", 1.0)


def test_imbalance_is_one_where_both_take_equally_long() -> None:
    assert imbalance(Blocks(1, 2), PROJECT, LOAD) == 1.0
    assert imbalance(Blocks(1, 4), PROJECT, LOAD) == imbalance(Blocks(2, 2), PROJECT, LOAD) == 2.0
    assert imbalance(Blocks(0, 2), PROJECT, LOAD) == math.inf
    assert imbalance(Blocks(2, 0), PROJECT, LOAD) == math.inf


def test_each_request_is_in_one_batch_that_fits() -> None:
    rng = default_rng(51)
    for _ in range(300):
        requests = [
            Blocks(int(rng.integers(0, 20)), int(rng.integers(0, 20)))
            for _ in range(int(rng.integers(0, 40)))
        ]
        most = Blocks(int(rng.integers(20, 60)), int(rng.integers(20, 60)))
        batches = pack(requests, most, PROJECT, LOAD)
        assert sorted(i for batch in batches for i in batch) == list(range(len(requests)))
        for batch in batches:
            total = Blocks(0, 0)
            worst = math.inf
            for i in batch:
                total = total + requests[i]
                assert imbalance(total, PROJECT, LOAD) <= worst
                worst = imbalance(total, PROJECT, LOAD)
            assert total.fits(most)


def test_no_request_of_a_later_batch_could_have_joined() -> None:
    rng = default_rng(52)
    for _ in range(100):
        requests = [Blocks(int(rng.integers(1, 20)), int(rng.integers(1, 20))) for _ in range(20)]
        most = Blocks(40, 40)
        batches = pack(requests, most, PROJECT, LOAD)
        first = sum((requests[i] for i in batches[0]), Blocks(0, 0))
        for i in (i for batch in batches[1:] for i in batch):
            grown = first + requests[i]
            worse = imbalance(grown, PROJECT, LOAD) > imbalance(first, PROJECT, LOAD)
            assert worse or not grown.fits(most)


def test_unlike_requests_are_paired() -> None:
    """Two that project much and two that load much: each batch gets one of each."""
    requests = [Blocks(4, 2), Blocks(4, 2), Blocks(1, 8), Blocks(1, 8)]
    batches = pack(requests, Blocks(5, 10), PROJECT, LOAD)
    assert sorted(map(sorted, batches)) == [[0, 2], [1, 3]]


def test_a_request_that_was_passed_is_tried_again_when_others_have_joined() -> None:
    requests = [Blocks(1, 4), Blocks(6, 0), Blocks(1, 4)]
    assert pack(requests, Blocks(99, 99), PROJECT, LOAD) == [[0, 2, 1]]


def test_requests_without_activations_fill_the_buffers() -> None:
    assert pack([Blocks(0, 4)] * 5, Blocks(0, 10), PROJECT, LOAD) == [[0, 1], [2, 3], [4]]


def test_a_request_too_large_for_the_buffers_is_named() -> None:
    with pytest.raises(ValueError, match="request 1 has 2 activation and 11 KV blocks"):
        pack([Blocks(1, 1), Blocks(2, 11)], Blocks(10, 10), PROJECT, LOAD)


def test_imbalance_is_a_ratio_whatever_the_seconds() -> None:
    # 3 blocks project in 3 ms, 1 loads in 1 ms: three times as long, as it is with 3 s and 1 s.
    fast = LineFit("KV projection", 1e-3), LineFit("load", 1e-3)
    assert imbalance(Blocks(3, 1), *fast) == imbalance(Blocks(1, 3), *fast) == pytest.approx(3.0)
