"""The requests of a run: the same for every router, and cut as stated."""

import numpy as np
import pytest

from benchmarks.routing.peers.traffic import Cut, arrivals, longest_tokens
from workload.shapes import SessionShape, TurnShape, Workload

BLOCK = 16


def turn(tokens, output=5, after_s=0.0, salt=0):
    ids = np.arange(1, 1 + (tokens + output) // BLOCK, dtype=np.uint64) + np.uint64(salt << 20)
    return TurnShape(after_s, tokens, output, ids[: tokens // BLOCK], ids)


@pytest.fixture
def workload():
    sessions = [
        SessionShape(f"s{i}", tuple(turn(100 + 16 * i + j, 5, 20.0 * (j > 0), i) for j in range(4)))
        for i in range(6)
    ]
    return Workload("w", BLOCK, tuple(sessions), "made up")


def described(found):
    return [(a.start_s, a.session.id, [t.input_tokens for t in a.session.turns]) for a in found]


def test_a_seed_gives_the_same_requests_and_another_gives_others(workload):
    once, again = (described(arrivals(workload, 8.0, 60.0, 3)) for _ in range(2))
    assert once == again
    assert once != described(arrivals(workload, 8.0, 60.0, 4))


def test_requests_come_at_the_rate_that_was_asked_for(workload):
    found = arrivals(workload, 8.0, 2_000.0, 1)
    assert sum(len(a.session.turns) for a in found) / 2_000.0 == pytest.approx(8.0, rel=0.05)
    assert all(0 < a.start_s < 2_000.0 for a in found)


def test_a_cut_keeps_the_blocks_and_scales_the_rest(workload):
    cut = Cut(turns=2, pause=0.25, scale=4).apply(workload)
    assert cut.block_tokens == BLOCK // 4
    for before, after in zip(workload.sessions, cut.sessions, strict=True):
        assert len(after.turns) == 2
        for old, new in zip(before.turns[:2], after.turns, strict=True):
            assert np.array_equal(new.kept_blocks, old.kept_blocks)
            assert new.input_tokens // cut.block_tokens == len(new.blocks)
            assert new.after_s == old.after_s / 4


def test_no_cut_changes_nothing(workload):
    same = Cut(turns=99, pause=1.0, scale=1).apply(workload)
    assert described(arrivals(same, 1.0, 50.0, 1)) == described(arrivals(workload, 1.0, 50.0, 1))


@pytest.mark.parametrize(
    "wrong", [{"turns": 0}, {"pause": -1.0}, {"pause": float("nan")}, {"scale": 0}]
)
def test_a_cut_that_leaves_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Cut(**wrong)


def test_a_scale_that_splits_tokens_is_refused(workload):
    with pytest.raises(ValueError, match="does not divide"):
        Cut(scale=3).apply(workload)


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (1.0, 0.0)])
def test_no_rate_and_no_time_are_refused(workload, rate, seconds):
    with pytest.raises(ValueError, match="above zero"):
        arrivals(workload, rate, seconds, 1)


def test_an_empty_workload_is_refused():
    with pytest.raises(ValueError, match="no sessions"):
        arrivals(Workload("w", BLOCK, (), ""), 1.0, 1.0, 1)


def test_the_longest_request_is_known(workload):
    assert longest_tokens(arrivals(workload, 8.0, 60.0, 1)) == 100 + 80 + 3 + 5
    assert longest_tokens([]) == 0
