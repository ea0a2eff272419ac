"""Engines are learnt from steps and loads, or from first tokens alone; and when they are not."""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.cost import StepModel, batch_work
from kappa.hardware import node_profile
from kappa.protocol import LoadSample, StepSample, WorkerReport
from kappa_router import ttft
from kappa_router.calibration import Calibration, OutputLengths, disk_token_s, load_token_s
from kappa_router.decision import ESTIMATE
from kappa_router.engine_fit import critical_ratio
from tests.router import building
from tests.router.building import KV_BYTES, NEVER, ask, outcome

STEP = StepModel(4e-5, 2e-10, 5e-3, 4e-8, 2e-3)
NAMES = ("token_s", "pair_s", "weights_s", "context_token_s", "fixed_s")


def announcement(**changes):
    node = replace(node_profile("h100-pcie5"), load_fixed_s=1e-3)
    plain = {"step": STEP, "device_blocks": 10_001, "node": node}
    return building.announcement("w", **{**plain, **changes})


def cluster(*, announced=None, **options):
    """A router of one worker, and what it knows of that."""
    made = building.router(announced or announcement(), stale_after_s=NEVER, **options)
    return made, made.workers["w"]


def batches(count, seed=0):
    """Steps as a busy engine runs them: [(new tokens, context)], some with a part of a prompt."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        batch = [(1, int(c)) for c in rng.integers(100, 9000, rng.integers(0, 24))]
        if not batch or rng.random() < 0.4:
            batch.append((int(2 ** rng.uniform(4, 13)), int(rng.integers(0, 30_000))))
        made.append(batch)
    return made


def took(true, seed=1, noise=0.03):
    """Noisy seconds of a batch by the law `true`."""
    rng = np.random.default_rng(seed)
    return lambda batch: true(batch) * math.exp(rng.normal(0.0, noise))


def step_sample(batch, seconds):
    return StepSample(*batch_work(batch), seconds)


def run(made, true, count=100, at_s=0.0, each=8, seed=0):
    """Reports of steps that last as `true` says."""
    seconds, steps = took(true), batches(count, seed)
    for i in range(0, count, each):
        samples = tuple(step_sample(batch, seconds(batch)) for batch in steps[i : i + each])
        made.report(WorkerReport("w", at_s + i, steps=samples), at_s + i)


def errors(worker, true):
    """Relative errors of the learnt step seconds, on batches that were not learnt from."""
    return [abs(worker.queue.speed.step_s(b) / true(b) - 1) for b in batches(200, seed=99)]


def test_the_threshold_moves_with_what_is_learnt():
    made, worker = cluster()
    made.blocks([building.stored("w", building.prompt(3200), tier="host")])
    asked = ask(tokens=3300)
    announced = critical_ratio(worker.calibration.speed)
    before, node = made.explain(asked, 0.0).chosen, worker.announcement.node
    slow = replace(STEP, **{name: 3 * getattr(STEP, name) for name in NAMES})
    run(made, slow.step_s)
    after = made.explain(asked, 200.0).chosen
    assert after.kappa_crit > 2.9 * before.kappa_crit
    # At it a request of 128 new tokens takes as long to load as to compute, by the true constants.
    learnt = critical_ratio(worker.calibration.speed)
    load_s = node.load_fixed_s + 128 * learnt * KV_BYTES / node.h2d_bytes_per_s
    assert load_s == pytest.approx(slow.step_s([(128, 128 * learnt)]), rel=0.1)
    assert learnt > 3 * announced
    assert worker.announcement.kappa_literal == pytest.approx(
        STEP.token_s * node.h2d_bytes_per_s / KV_BYTES
    )


def test_a_worker_without_a_threshold_says_so():
    # Attending to a loaded token from 128 new ones takes longer than to load it.
    far = Calibration(announcement(step=replace(STEP, pair_s=1e-6)))
    assert critical_ratio(far.speed) == math.inf


# -- before anything is learnt ------------------------------------------------------------------


def test_announced_speeds_are_what_a_forecast_starts_from():
    paced = replace(node_profile("h100-pcie5"), source="paced", dilation=10.0, load_fixed_s=0.5)
    step = replace(STEP, dilation=10.0)
    made = Calibration(announcement(node=paced, step=step))
    speed = made.speed
    assert speed.load_s(0) == 0.0
    assert speed.load_s(54) == pytest.approx(5.0 + 10 * 54 * KV_BYTES / 54e9)
    assert speed.step == step and speed.step_s([(9, 9)]) == step.real_s([(9, 9)])
    assert (made.compute_scale, made.link_scale, made.overhead_s) == (1.0, 1.0, 0.0)
    # Nothing is known better than to about a factor of 3; of a pace, of 1.5.
    assert made.certainty.link_sd == pytest.approx(math.log(1.5), rel=0.3)
    assert Calibration(announcement()).certainty.link_sd == pytest.approx(math.log(3.0), rel=0.3)


# -- steps and loads ----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("name", NAMES)
def test_step_constant_announced_wrong_by_three_is_learnt(name, factor):
    wrong = replace(STEP, **{name: getattr(STEP, name) * factor})
    made, worker = cluster(announced=announcement(step=wrong))
    run(made, STEP.real_s)
    off = errors(worker, STEP.real_s)
    assert np.median(off) < 0.05 and np.quantile(off, 0.9) < 0.15


def adds(batch):
    parts = STEP.parts(batch_work(batch))
    return parts.compute_s + parts.read_s + parts.fixed_s


def tiles(batch):
    return STEP.real_s([(-(-new // 128) * 128 if new > 1 else 1, held) for new, held in batch])


def warms_up(batch):
    """Half of the rate at 200 tokens."""
    parts = STEP.parts(batch_work(batch))
    return parts.compute_s * (1 + 200 / sum(new for new, _ in batch)) + parts.fixed_s


@pytest.mark.parametrize("law", [adds, tiles, warms_up])
@pytest.mark.parametrize("factor", [1.0, 3.0, 1 / 3])
def test_engine_of_another_law_is_learnt(law, factor):
    made, worker = cluster(announced=announcement(step=STEP.computing_scaled(factor)))
    run(made, law)
    off = errors(worker, law)
    assert np.median(off) < 0.1 and np.quantile(off, 0.9) < 0.3


def test_unexplained_cost_is_learnt_by_the_tokens_of_a_step():
    def law(batch):
        new = sum(tokens for tokens, _ in batch)
        return STEP.real_s(batch) * (1.6 if 200 < new < 1500 else 1.0)

    made, worker = cluster()
    run(made, law, count=200)
    speed, batch = worker.queue.speed, [(512, 1000)]
    assert speed.step_s(batch) == pytest.approx(law(batch), rel=0.15)
    # Physics alone is wrong about it, and the fleet prices with the factors too.
    assert speed.step.real_s(batch) < 0.85 * law(batch)
    slots = made.fleet.ready(0.0, NEVER, frozenset())
    rows = np.zeros(1, dtype=ESTIMATE)
    priced_s, *_ = ttft.median_idle(made.fleet.records, slots, rows, 512.0)
    assert priced_s - worker.calibration.overhead_s == pytest.approx(speed.step_s([(512, 0)]))


def test_loads_teach_the_link_whatever_else_is_announced():
    made, worker = cluster()
    for i, tokens in enumerate(range(500, 20_000, 500)):
        seconds = 0.004 + tokens * 3 * load_token_s(announcement())
        made.report(WorkerReport("w", i, loads=(LoadSample(tokens, seconds),)), float(i))
    speed = worker.queue.speed
    assert speed.load_s(10_000) == pytest.approx(
        0.004 + 30_000 * load_token_s(announcement()), rel=0.03
    )
    assert worker.calibration.link_scale == pytest.approx(3.0, rel=0.15)
    assert worker.calibration.certainty.link_sd < 0.1 < worker.calibration.certainty.compute_sd
    assert speed.step == STEP


def test_loads_from_disk_teach_the_disk_and_leave_the_link_alone():
    node = replace(announcement().node, disk_bytes_per_s=1e9)
    known = announcement(node=node, disk_blocks=1000)
    made, worker = cluster(announced=known)
    disk_s, link_s = disk_token_s(known), load_token_s(known)
    for i, tokens in enumerate(range(500, 20_000, 500)):
        seconds = tokens * link_s + 0.5 * tokens * 2.5 * disk_s
        seen = LoadSample(tokens, seconds, tokens / 2), LoadSample(tokens, tokens * link_s)
        made.report(WorkerReport("w", i, loads=seen), float(i))
    speed = worker.queue.speed
    assert speed.disk_token_s == pytest.approx(2.5 * disk_s, rel=0.1)
    assert speed.load_token_s == pytest.approx(link_s, rel=0.1)


@pytest.mark.parametrize("factor", [30.0, 1 / 10])
def test_engine_far_from_its_announcement_is_learnt_too(factor):
    made, worker = cluster()
    run(made, lambda batch: factor * STEP.real_s(batch))
    assert np.median(errors(worker, lambda batch: factor * STEP.real_s(batch))) < 0.1


def test_learning_stops_where_no_announcement_could_be_as_wrong():
    made, worker = cluster()
    run(made, lambda batch: 1e4 * STEP.real_s(batch))
    assert 1 < worker.calibration.compute_scale < 500


def test_halved_speed_is_learnt_within_a_few_reports():
    made, worker = cluster()
    run(made, STEP.real_s, count=200)
    run(made, lambda batch: 2 * STEP.real_s(batch), count=24, at_s=1000.0, seed=7)
    assert np.median(errors(worker, lambda batch: 2 * STEP.real_s(batch))) < 0.15


def test_learning_restarts_with_another_announcement_alone():
    made, worker = cluster()
    run(made, lambda batch: 2 * STEP.real_s(batch))
    learnt = worker.calibration.compute_scale
    assert learnt == pytest.approx(2.0, rel=0.1)
    made.join(announcement(), 200.0)
    assert worker.calibration.compute_scale == learnt
    made.join(announcement(step=STEP.computing_scaled(2.0)), 201.0)
    assert worker.calibration.compute_scale == 1.0


def test_nothing_is_learnt_without_calibration():
    made, worker = cluster(calibrate=False)
    run(made, lambda batch: 3 * STEP.real_s(batch))
    outcome(made, 5.0, 300.0)
    assert worker.calibration.compute_scale == 1.0 and worker.calibration.overhead_s == 0.0


# -- first tokens alone, as of a foreign engine -------------------------------------------------


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_first_tokens_alone_teach_computing_and_overhead(factor):
    made, _ = cluster(announced=announcement(step=STEP.computing_scaled(factor)))
    rng = np.random.default_rng(3)
    for i in range(60):
        tokens = int(2 ** rng.uniform(5, 13))
        outcome(made, 0.03 + STEP.real_s([(tokens, 0)]), 10.0 * i, tokens, name=f"r{i}")
    for tokens in (300, 3000):
        predicted_s = made.explain(ask(tokens=tokens, seed=9), 1000.0).chosen.ttft_s
        assert predicted_s == pytest.approx(0.03 + STEP.real_s([(tokens, 0)]), rel=0.1)


def test_gaps_between_tokens_teach_how_decoding_reads():
    slow = replace(STEP, weights_s=3 * STEP.weights_s)
    made, worker = cluster()
    now_s = 0.0
    for i in range(40):
        made.route(ask(f"r{i}", tokens=2000, seed=i), now_s)
        now_s += slow.real_s([(2000, 0)])
        made.first_token(f"r{i}", now_s)
        now_s += 50 * slow.real_s([(1, 2025)])
        made.tokens(f"r{i}", 51)
        made.release(f"r{i}", now_s)
    learnt_s = worker.queue.speed.step_s([(1, 2025)])
    assert learnt_s == pytest.approx(slow.real_s([(1, 2025)]), rel=0.1)


# -- what must not be believed ------------------------------------------------------------------

GARBAGE = [
    StepSample(1e308, 1e308, 1e308, 1.0), StepSample(0.0, 0.0, 0.0, 0.0),
    StepSample(100.0, 1.0, 1.0, math.nan), StepSample(100.0, math.inf, 1.0, 1.0),
    StepSample(-5.0, -5.0, -5.0, -5.0), StepSample(math.nan, 1.0, 1.0, 1.0),
]  # fmt: skip


def test_garbage_leaves_the_announced_speeds():
    made, worker = cluster()
    loads = LoadSample(math.nan, 1.0), LoadSample(10.0, -1.0), LoadSample(math.inf, math.inf)
    for i in range(30):
        made.report(WorkerReport("w", i, steps=tuple(GARBAGE), loads=loads), float(i))
    assert worker.queue.speed.step == STEP and worker.calibration.link_scale == 1.0


def test_seconds_unrelated_to_the_work_hardly_teach():
    rng = np.random.default_rng(5)
    made, worker = cluster()
    run(made, lambda batch: 10 ** rng.uniform(-5, 2), count=200)
    assert all(math.isfinite(getattr(worker.queue.speed.step, name)) for name in NAMES)
    assert worker.calibration.certainty.compute_sd > 0.2


@pytest.mark.parametrize("lie", [1e-2, 1e2])
def test_reports_that_first_tokens_contradict_are_not_believed(lie):
    rng = np.random.default_rng(4)
    made, worker = cluster()
    for i in range(30):
        run(made, lambda batch: lie * STEP.real_s(batch), count=16, at_s=40.0 * i, seed=i)
        tokens = int(2 ** rng.uniform(7, 13))
        outcome(made, STEP.real_s([(tokens, 0)]), 40.0 * i + 30, tokens, name=f"r{i}")
    assert not worker.calibration.believed
    predicted_s = made.explain(ask(tokens=4000, seed=9), 2000.0).chosen.ttft_s
    assert predicted_s == pytest.approx(STEP.real_s([(4000, 0)]), rel=0.25)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_clock_that_jumps_costs_one_observation(jump_s):
    made, _ = cluster(forecast_workers=0)
    now_s = 10_000.0
    for i in range(40):
        now_s += 10
        made.route(ask(f"r{i}", tokens=1000), now_s)
        if i == 20:
            now_s += jump_s
        made.first_token(f"r{i}", now_s + STEP.real_s([(1000, 0)]))
        made.release(f"r{i}", now_s + STEP.real_s([(1000, 0)]), complete=False)
    predicted_s = made.explain(ask(tokens=1000, seed=9), now_s + 100).chosen.ttft_s
    assert predicted_s == pytest.approx(STEP.real_s([(1000, 0)]), rel=0.1)


# -- lengths of streams -------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=700))
def test_expected_length_is_the_median_of_the_latest(lengths):
    outputs = OutputLengths()
    for seen, tokens in enumerate(lengths, 1):
        outputs.add(tokens)
        if seen % 50 == 0 or seen == len(lengths):
            assert outputs.guess(0) == int(median(lengths[max(seen - 256, 0) : seen]))


def test_length_guess_before_any_stream_is_within_the_bound():
    assert OutputLengths().guess(0) == 128
    assert OutputLengths().guess(3) == 3
