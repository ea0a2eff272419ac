"""Growth is judged by the upper end of its interval; what is left behind, exactly."""

import asyncio

import numpy as np
import pytest

from benchmarks.faults.evaluation import Observed
from benchmarks.faults.soak import (
    Held,
    Sample,
    Sampler,
    _result,
    left_behind,
    slope_of,
    slopes,
)
from benchmarks.faults.target import FaultsError

HOUR_S = 3600.0


def series(mb_per_hour, noise_mb, seed=0, count=240, correlation=0.0):
    rng = np.random.default_rng(seed)
    times_s = np.arange(count) * 10.0
    noise = rng.normal(0, noise_mb, count)
    for i in range(1, count):
        noise[i] += correlation * noise[i - 1]
    return times_s, 300 + mb_per_hour / HOUR_S * times_s + noise


def test_a_leak_is_found_in_noise_and_its_interval_holds_the_truth():
    held = 0
    for seed in range(100):
        times_s, values = series(50.0, 5.0, seed)
        slope, upper = slope_of(times_s, values)
        held += upper * HOUR_S >= 50.0
        assert slope * HOUR_S == pytest.approx(50.0, abs=20.0)
    assert held >= 92  # 97.5 % of them should


def test_samples_that_depend_on_each_other_widen_the_interval():
    times_s, values = series(0.0, 5.0)
    plain = slope_of(times_s, values)
    times_s, values = series(0.0, 5.0, correlation=0.9)
    bound = slope_of(times_s, values)
    assert bound[1] - bound[0] > 3 * (plain[1] - plain[0])


def test_a_constant_has_no_slope_and_few_samples_none_at_all():
    assert slope_of(range(10), [5.0] * 10) == (0.0, 0.0)
    with pytest.raises(ValueError, match="take 8 or more"):
        slope_of(range(5), range(5))
    with pytest.raises(ValueError, match="one moment"):
        slope_of([1.0] * 9, range(9))


def sample(t_s, processes, index=10, reservations=0):
    held = {pid: Held("worker", int(rss * 1e6), fds) for pid, (rss, fds) in processes.items()}
    return Sample(t_s, index, reservations, held)


def test_only_processes_that_lived_through_the_judged_part_have_a_slope():
    samples = [
        sample(float(t), {1: (100 + t / 36, 9), **({2: (50, 9)} if t < 250 else {})})
        for t in range(0, 301, 5)
    ]
    (found,) = slopes(samples)
    assert found.pid == 1 and found.mb_per_hour == pytest.approx(100.0, rel=0.01)
    assert not found.kept


def test_what_is_left_behind_is_named():
    before = sample(0.0, {1: (100, 9), 2: (100, 9)})
    assert left_behind(before, sample(9.0, {1: (500, 9), 3: (1, 70)})) == []
    after = sample(9.0, {1: (100, 10)}, index=12, reservations=1)
    assert left_behind(before, after) == [
        "reservations: 0 before, 1 after", "index_blocks: 10 before, 12 after",
        "descriptors of worker 1: 9, then 10",
    ]  # fmt: skip


def test_counts_that_nobody_gave_are_not_taken_for_equal():
    silent = sample(0.0, {}, index=-1, reservations=-1)
    assert left_behind(silent, silent) == [
        "reservations: not known, as nobody answered",
        "index_blocks: not known, as nobody answered",
    ]


def soaked(seen, samples):
    return _result(seen, samples, [], samples[0], samples[-1], 300.0)


def test_a_soak_without_a_slope_is_not_kept():
    steady = [sample(float(t), {1: (100, 9)}) for t in range(0, 301, 5)]
    assert soaked([], steady).kept
    # Nobody lived through it, or it was not looked at often enough.
    changing = [sample(s.t_s, {i: (100, 9)}) for i, s in enumerate(steady)]
    for samples in (changing, steady[::15]):
        result = soaked([], samples)
        assert not result.slopes and not result.kept


def test_a_stream_that_was_refused_is_lost_and_not_cut():
    steady = [sample(float(t), {1: (100, 9)}) for t in range(0, 301, 5)]
    refused = Observed(0.0, 0.1, 0.1, 503, streamed=True, complete=False)
    cut = Observed(0.0, 0.1, 0.2, 200, streamed=True, complete=False, announced=True)
    result = soaked([refused, cut], steady)
    assert (result.lost, result.streams_cut, result.streams_cut_untold) == (1, 1, 0)


class Unreadable:
    """A cluster that cannot be looked at."""

    def __getattr__(self, name):
        raise OSError("no such process")


async def test_a_look_that_failed_is_told():
    with pytest.raises(FaultsError, match="could not be looked at"):
        async with Sampler(Unreadable(), 0.01, 0.0) as sampler:
            await asyncio.wait([sampler._task], timeout=20)
