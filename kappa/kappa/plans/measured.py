"""Lines of transfers, constants of steps, a model's rates on a node: fitted to measurements. Pure.

No fitted constant is below zero. Fits over machines that do other things meanwhile are in relative
error and robust: a sample that lies far off the others' law counts for little (Huber's weights,
found by iterating).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappa.checks import read_json_object
from kappa.cost import StepModel, StepWork, chunk_work
from kappa.plans.rates import FORMAT, LEAST_ATTEND_R2, ComputeGrid, LineFit, PlanRates

# Huber: residuals beyond this many standard deviations, each at least the second, count linearly.
_HUBER = 1.5
_LEAST_DEVIATION = 1e-4
_LEAST_STEPS = 5
# Rounds of a fit, and the largest change of an error (logarithm) that ends one of steps.
_ROUNDS, _SETTLED, _SHARP = 40, 1e-9, math.inf
_LEAST_CURVATURE = 1e-9
_START_QUANTILES = 0.25, 0.5, 0.75

Floats = NDArray[np.float64]


def fit_line(
    name: str, tokens: Sequence[float], seconds: Sequence[float], *, relative: bool = False
) -> LineFit:
    """Least squares over samples; a negative fixed cost is noise, and the line then starts at 0.

    relative: robustly and in relative error, so that small sizes count as much as large ones.

    Raises:
        ValueError: fewer than three sizes, or a time that does not grow with tokens.
    """
    if len(tokens) != len(seconds) or len(set(tokens)) < 3:
        raise ValueError(
            f"the {name} fit has {len(tokens)} sizes and {len(seconds)} times: "
            "measure three different sizes or more, one time each"
        )
    x, y = np.asarray(tokens, float), np.asarray(seconds, float)
    columns = np.stack([x, np.ones_like(x)], axis=1)
    if relative:
        slope, start = _robust(columns / y[:, None])
    else:
        slope, start = not_negative(columns, y)
    return LineFit(name, slope, start, r_squared(y, slope * x + start))


@dataclass(frozen=True, slots=True)
class StepFit:
    """Constants of an engine's step, fitted to measured ones."""

    step: StepModel
    r2: float  # share of the variance of the seconds that the constants explain
    steps: int  # measured ones
    error: float  # median relative difference between modelled and measured seconds
    # The median and the 90th percentile of that difference, by kind of step (`kind_of`).
    errors: Mapping[str, tuple[float, float]]


def kind_of(work: StepWork[float]) -> str:
    """`decode`: a token for each request; `prefill`: one prompt's; `mixed`: any other."""
    tokens, pairs, reads = work
    if math.isclose(pairs, reads - 0.5 * tokens):
        return "decode"
    return "prefill" if math.isclose(pairs, tokens * (reads - 0.5 * tokens)) else "mixed"


def fit_steps(
    works: Sequence[StepWork[float]], seconds: Sequence[float] | Floats, expert_idle: float = 0.0,
    *, host: bool = True,
) -> StepFit:  # fmt: skip
    """The cost model of a step (`kappa.cost.StepModel`) that comes nearest to measured steps.

    The fit is in the logarithms of seconds and constants, so that short steps count as much as long
    ones and no constant is below zero. expert_idle: of the model's experts the share that a token
    leaves alone; 0: it has none. host: the seconds have the host's in them, a fixed cost.

    Raises:
        ValueError: fewer than five steps; a step that took no time; or steps of which none shows
            what computing a token takes.
    """
    y = np.asarray(seconds, float)
    if len(works) != len(y) or len(y) < _LEAST_STEPS or not (y > 0).all():
        raise ValueError(
            f"the step fit has {len(works)} steps and {len(y)} times, the shortest "
            f"{min(y, default=0.0)} s: measure {_LEAST_STEPS} steps or more, one time each"
        )
    law = _Law(works, y, expert_idle, host)
    _, values = min((law.fitted(start) for start in law.starts()), key=lambda fit: fit[0])
    found = dict(zip(_FITTED, values.tolist(), strict=True))
    # What no step shows is nothing.
    shown = law.shares(values)[1].max(axis=0) > _LEAST_SHARE
    found |= {name: 0.0 for name, is_shown in zip(_FITTED, shown, strict=True) if not is_shown}
    if found["token_s"] <= 0:
        raise ValueError(f"none of {len(y)} steps shows what computing a token takes")
    step = StepModel(**found, expert_idle=expert_idle if found["experts_s"] else 0.0)
    return rate_steps(step, works, y)


