"""The published way to the same constant: link overhead against κ, and the κ_crit that fits it.

Paper 001 (§6.1, Figures 5 and 6) takes O = 1 - TTFT(new tokens only)/TTFT(host hit) at each point
and reads κ_crit off O = κ/(κ + κ_crit), Eq. 8. Its baseline has no cached context, so attention
over the C tokens counts as link time (κ_crit too low); and below the weight-read floor, or beside a
fixed cost, the baseline is no line in N (κ_crit too high). With the device hit as the baseline the
first error goes and the second stays. Pure; called by `result`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.offload.overhead.points import Arm, Point, Sample

_RESAMPLES = 400
_KAPPA_RANGE = (1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class Overhead:
    """A point's link overhead: mean over requests, and its standard deviation."""

    point: Point
    overhead: float
    deviation: float


@dataclass(frozen=True, slots=True)
class PaperFit:
    """κ_crit by Eq. 8, its 95 % confidence interval over requests, and the points behind it."""

    kappa_crit: float
    low: float
    high: float
    r_squared: float
    points: tuple[Overhead, ...]


def fit_overhead(samples: Sequence[Sample], baseline: Arm = "new", seed: int = 0) -> PaperFit:
    """Fit Eq. 8 to the mean TTFTs of host hits against those of `baseline`.

    Raises:
        ValueError: a point lacks requests in one of the two arms.
    """
    times: dict[Point, dict[Arm, NDArray[np.float64]]] = {}
    for point in sorted({sample.point for sample in samples}):
        mine = [sample for sample in samples if sample.point == point]
        arms: tuple[Arm, ...] = (baseline, "host")
        times[point] = {a: np.array([s.ttft_s for s in mine if s.arm == a]) for a in arms}
        for arm, found in times[point].items():
            if not len(found):
                raise ValueError(f"point {point} has no request in the arm {arm!r}")
    ratios = np.array([point.ratio for point in times])
    overheads = np.array([_overhead(t[baseline], t["host"]) for t in times.values()])
    critical = _critical(ratios, overheads)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_RESAMPLES):
        resampled = [
            _overhead(_drawn(t[baseline], rng), _drawn(t["host"], rng)) for t in times.values()
        ]
        drawn.append(_critical(ratios, np.array(resampled)))
    left = float(((overheads - ratios / (ratios + critical)) ** 2).sum())
    spread = float(((overheads - overheads.mean()) ** 2).sum())
    return PaperFit(
        critical, float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)),
        1.0 - left / spread if spread else math.nan,
        tuple(
            Overhead(point, float(o), _deviation(t[baseline], t["host"]))
            for (point, t), o in zip(times.items(), overheads, strict=True)
        ),
    )  # fmt: skip


def _overhead(without: NDArray[np.float64], host: NDArray[np.float64]) -> float:
    return 1.0 - float(without.mean()) / float(host.mean())


def _deviation(without: NDArray[np.float64], host: NDArray[np.float64]) -> float:
    """Of one request's overhead, from the deviations of the two TTFTs."""
    relative = math.hypot(without.std() / without.mean(), host.std() / host.mean())
    return float(without.mean() / host.mean() * relative)


def _drawn(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.choice(values, size=len(values))


def _critical(ratios: NDArray[np.float64], overheads: NDArray[np.float64]) -> float:
    # Half a second to import: only where it is used, or every command would wait for it.
    from scipy.optimize import minimize_scalar

    def squares(log_critical: float) -> float:
        return float(((overheads - ratios / (ratios + math.exp(log_critical))) ** 2).sum())

    low, high = (math.log(bound) for bound in _KAPPA_RANGE)
    found = minimize_scalar(squares, bounds=(low, high), method="bounded")
    return math.exp(float(found.x))
