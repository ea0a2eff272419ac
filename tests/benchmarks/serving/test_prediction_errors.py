"""Classes, errors and the baseline, as `kappa bench predict` reports them; and the nodes' usage."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa_benchmarks.serving.client import usage
from kappa_benchmarks.serving.prediction_errors import (
    CLASSES,
    PACED_GOAL,
    REAL_GOAL,
    Outcome,
    baseline_errors,
    class_rows,
    length_bucket,
    outcome_from,
    ratio_bucket,
)


def outcome(name="r", at_s=0.0, *, parts=(0.0, 0.0, 1.0), tokens=(0, 0, 100), took=(1.0, 1.0)):
    """parts: queue, load, compute; tokens: device, cached, new; took: predicted, actual."""
    return Outcome(name, "pcie", at_s, *parts, took[0], *tokens, took[1])


@pytest.mark.parametrize(
    ("parts", "tokens", "kind"),
    [
        ((2.0, 1.0, 1.0), (0, 50, 50), "queue"),
        ((1.0, 1.0, 0.5), (0, 50, 50), "load"),
        ((0.9, 1.0, 1.0), (0, 50, 50), "load"),
        ((0.0, 0.0, 1.0), (64, 0, 50), "device"),
        ((0.0, 0.1, 1.0), (64, 32, 50), "load"),
        ((0.0, 0.0, 1.0), (0, 0, 50), "compute"),
        ((2.0, 0.0, 1.0), (64, 0, 50), "queue"),
    ],
)
def test_a_class_is_that_of_the_prediction(parts, tokens, kind):
    assert outcome(parts=parts, tokens=tokens).kind == kind


@given(parts=st.tuples(*[st.floats(0, 100)] * 3), tokens=st.tuples(*[st.integers(0, 10_000)] * 3))
def test_every_request_has_one_class(parts, tokens):
    assert outcome(parts=parts, tokens=tokens).kind in CLASSES


def test_error_is_relative_to_what_came():
    assert outcome(took=(3.0, 2.0)).error == outcome(took=(1.0, 2.0)).error == pytest.approx(0.5)


def test_a_decision_becomes_an_outcome_once_its_token_came():
    record = {
        "request_id": "a", "node": "c2c", "time_s": 5.0, "end": "done",
        "predicted": {
            "device_tokens": 32, "cached_tokens": 64, "new_tokens": 10,
            "queue_s": 0.1, "load_s": 0.2, "compute_s": 0.3, "ttft_s": 0.6,
        },
        "actual": {
            "device_tokens": 0, "cached_tokens": 96, "new_tokens": 10, "ttft_s": 0.5,
            "queue_s": 0.02, "load_s": 0.25, "compute_s": None,
        },
    }  # fmt: skip
    made = outcome_from(record)
    took = 0.5, 0, 96, 0.02, 0.25, None
    assert made == Outcome("a", "c2c", 5.0, 0.1, 0.2, 0.3, 0.6, 32, 64, 10, *took)
    excess_s = class_rows([], [replace(made, queue_s=0.9)])[3]["excess_s"]
    assert excess_s == {"queue": pytest.approx(0.88), "load": pytest.approx(-0.05), "compute": None}
    assert (made.error, made.ratio, made.miscounted) == (pytest.approx(0.2), 6.4, True)
    assert outcome_from({**record, "end": "error"}) is None
    assert outcome_from({**record, "actual": {**record["actual"], "ttft_s": None}}) is None


def test_ratio_buckets_grow_by_two():
    ratios = (0.0, 0.01, 0.99, 1.0, 1.99, 2.0, 64.0)
    assert [ratio_bucket(ratio) for ratio in ratios] == [0, 0, 4, 5, 5, 6, 11]


def test_the_baseline_knows_only_what_came_before_each_decision():
    warm_up = [outcome("w", 0.0, took=(0.0, 1.0))]
    late = outcome("late", 2.0, took=(0.0, 10.0))
    measured = [late, outcome("a", 5.0, took=(0.0, 2.0)), outcome("b", 20.0, took=(0.0, 2.0))]
    # At 5.0 only the warm-up's 1 s is known; at 20.0 also 10 s and 2 s.
    assert baseline_errors(warm_up, measured) == {"late": 0.9, "a": 0.5, "b": 0.0}
    assert baseline_errors([], [outcome("first")]) == {}


def test_the_baseline_falls_back_to_the_node_and_then_to_all():
    warm_up = [outcome(str(i), took=(0.0, seconds)) for i, seconds in enumerate((1.0, 2.0, 9.0))]
    other_bucket = outcome("b", 30.0, tokens=(0, 900, 100), took=(0.0, 4.0))
    elsewhere = Outcome("c", "c2c", 30.0, 0.0, 0.0, 1.0, 1.0, 0, 0, 100, 4.0)
    assert baseline_errors(warm_up, [other_bucket, elsewhere]) == {"b": 0.5, "c": 0.5}


def test_a_baseline_may_know_prompts_by_their_length():
    warm_up = [outcome("short", tokens=(0, 0, 100), took=(0.0, 1.0)),
               outcome("long", tokens=(0, 800, 100), took=(0.0, 8.0))]  # fmt: skip
    # 900 tokens, as the long one had, most of them on the device.
    same_length = outcome("a", 30.0, tokens=(850, 0, 50), took=(0.0, 4.0))
    assert baseline_errors(warm_up, [same_length], length_bucket) == {"a": 1.0}
    assert [length_bucket(outcome(tokens=(0, 0, n))) for n in (1, 127, 128, 255)] == [1, 7, 8, 8]


def known(actual_s):
    """A warm-up with this median, by ratio and by length."""
    return [outcome(f"w{i}", -20.0, took=(0.0, actual_s)) for i in range(3)]


def test_rows_have_one_shape_even_without_requests():
    measured = [outcome(str(i), 5.0, took=(1.1, 1.0)) for i in range(3)]
    rows = {row["class"]: row for row in class_rows(known(1.5), measured)}
    assert list(rows) == list(CLASSES)
    compute, queue = rows["compute"], rows["queue"]
    assert (compute["n"], compute["baseline_median_abs_err"], compute["goal_met"]) == (3, 0.5, True)
    assert compute["length_baseline_median_abs_err"] == 0.5
    assert compute["median_abs_err"] == compute["median_bias"] == pytest.approx(0.1)
    assert (queue["n"], queue["median_abs_err"], queue["goal_met"]) == (0, None, None)
    assert set(compute) == set(queue)


@pytest.mark.parametrize(
    ("goal", "knew_s", "took", "is_met"),
    [
        (PACED_GOAL, 1.5, [1.1], True),
        (PACED_GOAL, 1.11, [1.1], False),  # below the baseline, not by enough
        (PACED_GOAL, 9.0, [1.3], False),
        (REAL_GOAL, 1.5, [1.1] * 49, None),  # too few to tell
        (REAL_GOAL, 1.5, [1.1] * 50, True),
        (REAL_GOAL, 1.5, [1.16] * 50, False),
        (REAL_GOAL, 1.05, [1.1] * 50, False),  # the running median is better
        (REAL_GOAL, 1.5, [1.1] * 44 + [1.5] * 6, False),  # its tail is too long
    ],
)
def test_a_goal_needs_small_errors_below_those_of_the_baselines(goal, knew_s, took, is_met):
    # All at once: the baselines know the warm-up alone.
    measured = [outcome(str(i), 5.0, took=(each, 1.0)) for i, each in enumerate(took)]
    assert class_rows(known(knew_s), measured, goal)[2]["goal_met"] is is_met


def test_the_better_baseline_is_the_one_to_beat():
    # By ratio the median is far off; by length it is right.
    warm_up = [
        *known(1.05),
        *(outcome(f"x{i}", -20.0, tokens=(0, 0, 900), took=(0.0, 9.0)) for i in "ab"),
    ]
    late = [outcome(str(i), 30.0, took=(1.1, 1.0)) for i in range(50)]
    row = class_rows([*warm_up, outcome("x", -20.0, tokens=(0, 0, 900), took=(0.0, 9.0))], late)[2]
    assert row["length_baseline_median_abs_err"] < row["median_abs_err"]
    assert row["baseline_median_abs_err"] > row["median_abs_err"] and row["goal_met"] is False


def node(name, at_s, *, busy=0.0, steps=0, overruns=0, dropped=0):
    totals = {
        "time_s": at_s, "step_seconds_total": busy, "load_seconds_total": busy / 2,
        "store_seconds_total": busy / 4, "steps_total": steps, "overruns_total": overruns,
        "stores_dropped_total": dropped,
    }  # fmt: skip
    return {"worker": name, "node": name, "totals": totals}


def test_load_is_the_mean_of_busy_shares_by_workers_time():
    used = usage(
        [node("a", 10.0, dropped=2), node("b", 11.0, busy=5.0, steps=10)],
        [
            node("a", 20.0, busy=8.0, steps=100, overruns=3, dropped=7),
            node("b", 21.0, busy=9.0, steps=110, dropped=1),
        ],
    )
    assert used.load_by_node == pytest.approx({"a": 0.8, "b": 0.4})
    assert (used.load, used.link_load, used.store_load) == pytest.approx((0.6, 0.3, 0.15))
    assert used.overrun_share == pytest.approx(3 / 200)
    assert used.busy_s == pytest.approx(8.0 + 4.0)
    assert used.stores_dropped == 5 + 1


@pytest.mark.parametrize("after", [[node("a", 10.0)], [node("b", 20.0)], []])
def test_load_needs_two_reports_of_each_worker(after):
    with pytest.raises(ValueError):
        usage([node("a", 10.0)], after)
