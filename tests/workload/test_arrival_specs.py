"""Arrivals as written on a command line."""

from itertools import islice, pairwise

import numpy as np
import pytest

from workload import arrivals
from workload.arrival_specs import FORMS, ArrivalSpec, parse_arrivals


def first(spec, count=500, seed=5, **options):
    return list(islice(spec.times(np.random.default_rng(seed), **options), count))


def rng(seed=5):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("poisson:5", lambda: arrivals.poisson(5.0, rng())),
        ("constant:1e3", lambda: arrivals.constant(1000.0)),
        ("gamma:5,cv=3", lambda: arrivals.gamma(5.0, rng(), cv=3.0)),
        ("servegen:5", lambda: arrivals.servegen(5.0, rng())),
        ("servegen:5,window_s=30", lambda: arrivals.servegen(5.0, rng(), window_s=30.0)),
        ("ramp:1-20/300", lambda: arrivals.ramp(1.0, 20.0, 300.0, rng())),
        (" steps:1,0,2.5/60 ", lambda: arrivals.steps([1.0, 0.0, 2.5], 60.0, rng())),
    ],
)
def test_a_spec_gives_the_process_it_names(text, same_as):
    assert first(parse_arrivals(text)) == list(islice(same_as(), 500))


def test_traces_and_closed_loops_say_what_the_runner_must_know():
    assert parse_arrivals("trace") == ArrivalSpec("trace", speed=1.0)
    assert parse_arrivals("trace:x2.5") == ArrivalSpec("trace", speed=2.5)
    assert parse_arrivals("trace").times(rng()) is None
    closed = parse_arrivals("closed:64")
    assert closed.concurrency == 64
    assert first(closed, 3) == [0.0, 0.0, 0.0]
    assert parse_arrivals("poisson:5").concurrency is None


def test_rates_of_requests_become_rates_of_sessions():
    spec = parse_arrivals("steps:10,20/60")
    assert first(spec, rate_factor=0.1) == list(
        islice(arrivals.steps([1.0, 2.0], 60.0, rng()), 500)
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
        ("poisson", "the rate must be a number, found ''; write poisson:RATE"),
        ("poisson:five", "the rate must be a number, found 'five'"),
        ("poisson:0", "the rate must be above zero, found '0'"),
        ("poisson:nan", "the rate must be a number, found 'nan'"),
        ("poisson:5,cv=3", "unknown option 'cv=3'; write poisson:RATE"),
        ("gamma:5", "the coefficient of variation, cv, is missing; write gamma:RATE,cv=CV"),
        ("gamma:5,cv=-1", "the cv must be above zero, found '-1'"),
        ("trace:2", "the factor '2' does not begin with x; write trace or trace:xFACTOR"),
        ("trace:x0", "the factor must be above zero"),
        ("ramp:1-2", "the seconds are missing; write ramp:FROM-TO/SECONDS"),
        ("ramp:1/30", "a ramp goes from one rate to another, found '1'"),
        ("ramp:5-0/30", "the last one must be above zero"),
        ("steps:5/30", "steps need two rates at least"),
        ("steps:1,2/0", "the seconds must be above zero"),
        ("closed:2.5", "must be a whole number, found '2.5'; write closed:SESSIONS"),
        ("closed:0", "must be a whole number, found '0'"),
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
    for kind, form in FORMS.items():
        for word, example in examples.items():
            form = form.replace(word, example)
        assert parse_arrivals(form).kind == kind