_FITTED = (
    "token_s", "pair_s", "weights_s", "context_token_s", "fixed_s", "experts_s", "exposed",
)  # fmt: skip
_LEAST_SHARE = 1e-3


class _Law:
    """`kappa.step_seconds.steps_s` over measured steps, with the slopes of its logarithm.

    Constants are a vector in the order of `_FITTED`.
    """

    def __init__(
        self, works: Sequence[StepWork[float]], y: Floats, expert_idle: float, host: bool
    ) -> None:
        self.y, self.idle, self.host = y, expert_idle, host
        self.tokens, self.pairs, self.reads = np.asarray(works, float).T
        self.touched = 1.0 - expert_idle**self.tokens if expert_idle else 0.0 * self.tokens

    def starts(self) -> list[Floats]:
        """Constants to begin with, by the size from which on steps are taken to compute."""
        starts = []
        for bound in np.unique(np.quantile(self.tokens, _START_QUANTILES)):
            large, small = self.tokens >= bound, self.tokens <= bound
            token_s = float(np.median(self.y[large] / self.tokens[large]))
            least_s = 0.3 * float(self.y[small].min())
            pair_s = 0.3 * float((self.y / np.maximum(self.pairs, 1.0)).min())
            context_s = 0.3 * float((self.y / np.maximum(self.reads, 1.0)).min())
            experts_s = least_s if self.idle else 0.0
            fixed_s = least_s if self.host else 0.0
            starts.append(np.array([token_s, pair_s, least_s, context_s, fixed_s, experts_s, 0.3]))
        return starts

    def shares(self, values: Floats, sharpness: float = _SHARP) -> tuple[Floats, Floats]:
        """Seconds of each step, and by how much they grow with each constant, both in logarithms:
        the share that each part has of them, shape (steps, constants).

        sharpness: of the maxima, as the exponent of a norm; `_SHARP` is the law's own.
        """
        token_s, pair_s, weights_s, context_s, fixed_s, experts_s, exposed = values
        gemm_s, experts_s = self.tokens * token_s, experts_s * self.touched
        read_s, fixed_s = weights_s + experts_s, np.full_like(gemm_s, fixed_s)
        attend_s, context_s = self.pairs * pair_s, self.reads * context_s
        beside_s, computes = _longer(gemm_s, read_s, sharpness)
        attention_s, attends = _longer(attend_s, context_s, sharpness)
        hidden_s = exposed * np.maximum(gemm_s + read_s - beside_s, 0.0)
        gemm = computes + exposed * (1.0 - computes)
        read = 1.0 - computes + exposed * computes
        seconds = beside_s + hidden_s + attention_s + fixed_s
        parts = [
            gemm * gemm_s, attends * attend_s, read * weights_s, (1.0 - attends) * context_s,
            fixed_s, read * experts_s, hidden_s,
        ]  # fmt: skip
        return seconds, np.stack(parts, axis=1) / seconds[:, None]

    def fitted(self, start: Floats) -> tuple[float, Floats]:
        """(mean error, constants) from these on. The maxima are soft at first, so that the part
        that is hidden has a slope, too; a constant that went to nothing meanwhile starts again."""
        values = start
        for sharpness in (2.0, 6.0, 20.0, _SHARP):
            values = self._descended(np.maximum(values, 0.1 * start), sharpness)
        return float(np.abs(np.log(self.shares(values)[0] / self.y)).mean()), values

    def _descended(self, values: Floats, sharpness: float) -> Floats:
        """Damped Gauss-Newton with Huber's weights."""
        damping, (seconds, slopes) = 1e-2, self.shares(values, sharpness)
        errors = np.log(seconds / self.y)
        for _ in range(_ROUNDS):
            away = np.abs(errors)
            bound = _HUBER * max(1.4826 * float(np.median(away)), _LEAST_DEVIATION)
            weights = np.minimum(1.0, bound / np.maximum(away, bound))
            curvature = slopes.T @ (weights[:, None] * slopes)
            curvature[np.diag_indices_from(curvature)] += _LEAST_CURVATURE + damping * (
                1e-3 + np.diag(curvature)
            )
            change = np.linalg.solve(curvature, -slopes.T @ (weights * errors))
            moved = values * np.exp(np.clip(change, -1.0, 1.0))
            moved[-1] = min(moved[-1], 1.0)
            seconds, moved_slopes = self.shares(moved, sharpness)
            moved_errors = np.log(seconds / self.y)
            if (weights * moved_errors**2).sum() > (weights * errors**2).sum():
                damping = min(damping * 8.0, 1e6)
                continue
            settled = np.abs(moved_errors - errors).max() < _SETTLED
            values, errors, slopes, damping = moved, moved_errors, moved_slopes, damping / 8.0
            if settled:
                break
        return values


