"""Deadlines: read strictly, judged by prediction before waiting, and by the clock after."""

import pytest

from router.access.deadline import Deadline, deadline_of, late_workers
from router.errors import ApiError
from tests.router.offering import estimates


def refused(call, *arguments, **options):
    with pytest.raises(ApiError) as caught:
        call(*arguments, **options)
    return caught.value


@pytest.mark.parametrize(
    ("text", "allowed_s"), [("1", 0.001), (" 1500 ", 1.5), ("86400000", 86400)]
)
def test_a_deadline_is_whole_milliseconds_from_arrival(text, allowed_s):
    deadline = deadline_of(text, 10.0)
    assert deadline == Deadline(10.0, allowed_s) and deadline.at_s == 10.0 + allowed_s


def test_without_the_header_there_is_none():
    assert deadline_of("", 1.0) is None and deadline_of("  ", 1.0) is None


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-5",
        "1.5",
        "1e3",
        "soon",
        "0x10",
        "1 2",
        "86400001",
        "9" * 400,
        "²",
        "١",
        "+5",
        "1_000",
    ],
)
def test_what_is_no_deadline_is_refused_with_what_it_should_be(text):
    error = refused(deadline_of, text, 0.0)
    assert (error.status, error.param) == (400, "x-kappa-deadline-ms")
    assert "whole milliseconds" in error.message and text not in error.message.split()


def test_it_has_passed_from_its_moment_on():
    deadline = Deadline(10.0, 2.0)
    deadline.check(11.999)
    error = refused(deadline.check, 12.0)
    assert (error.status, error.code, error.retry_after_s) == (504, "deadline_exceeded", None)


def priced(ttft_s, tpot_s=0.1):
    return estimates(
        *({"ttft_s": ttft, "tpot_s": tpot_s} for ttft in ttft_s), expected_output_tokens=10
    )


def test_workers_predicted_too_late_are_told_apart():
    made = priced([1.0, 3.0, 1.99])
    late = late_workers(Deadline(0.0, 2.5), made, 0.5, streamed=True)
    assert late == {made.workers[1]}
    assert late_workers(Deadline(0.0, 9.0), made, 0.5, streamed=True) == frozenset()


def test_an_answer_that_is_not_streamed_is_there_with_its_last_token():
    made = priced([1.0, 1.5])
    assert late_workers(Deadline(0.0, 2.2), made, 0.0, streamed=True) == frozenset()
    assert late_workers(Deadline(0.0, 2.2), made, 0.0, streamed=False) == {made.workers[1]}


def test_if_all_are_late_it_is_refused_with_what_the_soonest_lacks():
    error = refused(late_workers, Deadline(0.0, 2.0), priced([3.0, 2.5]), 1.0, streamed=True)
    assert (error.status, error.code) == (429, "deadline_unmeetable")
    assert error.retry_after_s == pytest.approx(1.5)
    assert "2.5 s from now" in error.message
