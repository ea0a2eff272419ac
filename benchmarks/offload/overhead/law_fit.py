"""Node constants from measured TTFTs, by robust regression that knows the model and not the node.

TTFT = a + f·[host] + p·C + μ·C·[host] + max(φ·N + α·N·(C + N/2), q·(weights + KV read)), where
[host] marks the host arm and C is 0 in the arm of new tokens only. Without the arms' marks these
are the terms 1, N, N·C and C; the arms keep apart what one of them alone would lump together: the
link's seconds (μ, f) and the engine's own handling of a long prompt (p). Which requests are bound
by FLOPs and which by reading the weights is decided by the data. Pure; called by `result`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.offload.overhead.points import Sample
from kappa.model import ModelShape, attention_flops, kv_bytes_per_token, weight_read_bytes

Floats = NDArray[np.float64]

TERMS = ("fixed", "load_fixed", "prompt_token", "load_token", "new_token", "pair", "read_byte")
"""Names of the coefficients, seconds each: of a request, a load, a prompt token, and so on."""

_FLOP_TERMS, _READ_TERM = (4, 5), 6
_HUBER = 1.345  # 95 % as efficient as least squares on normal noise
_MAD = 1.4826  # from median absolute deviation to standard deviation


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the fit may know: FLOPs of a new token and of a query-key pair, KV and weight bytes."""

    token_flops: float
    pair_flops: float
    kv_token_bytes: float
    weight_bytes: float

    @classmethod
    def of(cls, shape: ModelShape) -> ModelFacts:
        """The facts of a dense model with ordinary attention.

        Raises:
            ValueError: a model whose FLOPs are not lines in N and N·C (experts, MLA).
        """
        if shape.attention == "mla" or shape.experts > shape.experts_active:
            raise ValueError(
                f"{shape.name}: the microbenchmark fits dense models with ordinary attention; "
                "with experts or MLA, time is no line in N and N·C"
            )
        # Of a pair: slope of the attention's FLOPs in the context, for one new token.
        pair = attention_flops(shape, 1.0, 1.0) - attention_flops(shape, 1.0, 0.0)
        return cls(
            2.0 * shape.params_active, pair, kv_bytes_per_token(shape),
            weight_read_bytes(shape, 1.0),
        )  # fmt: skip


class Estimate(NamedTuple):
    """A value, its 95 % confidence interval over requests, its range when any point is left out."""

    value: float
    low: float
    high: float
    left_out_low: float
    left_out_high: float


@dataclass(frozen=True, slots=True)
class LawFit:
    """What a node was found to do.

    constants: by name, rates in bytes/s and FLOP/s, the rest in seconds and κ; hbm_bytes_per_s is
    absent if no point was bound by reading. seconds: the coefficients by `TERMS`, with nan where
    absent. r_squared: of single requests; cells_r_squared: of the medians of point and arm.
    read_bound: the points, by "N:C", found bound by reading in any arm.
    """

    constants: Mapping[str, Estimate]
    seconds: Floats
    r_squared: float
    cells_r_squared: float
    read_bound: tuple[str, ...]
    facts: ModelFacts

    def predict(self, samples: Sequence[Sample]) -> Floats:
        """TTFT in seconds that the fit gives each request."""
        design = _design(samples, self.facts)
        return _predict(design, self.seconds)


def fit_law(
    samples: Sequence[Sample], facts: ModelFacts, seed: int = 0, resamples: int = 300
) -> LawFit:
    """Fit the law to one node's requests.

    Args:
        samples: of several points and all three arms, faulty ones left out; TTFTs undilated.
        facts: of the model; nothing about the node is told.
        seed: of the resampling behind the confidence intervals.
        resamples: how often requests are drawn again for them.

    Raises:
        ValueError: too few points to tell the terms apart.
    """
    design = _design(samples, facts)
    ttft_s = np.array([sample.ttft_s for sample in samples])
    read = _regime(design, ttft_s)
    seconds = _solve(design, ttft_s, read)
    cells = _cells(samples)
    rng = np.random.default_rng(seed)
    resampled = [_again(design, ttft_s, read, cells, rng) for _ in range(resamples)]
    left_out = _left_out(samples, design, ttft_s, read)
    fitted_s = _predict(design, seconds)
    medians = np.array([(np.median(ttft_s[i]), np.median(fitted_s[i])) for i in cells])
    return LawFit(
        _constants(seconds, resampled, left_out, facts),
        seconds,
        _r_squared(ttft_s, fitted_s),
        _r_squared(medians[:, 0], medians[:, 1]),
        tuple(dict.fromkeys(str(s.point) for s, bound in zip(samples, read, strict=True) if bound)),
        facts,
    )


