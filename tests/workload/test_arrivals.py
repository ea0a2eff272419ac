"""Streams of arrival times (rate, burstiness, seeds), and how one writes them."""

from itertools import islice, pairwise, takewhile

import numpy as np
import pytest

from kappa_workload import arrivals
from kappa_workload.arrivals import (
    FORMS,
    ArrivalSpec,
    ClientRate,
    RateDay,
    parse_arrivals,
    poisson,
    servegen,
    shipped_rates,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def within(stream, seconds):
    return np.array(list(takewhile(lambda time_s: time_s < seconds, stream)))


def dispersion(times_s):
    """Variance over mean of counts a second: 1 for a Poisson process."""
    counts = np.bincount(times_s.astype(int))
    return counts.var() / counts.mean()


@pytest.mark.parametrize("process", [poisson, servegen])
def test_times_never_go_back_and_are_fixed_by_the_seed(process):
    times_s = list(islice(process(5.0, rng(1)), 5000))

    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert all(type(time_s) is float for time_s in times_s[:3])
    assert times_s == list(islice(process(5.0, rng(1)), 5000))
    assert times_s != list(islice(process(5.0, rng(2)), 5000))


def test_poisson_has_its_rate_and_no_bursts():
    times_s = within(poisson(20.0, rng()), 2000)

    assert len(times_s) / 2000 == pytest.approx(20, rel=0.02)
    assert dispersion(times_s) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("rate_rps", [0.5, 5.0, 200.0])
def test_a_whole_day_of_servegen_has_the_mean_rate(rate_rps):
    day_s = 1440.0
    windows = len(shipped_rates().windows)
    times_s = within(servegen(rate_rps, rng(), window_s=day_s / windows), day_s)

    assert len(times_s) / day_s == pytest.approx(rate_rps, rel=0.05)


def test_servegen_swings_with_the_day_and_comes_in_bursts():
    day = shipped_rates()
    times_s = within(servegen(50.0, rng()), 60.0 * len(day.windows))
    per_window = np.bincount((times_s / 60).astype(int)) / 60

    recorded = np.array([sum(client.rate_rps for client in window) for window in day.windows])
    expected = np.sort(50.0 * recorded / recorded.mean())
    assert np.sort(per_window) == pytest.approx(expected, rel=0.1)
    assert dispersion(times_s) > 3


def test_seeds_see_different_parts_of_the_day():
    rates = {len(within(servegen(50.0, rng(seed)), 300)) for seed in range(10)}

    assert max(rates) > 1.2 * min(rates)


def test_steady_servegen_keeps_each_windows_rate_and_its_bursts():
    for seed in range(4):
        times_s = within(servegen(50.0, rng(seed), window_s=20.0, steady=True), 100)
        per_window = np.bincount((times_s / 20).astype(int))

        assert per_window == pytest.approx(np.full(5, 1000), rel=0.03)
        assert dispersion(times_s) > 1.5


def test_a_steady_servegen_passes_over_idle_windows():
    day = RateDay(windows=((ClientRate(1.0, "Gamma", 1.0),), ()))
    times_s = within(servegen(10.0, rng(), rates=day, window_s=10.0, steady=True), 40)

    assert len(times_s) == pytest.approx(200, abs=2)
    assert {*(times_s // 10)} in ({0, 2}, {1, 3})


def test_bursts_do_not_gather_at_the_edges_of_windows():
    client = ClientRate(rate_rps=1.0, pattern="Weibull", shape=0.2)
    day = RateDay(windows=((client,) * 40,))
    times_s = within(servegen(40.0, rng(), rates=day, window_s=10.0), 5000)
    place = times_s % 10.0

    assert np.histogram(place, bins=10, range=(0, 10))[0] == pytest.approx(
        len(times_s) / 10, rel=0.1
    )


def test_a_smaller_shape_makes_more_bursts():
    def gamma(shape):
        day = RateDay(windows=((ClientRate(1.0, "Gamma", shape),),))
        return dispersion(within(servegen(20.0, rng(), rates=day, window_s=600.0), 6000))

    assert gamma(0.05) > 2 * gamma(0.5) > 2 * gamma(20.0)


def test_the_smallest_shapes_and_idle_windows_do_no_harm():
    tiny = ClientRate(rate_rps=1.0, pattern="Gamma", shape=1e-6)
    day = RateDay(windows=((tiny,), ()))
    times_s = within(servegen(10.0, rng(), rates=day, window_s=5.0), 1000)

    assert np.isfinite(times_s).all()
    assert len(times_s) == pytest.approx(10_000, rel=0.02)


def gaps_of(times, count):
    return np.diff([0.0, *islice(times, count)])


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(cv):
    gaps = gaps_of(arrivals.gamma(20.0, np.random.default_rng(0), cv=cv), 100_000)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_constant_arrivals_are_evenly_spaced_however_late():
    times = list(islice(arrivals.constant(3.0), 100_000))
    assert times[2] == 1.0
    assert times[-1] == pytest.approx(100_000 / 3, rel=1e-12)


@pytest.mark.parametrize(("first", "last"), [(0.0, 40.0), (40.0, 4.0), (10.0, 10.0)])
def test_a_ramp_goes_evenly_from_rate_to_rate_and_stays(first, last):
    count = np.zeros(6)
    runs = 20
    for seed in range(runs):
        stream = arrivals.ramp(first, last, 100.0, np.random.default_rng(seed))
        times = np.fromiter(takewhile(lambda time_s: time_s < 150.0, stream), dtype=float)
        count += np.histogram(times, bins=6, range=(0.0, 150.0))[0]
    middles = np.array([12.5, 37.5, 62.5, 87.5, 100.0, 100.0]) / 100.0
    expected = (first + (last - first) * middles) * 25.0 * runs
    assert np.all(np.abs(count - expected) < 4 * np.sqrt(expected))


def test_steps_keep_each_rate_for_its_time_and_the_last_for_ever():
    stream = arrivals.steps([10.0, 0.0, 40.0], 50.0, np.random.default_rng(4))
    times = np.fromiter(takewhile(lambda time_s: time_s < 200.0, stream), dtype=float)
    count = np.histogram(times, bins=4, range=(0.0, 200.0))[0]
    assert count[1] == 0
    expected = np.array([500.0, 2000.0, 2000.0])
    assert np.all(np.abs(count[[0, 2, 3]] - expected) < 4 * np.sqrt(expected))


def first(spec, count=500, seed=5, **options):
    return list(islice(spec.times(np.random.default_rng(seed), **options), count))


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("poisson:5", lambda: arrivals.poisson(5.0, rng(5))),
        ("constant:1e3", lambda: arrivals.constant(1000.0)),
        ("gamma:5,cv=3", lambda: arrivals.gamma(5.0, rng(5), cv=3.0)),
        ("servegen:5", lambda: arrivals.servegen(5.0, rng(5))),
        ("servegen:5,window_s=30", lambda: arrivals.servegen(5.0, rng(5), window_s=30.0)),
        ("ramp:1-20/300", lambda: arrivals.ramp(1.0, 20.0, 300.0, rng(5))),
        (" steps:1,0,2.5/60 ", lambda: arrivals.steps([1.0, 0.0, 2.5], 60.0, rng(5))),
    ],
)
def test_a_spec_gives_the_process_it_names(text, same_as):
    assert first(parse_arrivals(text)) == list(islice(same_as(), 500))


def test_traces_and_closed_loops_say_what_the_runner_must_know():
    assert parse_arrivals("trace") == ArrivalSpec("trace", speed=1.0)
    assert parse_arrivals("trace:x2.5") == ArrivalSpec("trace", speed=2.5)
    assert parse_arrivals("trace").times(rng(5)) is None
    closed = parse_arrivals("closed:64")
    assert closed.concurrency == 64
    assert first(closed, 3) == [0.0, 0.0, 0.0]
    assert parse_arrivals("poisson:5").concurrency is None


def test_rates_of_requests_become_rates_of_sessions():
    spec = parse_arrivals("steps:10,20/60")
    assert first(spec, rate_factor=0.1) == list(
        islice(arrivals.steps([1.0, 2.0], 60.0, rng(5)), 500)
    )


def test_times_never_go_back():
    for text in ("gamma:5,cv=4", "ramp:0-20/30", "ramp:20-1/30", "steps:5,0,9/3", "constant:7"):
        times = first(parse_arrivals(text), 3000)
        assert all(a <= b for a, b in pairwise(times))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("poison:5", "unknown kind 'poison'. Did you mean 'poisson'"),
        ("", "unknown kind ''"),
        ("poisson", "write poisson:RATE"),
        ("poisson:five", "write poisson:RATE"),
        ("poisson:1.2.3", "write poisson:RATE"),
        ("poisson:0", "above zero"),
        ("poisson:1e999", "above zero"),
        ("poisson:nan", "write poisson:RATE"),
        ("poisson:5,cv=3", "write poisson:RATE"),
        ("gamma:5", "write gamma:RATE,cv=CV"),
        ("gamma:5,cv=-1", "write gamma"),
        ("servegen:5,window_s=0", "above zero"),
        ("trace:2", "write trace or trace:xFACTOR"),
        ("trace:x0", "above zero"),
        ("ramp:1-2", "write ramp:FROM-TO/SECONDS"),
        ("ramp:1/30", "write ramp"),
        ("ramp:5-0/30", "the last of rates at least"),
        ("steps:5/30", "write steps:RATE,RATE,…/SECONDS"),
        ("steps:1,2/0", "above zero"),
        ("closed:2.5", "write closed:SESSIONS"),
        ("closed:0", "above zero"),
    ],
)
def test_a_wrong_spec_says_how_it_is_written(text, reason):
    with pytest.raises(ValueError) as raised:
        parse_arrivals(text)
    assert str(raised.value).startswith(f"arrivals {text!r}: ")
    assert reason in str(raised.value)


def test_every_form_that_is_shown_can_be_read():
    examples = {
        "RATE,RATE,…": "1,2", "RATE": "5", "CV": "2", "[,window_s=SECONDS]": "", "FROM-TO": "1-2",
        "SECONDS": "9", "SESSIONS": "3", " or trace:xFACTOR": "",
    }  # fmt: skip
    for kind, (form, _) in FORMS.items():
        for word, example in examples.items():
            form = form.replace(word, example)
        assert parse_arrivals(form).kind == kind
