"""Outcomes against predictions: what admission adds to a prediction, and how soon it forgets."""

import math

import pytest

from router.lateness import Lateness


def served(lateness, worker, predicted_s, actual_s, count=20, start_s=0.0):
    """So many requests one after another, each predicted and answered alike; the end's time."""
    now_s = start_s
    for i in range(count):
        lateness.sent(f"{worker}{i}", worker, now_s, predicted_s, 0.0)
        now_s += actual_s
        lateness.first_token(f"{worker}{i}", now_s)
        lateness.ended(f"{worker}{i}")
    return now_s


def test_without_news_nothing_is_added():
    lateness = Lateness()
    assert (lateness.late_s("a", 5.0), lateness.share("a", 5.0)) == (0.0, 0.0)


def test_what_comes_later_than_predicted_is_expected_later():
    lateness = Lateness()
    now_s = served(lateness, "a", 0.1, 0.3)
    assert lateness.late_s("a", now_s) == pytest.approx(0.2)
    assert lateness.late_s("b", now_s) == 0.0


def test_what_comes_sooner_than_predicted_earns_nothing():
    lateness = Lateness()
    now_s = served(lateness, "a", 0.3, 0.1)
    assert lateness.late_s("a", now_s) == 0.0


def test_a_few_that_were_late_are_no_rule():
    lateness = Lateness()
    now_s = served(lateness, "a", 0.1, 0.1, count=20)
    now_s = served(lateness, "a", 0.1, 5.0, count=2, start_s=now_s)
    assert lateness.late_s("a", now_s) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_old_news_fades_in_the_workers_own_time(dilation):
    lateness = Lateness()
    lateness.sent("r", "a", 0.0, 0.0, 0.0, dilation=dilation)
    lateness.first_token("r", 1.0)
    late_s = [lateness.late_s("a", 1.0 + seconds * dilation) for seconds in (0.0, 0.5, 1.0, 9.0)]
    assert late_s[0] == 1.0 and late_s == sorted(late_s, reverse=True)
    assert late_s[2] == pytest.approx(late_s[1] ** 2) and late_s[3] < 0.01


def test_one_that_should_have_begun_tells_at_once():
    lateness = Lateness()
    lateness.sent("first", "a", 0.0, 0.5, 0.0)
    lateness.sent("second", "a", 1.0, 0.5, 0.0)
    assert lateness.late_s("a", 0.4) == 0.0
    assert lateness.late_s("a", 2.0) == pytest.approx(1.5)
    lateness.ended("first")
    assert lateness.late_s("a", 2.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("long", "window_s"), [(False, 3.0), (True, 12.0)])
@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_work_of_prompts_adds_up_and_fades_with_its_window(long, window_s, dilation):
    lateness = Lateness()
    for i in range(4):
        lateness.sent(f"r{i}", "a", 10.0, 0.1, 0.1 * window_s * dilation, dilation=dilation)
    assert lateness.share("a", 10.0, long=long) == pytest.approx(0.4)
    later_s = 10.0 + window_s * dilation
    assert lateness.share("a", later_s, long=long) == pytest.approx(0.4 / math.e)
    assert lateness.share("a", 9.0, long=long) == pytest.approx(0.4), "a clock may run backwards"


@pytest.mark.parametrize("long", [False, True])
def test_a_steady_stream_has_its_share(long):
    lateness = Lateness()
    for i in range(8000):
        lateness.sent(f"r{i}", "a", i * 0.01, 0.1, 0.003)
        lateness.ended(f"r{i}")
    assert lateness.share("a", 80.0, long=long) == pytest.approx(0.3, rel=0.02)


def test_nothing_is_kept_of_what_is_over_or_of_a_worker_that_left():
    lateness = Lateness()
    for i in range(1000):
        lateness.sent(f"r{i}", "ab"[i % 2], 0.0, 0.1, 0.1)
    for i in range(0, 1000, 2):
        lateness.first_token(f"r{i}", 1.0)
        lateness.ended(f"r{i}")
    lateness.left("b")
    assert len(lateness) == 0
    assert lateness.late_s("b", 99.0) == lateness.share("b", 0.0) == 0.0


def test_words_about_unknown_requests_change_nothing():
    lateness = Lateness()
    lateness.first_token("ghost", 1.0)
    lateness.ended("ghost")
    lateness.left("ghost")
    lateness.sent("r", "a", 0.0, 0.1, 0.0)
    lateness.left("a")
    lateness.first_token("r", 9.0)
    assert lateness.late_s("a", 9.0) == 0.0


