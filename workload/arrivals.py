"""When sessions arrive: endless seeded streams of times in seconds, at a mean rate.

`poisson` for workloads whose source says nothing of arrivals. `servegen` for independent single
requests: production clients that come in bursts and change their rates from window to window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

ArrivalProcess = Callable[[float, np.random.Generator], Iterator[float]]

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


def require_rate(rate_rps: float) -> None:
    """Refuse a rate at which nothing ever comes."""
    if not (np.isfinite(rate_rps) and rate_rps > 0):
        raise ValueError(f"rate_rps is {rate_rps}: give sessions a second, above zero")
