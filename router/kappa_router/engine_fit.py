"""The most probable constants of an engine, given observations of it, and how sure they are.

Observations are seconds that some work took, all sums of the same constants. Each constant is the
announced one times a log-normal multiple; noise has long tails (Student's t). Gauss-Newton finds
the most probable multiples; its curvature at the end says how sure they are. `router.calibration`
keeps the observations of a worker, calls this, and makes an `EngineSpeed` of the result, by which
the router predicts. Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa import step_seconds
from kappa.compiled import compiled, interpreted
from kappa.cost import QUESTION_TOKENS, StepLimit, StepModel, batch_work, least_ratio, transfer_s

# Of observations.
KINDS = STEP, LOAD, TTFT, GAP = 0, 1, 2, 3


class Observation(NamedTuple):
    """One timing observation: the `seconds` that the given work took. Omitted fields are zero."""

    # One of `KINDS`.
    kind: float
    seconds: float
    # The part of the seconds that teaches nothing.
    known_s: float = 0.0
    # The share of the seconds that something else may be to blame for.
    doubt: float = 0.0
    # Equal steps; tokens, pairs and reads of each (`kappa.cost.StepWork`).
    steps: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    reads: float = 0.0
    # Further steps, equal among themselves.
    mixed: float = 0.0
    mixed_tokens: float = 0.0
    mixed_pairs: float = 0.0
    mixed_reads: float = 0.0
    loads: float = 0.0
    load_tokens: float = 0.0
    # Of `load_tokens`, those that came from disk.
    disk_tokens: float = 0.0
    # Overheads in it, one a request.
    requests: float = 0.0
    # Its place in the order of arrival of its kind.
    number: float = 0.0
    # Not 0: it is from before a change.
    stale: float = 0.0


OBSERVATION = np.dtype([(name, np.float64) for name in Observation._fields])
# The constants, in this order, then the factors at steps of 1, 2, 4, ... tokens. The last two are
# shares, which stay as announced.
CONSTANTS = (
    "token_s", "pair_s", "weights_s", "context_token_s", "fixed_s", "load_token_s", "load_fixed_s",
    "overhead_s", "disk_token_s", "experts_s", "comm_token_s", "expert_idle", "exposed",
)  # fmt: skip
PARAMETERS = len(CONSTANTS) + step_seconds.FACTORS
FACTOR_WIDTH = 0.25
_TAIL = 4.0
_MOST_STEP = 1.0
_ITERATIONS = 8
_CONVERGED = 1e-3
_LEAST_S = 1e-9

Floats = NDArray[np.float64]
Observations = NDArray[np.void]
Places = NDArray[np.intp]
Work = list[tuple[int, int]]
"""A step's requests: the new tokens of each, and the tokens of its context before them."""

