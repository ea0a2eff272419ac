"""Which prefixes are hot, when a copy is worth it, and where it goes."""

import numpy as np
import pytest

from router.fleet import Rooms
from router.replication import (
    HotPrefix,
    HotPrefixes,
    ReplicationRule,
    best_target,
    saved_s,
    worthwhile,
)
from tests.router.offering import offers


def ids(first, count=8):
    return np.arange(first, first + count, dtype=np.uint64)


def rooms(**parts):
    count = len(next(iter(parts.values())))
    plain = {
        "spare_tokens": 1e6, "host_tokens": 1e6, "backlog_s": 0.0, "h2d_bytes_per_s": 63e9,
        "load_token_s": 1e-6, "net_tokens_per_s": 1e5, "net_backlog_s": 0.0,
    }  # fmt: skip
    return Rooms(**{k: np.array(parts.get(k, [v] * count), float) for k, v in plain.items()})


def test_savings_add_up_and_fade():
    hot = HotPrefixes(ReplicationRule(window_s=10.0))
    for now_s in (0.0, 1.0, 2.0):
        hot.used(ids(0), 8, 1.0, now_s)
    assert 2.5 < hot.hottest(2.0)[0].saved_s < 3.0
    assert hot.hottest(60.0) == []


def test_what_one_request_wants_is_not_hot():
    hot = HotPrefixes(ReplicationRule())
    hot.used(ids(0), 8, 100.0, 0.0)
    hot.used(ids(50), 0, 100.0, 0.0)
    assert hot.hottest(0.0) == [] and len(hot) == 1


def test_a_hot_prefix_is_what_its_requests_share():
    hot = HotPrefixes(ReplicationRule())
    one, other = ids(0, 12), ids(0, 12)
    other[10:] += 100
    hot.used(one, 12, 1.0, 0.0)
    # They agree up to eight blocks, the power of two, and on two more.
    hot.used(other, 11, 1.0, 0.0)
    (found,) = hot.hottest(0.0)
    assert found.hashes.tolist() == one[:10].tolist()


def test_the_hottest_come_first_and_are_not_copied_twice():
    hot = HotPrefixes(ReplicationRule(most_copies=2))
    for first, seconds in ((0, 1.0), (100, 3.0), (200, 2.0)):
        for _ in range(2):
            hot.used(ids(first), 8, seconds, 0.0)
    asked = hot.hottest(0.0)
    assert [int(prefix.hashes[0]) for prefix in asked] == [100, 200]
    hot.copied(asked[0])
    assert [int(prefix.hashes[0]) for prefix in hot.hottest(0.0)] == [200, 0]


def test_no_more_prefixes_are_tracked_than_allowed():
    hot = HotPrefixes(ReplicationRule(most_prefixes=3))
    for first in range(0, 1000, 100):
        hot.used(ids(first), 8, 1.0, 0.0)
    assert len(hot) == 3
    hot.used(ids(900), 8, 1.0, 0.0)
    assert int(hot.hottest(0.0)[0].hashes[0]) == 900


def test_a_request_saves_what_the_best_other_holder_would_give_it():
    chosen = offers({"ttft_s": 5.0}, {"ttft_s": 9.0})
    held = offers(
        {"load_s": 1.0, "gpu_backlog_s": 5.0, "compute_s": 0.5},
        {"load_s": 1.0, "link_backlog_s": 0.5, "compute_s": 0.5},
    )
    assert saved_s(chosen, 0, held) == pytest.approx(3.0)
    assert saved_s(held, 0, held) == 0.0


def test_a_copy_goes_to_the_fastest_link_with_most_room():
    held = np.array([1000.0, 0.0, 0.0, 0.0])
    links, spare = [63e9, 63e9, 450e9, 450e9], [9e5, 9e5, 5e5, 6e5]
    assert best_target(held, 1000.0, rooms(h2d_bytes_per_s=links, spare_tokens=spare)) == 3
    busy = rooms(h2d_bytes_per_s=links, spare_tokens=spare, backlog_s=[0, 0, 1.0, 9.0])
    assert best_target(held, 1000.0, busy) == 1
    # A tenth of each tier is left for what requests wait for.
    assert best_target(held, 1000.0, rooms(spare_tokens=[1e5] * 4)) == -1
    assert best_target(np.full(4, 1000.0), 1000.0, rooms(spare_tokens=spare)) == -1


@pytest.mark.parametrize(
    ("saved", "change", "ends"),
    [
        (1.0, {}, (0, 1)),
        (0.1, {}, None),
        (1.0, {"net_backlog_s": [5.0, 0.0]}, None),
        (1.0, {"net_tokens_per_s": [1e5, 0.0]}, None),
        (1.0, {"load_token_s": [1e-6, 1e-4]}, None),
    ],
)
def test_a_copy_must_save_more_than_it_costs(saved, change, ends):
    prefix = HotPrefix(ids(0), saved, 2.0, 0.0)
    known = rooms(**{"spare_tokens": [1e6, 1e6], **change})
    assert worthwhile(prefix, np.array([10_000.0, 0.0]), known) == ends
