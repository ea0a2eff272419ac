"""Arrivals of sessions: endless seeded streams of times in seconds, at a mean rate.

`poisson` is for sources without arrival times. `servegen` is for independent single requests:
production clients that come in bursts and change their rates from window to window. `gamma` gives
bursts of a given strength, `ramp` and `steps` load that grows, `constant` evenly spaced arrivals.
They draw ahead, so each needs an `rng` of its own. Closed loops have no times: all sessions are
there at once, and the runner starts one whenever another has ended.
"""

from __future__ import annotations

import difflib
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, repeat
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kappa_workload.reading import WorkloadError, table_records

ArrivalProcess = Callable[[float, np.random.Generator], Iterator[float]]

# ServeGen's client rates: a Parquet table of `client`, `window_s` (start of a window of 600 s),
# `rate_rps`, `cv`, `pattern` (Gamma or Weibull), `arg1` (shape) and `arg2` (scale) of the gaps
# between a client's requests. Source: alibaba/ServeGen (m-small), fits to Bailian production,
# Apache-2.0.
WINDOW_S = 600

Pattern = Literal["Gamma", "Weibull"]


class _RateRow(msgspec.Struct):
    window_s: Annotated[int, msgspec.Meta(ge=0, multiple_of=WINDOW_S)]
    rate_rps: Annotated[float, msgspec.Meta(ge=0, le=1e300)]
    pattern: Pattern
    arg1: Annotated[float, msgspec.Meta(gt=0, le=1e300)]


# Seconds that `servegen` gives to a window which lasted 600 s: runs last minutes, not a day, and
# ten times the speed lets them see the swings. An assumption.
REPLAY_WINDOW_S = 60.0


_DRAWS = 1024  # gaps drawn at a time: numpy is slow one by one


def poisson(rate_rps: float, rng: np.random.Generator) -> Iterator[float]:
    """Arrival times of a Poisson process of `rate_rps` sessions a second, for ever."""
    return _cumulated(lambda: rng.exponential(1.0 / rate_rps, _DRAWS))