_factor = interpreted(step_seconds.factor)


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The speed of an engine: steps, link, token budget and VRAM, in real seconds."""

    step: StepModel
    load_token_s: float
    load_fixed_s: float
    budget_tokens: int
    capacity_tokens: int
    # As the `Announcement` has it, and so is `step_factor`.
    packs: bool = False
    # What a token on disk takes besides `load_token_s`.
    disk_token_s: float = 0.0
    # Logarithms of the seconds of a step of 1, 2, 4, ... tokens over those of `step`; empty: equal.
    factors: tuple[float, ...] = ()
    step_factor: float = 0.0
    # Requests that run at a time; 0: not known.
    max_sequences: int = 0

    def step_s(self, work: Sequence[tuple[float, float]]) -> float:
        """Real seconds of one step."""
        total = batch_work(work)
        seconds = self.step.work_s(total) * self.step.dilation
        return seconds * _factor(self.factors, total.tokens) if self.factors else seconds

    def most_tokens(
        self, decoding: Work, behind_tokens: int, left_tokens: int = 0, waited_s: float = 0.0
    ) -> int:
        """Tokens of a step, those that decode included, as `StepLimit.tokens` has them."""
        if not self.step_factor:
            return self.budget_tokens
        context = sum([context for _, context in decoding])
        limit = StepLimit(self.step, self.step_factor)
        most = limit.tokens(len(decoding), context, behind_tokens, left_tokens, waited_s)
        return int(min(most, self.budget_tokens))

    def load_s(self, tokens: float, disk_tokens: float = 0) -> float:
        """Real seconds of link time for `tokens`, some of them on disk; none costs nothing."""
        link_s = transfer_s(tokens, self.load_token_s, self.load_fixed_s)
        return link_s + min(disk_tokens, tokens) * self.disk_token_s


# Asked for at each scrape, and the same until something is learnt.
@functools.lru_cache(maxsize=1024)
def critical_ratio(speed: EngineSpeed) -> float:
    """The κ from which on a request of `QUESTION_TOKENS` is memory-bound on an idle engine;
    infinite where attention to a loaded token takes longer than its load."""

    def memory_bound(ratio: float) -> bool:
        cached = ratio * QUESTION_TOKENS
        return speed.load_s(cached) >= speed.step_s([(QUESTION_TOKENS, cached)])

    return least_ratio(memory_bound)


class Prior(NamedTuple):
    """The belief before any observation, shape (constants,) each."""

    # Seconds.
    values: Floats
    # A constant moves as if it were larger by this, lest one that was announced as 0 stay 0.
    floors: Floats
    # Standard deviation of the logarithm.
    widths: Floats
    # How far the logarithm may move.
    most: Floats


@compiled
def constants_of(theta: Floats, values: Floats, floors: Floats) -> Floats:
    """The constants in seconds, from the logarithms of their multiples."""
    out = np.empty(len(values))
    for k in range(len(values)):
        out[k] = max(values[k] + (values[k] + floors[k]) * math.expm1(theta[k]), 0.0)
    return out


@compiled
def _add_steps(
    count: float, work: tuple[float, float, float], theta: Floats, constants: Floats,
    slopes: Floats, gradient: Floats,
) -> float:  # fmt: skip
    """Seconds of `count` steps alike; what each parameter adds to them goes to `gradient`.

    slopes: of the constants, by the logarithms of their multiples.
    """
    tokens, pairs, reads = work
    gemm_s, attend_s, context_s = tokens * constants[0], pairs * constants[1], reads * constants[3]
    touched = 1.0 - constants[11] ** tokens if constants[9] > 0 else 0.0
    weights_s, exposed = constants[2] + constants[9] * touched, constants[12]
    low, share = step_seconds.place(step_seconds.FACTORS, tokens)
    first = len(constants) + low
    scale = count * math.exp((1 - share) * theta[first] + share * theta[first + 1])
    # `step_seconds.steps_s` by its parts, whose slopes are wanted, too.
    gemm, weights = (1.0, exposed) if gemm_s >= weights_s else (exposed, 1.0)
    beside_s = gemm * gemm_s + weights * weights_s + max(attend_s, context_s)
    seconds = scale * (beside_s + tokens * constants[10] + constants[4])
    gradient[0] += gemm * scale * tokens * slopes[0]
    gradient[2] += weights * scale * slopes[2]
    gradient[9] += weights * scale * touched * slopes[9]
    if attend_s >= context_s:
        gradient[1] += scale * pairs * slopes[1]
    else:
        gradient[3] += scale * reads * slopes[3]
    gradient[4] += scale * slopes[4]
    gradient[10] += scale * tokens * slopes[10]
    gradient[first] += (1 - share) * seconds
    gradient[first + 1] += share * seconds
    return seconds


@compiled
def _seconds(row: Any, theta: Floats, constants: Floats, slopes: Floats, gradient: Floats) -> float:
    """Expected seconds of an observation; `gradient` is filled in."""
    gradient[:] = 0.0
    seconds = row.known_s
    if row.steps > 0:
        work = (row.tokens, row.pairs, row.reads)
        seconds += _add_steps(row.steps, work, theta, constants, slopes, gradient)
    if row.mixed > 0:
        work = (row.mixed_tokens, row.mixed_pairs, row.mixed_reads)
        seconds += _add_steps(row.mixed, work, theta, constants, slopes, gradient)
    seconds += row.load_tokens * constants[5] + row.loads * constants[6]
    seconds += row.requests * constants[7] + row.disk_tokens * constants[8]
    gradient[5] += row.load_tokens * slopes[5]
    gradient[6] += row.loads * slopes[6]
    gradient[7] += row.requests * slopes[7]
    gradient[8] += row.disk_tokens * slopes[8]
    return seconds


@compiled
def _slopes(theta: Floats, values: Floats, floors: Floats) -> Floats:
    """Slopes of the constants by the logarithms of their multiples."""
    out = np.empty(len(values))
    for k in range(len(values)):
        moved = (values[k] + floors[k]) * math.exp(theta[k])
        # One that is nothing, and would be less, hardly moves.
        out[k] = moved if moved > floors[k] else 0.5 * moved
    return out


def _variance_of_arrays(gradient: Floats, covariance: Floats) -> float:
    return float(gradient @ covariance @ gradient)


@partial(compiled, plain=_variance_of_arrays)
def _variance(gradient: Floats, covariance: Floats) -> float:
    variance = 0.0
    for a in range(len(gradient)):
        for b in range(len(gradient)):
            variance += gradient[a] * covariance[a, b] * gradient[b]
    return variance


@compiled
def expected(
    rows: Observations, theta: Floats, covariance: Floats, values: Floats, floors: Floats
) -> tuple[Floats, Floats]:
    """Seconds that each of `rows` should take, and their standard deviation."""
    constants, slopes = constants_of(theta, values, floors), _slopes(theta, values, floors)
    seconds, deviations = np.empty(len(rows)), np.empty(len(rows))
    gradient = np.empty(len(theta))
    for i in range(len(rows)):
        seconds[i] = max(_seconds(rows[i], theta, constants, slopes, gradient), _LEAST_S)
        deviations[i] = math.sqrt(max(_variance(gradient, covariance), 0.0))
    return seconds, deviations


def _add_observation_of_arrays(
    gradient: Floats, expected_s: float, weight: float, error: float, slope: Floats,
    curvature: Floats,
) -> None:  # fmt: skip
    share = gradient / expected_s
    slope += weight * error * share
    curvature += weight * np.outer(share, share)


@partial(compiled, plain=_add_observation_of_arrays)
def _add_observation(
    gradient: Floats, expected_s: float, weight: float, error: float, slope: Floats,
    curvature: Floats,
) -> None:  # fmt: skip
    """Add an observation's part to slope and lower triangle of the curvature."""
    for a in range(len(gradient)):
        if gradient[a] != 0.0:
            at = weight * gradient[a] / expected_s
            slope[a] += at * error
            for b in range(a + 1):
                if gradient[b] != 0.0:
                    curvature[a, b] += at * gradient[b] / expected_s


