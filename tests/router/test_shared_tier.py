"""Workers that share a host tier can load what any of them has stored."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.shared_tier import SharedTiers

NAMES = ["a", "b", "c", "d"]


def widened(device, cached, **servers):
    shared = SharedTiers()
    for worker in NAMES:
        shared.join(worker, servers.get(worker, ""))
    cached = np.array(cached, dtype=float)
    shared.widen(NAMES[: len(cached)], np.array(device, dtype=float), cached)
    return cached.tolist()


def test_what_one_holds_all_of_its_server_can_load():
    assert widened([0, 64, 0], [96, 0, 0], a="s", b="s") == [96, 32, 0]


def test_what_is_on_a_device_is_in_the_server_too():
    assert widened([128, 0], [32, 0], a="s", b="s") == [32, 160]


def test_servers_are_kept_apart_and_a_tier_of_ones_own_is_nobody_elses():
    assert widened([0, 0, 0, 0], [96, 0, 64, 0], a="s", b="s", c="t", d="t") == [96, 96, 64, 64]
    assert widened([0, 0, 0], [96, 0, 0], a="s") == [96, 0, 0]


def test_a_worker_that_left_or_changed_its_tier_shares_no_more():
    shared = SharedTiers()
    for worker in "ab":
        shared.join(worker, "s")
    shared.leave("b")
    shared.join("a", "")
    assert not shared
    cached = np.array([96.0, 0.0])
    shared.widen(["a", "b"], np.zeros(2), cached)
    assert cached.tolist() == [96.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_nobody_holds_less_and_all_reach_as_far(held):
    device, cached = [d for d, _ in held], [c for _, c in held]
    after = widened(device, cached, a="s", b="s", c="s", d="s")
    reach = max(max(d + c for d, c in held), max(device))
    assert all(new >= old for new, old in zip(after, cached, strict=True))
    assert all(d + c == reach for d, c in zip(device, after, strict=True))