def _cumulated(draw: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    """Times after gaps that are drawn many at a time."""
    now_s = 0.0
    while True:
        times_s = now_s + np.cumsum(draw())
        yield from times_s.tolist()
        now_s = float(times_s[-1])


def constant(rate_rps: float) -> Iterator[float]:
    """Evenly spaced arrival times, the first after one gap, for ever."""
    return (number / rate_rps for number in count(1))


def gamma(rate_rps: float, rng: np.random.Generator, *, cv: float) -> Iterator[float]:
    """Arrival times with independent gamma gaps of mean `1 / rate_rps`, for ever.

    cv: coefficient of variation of the gaps: 1 is `poisson`, more comes in bursts.
    """
    shape = cv**-2
    return _cumulated(lambda: rng.gamma(shape, 1.0 / (rate_rps * shape), _DRAWS))


def ramp(
    first_rps: float, last_rps: float, length_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """Arrivals at random, at a rate that goes evenly from one, zero or more, to another in
    `length_s` seconds, then stays there."""
    within = (first_rps + last_rps) / 2 * length_s
    slope = (last_rps - first_rps) / length_s

    def time_s(expected: float) -> float:
        if expected >= within:
            return length_s + (expected - within) / last_rps
        # The root of first·t + slope·t²/2 = expected, in the form that bears a slope of zero.
        return 2 * expected / (first_rps + math.sqrt(first_rps**2 + 2 * slope * expected))

    # A unit Poisson process, put through the inverse of the expected number of arrivals.
    return map(time_s, poisson(1.0, rng))


def steps(rates_rps: Sequence[float], step_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Arrivals at random, at each rate for `step_s` seconds, and at the last one for ever; all but
    the last may be zero."""
    # The arrivals expected before each step begins.
    before = list(accumulate((rate * step_s for rate in rates_rps[:-1]), initial=0.0))

    def time_s(expected: float) -> float:
        step = bisect_right(before, expected) - 1
        return step * step_s + (expected - before[step]) / rates_rps[step]

    return map(time_s, poisson(1.0, rng))


@dataclass(frozen=True, slots=True)
class ClientRate:
    """One client in one window: its rate, and the distribution of its gaps up to their mean.

    The recorded scale is not kept: it disagrees with the rate where a client paused within the
    window, and the rate is what was counted.
    """

    rate_rps: float
    pattern: Pattern
    shape: float


@dataclass(frozen=True, slots=True)
class RateDay:
    """Consecutive windows of `WINDOW_S`, each with its active clients; it may be shorter than a
    day, or longer.
    """

    windows: tuple[tuple[ClientRate, ...], ...]

    @property
    def mean_rps(self) -> float:
        """Mean rate of all clients together over all windows."""
        total = sum(client.rate_rps for window in self.windows for client in window)
        return total / len(self.windows)


def read_rates(path: Path) -> RateDay:
    """Read a table of rates; windows between the first and the last that have no row are idle."""
    windows: dict[int, list[ClientRate]] = {}
    for _, row in table_records(path, _RateRow):
        client = ClientRate(row.rate_rps, row.pattern, row.arg1)
        windows.setdefault(row.window_s // WINDOW_S, []).append(client)
    first, last = min(windows), max(windows)
    day = RateDay(tuple(tuple(windows.get(index, ())) for index in range(first, last + 1)))
    if not day.mean_rps:
        raise WorkloadError(f"{path}: every rate in column 'rate_rps' is zero")
    return day


def shipped_rates() -> RateDay:
    """The day of client rates that ships with this package
    (`workload/kappa_workload/data/README.md`)."""
    return read_rates(Path(__file__).parent / "data" / "servegen_day_rates.parquet")


def servegen(
    rate_rps: float,
    rng: np.random.Generator,
    *,
    rates: RateDay | None = None,
    window_s: float = REPLAY_WINDOW_S,
    steady: bool = False,
) -> Iterator[float]:
    """Arrival times of many clients, each with its own bursts and changes of rate, for ever.

    The day starts at a random window and repeats. Every client's rate is scaled by one number, so
    that the mean over a whole day is `rate_rps`; over less than a day it is what that part of the
    day was. Each client gets as many arrivals in a window as its rate says, with gaps of the
    fitted shape, beginning at a random point of their cycle.

    rates: client rates; None: those that ship with the package. window_s: seconds that a window of
    the source lasts here; for a run of R seconds over a whole day, and so with the exact mean, give
    R / len(rates.windows). steady: every window has the mean rate, with its own clients and bursts.
    """
    rates = rates or shipped_rates()
    index = int(rng.integers(len(rates.windows)))
    start_s = 0.0
    while True:
        clients = rates.windows[index]
        recorded_rps = sum(client.rate_rps for client in clients if steady) or rates.mean_rps
        # Arrivals in this window, per recorded rps.
        expected = rate_rps / recorded_rps * window_s
        places = [_places(client, client.rate_rps * expected, rng) for client in clients]
        if places:
            yield from (start_s + window_s * np.sort(np.concatenate(places))).tolist()
        index = (index + 1) % len(rates.windows)
        start_s += window_s


def _places(client: ClientRate, expected: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A client's requests in a window, as places from 0 to 1: `expected` of them on average."""
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


Kind = Literal["poisson", "constant", "gamma", "servegen", "trace", "ramp", "steps", "closed"]


FORMS: dict[Kind, tuple[str, str]] = {
    "poisson": ("poisson:RATE", "(?P<rates>N)"),
    "constant": ("constant:RATE", "(?P<rates>N)"),
    "gamma": ("gamma:RATE,cv=CV", "(?P<rates>N),cv=(?P<cv>N)"),
    "servegen": ("servegen:RATE[,window_s=SECONDS]", "(?P<rates>N)(,window_s=(?P<seconds>N))?"),
    "trace": ("trace or trace:xFACTOR", "(x(?P<speed>N))?"),
    "ramp": ("ramp:FROM-TO/SECONDS", "(?P<rates>N-N)/(?P<seconds>N)"),
    "steps": ("steps:RATE,RATE,…/SECONDS", "(?P<rates>N(,N)+)/(?P<seconds>N)"),
    "closed": ("closed:SESSIONS", r"(?P<concurrency>\d+)"),
}
"""Syntax of each kind, for people and as a pattern in which N is a number. Rates are sessions a
second."""


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """A parsed specification of arrivals."""

    kind: Kind
    # One rate; the first and the last of a ramp; all of steps; none for trace and closed.
    rates_rps: tuple[float, ...] = ()
    cv: float = 1.0  # coefficient of variation of gamma gaps
    seconds: float = 0.0  # length of a ramp, a step, or a ServeGen window
    speed: float = 1.0  # divides a trace's times
    concurrency: int | None = None  # of a closed loop; else None
    text: str = field(default="", compare=False)

    def times(
        self, rng: np.random.Generator, *, rate_factor: float = 1.0
    ) -> Iterator[float] | None:
        """Arrival times in seconds; None for a trace, where the workload has them.

        rate_factor: multiplies every rate; one over the requests of a session, if rates count
        requests.
        """
        rates = [rate * rate_factor for rate in self.rates_rps]
        match self.kind:
            case "trace":
                return None
            case "closed":
                return repeat(0.0)
            case "poisson":
                return poisson(rates[0], rng)
            case "constant":
                return constant(rates[0])
            case "gamma":
                return gamma(rates[0], rng, cv=self.cv)
            case "servegen":
                return servegen(rates[0], rng, window_s=self.seconds or REPLAY_WINDOW_S)
            case "ramp":
                return ramp(rates[0], rates[1], self.seconds, rng)
            case "steps":
                return steps(rates, self.seconds, rng)


_NUMBER = r"[\d.]+(?:[eE][+-]?\d+)?"


def parse_arrivals(text: str) -> ArrivalSpec:
    """Parse a specification; `ValueError` explains the syntax."""
    kind, _, rest = text.strip().partition(":")
    if kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = "; ".join(form for form, _ in FORMS.values())
        raise ValueError(f"arrivals {text!r}: unknown kind {kind!r}.{hint} Known: {known}")
    form, pattern = FORMS[kind]
    wrong = ValueError(
        f"arrivals {text!r}: write {form}; numbers above zero, the last of rates at least"
    )
    match = re.fullmatch(pattern.replace("N", _NUMBER), rest)
    if match is None:
        raise wrong
    given = {name: value for name, value in match.groupdict().items() if value}
    try:
        rates = tuple(map(float, re.findall(_NUMBER, given.pop("rates", ""))))
        number = {name: float(value) for name, value in given.items()}
    except ValueError:
        raise wrong from None
    if not all(0 < each < math.inf for each in (*rates[-1:], *number.values())):
        raise wrong
    sessions = number.pop("concurrency", None)
    concurrency = None if sessions is None else int(sessions)
    return ArrivalSpec(kind, rates, concurrency=concurrency, text=text, **number)