@compiled
def _equations(
    rows: Observations, theta: Floats, prior: Prior, noise: Floats, weights: Floats
) -> tuple[Floats, Floats]:
    """Curvature and slope of the logarithm of the probability at `theta`."""
    values, floors, widths, _ = prior
    total = len(theta)
    gradient, slope = np.empty(total), np.empty(total)
    curvature = np.zeros((total, total))
    constants, slopes = constants_of(theta, values, floors), _slopes(theta, values, floors)
    for k in range(total):
        curvature[k, k] = 1 / widths[k] ** 2
        slope[k] = -theta[k] * curvature[k, k]
    for i in range(len(rows)):
        row = rows[i]
        expected_s = max(_seconds(row, theta, constants, slopes, gradient), _LEAST_S)
        error = math.log(row.seconds / expected_s)
        deviation = noise[int(row.kind)] + row.doubt
        spread = error / deviation
        weight = weights[i] * (_TAIL + 1) / (_TAIL + spread * spread) / (deviation * deviation)
        _add_observation(gradient, expected_s, weight, error, slope, curvature)
    for a in range(total):
        for b in range(a):
            curvature[b, a] = curvature[a, b]
    return curvature, slope


@compiled
def _moved(theta: Floats, change: Floats, most: Floats) -> bool:
    """Move `theta`, no further than it may go; whether there was hardly anything to move."""
    largest = 0.0
    for k in range(len(theta)):
        largest = max(largest, abs(change[k]))
    share = min(1.0, _MOST_STEP / max(largest, _MOST_STEP))
    for k in range(len(theta)):
        at = theta[k] + change[k] * share
        # NaN is left as it is; the caller checks.
        if at > most[k]:
            at = most[k]
        elif at < -most[k]:
            at = -most[k]
        theta[k] = at
    return largest < _CONVERGED


