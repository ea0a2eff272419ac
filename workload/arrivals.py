"""When sessions arrive: endless seeded streams of times in seconds, at a mean rate.

`poisson` for workloads whose source says nothing of arrivals. `servegen` for independent single
requests: production clients that come in bursts and change their rates from window to window.
`gamma` for bursts of a given strength, `ramp` and `steps` for load that grows, `constant` for
evenly spaced arrivals. `workload.arrival_specs` reads them from a command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workload.servegen import ClientRate, RateDay, read_rates

ArrivalProcess = Callable[[float, np.random.Generator], Iterator[float]]

# Seconds that `servegen` gives to a window which lasted 600 s: runs last minutes, not a day, and
# ten times the speed lets them see the swings. An assumption.
REPLAY_WINDOW_S = 60.0

_DRAWS = 1024  # gaps drawn at a time: numpy is slow one by one


def poisson(rate_rps: float, rng: np.random.Generator) -> Iterator[float]:
    """Arrival times of a Poisson process of `rate_rps` sessions a second, for ever.

    It draws ahead, so `rng` must belong to this stream alone.
    """
    require_rate(rate_rps)
    return _poisson(rate_rps, rng)


def _poisson(rate_rps: float, rng: np.random.Generator) -> Iterator[float]:
    now_s = 0.0
    while True:
        times_s = now_s + np.cumsum(rng.exponential(1.0 / rate_rps, _DRAWS))
        yield from times_s.tolist()
        now_s = float(times_s[-1])


def constant(rate_rps: float) -> Iterator[float]:
    """Evenly spaced arrival times, the first after one gap, for ever."""
    require_rate(rate_rps)
    return (number / rate_rps for number in count(1))


def gamma(rate_rps: float, rng: np.random.Generator, *, cv: float) -> Iterator[float]:
    """Arrival times with independent gamma gaps, for ever; as `poisson` if `cv` is 1.

    Args:
        rate_rps: mean arrivals a second.
        rng: for this stream alone.
        cv: coefficient of variation of the gaps, above zero: more than 1 comes in bursts.
    """
    require_rate(rate_rps)
    if not (np.isfinite(cv) and cv > 0):
        raise ValueError(f"cv is {cv}: give a coefficient of variation, above zero")
    return _gamma(rate_rps, cv**-2, rng)


def _gamma(rate_rps: float, shape: float, rng: np.random.Generator) -> Iterator[float]:
    now_s = 0.0
    while True:
        gaps = rng.gamma(shape, 1.0 / (rate_rps * shape), _DRAWS)
        times_s = now_s + np.cumsum(gaps)
        yield from times_s.tolist()
        now_s = float(times_s[-1])


def ramp(
    first_rps: float, last_rps: float, length_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """Arrivals at random, at a rate that goes evenly from one to another, then stays there.

    Args:
        first_rps: rate at the start, zero or more.
        last_rps: rate from `length_s` on, above zero.
        length_s: of the ramp.
        rng: for this stream alone.
    """
    require_rate(last_rps)
    if not (np.isfinite(first_rps) and first_rps >= 0):
        raise ValueError(f"first_rps is {first_rps}: give sessions a second, zero or more")
    if not (np.isfinite(length_s) and length_s > 0):
        raise ValueError(f"length_s is {length_s}: give seconds, above zero")
    return _ramp(first_rps, last_rps, length_s, rng)


def _ramp(
    first_rps: float, last_rps: float, length_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """A unit Poisson process, put through the inverse of the expected number of arrivals."""
    within = (first_rps + last_rps) / 2 * length_s
    slope = (last_rps - first_rps) / length_s
    for expected in _poisson(1.0, rng):
        if expected >= within:
            yield length_s + (expected - within) / last_rps
        else:
            # The root of first·t + slope·t²/2 = expected, in the form that bears a slope of zero.
            root = math.sqrt(first_rps**2 + 2 * slope * expected)
            yield 2 * expected / (first_rps + root)


def steps(rates_rps: Sequence[float], step_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Arrivals at random, at each rate for `step_s` seconds, and at the last one for ever.

    Args:
        rates_rps: rates in order; all but the last may be zero.
        step_s: how long each lasts.
        rng: for this stream alone.
    """
    if not rates_rps:
        raise ValueError("rates_rps is empty: give one rate at least")
    require_rate(rates_rps[-1])
    if not all(np.isfinite(rate) and rate >= 0 for rate in rates_rps):
        raise ValueError(f"rates_rps is {list(rates_rps)}: give sessions a second, zero or more")
    if not (np.isfinite(step_s) and step_s > 0):
        raise ValueError(f"step_s is {step_s}: give seconds, above zero")
    return _steps(tuple(rates_rps), step_s, rng)