def test_a_request_sent_again_waits_at_one_worker_only():
    lateness = Lateness()
    lateness.sent("r", "a", 0.0, 0.1, 0.0)
    lateness.sent("r", "b", 5.0, 0.1, 0.0)
    assert lateness.late_s("a", 9.0) == 0.0
    assert lateness.late_s("b", 9.0) == pytest.approx(3.9)


def paced(lateness, expected_s, actual_s, tokens=11, count=20):
    for i in range(count):
        lateness.sent(f"p{i}", "a", 0.0, 0.0, 0.0, expected_s)
        lateness.first_token(f"p{i}", 0.0)
        lateness.ended(f"p{i}", actual_s * (tokens - 1), tokens)


@pytest.mark.parametrize(
    ("actual_s", "factor"), [(0.03, 1.5), (0.02, 1.0), (0.014, 0.7), (9.0, 2.0), (0.001, 0.6)]
)
def test_tokens_are_expected_at_the_pace_of_late_within_bounds(actual_s, factor):
    lateness = Lateness()
    paced(lateness, 0.02, actual_s)
    assert lateness.pace("a") == pytest.approx(factor)
    assert lateness.pace("b") == 1.0


@pytest.mark.parametrize("tokens", [0, 1])
def test_what_was_cut_short_tells_nothing_of_the_pace(tokens):
    lateness = Lateness()
    paced(lateness, 0.02, 0.03)
    paced(lateness, 0.02, 9.0, tokens=tokens)
    assert lateness.pace("a") == pytest.approx(1.5)


def test_prompts_that_came_meanwhile_are_no_pace():
    # Each token took twice as long as alone, and prompts took half of the time.
    lateness = Lateness()
    for i in range(20):
        lateness.sent(f"p{i}", "a", 0.0, 0.0, 0.0, 0.02)
        lateness.first_token(f"p{i}", 0.0)
    for i in range(20):
        lateness.sent(f"prompt{i}", "a", 0.4, 0.0, 1.5 / 20)
    assert lateness.share("a", 0.4) == pytest.approx(0.5)
    for i in range(20):
        lateness.ended(f"p{i}", 0.4, 11)
    assert lateness.pace("a") == pytest.approx(1.0)


def test_without_a_prediction_of_the_pace_its_outcome_tells_nothing():
    lateness = Lateness()
    lateness.sent("r", "a", 0.0, 0.1, 0.0)
    lateness.first_token("r", 0.1)
    lateness.ended("r", 9.0, 11)
    assert lateness.pace("a") == 1.0


def late(lateness, seconds):
    for i, late_s in enumerate(seconds):
        lateness.sent(f"l{i}", "a", -late_s, 0.0, 0.0)
        lateness.first_token(f"l{i}", 0.0)
        lateness.ended(f"l{i}")
    return lateness.late_s("a", 0.0)


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        ([3.0], 3.0),
        # Of five the fourth is passed by one: the place int(0.8·5) = 4 of 0, 1, 2, 3, 4.
        ([4.0, 0.0, 3.0, 1.0, 2.0], 4.0),
        ([*range(10)], 8.0),
        # The last 16 are 4 to 19: the place int(12.8) = 12 of them is 16.
        ([*range(20)], 16.0),
    ],
)
def test_lateness_is_what_four_of_five_of_the_last_sixteen_did_not_exceed(seconds, expected_s):
    assert late(Lateness(), seconds) == expected_s


def test_news_counts_for_a_third_after_half_a_second():
    lateness = Lateness()
    assert late(lateness, [2.0]) == 2.0
    assert lateness.late_s("a", 0.5) == pytest.approx(2.0 / math.e)
    assert lateness.late_s("a", -1.0) == 2.0, "a clock may run backwards"


def test_two_tokens_are_a_pace_and_the_middle_one_of_the_last_sixteen_counts():
    lateness = Lateness()
    for i, factor in enumerate([0.7, 1.2, 1.6]):
        lateness.sent(f"p{i}", "a", 0.0, 0.0, 0.0, 0.5)
        lateness.first_token(f"p{i}", 1.0)
        lateness.ended(f"p{i}", 1.0 + 0.5 * factor, 2)
    assert lateness.pace("a") == pytest.approx(1.2)
    # 0.5 s alone, 1.2 times that here, and prompts that take a quarter of the time: 0.6 / 0.75.
    lateness.sent("prompt", "a", 5.0, 0.0, 0.75)
    assert lateness.token_s("a", 5.0, 0.5) == pytest.approx(0.8)
    assert lateness.token_s("a", 5.0, 0.5, long=True) == pytest.approx(0.6 / (1 - 0.75 / 12))
