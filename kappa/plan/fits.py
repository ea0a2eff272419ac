"""What is fitted to measurements before anything is planned: lines in tokens, and a grid of steps.

HybridServe (Section 4.3) plans on two least-squares lines, seconds to load and to project n tokens,
and trusts them because R² is 0.99; here a line below `LEAST_R2` is refused by name. The seconds of
a prefill step are no line: they are measured on a grid of new and context tokens, read between its
points, and carried on beyond it by the law of `kappa.cost`, fitted to the same grid.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from kappa.cost import StepModel, chunk_work, transfer_s

LEAST_R2 = 0.98
"""Below this a line says too little of what it was fitted to; the paper's have 0.99."""

# A step counts as compute-bound where it lasts this much longer than the reads beneath it.
_ABOVE_FLOOR = 1.5
_LEAST_POINTS = 4


@dataclass(frozen=True, slots=True)
class LineFit:
    """Seconds of n tokens: `per_token_s`·n + `fixed_s` for n > 0, nothing for none.

    `r2` is the share of the samples' variance that the line explains; 1 for one from the law.
    """

    name: str
    per_token_s: float
    fixed_s: float = 0.0
    r2: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a line that cannot be seconds.

        Raises:
            ValueError: names the fit, the figure, and what to do.
        """
        if not (math.isfinite(self.per_token_s) and self.per_token_s > 0):
            raise ValueError(
                f"the {self.name} fit has {self.per_token_s} seconds per token: time must grow "
                "with tokens; measure larger sizes"
            )
        if not (math.isfinite(self.fixed_s) and self.fixed_s >= 0 and self.r2 <= 1.0):
            raise ValueError(
                f"the {self.name} fit has fixed_s {self.fixed_s} and R² {self.r2}: "
                "give a fixed cost of 0 or more and an R² of 1 or less"
            )

    def seconds(self, tokens: float) -> float:
        """Seconds of `tokens`; zero for none."""
        return transfer_s(tokens, self.per_token_s, self.fixed_s)

    def scaled(self, factor: float) -> LineFit:
        """The same line where each token takes `factor` times as long."""
        return LineFit(self.name, self.per_token_s * factor, self.fixed_s, self.r2)


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


def require_fit(fit: LineFit) -> LineFit:
    """The fit itself, if it can be planned with.

    Raises:
        ValueError: its R² is below `LEAST_R2`; names the fit.
    """
    if not fit.r2 >= LEAST_R2:
        raise ValueError(
            f"the {fit.name} fit has R² {fit.r2:.3f}, below {LEAST_R2}: "
            "measure again on an idle machine, or with larger sizes"
        )
    return fit


@dataclass(frozen=True, slots=True)
class ComputeGrid:
    """Measured seconds of a prefill step of T new tokens behind S context tokens.

    `seconds[i][j]` belongs to `new_tokens[i]` and `context_tokens[j]`; both axes ascend.
    """

    new_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Refuse axes that do not ascend and a table that does not fit them.

        Raises:
            ValueError: names what is wrong.
        """
        for name in ("new_tokens", "context_tokens"):
            axis = getattr(self, name)
            if len(axis) < 2 or any(b <= a for a, b in pairwise(axis)):
                raise ValueError(f"ComputeGrid.{name} is {axis}: give two ascending values or more")
        shape = [len(row) for row in self.seconds]
        if shape != [len(self.context_tokens)] * len(self.new_tokens):
            raise ValueError(
                f"ComputeGrid.seconds has rows of {shape}: give {len(self.new_tokens)} rows "
                f"of {len(self.context_tokens)}"
            )
        if not all(math.isfinite(v) and v > 0 for row in self.seconds for v in row):
            raise ValueError("ComputeGrid.seconds: give finite times above zero")

    def clamp(self, new_tokens: float, context_tokens: float) -> tuple[float, float]:
        """The nearest point that the grid covers."""
        return (
            min(max(new_tokens, self.new_tokens[0]), self.new_tokens[-1]),
            min(max(context_tokens, self.context_tokens[0]), self.context_tokens[-1]),
        )

    def seconds_at(self, new_tokens: float, context_tokens: float) -> float:
        """Seconds, bilinear between the points; beyond the edge those of the edge."""
        new_tokens, context_tokens = self.clamp(new_tokens, context_tokens)
        i, u = _cell(self.new_tokens, new_tokens)
        j, v = _cell(self.context_tokens, context_tokens)
        low, high = self.seconds[i], self.seconds[i + 1]
        below = low[j] * (1 - v) + low[j + 1] * v
        above = high[j] * (1 - v) + high[j + 1] * v
        return below * (1 - u) + above * u


def _cell(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """Index of the cell that holds `value`, and how far into it (0 to 1)."""
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def fit_step(grid: ComputeGrid) -> StepModel:
    """The law of a step that comes nearest to a measured grid.

    The row of fewest new tokens gives the reads: weights, and KV per context token. A fixed cost,
    GEMM seconds per token and attention seconds per pair are fitted, in relative error, to the
    steps that last well longer than those reads (to all, where hardly any does). No constant is
    below zero.
    """
    context = np.asarray(grid.context_tokens)
    least_new = grid.new_tokens[0]
    columns = np.stack([np.ones_like(context), context + least_new], axis=1)
    weights_s, context_s = _not_negative(columns, np.asarray(grid.seconds[0]))
    points = np.array(
        [
            (t, s, grid.seconds[i][j])
            for i, t in enumerate(grid.new_tokens)
            for j, s in enumerate(grid.context_tokens)
        ]
    )
    t, s, y = points.T
    bound = y > _ABOVE_FLOOR * (weights_s + context_s * (s + t))
    if bound.sum() < _LEAST_POINTS:
        bound[:] = True
    columns = np.stack([np.ones_like(t), t, chunk_work(t, s).pairs], axis=1) / y[:, None]
    fixed_s, token_s, pair_s = _not_negative(columns[bound], np.ones(int(bound.sum())))
    # Both sides of the law's maximum carry the fixed cost; the reads were fitted with it inside.
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
