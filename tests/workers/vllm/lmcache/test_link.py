"""When a failing server is left alone, and how often that is logged."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kappa_workers.vllm.lmcache.base import LOAD, LOOKUP, TierGuard


def test_guard_doubles_the_pause_with_each_failure_up_to_60_s():
    guard = TierGuard(retry_s=5.0, slow_s=1.0)
    now_s, pauses = 100.0, []
    for _ in range(7):
        assert guard.allows(now_s)
        guard.failed(LOAD, now_s)
        closed_s = next(s for s in range(1, 1000) if guard.allows(now_s + s))
        pauses.append(closed_s)
        now_s += closed_s
    assert pauses == [5, 10, 20, 40, 60, 60, 60]
    guard.answered()
    guard.failed(LOAD, now_s)
    assert not guard.allows(now_s + 4.9) and guard.allows(now_s + 5.0)


def test_failures_while_it_is_closed_do_not_close_it_for_longer():
    guard = TierGuard(retry_s=5.0, slow_s=1.0)
    for moment in (0.0, 1.0, 2.0, 4.9):
        guard.failed(LOOKUP, moment)
    assert guard.allows(5.0)
    assert guard.failures == {LOOKUP: 4}


def test_guard_counts_a_failure_without_pause_and_stays_open():
    guard = TierGuard(retry_s=5.0, slow_s=1.0)
    assert guard.failed("absent", 0.0, pause=False) == {"absent": 1}
    assert guard.allows(0.0) and guard.failures == {"absent": 1}


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=200))
def test_guard_warns_once_a_minute_and_counts_every_failure(gaps):
    guard, now_s, warned, named = TierGuard(1.0, 1.0), 0.0, [], 0
    for gap in gaps:
        now_s += gap
        warning = guard.failed(LOAD, now_s)
        if warning:
            warned.append(now_s)
            named += warning[LOAD]
    assert all(later - sooner >= 60.0 for sooner, later in pairwise(warned))
    assert named + guard.failed(LOAD, now_s + 61.0)[LOAD] == len(gaps) + 1 == guard.failures[LOAD]
