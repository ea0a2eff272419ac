"""What is learnt of one worker: its engine's constants, and how long streams are.

Every kind of worker is learnt alike. Ours report steps and loads; of an engine that reports nothing
there are the times to first tokens, and between tokens. Each is an observation: so many seconds
for so much work. All are sums of the same constants, so one estimate takes them all: the most
probable multiples of the announced constants (their logarithms are normal), under noise with long
tails (Student's t), by Gauss-Newton. What physics does not explain (tiles, padding, experts) is a
factor by the tokens of a step, near 1 unless many observations say otherwise. The curvature at the
end says how sure it is.

The latest few observations of each kind and size are kept, so that the many steps that decode do
not push out the few that prefill. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from kappa.cost import chunk_work
from kappa.protocol import Announcement, WorkerReport
from router.engine_queue import EngineSpeed
from router.fleet import Certainty, Flight

# Kinds of observations.
STEP, LOAD, TTFT, GAP = range(4)


class Observation(NamedTuple):
    """So many seconds for so much work; what is not given is nothing.

    steps: alike, of so many tokens, pairs and reads each (`kappa.cost.StepWork`), and `mixed`
    others; loads and their tokens, of which some from disk; requests: overheads in it; known_s:
    part of the seconds that teaches nothing. doubt: share of the seconds that something else may be
    to blame for. number: in the order of arrival of its kind. stale: from before a change, not 0.
    """

    kind: float
    seconds: float
    known_s: float = 0.0
    doubt: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    reads: float = 0.0
    mixed: float = 0.0
    mixed_tokens: float = 0.0
    mixed_pairs: float = 0.0
    mixed_reads: float = 0.0
    loads: float = 0.0
    load_tokens: float = 0.0
    disk_tokens: float = 0.0
    requests: float = 0.0
    number: float = 0.0
    stale: float = 0.0


OBSERVATION = np.dtype([(name, np.float64) for name in Observation._fields])
# The constants, in this order, then the factors at steps of 1, 2, 4, ... tokens.
CONSTANTS = (
    "token_s", "pair_s", "weights_s", "context_token_s", "fixed_s", "load_token_s", "load_fixed_s",
    "overhead_s", "disk_token_s",
)  # fmt: skip
FACTORS = 14
PARAMETERS = len(CONSTANTS) + FACTORS
FACTOR_WIDTH = 0.25
_TAIL = 4.0
_MOST_STEP = 1.0
_ITERATIONS = 8
_CONVERGED = 1e-3
_LEAST_S = 1e-9

Floats = NDArray[np.float64]
Observations = NDArray[np.void]


class Prior(NamedTuple):
    """What is believed before anything was observed, shape (constants,) each.

    values: seconds. floors: a constant moves as if it were larger by so much, lest one that was
    announced as nothing stay nothing. widths: standard deviation of the logarithm. most: how far
    the logarithm may move.
    """

    values: Floats
    floors: Floats
    widths: Floats
    most: Floats


@compiled
def constants_of(theta: Floats, values: Floats, floors: Floats) -> Floats:
    """The constants in seconds, from the logarithms of their multiples."""
    out = np.empty(len(values))
    for k in range(len(values)):
        out[k] = max(values[k] + (values[k] + floors[k]) * math.expm1(theta[k]), 0.0)
    return out


@compiled
def place(tokens: float) -> tuple[int, float]:
    """Between which factors a step of so many tokens lies: the first, and the share of the next."""
    x = math.log2(max(tokens, 1.0))
    low = min(int(x), FACTORS - 2)
    return low, min(x - low, 1.0)


@compiled
def _add_steps(
    count: float, work: tuple[float, float, float], theta: Floats, constants: Floats,
    slopes: Floats, gradient: Floats,
) -> float:  # fmt: skip
    """Seconds of `count` steps alike; what each parameter adds to them goes to `gradient`.

    slopes: of the constants, by the logarithms of their multiples.
    """
    tokens, pairs, reads = work
    compute_s = tokens * constants[0] + pairs * constants[1]
    read_s = constants[2] + reads * constants[3]
    low, share = place(tokens)
    first = len(constants) + low
    scale = count * math.exp((1 - share) * theta[first] + share * theta[first + 1])
    seconds = scale * (max(compute_s, read_s) + constants[4])
    if compute_s >= read_s:
        gradient[0] += scale * tokens * slopes[0]
        gradient[1] += scale * pairs * slopes[1]
    else:
        gradient[2] += scale * slopes[2]
        gradient[3] += scale * reads * slopes[3]
    gradient[4] += scale * slopes[4]
    gradient[first] += (1 - share) * seconds
    gradient[first + 1] += share * seconds
    return seconds


@compiled
def _seconds(row: Any, theta: Floats, constants: Floats, slopes: Floats, gradient: Floats) -> float:
    """What an observation should have taken; `gradient` is filled in."""
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
    """Of the constants, by the logarithms of their multiples."""
    out = np.empty(len(values))
    for k in range(len(values)):
        moved = (values[k] + floors[k]) * math.exp(theta[k])
        # One that is nothing, and would be less, hardly moves.
        out[k] = moved if moved > floors[k] else 0.5 * moved
    return out


@compiled
def expected(
    rows: Observations, theta: Floats, values: Floats, floors: Floats
) -> tuple[Floats, Floats]:
    """Seconds that each of `rows` should have taken, and how much each parameter adds to them:
    shapes (rows,) and (rows, parameters)."""
    constants, slopes = constants_of(theta, values, floors), _slopes(theta, values, floors)
    seconds, gradients = np.empty(len(rows)), np.empty((len(rows), len(theta)))
    for i in range(len(rows)):
        found = _seconds(rows[i], theta, constants, slopes, gradients[i])
        seconds[i] = max(found, _LEAST_S)
    return seconds, gradients


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
        for a in range(total):
            if gradient[a] != 0.0:
                at = weight * gradient[a] / expected_s
                slope[a] += at * error
                for b in range(a + 1):
                    curvature[a, b] += at * gradient[b] / expected_s
    for a in range(total):
        for b in range(a):
            curvature[b, a] = curvature[a, b]
    return curvature, slope


def fit(rows: Observations, theta: Floats, prior: Prior, noise: Floats, weights: Floats) -> Floats:
    """Move `theta` to the most probable parameters; returns their covariance.

    noise: standard deviation of the logarithm of each kind's seconds; weights: of each row.
    """
    for _ in range(_ITERATIONS):
        curvature, slope = _equations(rows, theta, prior, noise, weights)
        change = np.linalg.solve(curvature, slope)
        largest = float(np.abs(change).max())
        theta += change * min(1.0, _MOST_STEP / max(largest, _MOST_STEP))
        np.clip(theta, -prior.most, prior.most, out=theta)
        if largest < _CONVERGED:
            break
    covariance: Floats = np.linalg.inv(curvature).astype(np.float64)
    return covariance


# -- one worker ---------------------------------------------------------------------------------

# Of each kind: observations kept of each size (a power of two), and the least noise in the
# logarithm of their seconds.
_SIZES = 14
_KEPT = {STEP: 8, LOAD: 4, TTFT: 6, GAP: 3}
_LEAST_NOISE = (0.05, 0.05, 0.1, 0.1)
# Noise is thought to be so much, as if so many observations had shown it; at most so much.
_FIRST_NOISE, _FIRST_COUNT, _MOST_NOISE = 0.3, 8, 3.0
# A normal sample's standard deviation over its median distance from the middle.
_MEDIAN_TO_SD = 1.48
# An observation counts half after so many later ones of its kind; from before a change hardly.
_HALF_LIFE = 200.0
_STALE = 0.03
# The engine changed if so many in a row are this far off in the middle (logarithm), and beyond so
# many times the noise; after that many of their kind.
_RUN, _CHANGED, _CLEARLY, _SETTLED = 6, 0.2, 2.5, 24
# What changes with a kind.
_FOLLOW = {STEP: (STEP, TTFT, GAP), LOAD: (LOAD, TTFT), TTFT: (TTFT, GAP), GAP: (GAP, TTFT)}
# Reports are not believed if first tokens, so many at least, are further off with them (in the
# middle, logarithm) than this, and than without by so much.
_JUDGES, _WRONG, _WORSE = 5, 0.3, 0.1
# Fits are so many observations apart, and so many seconds, once there are many.
_FEW, _SOME, _REFIT_S = 64, 8, 1.0
_LEAST_TOKENS = 8
_MOST_OVERHEAD_S = 2.0
# What is announced is off by such a factor (one standard deviation), by less where a pace keeps it;
# of the overhead nothing is announced.
_WIDTH, _PACED_WIDTH, _OVERHEAD_WIDTH = 3.0, 1.5, 30.0
# A constant may be this many times what was announced, or its inverse; beside a server for KV.
_MOST_MULTIPLE, _SERVER_MULTIPLE, _MOST_FACTOR = 100.0, 1000.0, 4.0
# Seconds by which a constant that was announced as nothing is thought larger; see `Prior`.
_FLOORS = (1e-8, 1e-13, 1e-4, 1e-10, 5e-4, 1e-9, 5e-4, 5e-3, 1e-9)
_SHORTEST_S, _LONGEST_S, _MOST_WORK = 1e-7, 1e5, 1e15
# A prompt or load of so many tokens shows what was learnt.
_SHOWN_TOKENS = 2048.0
_OUTPUTS_KEPT = 256
_DEFAULT_OUTPUT_TOKENS = 128

_STEP_CONSTANTS = CONSTANTS[:5]


class Calibration:
    """The constants of one worker's engine, and how sure they are.

    speed, overhead_s: what predictions use; the overhead is what a request costs besides the
    engine (HTTP, Ray, tokens on the way). link_scale, compute_scale: learnt over announced seconds
    of a load, and of a prompt, of 2,048 tokens; certainty: how sure they are. believed: the
    worker's reports agree with first tokens.
    """

    def __init__(self, announced: Announcement, overhead_s: float = 0.0) -> None:
        self._announced = announced
        self._prior = _prior(announced, overhead_s)
        self._theta = np.zeros(PARAMETERS)
        self._noise = np.full(len(_KEPT), _FIRST_NOISE)
        self._starts: dict[int, int] = {}
        capacity = 0
        for kind, kept in _KEPT.items():
            self._starts[kind], capacity = capacity, capacity + kept * _SIZES
        self._rows: Observations = np.zeros(capacity, dtype=OBSERVATION)
        self._places: dict[tuple[int, int], int] = {}
        self._latest = {kind: deque[int](maxlen=_RUN) for kind in _KEPT}
        self._counts = dict.fromkeys(_KEPT, 0)
        self._new = 0
        self._fitted_s = -math.inf
        # Of what is decoded there: since when, so many requests with so much context; and the
        # integrals over time, then the steps, tokens, pairs and reads of prompts that were done.
        self._at_s = 0.0
        self._decoding = self._context = 0.0
        self._done = np.zeros(6)
        self.believed = True
        # Compiled now rather than while the first request waits.
        none = self._rows[:0], self._theta, self._prior, self._noise, np.empty(0)
        self._use(fit(*none))

    # -- what is observed -----------------------------------------------------------------------

    def reported(self, report: WorkerReport) -> None:
        """A worker reported steps and loads."""
        for step in report.steps:
            work = step.tokens, step.pairs, step.reads
            self._add(step.tokens, Observation(STEP, step.seconds, 0.0, 0.0, 1.0, *work))
        for load in report.loads:
            seen = Observation(LOAD, load.seconds, loads=1.0, load_tokens=load.tokens)
            self._add(load.tokens, seen._replace(disk_tokens=load.disk_tokens))

    def first_token(self, flight: Flight, now_s: float) -> None:
        """The first token of a request came; later ones are counted from here."""
        flight.decoded = now_s, self._decoded(now_s)
        chosen = flight.chosen
        if chosen is None or not flight.informed:
            return
        seconds = now_s - flight.sent_s
        if chosen.plan:
            # How a planner's loads overlap with computing is its own matter.
            rest_s = max(chosen.ttft_s - self.overhead_s, 0.0)
            self._add(1.0, Observation(TTFT, seconds, rest_s, doubt=1.0, requests=1.0))
            return
        new, host = max(flight.new_tokens, 1), flight.host_tokens
        beside, context = flight.beside
        steps, work = self._chunks(new, flight.prompt_tokens - new)
        # Waiting was predicted with the scale known then; it is as wrong as that.
        queue_s = chosen.queue_s / self.compute_scale
        doubt = chosen.queue_s / max(chosen.ttft_s, _SHORTEST_S)
        seen = Observation(
            TTFT, seconds, queue_s, min(doubt, 1.0), steps, work[0] / steps + beside,
            work[1] / steps + context, flight.prompt_tokens + context, loads=host > 0,
            load_tokens=host, disk_tokens=flight.disk_tokens, requests=1.0,
        )  # fmt: skip
        self._add(new + host, seen)

    def prefilled(self, flight: Flight, now_s: float) -> None:
        """A prompt is done, and decodes from now on."""
        self._decoded(now_s)
        new = max(flight.new_tokens, 1)
        steps, (tokens, pairs) = self._chunks(new, flight.prompt_tokens - new)
        self._done[2:] += steps, tokens, pairs, steps * flight.prompt_tokens
        self._decoding += 1
        self._context += flight.prompt_tokens

    def ended(self, flight: Flight, now_s: float, tokens: int) -> None:
        """A request that was prefilled ended, after so many tokens (0: they tell nothing)."""
        done = self._decoded(now_s)
        self._decoding = max(self._decoding - 1, 0.0)
        self._context = max(self._context - flight.prompt_tokens, 0.0)
        if tokens < _LEAST_TOKENS or flight.decoded is None or self._counts[STEP]:
            return
        since_s, before = flight.decoded
        seconds, steps = now_s - since_s, tokens - 1.0
        if seconds <= 0:
            return
        beside, context, mixed, new, pairs, reads = done - before
        beside, context, mixed = beside / seconds, context / seconds, min(mixed, steps)
        each = max(mixed, 1.0)
        seen = Observation(
            GAP, seconds, 0.0, 0.0, steps - mixed, beside, context, context, mixed,
            new / each + beside, pairs / each + context, reads / each + context,
        )  # fmt: skip
        self._add(beside, seen)

    def _chunks(self, new: int, held: int) -> tuple[float, tuple[float, float]]:
        """Steps of a prompt by the token budget, and its tokens and pairs."""
        tokens, pairs, _ = chunk_work(float(new), float(held))
        return float(math.ceil(new / self._announced.max_batch_tokens)), (tokens, pairs)

    def _decoded(self, now_s: float) -> Floats:
        """What was decoded and prefilled up to now, to subtract what it was earlier."""
        passed_s = max(now_s - self._at_s, 0.0) if self._at_s else 0.0
        self._at_s = now_s
        self._done[:2] += self._decoding * passed_s, self._context * passed_s
        return self._done.copy()

    def _add(self, size: float, seen: Observation) -> None:
        """Keep an observation in place of the oldest of its kind and size."""
        if not (_SHORTEST_S < seen.seconds < _LONGEST_S and 0 <= size < _MOST_WORK):
            return
        if not all(0 <= value < _MOST_WORK for value in seen):
            return
        kind = int(seen.kind)
        bin_ = min(int(size).bit_length(), _SIZES - 1)
        turn = self._places.get((kind, bin_), 0)
        self._places[kind, bin_] = (turn + 1) % _KEPT[kind]
        place = self._starts[kind] + bin_ * _KEPT[kind] + turn
        self._counts[kind] += 1
        self._rows[place] = seen._replace(number=self._counts[kind])
        self._latest[kind].append(place)
        self._new += 1

    # -- what is learnt -------------------------------------------------------------------------

    def fit(self, now_s: float) -> bool:
        """Learn from what came, if it is enough or long ago; whether anything was learnt."""
        seen = sum(self._counts.values())
        if not self._new or (seen > _FEW and self._new < _SOME):
            return False
        if seen > _FEW and 0 <= now_s - self._fitted_s < _REFIT_S:
            return False
        self._new, self._fitted_s = 0, now_s
        self._notice_changes()
        rows = self._waited(self._rows[self._rows["seconds"] > 0])
        kinds = rows["kind"].astype(np.intp)
        ages = np.array([self._counts[kind] for kind in _KEPT])[kinds] - rows["number"]
        weights = np.where(rows["stale"] > 0, _STALE, 0.5 ** (ages / _HALF_LIFE))
        if self.believed:
            theta, covariance = self._fitted(rows, self._theta, weights)
            self.believed = not self._contradicted(theta)
        if not self.believed:
            own = (kinds == TTFT) | (kinds == GAP)
            theta, covariance = self._fitted(rows[own], np.zeros_like(self._theta), weights[own])
            self.believed = self._agree(theta)
        self._theta = theta
        self._use(covariance)
        return True

    def _waited(self, rows: Observations) -> Observations:
        """Copies of observations, with waiting as long as what is known now makes it."""
        rows["known_s"] = np.minimum(rows["known_s"] * self.compute_scale, 0.9 * rows["seconds"])
        return rows

    def _fitted(self, rows: Observations, start: Floats, weights: Floats) -> tuple[Floats, Floats]:
        """The most probable parameters and their covariance; measures the noise about them."""
        kinds, theta = rows["kind"].astype(np.intp), start.copy()
        covariance = fit(rows, theta, self._prior, self._noise, weights)
        errors = self._errors(rows, theta)
        if not (np.isfinite(theta).all() and np.isfinite(covariance).all()):
            return np.zeros_like(theta), np.diag(self._prior.widths**2)
        for kind in np.unique(kinds):
            own = errors[(kinds == kind) & (rows["stale"] == 0)]
            if len(own):
                # About their middle: what all are off by is still to be learnt, and no noise.
                off = np.abs(own - np.median(own))
                spread = min(_MEDIAN_TO_SD * float(np.median(off)), _MOST_NOISE)
                total = len(own) * spread**2 + _FIRST_COUNT * _FIRST_NOISE**2
                noise = math.sqrt(total / (len(own) + _FIRST_COUNT))
                self._noise[kind] = max(noise, _LEAST_NOISE[kind])
        return theta, covariance

    def _errors(self, rows: Observations, theta: Floats) -> Floats:
        """Logarithms of observed over expected seconds."""
        expected_s, _ = expected(rows, theta, self._prior.values, self._prior.floors)
        errors: Floats = np.log(rows["seconds"] / expected_s)
        return errors

    def _notice_changes(self) -> None:
        """Where the latest observations of a kind are all off, what came before them is stale."""
        for kind, places in self._latest.items():
            if len(places) < _RUN or self._counts[kind] < _SETTLED:
                continue
            if not self.believed and kind in (STEP, LOAD):
                continue
            rows = self._waited(self._rows[list(places)])
            off = float(np.median(self._errors(rows, self._theta)))
            if abs(off) > max(_CHANGED, _CLEARLY * self._noise[kind]):
                for other in _FOLLOW[kind]:
                    kept = self._latest[other] if other == kind else ()
                    stale = self._rows["kind"] == other
                    stale[list(kept)] = False
                    self._rows["stale"][stale] = 1.0

    def _contradicted(self, theta: Floats) -> bool:
        """Whether the latest first tokens come when they should by the prior, not by `theta`."""
        judges = self._waited(self._rows[list(self._latest[TTFT])])
        judges = judges[judges["stale"] == 0]
        if len(judges) < _JUDGES or not (self._counts[STEP] or self._counts[LOAD]):
            return False
        learnt, prior = (
            float(np.median(np.abs(self._errors(judges, each))))
            for each in (theta, np.zeros_like(theta))
        )
        return learnt > max(_WRONG, prior + _WORSE)

    def _agree(self, theta: Floats) -> bool:
        """Whether the latest reports are what first tokens alone make probable."""
        places = [*self._latest[STEP], *self._latest[LOAD]]
        return float(np.median(np.abs(self._errors(self._rows[places], theta)))) < _WRONG

    def _use(self, covariance: Floats) -> None:
        """Derive speed, overhead and certainty from the parameters."""
        announced, prior, theta = self._announced, self._prior, self._theta
        constants = constants_of(theta, prior.values, prior.floors)
        dilation = announced.step.dilation
        ratios = constants[:5] / np.where(prior.values > 0, prior.values, dilation)[:5]
        step = {
            # As announced where nothing was learnt, to the last bit.
            name: float(ratio) * (getattr(announced.step, name) or 1.0)
            for name, ratio in zip(_STEP_CONSTANTS, ratios, strict=True)
        }
        self.speed = EngineSpeed(
            step=replace(announced.step, **step),
            load_token_s=float(constants[5]),
            load_fixed_s=float(constants[6]),
            disk_token_s=float(constants[8]),
            budget_tokens=announced.max_batch_tokens,
            capacity_tokens=(announced.device_blocks - 1) * announced.block_tokens,
            packs=announced.packs,
            step_factor=announced.step_factor,
            factors=tuple(theta[len(constants) :].tolist()),
        )
        self.overhead_s = min(float(constants[7]), _MOST_OVERHEAD_S)
        shown = np.zeros(3, dtype=OBSERVATION)
        tokens = min(_SHOWN_TOKENS, float(announced.max_batch_tokens))
        shown["steps"][0], shown["tokens"][0], shown["reads"][0] = 1.0, tokens, tokens
        shown["pairs"][0] = 0.5 * tokens * tokens
        shown["loads"][1], shown["load_tokens"][1], shown["requests"][2] = 1.0, _SHOWN_TOKENS, 1.0
        scale = prior.values, prior.floors
        before_s, _ = expected(shown, np.zeros_like(theta), *scale)
        now_s, slopes = expected(shown, theta, *scale)
        self.compute_scale, self.link_scale = (now_s / before_s).tolist()[:2]
        sd_s = np.sqrt(np.einsum("ia,ab,ib->i", slopes, covariance, slopes).clip(0.0))
        compute_sd, link_sd = (sd_s / now_s).tolist()[:2]
        self.certainty = Certainty(compute_sd, link_sd, float(sd_s[2]), float(self._noise[TTFT]))


def _prior(announced: Announcement, overhead_s: float) -> Prior:
    """What an announcement makes probable, in real seconds."""
    step, node = announced.step, announced.node
    values = np.array([
        *(getattr(step, name) * step.dilation for name in _STEP_CONSTANTS),
        load_token_s(announced), node.load_fixed_s * node.dilation, overhead_s,
        disk_token_s(announced),
    ])  # fmt: skip
    dilations = *[step.dilation] * 5, node.dilation, node.dilation, 1.0, node.dilation
    floors = np.array(_FLOORS) * np.array(dilations)
    widths = np.full(PARAMETERS, FACTOR_WIDTH)
    most = np.full(PARAMETERS, math.log(_MOST_FACTOR))
    paced = node.source == "paced"
    widths[: len(values)] = math.log(_PACED_WIDTH if paced else _WIDTH)
    most[: len(values)] = math.log(_MOST_MULTIPLE)
    widths[7] = math.log(_OVERHEAD_WIDTH)
    if announced.tier == "lmcache":
        # What is announced is the link; a server behind it is known by measuring only.
        widths[5:7] = most[5:7] = math.log(_SERVER_MULTIPLE)
    return Prior(values, floors, widths, most)


def load_token_s(announced: Announcement) -> float:
    """Real seconds to load one token, as announced."""
    node = announced.node
    return node.dilation * announced.kv_bytes_per_token / node.h2d_bytes_per_s


def disk_token_s(announced: Announcement) -> float:
    """Real seconds that a token on disk takes besides, as announced."""
    node = announced.node
    rate = node.disk_bytes_per_s
    return node.dilation * announced.kv_bytes_per_token / rate if rate else 0.0


class OutputLengths:
    """Recent output lengths, to guess when a stream ends."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._ordered: list[int] = []
        self._median = _DEFAULT_OUTPUT_TOKENS

    def add(self, tokens: int) -> None:
        latest, ordered = self._latest, self._ordered
        if len(latest) == _OUTPUTS_KEPT:
            del ordered[bisect_left(ordered, latest.popleft())]
        latest.append(tokens)
        insort(ordered, tokens)
        # Here, once per request that ends, not at each guess.
        half = len(ordered) // 2
        self._median = (ordered[half] + ordered[~half]) // 2

    def guess(self, max_tokens: int) -> int:
        """How many a request for at most `max_tokens` (0: no bound) will generate."""
        return max(1, min(self._median, max_tokens) if max_tokens > 0 else self._median)