def _longer(a: Floats, b: Floats, sharpness: float) -> tuple[Floats, Floats]:
    """The soft maximum of two times, and the share of its growth that is the first one's."""
    longest = np.maximum(np.maximum(a, b), 1e-300)
    if math.isinf(sharpness):
        return longest, (a >= b).astype(float)
    first, second = (a / longest) ** sharpness, (b / longest) ** sharpness
    return longest * (first + second) ** (1.0 / sharpness), first / (first + second)


def rate_steps(
    step: StepModel, works: Sequence[StepWork[float]], seconds: Sequence[float] | Floats
) -> StepFit:
    """The fit of a given model to measured steps."""
    y = np.asarray(seconds, float)
    modelled = np.asarray([step.work_s(work) for work in works])
    off, kinds = np.abs(modelled / y - 1.0), np.array([kind_of(work) for work in works])
    errors = {
        kind: (float(np.median(own)), float(np.quantile(own, 0.9)))
        for kind in sorted({*kinds.tolist()})
        for own in (off[kinds == kind],)
    }
    return StepFit(step, r_squared(y, modelled), len(y), float(np.median(off)), errors)


def r_squared(measured: Floats, modelled: Floats) -> float:
    """Share of the measured variance that the model explains; 0 if nothing varies."""
    spread = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((measured - modelled) ** 2).sum()) / spread if spread > 0 else 0.0


def _robust(columns: Floats) -> list[float]:
    """Non-negative coefficients with which the columns sum to nearly one in most rows."""
    weights = np.ones(len(columns))
    found = [0.0] * columns.shape[1]
    for _ in range(_ROUNDS):
        before, found = found, not_negative(columns * weights[:, None], weights)
        away = np.abs(columns @ np.asarray(found) - 1.0)
        bound = _HUBER * max(1.4826 * float(np.median(away)), _LEAST_DEVIATION)
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(away, bound)))
        if np.allclose(before, found, rtol=1e-6, atol=0.0):
            break
    return found


def not_negative(columns: Floats, values: Floats) -> list[float]:
    """Non-negative least squares, by trying every set of coefficients that are zero."""
    count = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled = columns / scale
    gram, target = scaled.T @ scaled, scaled.T @ values
    best, least_error = np.zeros(count), math.inf
    for used in (list(u) for n in range(1, count + 1) for u in combinations(range(count), n)):
        try:
            some = np.linalg.solve(gram[np.ix_(used, used)], target[used])
        except np.linalg.LinAlgError:  # two columns that are the same: others have all they say
            continue
        if not (some >= 0).all():
            continue
        error = float(((values - scaled[:, used] @ some) ** 2).sum())
        if error < least_error:
            best, least_error = np.zeros(count), error
            best[used] = some / scale[used]
    return [float(value) for value in best]


# -- load plans ----------------------------------------------------------------------------------


def fit_grid(grid: ComputeGrid) -> StepFit:
    """The cost model of a step that comes nearest to a measured grid."""
    works = [chunk_work(n, s) for n in grid.new_tokens for s in grid.context_tokens]
    return fit_steps(works, [seconds for row in grid.seconds for seconds in row])


