"""When sessions arrive: endless seeded streams of times in seconds, at a mean rate.

`poisson` for workloads whose source says nothing of arrivals. `servegen` for independent single
requests: production clients that come in bursts and change their rates from window to window.
`gamma` for bursts of a given strength, `ramp` and `steps` for load that grows, `constant` for
evenly spaced arrivals. `parse_arrivals` reads them as one writes them on a command line:
`poisson:5`, `gamma:5,cv=3`, `ramp:1-20/300`. Closed loops have no times: all sessions are there at
once, and the runner starts one whenever another has ended.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from typing import Literal

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
    shape = cv**-2
    return _cumulated(lambda: rng.gamma(shape, 1.0 / (rate_rps * shape), _DRAWS))


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
    for expected in poisson(1.0, rng):
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
    for expected in poisson(1.0, rng):
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
    if not (np.isfinite(rate_rps) and rate_rps > 0):
        raise ValueError(f"rate_rps is {rate_rps}: give sessions a second, above zero")


Kind = Literal["poisson", "constant", "gamma", "servegen", "trace", "ramp", "steps", "closed"]


FORMS: dict[Kind, str] = {
    "poisson": "poisson:RATE",
    "constant": "constant:RATE",
    "gamma": "gamma:RATE,cv=CV",
    "servegen": "servegen:RATE[,window_s=SECONDS]",
    "trace": "trace or trace:xFACTOR",
    "ramp": "ramp:FROM-TO/SECONDS",
    "steps": "steps:RATE,RATE,…/SECONDS",
    "closed": "closed:SESSIONS",
}
"""How each kind is written. Rates are sessions a second."""


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """How sessions arrive.

    rates_rps: one rate; the first and the last of a ramp; all of steps; none for trace and closed.
    cv: coefficient of variation of gamma gaps. seconds: a ramp's length, a step's, or that of a
    ServeGen window. speed: by which a trace's times are divided. concurrency: of a closed loop.
    """

    kind: Kind
    rates_rps: tuple[float, ...] = ()
    cv: float = 1.0
    seconds: float = 0.0
    speed: float = 1.0
    concurrency: int | None = None
    text: str = field(default="", compare=False)

    def times(
        self, rng: np.random.Generator, *, rate_factor: float = 1.0
    ) -> Iterator[float] | None:
        """Arrival times in seconds; None for a trace, whose workload has them.

        Args:
            rng: for this stream alone.
            rate_factor: multiplies every rate: one over the requests of a session, if rates are
                meant in requests a second.
        """
        rates = [rate * rate_factor for rate in self.rates_rps]
        if self.kind == "trace":
            return None
        if self.kind == "closed":
            return repeat(0.0)
        if self.kind == "poisson":
            return poisson(rates[0], rng)
        if self.kind == "constant":
            return constant(rates[0])
        if self.kind == "gamma":
            return gamma(rates[0], rng, cv=self.cv)
        if self.kind == "servegen":
            return servegen(rates[0], rng, window_s=self.seconds or REPLAY_WINDOW_S)
        if self.kind == "ramp":
            return ramp(rates[0], rates[1], self.seconds, rng)
        return steps(rates, self.seconds, rng)


def parse_arrivals(text: str) -> ArrivalSpec:
    """Read a spec.

    Raises:
        ValueError: says what is wrong with it, and how it is written.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in FORMS:
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"arrivals {text!r}: unknown kind {kind!r}.{hint} Known: {'; '.join(FORMS.values())}"
        )
    try:
        return _parsed(kind, rest, text)
    except ValueError as error:
        raise ValueError(f"arrivals {text!r}: {error}; write {FORMS[kind]}") from None


def _parsed(kind: Kind, rest: str, text: str) -> ArrivalSpec:
    if kind == "trace":
        if rest and not rest.startswith("x"):
            raise ValueError(f"the factor {rest!r} does not begin with x")
        return ArrivalSpec(kind, speed=_positive("factor", rest[1:]) if rest else 1.0, text=text)
    if kind == "closed":
        if not rest.isdecimal() or not int(rest):
            raise ValueError(f"the number of sessions must be a whole number, found {rest!r}")
        return ArrivalSpec(kind, concurrency=int(rest), text=text)
    if kind in ("ramp", "steps"):
        rates, slash, seconds = rest.partition("/")
        if not slash:
            raise ValueError("the seconds are missing")
        parts = rates.split("-" if kind == "ramp" else ",")
        if kind == "ramp" and len(parts) != 2:
            raise ValueError(f"a ramp goes from one rate to another, found {rates!r}")
        numbers = tuple(_number("rate", part) for part in parts)
        _require_rates(kind, numbers)
        return ArrivalSpec(kind, numbers, seconds=_positive("seconds", seconds), text=text)
    rate, *extras = rest.split(",")
    options = _options(extras, {"gamma": "cv", "servegen": "window_s"}.get(kind))
    if kind == "gamma" and not options:
        raise ValueError("the coefficient of variation, cv, is missing")
    return ArrivalSpec(
        kind,
        (_positive("rate", rate),),
        cv=options.get("cv", 1.0),
        seconds=options.get("window_s", 0.0),
        text=text,
    )


def _require_rates(kind: Kind, rates: tuple[float, ...]) -> None:
    if min(rates) < 0 or rates[-1] <= 0:
        raise ValueError("rates must not be negative, and the last one must be above zero")
    if kind == "steps" and len(rates) < 2:
        raise ValueError("steps need two rates at least")


def _options(extras: list[str], known: str | None) -> dict[str, float]:
    options: dict[str, float] = {}
    for extra in extras:
        name, _, value = extra.partition("=")
        if name != known:
            raise ValueError(f"unknown option {extra!r}")
        options[name] = _positive(name, value)
    return options


def _number(what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the {what} must be a number, found {text!r}")
    return number


def _positive(what: str, text: str) -> float:
    number = _number(what, text)
    if number <= 0:
        raise ValueError(f"the {what} must be above zero, found {text!r}")
    return number
