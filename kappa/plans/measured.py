"""What is fitted to measurements before anything is planned: lines in tokens, and grids of steps.

HybridServe (Section 4.3) plans on two least-squares lines, seconds to load and to project n tokens,
and trusts them because R² is 0.99; here a line below `LEAST_R2` is refused by name. The seconds of
a prefill step are no line: they are measured on a grid of new and context tokens, to which the cost
model is fitted for what lies beyond it. Files of machines where decoding steps and CPU attention
were not measured lack those keys, and rates then go without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappa.cost import StepModel, chunk_work
from kappa.json_file import read_json_object
from kappa.plans.rates import LEAST_R2, ComputeGrid, LineFit, PlanRates

FORMAT = "kappa-load-rates/1"
"""The value of "format" in a file of measured rates."""

# A step counts as compute-bound where it lasts this much longer than the reads beneath it.
_ABOVE_FLOOR = 1.5
_LEAST_POINTS = 4


def fit_line(name: str, tokens: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Least squares over samples; a negative fixed cost is noise, and the line then starts at 0.

    Raises:
        ValueError: fewer than three sizes, or a time that does not grow with tokens.
    """
    if len(tokens) != len(seconds) or len(set(tokens)) < 3:
        raise ValueError(
            f"the {name} fit has {len(tokens)} sizes and {len(seconds)} times: "
            "measure three different sizes or more, one time each"
        )
    x, y = np.asarray(tokens, float), np.asarray(seconds, float)
    slope, start = (float(v) for v in np.polyfit(x, y, 1))
    if start < 0:
        slope, start = float(x @ y / (x @ x)), 0.0
    spread = float(((y - y.mean()) ** 2).sum())
    error = float(((y - slope * x - start) ** 2).sum())
    return LineFit(name, slope, start, 1.0 - error / spread if spread > 0 else 0.0)


def fit_step(grid: ComputeGrid) -> StepModel:
    """The cost model of a step that comes nearest to a measured grid.

    The row of fewest new tokens gives the reads: weights, and KV per context token. A fixed cost,
    GEMM seconds per token and attention seconds per pair are fitted, in relative error, to the
    steps that last well longer than those reads (to all, where hardly any does). No constant is
    below zero.
    """
    context = np.asarray(grid.context_tokens)
    columns = np.stack([np.ones_like(context), context + grid.new_tokens[0]], axis=1)
    weights_s, context_s = _not_negative(columns, np.asarray(grid.seconds[0]))
    new, behind = (axis.ravel() for axis in np.meshgrid(grid.new_tokens, context, indexing="ij"))
    seconds = np.asarray(grid.seconds).ravel()
    bound = seconds > _ABOVE_FLOOR * (weights_s + context_s * (behind + new))
    if bound.sum() < _LEAST_POINTS:
        bound[:] = True
    columns = np.stack([np.ones_like(new), new, chunk_work(new, behind).pairs], axis=1)
    columns /= seconds[:, None]
    fixed_s, token_s, pair_s = _not_negative(columns[bound], np.ones(int(bound.sum())))
    # Both sides of the model's maximum carry the fixed cost; the reads were fitted with it inside.
    fixed_s = min(fixed_s, weights_s)
    return StepModel(token_s, pair_s, weights_s - fixed_s, context_s, fixed_s)