def one_arm_rates(samples: Sequence[Sample], fit: LawFit) -> tuple[float, float]:
    """Link bytes/s and FLOP/s from the host arm alone, regressed on 1, N, N·(C + N/2) and C.

    What a published measurement without the other arms can do: the engine's handling of a long
    prompt then counts as link time. Points that `fit` found bound by reading are left out.
    """
    chosen = [s for s in samples if s.arm == "host" and str(s.point) not in fit.read_bound]
    new = np.array([s.point.new_tokens for s in chosen], dtype=float)
    cached = np.array([s.point.cached_tokens for s in chosen], dtype=float)
    design = np.column_stack([np.ones_like(new), new, new * (cached + new / 2), cached])
    _, new_s, _, cached_s = _robust(design, np.array([s.ttft_s for s in chosen]))
    return _rate(fit.facts.kv_token_bytes, cached_s), _rate(fit.facts.token_flops, new_s)


# -- the regression --------------------------------------------------------------------------------


def _design(samples: Sequence[Sample], facts: ModelFacts) -> Floats:
    """All terms' amounts, one row per request; a regime uses either FLOPs or bytes read."""
    new = np.array([s.point.new_tokens for s in samples], dtype=float)
    held = np.array([s.point.cached_tokens * (s.arm != "new") for s in samples], dtype=float)
    host = np.array([s.arm == "host" for s in samples], dtype=float)
    read_bytes = facts.weight_bytes + facts.kv_token_bytes * (new + held)
    pairs = new * (held + new / 2)
    return np.column_stack([np.ones_like(new), host, held, held * host, new, pairs, read_bytes])


def _in_regime(design: Floats, read: NDArray[np.bool_]) -> Floats:
    active = design.copy()
    for term in _FLOP_TERMS:
        active[read, term] = 0.0
    active[~read, _READ_TERM] = 0.0
    return active


def _solve(
    design: Floats, ttft_s: Floats, read: NDArray[np.bool_], checked: bool = False
) -> Floats:
    """Coefficients by `TERMS`; nan for reading where nothing is bound by it."""
    active = _in_regime(design, read)
    used = list(range(len(TERMS))) if read.any() else list(range(_READ_TERM))
    columns = active[:, used]
    if not checked and _rank(columns) < len(used):
        raise ValueError(
            "the points cannot tell the law's terms apart: measure all three arms at four points "
            "or more that are bound by FLOPs, with several values of N and of C"
        )
    seconds = np.full(len(TERMS), np.nan)
    seconds[used] = _robust(columns, ttft_s)
    return seconds


def _rank(columns: Floats) -> int:
    """Of columns made comparable: a condition number worse than 1e8 counts as a loss."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    return int(np.linalg.matrix_rank(columns / scale, tol=1e-8 * math.sqrt(len(columns))))


def _robust(design: Floats, ttft_s: Floats) -> Floats:
    """Huber's M-estimate by reweighted least squares, columns scaled for condition."""
    scale = np.abs(design).max(axis=0)
    scaled = design / scale
    weights = np.ones(len(ttft_s))
    seconds = np.zeros(design.shape[1])
    for _ in range(50):
        weighted = scaled * weights[:, None]
        found = np.linalg.solve(weighted.T @ scaled, weighted.T @ ttft_s)
        residual = ttft_s - scaled @ found
        spread_s = _MAD * np.median(np.abs(residual))
        moved_s = np.abs(found - seconds).max()
        if moved_s <= 1e-6 * np.abs(found).max() or spread_s == 0:
            return found / scale
        seconds = found
        distance = np.abs(residual) / spread_s
        weights = np.minimum(1.0, _HUBER / np.maximum(distance, 1e-12))
    return seconds / scale


def _predict(design: Floats, seconds: Floats) -> Floats:
    flop_s = design[:, _FLOP_TERMS] @ seconds[list(_FLOP_TERMS)]
    read_s = np.nan_to_num(seconds[_READ_TERM]) * design[:, _READ_TERM]
    return design[:, :4] @ seconds[:4] + np.maximum(flop_s, read_s)


