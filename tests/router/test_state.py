"""What is learnt of a worker: from which samples, how far, and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Admission, Announcement, WorkerReport
from router.jobs import Job
from router.state import Calibration, ClusterState, engine_speed, load_token_s

KV_BYTES = 131072.0
STEP = StepModel(1e-5, 1e-10, 1e-3, 1e-8)


def announcement(worker="w", **changes):
    said = Announcement(
        worker=worker, model="m", node=node_profile("h100-pcie5"), step=STEP,
        kv_bytes_per_token=KV_BYTES, emulated_model="", fingerprint="f", block_tokens=16,
        device_blocks=101, host_blocks=0, max_batch_tokens=512, max_context_tokens=4096,
        events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip
    return replace(said, **changes)


def cluster(**options):
    state = ClusterState(**options)
    state.join(announcement(), 0.0)
    return state, state.workers["w"]


def loads(state, reports, scale=3.0, steps=0, tokens=100_000):
    """Reports of loads that lasted `scale` times as long as announced."""
    second = tokens * load_token_s(announcement()) * scale
    for i in range(reports):
        report = WorkerReport(
            "w", float(i), steps_total=steps + i, load_tokens_total=i * tokens,
            load_seconds_total=i * second,
        )  # fmt: skip
        state.report(report, float(i))


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
        state, worker = cluster(calibrate=calibrate)
        for _ in range(10):
            state.outcome("w", 0.001, 0.0, 0.002)
        for _ in range(10):
            state.outcome("w", worker.calibration.compute_scale, 0.0, 2.001)
        scale = 2.0 if calibrate else 1.0
        learnt = worker.shadow.speed.step
        assert learnt.token_s == pytest.approx(scale * STEP.token_s, rel=0.01)
        assert learnt.pair_s == pytest.approx(scale * STEP.pair_s, rel=0.01)
        # FLOPs are learnt, reading memory is not.
        assert (learnt.weights_s, learnt.context_token_s) == (STEP.weights_s, STEP.context_token_s)
    state.outcome("nobody", 1.0, 1.0, 1.0)


# -- the link -----------------------------------------------------------------------------------


def test_the_link_is_learnt_from_differences_of_totals():
    state, worker = cluster()
    loads(state, reports=1)
    assert worker.calibration.link_scale == 1.0
    loads(state, reports=2)
    assert 2.0 < worker.calibration.link_scale < 3.0
    loads(state, reports=12)
    assert worker.calibration.link_scale == pytest.approx(3.0, rel=0.01)
    assert worker.shadow.speed.load_token_s == pytest.approx(
        3 * load_token_s(announcement()), rel=0.01
    )


def test_a_paced_node_is_believed_as_soon_as_one_at_its_own_speed():
    learnt = []
    for dilation in (1.0, 10.0):
        said = announcement(node=replace(announcement().node, source="paced", dilation=dilation))
        state = ClusterState()
        state.join(said, 0.0)
        for i in range(2):
            seconds = 3.0 * i * 1000 * load_token_s(said)
            state.report(
                WorkerReport("w", float(i), steps_total=i, load_tokens_total=1000 * i,
                             load_seconds_total=seconds), float(i))  # fmt: skip
        learnt.append(state.workers["w"].calibration.link_scale)
    assert learnt[0] == pytest.approx(learnt[1])
    assert 1.0 < learnt[0] < 1.2


def test_a_freak_counts_as_four_times_what_was_announced_and_fades():
    state, worker = cluster()
    loads(state, reports=20, scale=1.0)
    told, stuck_s = worker.report, 1000.0
    state.report(
        replace(told, steps_total=99, load_tokens_total=told.load_tokens_total + 100_000,
                load_seconds_total=told.load_seconds_total + stuck_s), 99.0)  # fmt: skip
    assert 1.0 < worker.calibration.link_scale < 1.4
    loads(state, reports=60, scale=1.0, steps=100)
    assert worker.calibration.link_scale == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("real", "learnt"), [(1000.0, 4.0), (1e-6, 0.25)])
def test_the_link_scale_is_bounded(real, learnt):
    state, worker = cluster()
    loads(state, reports=20, scale=real)
    assert worker.calibration.link_scale == pytest.approx(learnt, rel=0.02)


def test_totals_of_a_worker_that_started_anew_teach_nothing():
    state, worker = cluster()
    token_s = load_token_s(announcement())
    lives = [
        (500, 10_000, 10_000 * token_s),
        (3, 0, 0.0),
        # More tokens than before, in less time than before: another life, not a negative time.
        (900, 50_000, 50_000 * token_s),
        (4, 60_000, 20_000 * token_s),
    ] * 4
    for i, (steps, tokens, seconds) in enumerate(lives):
        report = WorkerReport("w", 1.0 * i, steps_total=steps, load_tokens_total=tokens,
                              load_seconds_total=seconds)  # fmt: skip
        state.report(report, 1.0 * i)
    assert worker.calibration.link_scale == pytest.approx(1.0)


def test_without_calibration_totals_are_only_kept():
    state, worker = cluster(calibrate=False)
    loads(state, reports=20)
    assert worker.calibration.link_scale == 1.0
    assert worker.report.load_tokens_total == 1_900_000


# -- workers ------------------------------------------------------------------------------------


def test_a_report_is_a_sign_of_life_and_corrects_the_forecast():
    state, worker = cluster()
    for name in "ab":
        worker.shadow.submit(Job(name, 1.0, 64, 64, 9000, 10), 1.0)
    admitted = (Admission("a", 128, 0, 100), Admission("unknown", 1, 1, 1))
    state.report(WorkerReport("w", 2.0, admitted=admitted, prefilled=("b", "unknown")), 1.001)
    assert worker.seen_s == 1.001
    assert (worker.shadow.waiting, worker.shadow.decoding) == (1, 1)
    state.report(WorkerReport("nobody", 2.0), 9.0)
    assert worker.seen_s == 1.001


def test_the_same_figures_again_keep_what_was_learnt_and_new_ones_do_not():
    state, worker = cluster()
    for _ in range(10):
        state.outcome("w", 0.001, 0.0, 0.002)
    loads(state, reports=20)
    state.join(announcement(), 30.0)
    assert worker.calibration.link_scale == pytest.approx(3.0, rel=0.01)
    slower = replace(announcement().node, h2d_bytes_per_s=21e9)
    state.join(announcement(node=slower), 31.0)
    assert worker.calibration.link_scale == 1.0
    assert worker.calibration.overhead_s == pytest.approx(0.001)
    assert worker.shadow.speed.load_token_s == pytest.approx(KV_BYTES / 21e9)
    assert worker.seen_s == 31.0


def test_a_worker_that_left_takes_its_forecast_with_it():
    state, worker = cluster()
    worker.shadow.submit(Job("a", 1.0, 0, 0, 10, 10), 1.0)
    state.leave("w")
    state.leave("w")
    state.join(announcement(), 2.0)
    assert len(state.workers["w"].shadow) == 0


def steps(state, reports, scale):
    """Reports of computing that lasted `scale` times as long as the announced model says."""
    for i in range(reports):
        report = WorkerReport(
            "w", float(i), steps_total=10 * i, computed_seconds_total=scale * i,
            computed_announced_seconds_total=float(i), step_seconds_total=50.0 * i,
        )  # fmt: skip
        state.report(report, float(i))


@pytest.mark.parametrize(("real", "learnt"), [(3.0, 3.0), (0.5, 0.5), (100.0, 4.0), (0.01, 0.25)])
def test_the_gpu_is_learnt_from_steps_within_bounds(real, learnt):
    state, worker = cluster()
    steps(state, 8, real)
    assert worker.calibration.compute_scale == pytest.approx(learnt, rel=0.03)
    assert worker.shadow.speed.step.real_s([(9000, 9)]) == pytest.approx(
        worker.calibration.compute_scale * STEP.real_s([(9000, 9)])
    )


def test_what_is_learnt_reaches_the_fleet():
    state, _ = cluster()
    before_s = state.fleet.idle_ttft_s(state.fleet.ready(0.0, 1e9, frozenset()), 1000, 500)[0]
    steps(state, 8, 2.0)
    loads(state, 8, scale=2.0, steps=100)
    after_s = state.fleet.idle_ttft_s(state.fleet.ready(0.0, 1e9, frozenset()), 1000, 500)[0]
    assert after_s == pytest.approx(2 * before_s, rel=0.01)


def test_a_little_computing_teaches_little():
    state, worker = cluster()
    state.report(WorkerReport("w", 0.0), 0.0)
    state.report(
        WorkerReport("w", 1.0, steps_total=1, computed_seconds_total=0.003,
                     computed_announced_seconds_total=0.001), 1.0)  # fmt: skip
    assert 1.0 < worker.calibration.compute_scale < 1.1


def test_once_steps_are_reported_outcomes_leave_the_compute_scale_alone():
    state, worker = cluster()
    steps(state, 8, 2.0)
    for _ in range(20):
        state.outcome("w", 10.0, 0.0, 90.0)
    assert worker.calibration.compute_scale == pytest.approx(2.0, rel=0.01)