def rates_from_measured(data: Mapping[str, Any] | str | Path) -> PlanRates:
    """Rates from what `engine.profile` measured: its object, or the file that holds it.

    The lines are fitted here, from the samples, so that a file cannot claim an R² it has not. Files
    of machines where decoding steps and CPU attention were not measured lack those keys.

    Raises:
        ValueError: a file that cannot be read, a key that is missing, or a poor fit, by name.
    """
    origin = "measured rates"
    if not isinstance(data, Mapping):
        origin = str(data)
        data = read_json_object(data, "file of measured rates")
    if data.get("format") != FORMAT:
        raise ValueError(
            f"{origin}: format is {data.get('format')!r}, not {FORMAT!r}: profile again"
        )
    try:
        return _fitted_rates(data)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{origin}: lacks or garbles {error}: profile again") from error


def _fitted_rates(data: Mapping[str, Any]) -> PlanRates:
    layers, alone = int(data["layers"]), float(data["h2d_bytes_per_s"])

    def line(name: str, samples: Mapping[str, Any]) -> LineFit:
        """Over all layers, from the samples of one."""
        return fit_line(name, samples["tokens"], [layers * float(s) for s in samples["seconds"]])

    def grid(measured: Mapping[str, Any], *axes: str) -> ComputeGrid:
        rows, columns = (tuple(map(float, measured[axis])) for axis in axes)
        return ComputeGrid(rows, columns, tuple(tuple(map(float, r)) for r in measured["seconds"]))

    # Without CPU attention, or with a line too poor to plan with, the CPU does not attend; the rest
    # of the file is as good as it was.
    attend, beside = None, {"h2d_bytes_per_s": alone, "share_while_loading": 1.0}
    if data.get("attend") is not None:
        try:
            attend = line("CPU attention", data["attend"])
            attend.require(LEAST_ATTEND_R2)
            beside = data["attend"]
        except ValueError:
            attend = None
    multiply = None
    if data.get("multiply") is not None:
        try:
            multiply = line("FC1 on the CPU", data["multiply"])
        except ValueError:
            multiply = None
    sizes = tuple(map(float, data.get("matrix_bytes", (1.0, 1.0, 1.0, 1.0))))
    prefill = grid(data["grid"], "new_tokens", "context_tokens")
    decode, from_kv, from_acts = (
        grid(data[name], "sequences", "resident_tokens") if data.get(name) else None
        for name in ("decode", "from_kv", "from_acts")
    )
    return PlanRates(
        name=f"{data['model']} on {data['device']}",
        layers=layers,
        kv_bytes=float(data["kv_bytes_per_token"]),
        activation_bytes=float(data["activation_bytes_per_token"]),
        load=line("load", data["load"]),
        project=line("KV projection", data["project"]),
        step=fit_grid(prefill).step,
        grid=prefill,
        overlap=None if data.get("overlap") is None else float(data["overlap"]),
        decode=decode,
        from_kv=from_kv,
        from_acts=from_acts,
        attend=attend,
        h2d_attending=min(1.0, float(beside["h2d_bytes_per_s"]) / alone),
        attend_loading=min(1.0, float(beside["share_while_loading"])),
        weights_s=float(data.get("weights_s", 0.0)),
        multiply=multiply,
        matrix_bytes=(sizes[0], sizes[1], sizes[2], sizes[3]),
    )


def as_measured(rates: PlanRates, model: str, device: str) -> dict[str, Any]:
    """Rates in the form of a measurement, for nodes that are known by formula alone.

    `rates_from_measured` gives them back, but for the points between those of the grid.
    """
    new, context = (1.0, 16.0, 128.0, 512.0, 2048.0), (0.0, 2048.0, 8192.0, 32768.0)
    sizes = [128.0, 512.0, 2048.0, 8192.0]

    def line(fit: LineFit) -> dict[str, list[float]]:
        seconds = [(fit.fixed_s + fit.per_token_s * n) / rates.layers for n in sizes]
        return {"tokens": sizes, "seconds": seconds}

    link = rates.h2d_bytes_per_s
    return {
        "format": FORMAT, "source": "law", "model": model, "device": device,
        "layers": rates.layers, "kv_bytes_per_token": rates.kv_bytes,
        "activation_bytes_per_token": rates.activation_bytes,
        "overlap": rates.overlap,
        "load": line(rates.load), "project": line(rates.project),
        "grid": {
            "new_tokens": list(new), "context_tokens": list(context),
            "seconds": [[rates.prefill_s(n, s) for s in context] for n in new],
        },
        "h2d_bytes_per_s": link, "weights_s": rates.weights_s,
    }  # fmt: skip