def fit(rows: Observations, theta: Floats, prior: Prior, noise: Floats, weights: Floats) -> Floats:
    """Move `theta` to the most probable parameters; returns their covariance.

    noise: standard deviation of the logarithm of each kind's seconds; weights: of each row.
    """
    before = np.zeros_like(theta)
    for _ in range(_ITERATIONS):
        curvature, slope = _equations(rows, theta, prior, noise, weights)
        change: Floats = np.linalg.solve(curvature, slope).astype(np.float64, copy=False)
        # Where a maximum has its corner, steps would go there and back for ever.
        if np.dot(change, before) < 0:
            change = 0.5 * change
        before = change
        if _moved(theta, change, prior.most):
            break
    covariance: Floats = np.linalg.inv(curvature).astype(np.float64, copy=False)
    return covariance


# -- how far off they are -------------------------------------------------------------------------


class Observed(NamedTuple):
    """The observations of a worker, copied from the places where they are kept."""

    rows: Observations
    # How many of its kind came after each, shape (rows,).
    later: Floats
    # The row of each place, -1 where it is empty, shape (places,).
    places: Places


@compiled
def observed(rows: Observations, counts: Floats, scale: float) -> Observed:
    """The rows that hold an observation. Their waiting is as long as `scale` makes it, which is
    learnt over announced seconds now.

    counts: observations of each kind so far.
    """
    places, found = np.full(len(rows), -1), 0
    for i in range(len(rows)):
        if rows[i].seconds > 0:
            places[i], found = found, found + 1
    kept, later = rows[:found].copy(), np.empty(found)
    for i in range(len(rows)):
        if places[i] >= 0:
            kept[places[i]] = rows[i]
            row = kept[places[i]]
            row.known_s = min(row.known_s * scale, 0.9 * row.seconds)
            later[places[i]] = counts[int(row.kind)] - row.number
    return Observed(kept, later, places)


@compiled
def _ratios(rows: Observations, theta: Floats, values: Floats, floors: Floats) -> Floats:
    """Observed over expected seconds."""
    out, gradient = np.empty(len(rows)), np.empty(len(theta))
    constants, slopes = constants_of(theta, values, floors), _slopes(theta, values, floors)
    for i in range(len(rows)):
        expected_s = _seconds(rows[i], theta, constants, slopes, gradient)
        out[i] = rows[i].seconds / max(expected_s, _LEAST_S)
    return out


def errors_of(rows: Observations, theta: Floats, prior: Prior) -> Floats:
    """Logarithms of observed over expected seconds."""
    errors: Floats = np.log(_ratios(rows, theta, prior.values, prior.floors))
    return errors


@compiled
def middle(values: Floats) -> float:
    """The median of at least one value."""
    ordered, half = np.sort(values), len(values) // 2
    return 0.5 * (ordered[len(values) - 1 - half] + ordered[half])


@compiled
def spreads(rows: Observations, errors: Floats) -> tuple[Floats, Floats]:
    """Counts of observations since the last change, by kind, and the median distance of their
    errors from their median: an error that all share is still to be learnt, and no noise."""
    counts, medians, own = np.zeros(len(KINDS)), np.zeros(len(KINDS)), np.empty(len(rows))
    for kind in range(len(KINDS)):
        found = 0
        for i in range(len(rows)):
            if rows[i].kind == kind and rows[i].stale == 0:
                own[found], found = errors[i], found + 1
        if found:
            counts[kind] = found
            medians[kind] = middle(np.abs(own[:found] - middle(own[:found])))
    return counts, medians
