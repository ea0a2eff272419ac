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
from kappa.plans.rates import FORMAT, ComputeGrid, LineFit, PlanRates

# Huber: residuals beyond this many standard deviations, each at least the second, count linearly.
_HUBER = 1.5
_LEAST_DEVIATION = 1e-4
_ROUNDS = 20
_LEAST_STEPS = 5

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


def fit_steps(works: Sequence[StepWork[float]], seconds: Sequence[float]) -> StepFit:
    """The cost model of a step (`kappa.cost.StepModel`) that comes nearest to measured steps.

    A step lasts the longer of computing and reading. Which steps wait for which is not known, so it
    is guessed, fitted, and guessed again by the fit, from several first guesses.

    Raises:
        ValueError: fewer than five steps; a step that took no time; or steps of which none shows
            what computing a token takes.
    """
    y = np.asarray(seconds, float)
    if len(works) != len(y) or len(y) < _LEAST_STEPS or not (y > 0).all():
        raise ValueError(
            f"the step fit has {len(works)} steps and {len(y)} times, the shortest "
            f"{min(seconds, default=0.0)} s: measure {_LEAST_STEPS} steps or more, one time each"
        )
    found = min(
        (_fitted_steps(works, y, first) for first in _guesses(works)), key=lambda fit: fit[0]
    )
    token_s, pair_s, weights_s, context_token_s, fixed_s = found[1]
    if token_s <= 0:
        raise ValueError(f"none of {len(y)} steps shows what computing a token takes")
    return rate_steps(StepModel(token_s, pair_s, weights_s, context_token_s, fixed_s), works, y)


def rate_steps(
    step: StepModel, works: Sequence[StepWork[float]], seconds: Sequence[float] | Floats
) -> StepFit:
    """The fit of a given model to measured steps."""
    y = np.asarray(seconds, float)
    modelled = np.asarray([step.parts(work).step_s for work in works])
    error = float(np.median(np.abs(modelled / y - 1.0)))
    return StepFit(step, r_squared(y, modelled), len(y), error)


def r_squared(measured: Floats, modelled: Floats) -> float:
    """Share of the measured variance that the model explains; 0 if nothing varies."""
    spread = float(((measured - measured.mean()) ** 2).sum())
    return 1.0 - float(((measured - modelled) ** 2).sum()) / spread if spread > 0 else 0.0


def _guesses(works: Sequence[StepWork[float]]) -> list[NDArray[np.bool_]]:
    """Guesses of the steps that compute for longer than they read: those above some size."""
    tokens = np.asarray([work.tokens for work in works])
    return [tokens > bound for bound in (0.0, *np.unique(tokens)[:-1])]


def _fitted_steps(
    works: Sequence[StepWork[float]], y: Floats, computes: NDArray[np.bool_]
) -> tuple[float, list[float]]:
    """(mean relative error, constants) of the best fit, iterating from a guess until it agrees with
    its own fit."""
    tokens, pairs, reads = np.asarray(works, float).T
    best, least_error = [0.0] * 5, math.inf
    for _ in range(_ROUNDS):
        columns = np.stack(
            [tokens * computes, pairs * computes, ~computes, reads * ~computes, np.ones_like(y)],
            axis=1,
        )
        found = _robust(columns / y[:, None])
        compute_s = tokens * found[0] + pairs * found[1]
        read_s = found[2] + reads * found[3]
        error = float(np.abs((np.maximum(compute_s, read_s) + found[4]) / y - 1.0).mean())
        if error < least_error:
            best, least_error = found, error
        before, computes = computes, compute_s >= read_s
        if (before == computes).all():
            break
    return least_error, best


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
            attend.require()
            beside = data["attend"]
        except ValueError:
            attend = None
    prefill = grid(data["grid"], "new_tokens", "context_tokens")
    decode = data.get("decode")
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
        decode=None if decode is None else grid(decode, "sequences", "resident_tokens"),
        attend=attend,
        h2d_attending=min(1.0, float(beside["h2d_bytes_per_s"]) / alone),
        attend_loading=min(1.0, float(beside["share_while_loading"])),
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
        "h2d_bytes_per_s": link,
    }  # fmt: skip
