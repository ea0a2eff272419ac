"""Arrivals as one writes them on a command line: `poisson:5`, `gamma:5,cv=3`, `ramp:1-20/300`.

A spec is a process and its rate, in sessions a second. `parse_arrivals` reads it; `times` gives the
endless stream that `workload.replay` takes. Closed loops have no times: all sessions are there at
once, and the runner starts one whenever another has ended.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

import numpy as np

from workload import arrivals

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
            return arrivals.poisson(rates[0], rng)
        if self.kind == "constant":
            return arrivals.constant(rates[0])
        if self.kind == "gamma":
            return arrivals.gamma(rates[0], rng, cv=self.cv)
        if self.kind == "servegen":
            return arrivals.servegen(
                rates[0], rng, window_s=self.seconds or arrivals.REPLAY_WINDOW_S
            )
        if self.kind == "ramp":
            return arrivals.ramp(rates[0], rates[1], self.seconds, rng)
        return arrivals.steps(rates, self.seconds, rng)


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
