"""What clients saw, held against a fault's promise."""

import pytest

from benchmarks.faults.catalogue import FAULTS, Fault, fault_named
from benchmarks.faults.evaluation import After, Observed, evaluate, first_answer_s

KILLED = Fault("killed", "a kill", first_answer_s=1.0, recovers=True)
BACK = After(recovery_s=30.0, start_s=27.0)


def whole(sent_s, took_s=0.5, status=200, **more):
    return Observed(sent_s, sent_s + took_s, sent_s + took_s, status, False, status == 200, **more)


def cut(sent_s, first_s, announced):
    return Observed(sent_s, first_s, sent_s + 2.0, 200, True, False, announced, error="ClientError")


GOOD = [whole(float(t)) for t in range(8, 14)]


def test_all_answered_and_back_in_time_is_kept():
    verdict = evaluate(KILLED, GOOD, 10.0, BACK)
    assert verdict.kept and verdict.lost == 0 and verdict.first_answer_s == pytest.approx(0.5)


@pytest.mark.parametrize("status", [500, 503, 429, 0])
def test_a_request_that_was_refused_is_lost_too(status):
    verdict = evaluate(KILLED, [*GOOD, whole(9.8, status=status)], 10.0, BACK)
    assert not verdict.kept and verdict.lost == 1
    assert "1 of 7 requests lost" in verdict.failed[0]


def test_a_stream_that_had_begun_may_end_if_it_says_so():
    assert evaluate(KILLED, [*GOOD, cut(9.5, 9.7, announced=True)], 10.0, BACK).kept
    verdict = evaluate(KILLED, [*GOOD, cut(9.5, 9.7, announced=False)], 10.0, BACK)
    assert verdict.failed == ("1 streams ended without a word",)


def test_a_stream_that_had_not_begun_counts_as_lost():
    verdict = evaluate(KILLED, [*GOOD, cut(9.5, None, announced=False)], 10.0, BACK)
    assert verdict.lost == 1 and not verdict.kept


def test_only_what_was_open_at_that_moment_may_be_lost_with_its_way_out():
    fault = Fault("ingress", "its way out", may_lose_open=True)
    assert evaluate(fault, [*GOOD, whole(9.8, status=500)], 10.0, After()).kept
    assert not evaluate(fault, [*GOOD, whole(10.2, status=500)], 10.0, After()).kept


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (After(reservations=2, recovery_s=1.0, start_s=1.0), "2 reservations leaked"),
        (After(orphans=("7 x",), recovery_s=1.0, start_s=1.0), "1 orphan"),
        (After(recovery_s=30.0, start_s=20.0), "10.0 s more than the start"),
        (After(), "did not come back"),
        (After(recovery_s=1.0, start_s=1.0, shown=False), "not seen"),
        (After(recovery_s=1.0, start_s=1.0, complaints=("a lie",)), "a lie"),
    ],
)
def test_what_is_wrong_afterwards_breaks_the_promise(after, word):
    assert word in "; ".join(evaluate(KILLED, GOOD, 10.0, after).failed)


def test_the_first_answer_is_of_a_request_sent_afterwards():
    assert first_answer_s([whole(9.9, took_s=0.2), whole(10.5, took_s=0.6)], 10.0) == pytest.approx(
        1.1
    )
    assert first_answer_s([whole(9.9)], 10.0) is None
    late = evaluate(KILLED, [whole(10.5, took_s=0.6)], 10.0, BACK)
    assert late.failed == ("first answer after 1.10 s, limit 1 s",)


def test_faults_are_found_by_name_and_each_has_a_deed():
    from benchmarks.faults.actions import _MAKERS

    assert {fault.name for fault in FAULTS} == set(_MAKERS)
    assert fault_named("slow_link").engine == "emulated"
    with pytest.raises(ValueError, match="there are worker_killed"):
        fault_named("meteor")