def _not_negative(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Least squares with no coefficient below zero: the best over which ones are zero."""
    count = columns.shape[1]
    best, least_error = [0.0] * count, math.inf
    for used in (u for size in range(1, count + 1) for u in combinations(range(count), size)):
        some = np.linalg.lstsq(columns[:, used], values, rcond=None)[0]
        error = float(((values - columns[:, used] @ some) ** 2).sum())
        if (some >= 0).all() and error < least_error:
            best, least_error = [0.0] * count, error
            for index, value in zip(used, some, strict=True):
                best[index] = float(value)
    return best


def rates_from_measured(
    data: Mapping[str, Any] | str | Path, *, overlap: float | None = None
) -> PlanRates:
    """Rates from what `engine.profile` measured: its object, or the file that holds it.

    The lines are fitted here, from the samples, so that a file cannot claim an R² it has not.

    Raises:
        ValueError: a file that cannot be read, a key that is missing, or a poor fit, by name.
    """
    origin = "measured rates"
    if not isinstance(data, Mapping):
        origin = str(data)
        data = read_json_object(data, "file of measured rates")
    if data.get("format") != FORMAT:
        raise ValueError(
            f"{origin}: format is {data.get('format')!r}, not {FORMAT!r}: profile anew"
        )
    if overlap is None and data.get("overlap") is not None:
        overlap = float(data["overlap"])
    try:
        return _fitted(data, overlap)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{origin}: lacks or garbles {error}: profile anew") from error


def _fitted(data: Mapping[str, Any], overlap: float | None) -> PlanRates:
    layers = int(data["layers"])
    alone = float(data["h2d_bytes_per_s"])
    grid = _grid(data["grid"], "new_tokens", "context_tokens")
    decode = data.get("decode")
    attend = _attend(data.get("attend"), layers)
    beside = data["attend"] if attend else {"h2d_bytes_per_s": alone, "share_while_loading": 1.0}
    return PlanRates(
        name=f"{data['model']} on {data['device']}",
        layers=layers,
        kv_bytes=float(data["kv_bytes_per_token"]),
        activation_bytes=float(data["activation_bytes_per_token"]),
        load=_layers_line("load", data["load"], layers),
        project=_layers_line("KV projection", data["project"], layers),
        step=fit_step(grid),
        grid=grid,
        overlap=overlap,
        h2d_cpu_busy=min(1.0, float(data["h2d_cpu_busy_bytes_per_s"]) / alone),
        weights_load_s=float(data["weight_bytes"]) / alone,
        decode=None if decode is None else _grid(decode, "sequences", "resident_tokens"),
        attend=attend,
        h2d_attending=min(1.0, float(beside["h2d_bytes_per_s"]) / alone),
        attend_loading=min(1.0, float(beside["share_while_loading"])),
    )


def _layers_line(name: str, samples: Mapping[str, Any], layers: int) -> LineFit:
    """A line over all layers from the samples of one: {"tokens": [...], "seconds": [...]}."""
    return fit_line(name, samples["tokens"], [layers * float(s) for s in samples["seconds"]])


def _grid(data: Mapping[str, Any], rows: str, columns: str) -> ComputeGrid:
    return ComputeGrid(
        tuple(map(float, data[rows])),
        tuple(map(float, data[columns])),
        tuple(tuple(map(float, row)) for row in data["seconds"]),
    )


def _attend(samples: Mapping[str, Any] | None, layers: int) -> LineFit | None:
    """CPU attention; a line too poor to plan with counts as not measured, and the CPU is not asked.

    The rest of the file is as good as it was.
    """
    if samples is None:
        return None
    try:
        line = _layers_line("CPU attention", samples, layers)
    except ValueError:
        return None
    return line if line.r2 >= LEAST_R2 else None


def as_measured(rates: PlanRates, model: str, device: str) -> dict[str, Any]:
    """Rates in the form of a measurement, for nodes that are known by formula alone.

    `rates_from_measured` gives them back, but for the points between those of the grid.
    """
    layers, sizes = rates.layers, (128, 512, 2048, 8192)
    new, context = (1, 16, 128, 512, 2048), (0, 2048, 8192, 32768)

    def line(fit: LineFit) -> dict[str, list[float]]:
        seconds = [(fit.fixed_s + fit.per_token_s * n) / layers for n in sizes]
        return {"tokens": [float(n) for n in sizes], "seconds": seconds}

    link = rates.h2d_bytes_per_s
    return {
        "format": FORMAT,
        "source": "law",
        "model": model,
        "device": device,
        "layers": layers,
        "kv_bytes_per_token": rates.kv_bytes,
        "activation_bytes_per_token": rates.activation_bytes,
        "weight_bytes": rates.weights_load_s * link,
        "overlap": rates.overlap,
        "load": line(rates.load),
        "project": line(rates.project),
        "grid": {
            "new_tokens": [float(n) for n in new],
            "context_tokens": [float(n) for n in context],
            "seconds": [[rates.prefill_s(n, s) for s in context] for n in new],
        },
        "h2d_bytes_per_s": link,
        "h2d_while_storing_bytes_per_s": link,
        "h2d_cpu_busy_bytes_per_s": link * rates.h2d_cpu_busy,
    }
