"""From a node's requests to what is reported: what was recovered, against what was configured.

Beside the regression stands the published way to the same constant. Paper 001 (§6.1, Figures 5 and
6) takes O = 1 - TTFT(new tokens only)/TTFT(host hit) at each point and reads κ_crit off
O = κ/(κ + κ_crit), Eq. 8. Its baseline has no cached context, so attention over the C tokens counts
as link time (κ_crit too low); and below the weight-read floor, or beside a fixed cost, the baseline
is no line in N (κ_crit too high). With the device hit as the baseline the first error goes and the
second stays.

Faulty requests (their counters differ from what the arm asked for) are counted and left out before.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.offload.overhead.law_fit import (
    Estimate,
    Floats,
    LawFit,
    ModelFacts,
    fit_law,
    one_arm_rates,
)
from benchmarks.offload.overhead.points import ARMS, Arm, Point, Sample
from kappa.cost import kappa_crit
from kappa.hardware import NodeProfile
from kappa.model import ModelShape

Row = dict[str, Any]

_RESAMPLES = 400
_KAPPA_RANGE = (1e-3, 1e6)


def node_result(
    samples: Sequence[Sample], shape: ModelShape, node: NodeProfile, seed: int = 0
) -> Row:
    """Fits and counts of one node, ready for JSON.

    Args:
        samples: every request, faulty ones too; TTFTs undilated.
        shape: the model that the node emulates.
        node: as configured; only compared with, never fitted with.
        seed: of the resampling.

    Raises:
        ValueError: too few sound requests for the fits.
    """
    sound = [sample for sample in samples if not sample.fault]
    fit = fit_law(sound, ModelFacts.of(shape), seed)
    true = configured(shape, node)
    published = fit_overhead(sound, "new", seed)
    isolated = fit_overhead(sound, "device", seed)
    link, flops = one_arm_rates(sound, fit)
    critical = true["kappa_crit"]
    return {
        "node": node.name,
        "configured": true,
        "recovered": {name: _estimate(e, true.get(name)) for name, e in fit.constants.items()},
        "r_squared": fit.r_squared,
        "cells_r_squared": fit.cells_r_squared,
        "read_bound_points": list(fit.read_bound),
        "host_arm_alone": {
            "link_bytes_per_s": _with_error(link, true["link_bytes_per_s"]),
            "flops_per_s": _with_error(flops, true["flops_per_s"]),
        },
        "paper_fit": _paper(published, critical),
        "paper_fit_device_baseline": _paper(isolated, critical),
        "cells": list(_cells(samples, fit)),
        "requests": len(samples),
        "left_out": len(samples) - len(sound),
        "faults": dict(Counter(sample.fault for sample in samples if sample.fault)),
        "overrun_share": sum(bool(sample.overruns) for sample in samples) / max(len(samples), 1),
        "loaded_bytes": sum(sample.loaded_bytes for sample in samples),
    }


def configured(shape: ModelShape, node: NodeProfile) -> dict[str, float]:
    """The node's own constants under the names of the recovered ones."""
    return {
        "link_bytes_per_s": node.h2d_bytes_per_s,
        "flops_per_s": node.flops_per_s,
        "attention_flops_per_s": node.attention_flops_per_s or node.flops_per_s,
        "hbm_bytes_per_s": node.hbm_bytes_per_s,
        "kappa_crit": kappa_crit(shape, node),
    }


def _cells(samples: Sequence[Sample], fit: LawFit) -> Iterable[Row]:
    """What was measured at each point and arm, with the fit's TTFT beside it."""
    groups: dict[tuple[Point, Arm], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.point, sample.arm), []).append(sample)
    for point in sorted({point for point, _ in groups}):
        for arm in ARMS:
            found = groups.get((point, arm), [])
            sound = [sample for sample in found if not sample.fault]
            if not sound:
                continue
            ttfts = [sample.ttft_s for sample in sound]
            quarters = statistics.quantiles(ttfts, n=4) if len(ttfts) > 1 else ttfts * 3
            yield {
                "new_tokens": point.new_tokens, "cached_tokens": point.cached_tokens,
                "kappa": point.ratio, "arm": arm, "requests": len(sound),
                "left_out": len(found) - len(sound),
                "overrun_share": sum(bool(s.overruns) for s in sound) / len(sound),
                "ttft_median_s": statistics.median(ttfts), "ttft_mean_s": statistics.fmean(ttfts),
                "ttft_std_s": statistics.pstdev(ttfts), "ttft_iqr_s": quarters[2] - quarters[0],
                "ttft_fit_s": float(fit.predict(sound[:1])[0]),
                "loaded_bytes": sound[0].loaded_bytes,
            }  # fmt: skip


def _paper(fit: PaperFit, true: float) -> Row:
    return {
        "kappa_crit": fit.kappa_crit, "low": fit.low, "high": fit.high,
        "bias": fit.kappa_crit / true - 1.0, "r_squared": _finite(fit.r_squared),
        "points": [
            {
                "new_tokens": o.point.new_tokens, "cached_tokens": o.point.cached_tokens,
                "kappa": o.point.ratio, "overhead": o.overhead, "deviation": o.deviation,
                # What Eq. 8 makes of this point alone: its errors no longer cancel.
                "kappa_crit": _finite(_implied(o)),
            }
            for o in fit.points
        ],
    }  # fmt: skip


def _implied(point: Overhead) -> float:
    """κ_crit at which Eq. 8 gives this point's overhead; infinite without any."""
    share = point.overhead
    return point.point.ratio * (1.0 - share) / share if share > 0 else math.inf


def _estimate(estimate: Estimate, true: float | None) -> Row:
    row = {name: _finite(value) for name, value in estimate._asdict().items()}
    return row | ({"error": _finite(estimate.value / true - 1.0)} if true else {})


def _with_error(value: float, true: float) -> Mapping[str, float | None]:
    return {"value": _finite(value), "error": _finite(value / true - 1.0)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    times: dict[Point, dict[Arm, Floats]] = {}
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


def _overhead(without: Floats, host: Floats) -> float:
    return 1.0 - float(without.mean()) / float(host.mean())


def _deviation(without: Floats, host: Floats) -> float:
    """Of one request's overhead, from the deviations of the two TTFTs."""
    relative = math.hypot(without.std() / without.mean(), host.std() / host.mean())
    return float(without.mean() / host.mean() * relative)


def _drawn(values: Floats, rng: np.random.Generator) -> Floats:
    return rng.choice(values, size=len(values))


def _critical(ratios: Floats, overheads: Floats) -> float:
    # Half a second to import: only where it is used, or every command would wait for it.
    from scipy.optimize import minimize_scalar

    def squares(log_critical: float) -> float:
        return float(((overheads - ratios / (ratios + math.exp(log_critical))) ** 2).sum())

    low, high = (math.log(bound) for bound in _KAPPA_RANGE)
    found = minimize_scalar(squares, bounds=(low, high), method="bounded")
    return math.exp(float(found.x))