def _regime(design: Floats, ttft_s: Floats) -> NDArray[np.bool_]:
    """Which requests are bound by reading: of the consistent answers, the one that fits best.

    Requests with few new tokens are candidates, by every threshold; an answer is consistent if the
    larger of the two times that it yields is the one that it assumed.
    """
    new = design[:, _FLOP_TERMS[0]]
    best, best_score = np.zeros(len(ttft_s), dtype=bool), math.inf
    for least in np.unique(new):
        read = new < least
        with_floor = _consistent(design, ttft_s, read)
        if with_floor is None:
            continue
        read, seconds = with_floor
        residual = np.abs(ttft_s - _predict(design, seconds))
        parameters = len(TERMS) - int(not read.any())
        count = len(ttft_s)
        # Bayesian information, by mean absolute deviation (Laplace), so outliers weigh little.
        score = 2 * count * math.log(max(residual.mean(), 1e-15)) + parameters * math.log(count)
        if score < best_score:
            best, best_score = read, score
    return best


def _consistent(
    design: Floats, ttft_s: Floats, read: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], Floats] | None:
    for _ in range(10):
        try:
            seconds = _solve(design, ttft_s, read)
        except ValueError:
            return None
        if not read.any():
            return read, seconds
        flop_s = design[:, _FLOP_TERMS] @ seconds[list(_FLOP_TERMS)]
        found = flop_s < seconds[_READ_TERM] * design[:, _READ_TERM]
        if (found == read).all():
            return read, seconds
        read = found
    return None


# -- how sure it is --------------------------------------------------------------------------------


def _cells(samples: Sequence[Sample]) -> list[NDArray[np.intp]]:
    rows: dict[object, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault((sample.point, sample.arm), []).append(row)
    return [np.array(found) for found in rows.values()]


def _again(
    design: Floats,
    ttft_s: Floats,
    read: NDArray[np.bool_],
    cells: Sequence[NDArray[np.intp]],
    rng: np.random.Generator,
) -> Floats:
    """Coefficients of requests drawn again, as many of each point and arm as there were."""
    rows = np.concatenate([rng.choice(cell, size=len(cell)) for cell in cells])
    return _solve(design[rows], ttft_s[rows], read[rows], checked=True)


def _left_out(
    samples: Sequence[Sample], design: Floats, ttft_s: Floats, read: NDArray[np.bool_]
) -> list[Floats]:
    """Coefficients without each of the points that can be spared."""
    found = []
    for point in dict.fromkeys(sample.point for sample in samples):
        kept = np.array([sample.point != point for sample in samples])
        try:
            found.append(_solve(design[kept], ttft_s[kept], read[kept]))
        except ValueError:
            continue
    return found


def _constants(
    seconds: Floats, resampled: Sequence[Floats], left_out: Sequence[Floats], facts: ModelFacts
) -> dict[str, Estimate]:
    values = _named(seconds, facts)
    drawn = [_named(one, facts) for one in resampled]
    without = [_named(one, facts) for one in left_out]
    found = {}
    for name, value in values.items():
        # "lower" and "higher" pick drawn values, so that an infinite one stays one.
        spread = np.array([one[name] for one in drawn if name in one])
        others = [one[name] for one in without if name in one] or [math.nan]
        found[name] = Estimate(
            value, float(np.quantile(spread, 0.025, method="lower")),
            float(np.quantile(spread, 0.975, method="higher")), min(others), max(others),
        )  # fmt: skip
    return found


def _named(seconds: Floats, facts: ModelFacts) -> dict[str, float]:
    of = dict(zip(TERMS, seconds.tolist(), strict=True))
    named = {
        "link_bytes_per_s": _rate(facts.kv_token_bytes, of["load_token"]),
        "flops_per_s": _rate(facts.token_flops, of["new_token"]),
        "attention_flops_per_s": _rate(facts.pair_flops, of["pair"]),
        "kappa_crit": _rate(of["new_token"], of["load_token"]),
        "request_fixed_s": of["fixed"],
        "load_fixed_s": of["load_fixed"],
        "prompt_token_s": of["prompt_token"],
    }
    if not math.isnan(of["read_byte"]):
        named["hbm_bytes_per_s"] = _rate(1.0, of["read_byte"])
    return named


def _rate(amount: float, seconds: float) -> float:
    """Infinite where noise made it take no time or less."""
    return amount / seconds if seconds > 0 else math.inf


def _r_squared(values: Floats, fitted: Floats) -> float:
    spread = float(((values - values.mean()) ** 2).sum())
    return 1.0 - float(((values - fitted) ** 2).sum()) / spread if spread else math.nan
