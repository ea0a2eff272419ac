"""What is learnt from outcomes: from which samples, how far, and when not."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import WorkerReport
from router.calibration import Calibration, OutputLengths, engine_speed, load_token_s
from tests.router import building
from tests.router.building import KV_BYTES, NEVER, outcome

STEP = StepModel(1e-5, 1e-10, 1e-3, 1e-8)


def announcement(**changes):
    plain = {"step": STEP, "device_blocks": 101, "max_batch_tokens": 512}
    return building.announcement("w", **{**plain, **changes})


def cluster(*, calibrate=True, announced=None):
    """A router of one worker, and what it knows of that."""
    made = building.router(announced or announcement(), calibrate=calibrate, stale_after_s=NEVER)
    return made, made.workers["w"]


def loads(made, reports, scale=3.0, steps=0, tokens=100_000):
    """Reports of loads that lasted `scale` times as long as announced."""
    second = tokens * load_token_s(announcement()) * scale
    for i in range(reports):
        report = WorkerReport(
            "w", float(i), steps_total=steps + i, load_tokens_total=i * tokens,
            load_seconds_total=i * second,
        )  # fmt: skip
        made.report(report, float(i))


def test_the_announced_speeds_are_what_a_forecast_starts_from():
    paced = replace(node_profile("h100-pcie5"), source="paced", dilation=10.0, load_fixed_s=0.5)
    speed = engine_speed(announcement(node=paced), Calibration())
    assert speed.load_s(0) == 0.0
    assert speed.load_s(63) == pytest.approx(5.0 + 10 * 63 * KV_BYTES / 63e9)
    assert (speed.budget_tokens, speed.capacity_tokens) == (512, 1600)
    assert speed.step == STEP


def test_a_calibration_scales_compute_and_link():
    speed = engine_speed(announcement(), Calibration(link_scale=2.0, compute_scale=3.0))
    assert speed.load_token_s == pytest.approx(2 * load_token_s(announcement()))
    assert speed.step.real_s([(9000, 9)]) == pytest.approx(3 * STEP.real_s([(9000, 9)]))


# -- overhead and compute -----------------------------------------------------------------------


def test_the_overhead_is_a_median_once_there_are_samples():
    calibration = Calibration()
    for extra_s in (0.1, 0.2, 0.3, 50.0):
        calibration.outcome(0.01, 0.5, 0.51 + extra_s)
        assert calibration.overhead_s == 0.0
    calibration.outcome(0.01, 0.5, 0.51 + 0.15)
    assert calibration.overhead_s == pytest.approx(0.2)
    assert calibration.compute_scale == 1.0


def test_the_overhead_is_bounded():
    late, early = Calibration(), Calibration()
    for _ in range(20):
        late.outcome(0.001, 0.0, 1e6)
        early.outcome(0.001, 5.0, 0.0)
    assert late.overhead_s == 2.0
    assert early.overhead_s == 0.0


@pytest.mark.parametrize(("real", "learnt"), [(0.5, 0.5), (3.0, 3.0), (99.0, 4.0), (1e-3, 0.25)])
def test_long_prompts_teach_the_compute_scale_within_bounds(real, learnt):
    calibration = Calibration()
    for _ in range(10):
        calibration.outcome(0.01, 0.0, 0.03)
    for i in range(30):
        # What was predicted had the correction known by then in it.
        calibration.outcome(2.0 * calibration.compute_scale, 0.3, 0.3 + 0.02 + 2.0 * real)
        assert i >= 4 or calibration.compute_scale == 1.0
    assert calibration.compute_scale == pytest.approx(learnt, rel=0.01)
    assert calibration.overhead_s == pytest.approx(0.02)


def test_an_outcome_changes_the_forecast_unless_calibration_is_off():
    for calibrate in (True, False):
        made, worker = cluster(calibrate=calibrate)
        for _ in range(10):
            outcome(made, 0.001, 0.002)
        for _ in range(10):
            outcome(made, worker.calibration.compute_scale, 2.001)
        scale = 2.0 if calibrate else 1.0
        learnt = worker.queue.speed.step
        assert learnt.token_s == pytest.approx(scale * STEP.token_s, rel=0.01)
        assert learnt.pair_s == pytest.approx(scale * STEP.pair_s, rel=0.01)
        # FLOPs are learnt, reading memory is not.
        assert (learnt.weights_s, learnt.context_token_s) == (STEP.weights_s, STEP.context_token_s)


# -- the link -----------------------------------------------------------------------------------


def test_the_link_is_learnt_from_differences_of_totals():
    made, worker = cluster()
    loads(made, reports=1)
    assert worker.calibration.link_scale == 1.0
    loads(made, reports=2)
    assert 2.0 < worker.calibration.link_scale < 3.0
    loads(made, reports=12)
    assert worker.calibration.link_scale == pytest.approx(3.0, rel=0.01)
    assert worker.queue.speed.load_token_s == pytest.approx(
        3 * load_token_s(announcement()), rel=0.01
    )


def test_a_paced_node_is_believed_as_soon_as_one_at_its_own_speed():
    learnt = []
    for dilation in (1.0, 10.0):
        announced = announcement(
            node=replace(announcement().node, source="paced", dilation=dilation)
        )
        made, worker = cluster(announced=announced)
        for i in range(2):
            seconds = 3.0 * i * 1000 * load_token_s(announced)
            made.report(
                WorkerReport("w", float(i), steps_total=i, load_tokens_total=1000 * i,
                             load_seconds_total=seconds), float(i))  # fmt: skip
        learnt.append(worker.calibration.link_scale)
    assert learnt[0] == pytest.approx(learnt[1])
    assert 1.0 < learnt[0] < 1.2


def test_an_outlier_counts_as_four_times_what_was_announced_and_fades():
    made, worker = cluster()
    loads(made, reports=20, scale=1.0)
    last, stuck_s = worker.report, 1000.0
    made.report(
        structs.replace(last, steps_total=99, load_tokens_total=last.load_tokens_total + 100_000,
                load_seconds_total=last.load_seconds_total + stuck_s), 99.0)  # fmt: skip
    assert 1.0 < worker.calibration.link_scale < 1.4
    loads(made, reports=60, scale=1.0, steps=100)
    assert worker.calibration.link_scale == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("real", "learnt"), [(1000.0, 4.0), (1e-6, 0.25)])
def test_the_link_scale_is_bounded(real, learnt):
    made, worker = cluster()
    loads(made, reports=20, scale=real)
    assert worker.calibration.link_scale == pytest.approx(learnt, rel=0.02)


def test_steps_that_fell_are_another_life_though_loads_and_seconds_rose():
    made, worker = cluster()
    token_s = load_token_s(announcement())
    tokens, seconds = 0, 0.0
    for i in range(16):
        # A worker starts anew at every second report; only the loads of a life are as announced.
        tokens += 100_000
        seconds += 100_000 * token_s * (3.0 if i % 2 else 1.0)
        report = WorkerReport("w", 1.0 * i, steps_total=4 if i % 2 else 900,
                              load_tokens_total=tokens, load_seconds_total=seconds)  # fmt: skip
        made.report(report, 1.0 * i)
    assert worker.calibration.link_scale == pytest.approx(1.0)


def test_without_calibration_totals_are_only_kept():
    made, worker = cluster(calibrate=False)
    loads(made, reports=20)
    assert worker.calibration.link_scale == 1.0
    assert worker.report.load_tokens_total == 1_900_000


# -- workers ------------------------------------------------------------------------------------


def test_the_same_figures_again_keep_what_was_learnt_and_new_ones_do_not():
    made, worker = cluster()
    for _ in range(10):
        outcome(made, 0.001, 0.002)
    loads(made, reports=20)
    made.join(announcement(), 30.0)
    assert worker.calibration.link_scale == pytest.approx(3.0, rel=0.01)
    slower = replace(announcement().node, h2d_bytes_per_s=21e9)
    made.join(announcement(node=slower), 31.0)
    assert worker.calibration.link_scale == 1.0
    assert worker.calibration.overhead_s == pytest.approx(0.001)
    assert worker.queue.speed.load_token_s == pytest.approx(KV_BYTES / 21e9)
    assert worker.seen_s == 31.0


def steps(made, reports, scale):
    """Reports of computing that lasted `scale` times as long as the announced model says."""
    for i in range(reports):
        report = WorkerReport(
            "w", float(i), steps_total=10 * i, computed_seconds_total=scale * i,
            computed_announced_seconds_total=float(i), step_seconds_total=50.0 * i,
        )  # fmt: skip
        made.report(report, float(i))


@pytest.mark.parametrize(("real", "learnt"), [(3.0, 3.0), (0.5, 0.5), (100.0, 4.0), (0.01, 0.25)])
def test_the_gpu_is_learnt_from_steps_within_bounds(real, learnt):
    made, worker = cluster()
    steps(made, 8, real)
    assert worker.calibration.compute_scale == pytest.approx(learnt, rel=0.03)
    assert worker.queue.speed.step.real_s([(9000, 9)]) == pytest.approx(
        worker.calibration.compute_scale * STEP.real_s([(9000, 9)])
    )


def test_what_is_learnt_reaches_the_fleet():
    made, _ = cluster()
    slots = made.fleet.ready(0.0, 1e9, frozenset())
    before_s = made.fleet.idle_s(slots, 1000, 500)[0]
    steps(made, 8, 2.0)
    loads(made, 8, scale=2.0, steps=100)
    after_s = made.fleet.idle_s(slots, 1000, 500)[0]
    assert after_s == pytest.approx(2 * before_s, rel=0.01)


def test_a_little_computing_teaches_little():
    made, worker = cluster()
    made.report(WorkerReport("w", 0.0), 0.0)
    made.report(
        WorkerReport("w", 1.0, steps_total=1, computed_seconds_total=0.003,
                     computed_announced_seconds_total=0.001), 1.0)  # fmt: skip
    assert 1.0 < worker.calibration.compute_scale < 1.1


def test_once_steps_are_reported_outcomes_leave_the_compute_scale_alone():
    made, worker = cluster()
    steps(made, 8, 2.0)
    for _ in range(20):
        outcome(made, 10.0, 90.0)
    assert worker.calibration.compute_scale == pytest.approx(2.0, rel=0.01)


# -- lengths of streams -------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=700))
def test_the_expected_length_is_the_median_of_the_latest(lengths):
    outputs = OutputLengths()
    for seen, tokens in enumerate(lengths, 1):
        outputs.add(tokens)
        if seen % 50 == 0 or seen == len(lengths):
            assert outputs.guess(0) == int(median(lengths[max(seen - 256, 0) : seen]))


def test_before_any_stream_ended_there_is_a_guess_within_the_bound():
    assert OutputLengths().guess(0) == 128
    assert OutputLengths().guess(3) == 3