def _steps(
    rates_rps: tuple[float, ...], step_s: float, rng: np.random.Generator
) -> Iterator[float]:
    step, before = 0, 0.0  # the step that now runs, and the arrivals expected before it
    for expected in _poisson(1.0, rng):
        while step + 1 < len(rates_rps) and expected >= before + rates_rps[step] * step_s:
            before += rates_rps[step] * step_s
            step += 1
        yield step * step_s + (expected - before) / rates_rps[step]


def shipped_rates() -> RateDay:
    """The day of client rates that ships with this package (`workload/data/README.md`)."""
    return read_rates(Path(__file__).parent / "data" / "servegen_day_rates.parquet")


def servegen(
    rate_rps: float,
    rng: np.random.Generator,
    *,
    rates: RateDay | None = None,
    window_s: float = REPLAY_WINDOW_S,
) -> Iterator[float]:
    """Arrival times of many clients, each bursty and unsteady in its own way, for ever.

    The day starts at a random window and repeats. Every client's rate is scaled by one number, so
    that the mean over a whole day is `rate_rps`; over less than a day it is what that part of the
    day was. Each client gets as many arrivals in a window as its rate says, with gaps of the
    fitted shape, beginning at a random point of their cycle.

    Args:
        rate_rps: mean arrivals a second over the whole day.
        rng: for this stream alone.
        rates: whose rates to use; those that ship with the package if None.
        window_s: seconds that a window of the source lasts here. A run of R seconds that should
            see a whole day, and so the exact mean, wants R / len(rates.windows).
    """
    require_rate(rate_rps)
    if not (np.isfinite(window_s) and window_s > 0):
        raise ValueError(f"window_s is {window_s}: give seconds, above zero")
    return _servegen(rate_rps, rng, rates or shipped_rates(), window_s)


def _servegen(
    rate_rps: float, rng: np.random.Generator, rates: RateDay, window_s: float
) -> Iterator[float]:
    expected = rate_rps / rates.mean_rps * window_s  # arrivals a window, per recorded rps
    index = int(rng.integers(len(rates.windows)))
    start_s = 0.0
    while True:
        clients = rates.windows[index]
        places = [_places(client, client.rate_rps * expected, rng) for client in clients]
        if places:
            yield from (start_s + window_s * np.sort(np.concatenate(places))).tolist()
        index = (index + 1) % len(rates.windows)
        start_s += window_s


def _places(client: ClientRate, expected: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Where in a window, from 0 to 1, a client's requests fall: `expected` of them on average."""
    count = int(expected + rng.random())
    if client.pattern == "Gamma":
        gaps = rng.standard_gamma(client.shape, count)
    else:
        gaps = rng.weibull(client.shape, count)
    total = gaps.sum()
    if not (np.isfinite(total) and total > 0):  # the smallest shapes leave the range of a float
        return rng.random(count)
    # On a circle, turned at random: otherwise the bursts of all clients would meet at the edges.
    places: NDArray[np.float64] = (np.cumsum(gaps) / total + rng.random()) % 1.0
    return places


def require_rate(rate_rps: float) -> None:
    """Refuse a rate at which nothing ever comes."""
    if not (np.isfinite(rate_rps) and rate_rps > 0):
        raise ValueError(f"rate_rps is {rate_rps}: give sessions a second, above zero")
