"""Calibration learns the constants of one worker's engine, and how long streams are.

It learns every kind of worker alike. Ours report steps and loads; of an engine that reports nothing
there are the times to first tokens, and between tokens. Each is an observation, the seconds that
some work took; `kappa_router.engine_fit` finds the most probable constants. Effects that physics
does not explain (tiles, padding, experts) are a factor by the tokens of a step, near 1 unless many
observations say otherwise.

The latest few observations of each kind and size are kept, so that the many steps that decode do
not push out the few that prefill. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import replace

import numpy as np

from kappa.compiled import COMPILES
from kappa.cost import STEP_SECONDS, chunk_work
from kappa.protocol import Announcement, WorkerReport
from kappa_router import engine_fit
from kappa_router.engine_fit import (
    GAP,
    KINDS,
    LOAD,
    STEP,
    TTFT,
    EngineSpeed,
    Floats,
    Observation,
    Observations,
)
from kappa_router.fleet import Certainty, Flight

# Of each kind: observations kept of each size (a power of two), and the least noise in the
# logarithm of their seconds.
_SIZES = 14
_KEPT = {STEP: 8, LOAD: 4, TTFT: 6, GAP: 3}
_LEAST_NOISE = (0.05, 0.05, 0.1, 0.1)
# The noise before any observation, how many observations that counts as, and the most noise.
_FIRST_NOISE, _FIRST_COUNT, _MOST_NOISE = 0.3, 8, 3.0
# A normal sample's standard deviation over its median distance from the middle.
_MEDIAN_TO_SD = 1.48
# Later observations of a kind that halve the weight of one; the weight of one before a change.
_HALF_LIFE = 200.0
_STALE = 0.03
# The engine changed if the median error (logarithm) of a run of observations exceeds both a bound
# and a multiple of the noise, once a kind has enough of them: run, bound, multiple, enough.
_RUN, _CHANGED, _CLEARLY, _SETTLED = 6, 0.2, 2.5, 24
# What changes with a kind.
_FOLLOW = {STEP: (STEP, TTFT, GAP), LOAD: (LOAD, TTFT), TTFT: (TTFT, GAP), GAP: (GAP, TTFT)}
# Reports are not believed if they make first tokens wrong: the fewest first tokens that judge, the
# median error (logarithm) with reports, and by how much it must exceed that without.
_JUDGES, _WRONG, _WORSE = 5, 0.3, 0.1
# Beyond `_FEW` observations, a fit waits for `_SOME` new ones and `_REFIT_S` seconds.
# (A fit without a compiler takes a second.)
_FEW, _SOME, _REFIT_S = 64, 8, 1.0 if COMPILES else 10.0
_LEAST_TOKENS = 8
_MOST_OVERHEAD_S = 2.0
# Announced constants are off by such a factor (one standard deviation), by less where a pace keeps
# them; the overhead is not announced.
_WIDTH, _PACED_WIDTH, _OVERHEAD_WIDTH = 3.0, 1.5, 30.0
# A constant may be this many times what was announced, or its inverse; beside a server for KV.
_MOST_MULTIPLE, _SERVER_MULTIPLE, _MOST_FACTOR = 100.0, 1000.0, 4.0
# Seconds by which a constant that was announced as nothing is thought larger; see `Prior`.
_FLOORS = (1e-8, 1e-13, 1e-4, 1e-10, 5e-4, 1e-9, 5e-4, 5e-3, 1e-9, 0.0, 0.0, 0.0, 0.0)
_SHORTEST_S, _LONGEST_S, _MOST_WORK = 1e-7, 1e5, 1e15
# The size of the prompt and of the load by which learnt constants are shown.
_SHOWN_TOKENS = 2048.0
_OUTPUTS_KEPT = 256
_DEFAULT_OUTPUT_TOKENS = 128

_STEP_PLACES = {name: engine_fit.CONSTANTS.index(name) for name in STEP_SECONDS}


class Calibration:
    """The constants of one worker's engine, and how sure they are.

    speed, overhead_s: what predictions use; the overhead is what a request costs besides the
    engine (HTTP, Ray, tokens on the way). link_scale, compute_scale: learnt over announced seconds
    of a load, and of a prompt, of 2,048 tokens; certainty: how sure they are. believed: the
    worker's reports agree with first tokens.
    """

    def __init__(self, announced: Announcement, overhead_s: float = 0.0) -> None:
        self._announced = announced
        self._prior = prior = _prior(announced, overhead_s)
        self._theta = np.zeros(engine_fit.PARAMETERS)
        self._noise = np.full(len(KINDS), _FIRST_NOISE)
        self._starts: dict[int, int] = {}
        capacity = 0
        for kind, kept in _KEPT.items():
            self._starts[kind], capacity = capacity, capacity + kept * _SIZES
        self._rows: Observations = np.zeros(capacity, dtype=engine_fit.OBSERVATION)
        self._places: dict[tuple[int, int], int] = {}
        self._latest = {kind: deque[int](maxlen=_RUN) for kind in KINDS}
        self._counts = [0] * len(KINDS)
        self._new = 0
        self._fitted_s = -math.inf
        # Since `_at_s` this number of requests decodes with this context in all; `_done` holds both
        # integrated over time, then steps, tokens, pairs and reads of the prompts that were done.
        self._at_s = 0.0
        self._decoding = self._context = 0.0
        self._done = np.zeros(6)
        self.believed = True
        # Compiled now rather than while the first request waits.
        none, counts, _ = engine_fit.observed(self._rows, np.zeros(len(KINDS)), 1.0)
        engine_fit.spreads(none, engine_fit.errors_of(none, self._theta, prior))
        engine_fit.middle(np.zeros(1))
        # A prompt, a load and an overhead, and what they take as announced.
        tokens = min(_SHOWN_TOKENS, float(announced.max_batch_tokens))
        self._shown = shown = np.zeros(3, dtype=engine_fit.OBSERVATION)
        shown["steps"][0], shown["tokens"][0], shown["reads"][0] = 1.0, tokens, tokens
        shown["pairs"][0] = 0.5 * tokens * tokens
        shown["loads"][1], shown["load_tokens"][1], shown["requests"][2] = 1.0, _SHOWN_TOKENS, 1.0
        covariance = engine_fit.fit(none, self._theta, prior, self._noise, counts)
        self._shown_s, _ = engine_fit.expected(
            shown, self._theta, covariance, prior.values, prior.floors
        )
        self._use(covariance)

    # -- observations ---------------------------------------------------------------------------

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
        """A request that was prefilled ended, after `tokens` tokens (0: they tell nothing)."""
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
        """Totals of decoding and prefill up to now, from which earlier ones are subtracted."""
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

    # -- learning -------------------------------------------------------------------------------

    def fit(self, now_s: float) -> bool:
        """Learn from what came, if it is enough or long ago; whether anything was learnt."""
        many = sum(self._counts) > _FEW
        if not self._new or (many and self._new < _SOME):
            return False
        if many and 0 <= now_s - self._fitted_s < _REFIT_S:
            return False
        self._new, self._fitted_s = 0, now_s
        rows, weights, places = self._seen()
        if self._notice_changes(rows, places):
            rows, weights, places = self._seen()
        if self.believed:
            theta, covariance, errors = self._fitted(rows, self._theta, weights)
            self.believed = not self._contradicted(rows, places, errors)
        if not self.believed:
            own = rows["kind"] >= TTFT
            start = np.zeros_like(self._theta)
            theta, covariance, _ = self._fitted(rows[own], start, weights[own])
            # Whether the latest reports are what first tokens alone make probable.
            latest = places[[*self._latest[STEP], *self._latest[LOAD]]]
            self.believed = self._off(rows[latest], theta) < _WRONG
        self._theta = theta
        self._use(covariance)
        return True

    def _seen(self) -> tuple[Observations, Floats, engine_fit.Places]:
        """The observations, the weight of each, and the row of each place among them."""
        counts = np.array(self._counts, dtype=np.float64)
        rows, later, places = engine_fit.observed(self._rows, counts, self.compute_scale)
        weights = np.where(rows["stale"] > 0, _STALE, 0.5 ** (later / _HALF_LIFE))
        return rows, weights, places

    def _fitted(
        self, rows: Observations, start: Floats, weights: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """The most probable parameters, their covariance and the errors with them; measures the
        noise about these."""
        theta = start.copy()
        covariance = engine_fit.fit(rows, theta, self._prior, self._noise, weights)
        if not (np.isfinite(theta).all() and np.isfinite(covariance).all()):
            theta = np.zeros_like(theta)
            covariance = np.diag(self._prior.widths**2)
            return theta, covariance, engine_fit.errors_of(rows, theta, self._prior)
        errors = engine_fit.errors_of(rows, theta, self._prior)
        counts, medians = engine_fit.spreads(rows, errors)
        for kind, count in enumerate(counts.tolist()):
            if count:
                spread = min(_MEDIAN_TO_SD * float(medians[kind]), _MOST_NOISE)
                total = count * spread**2 + _FIRST_COUNT * _FIRST_NOISE**2
                noise = math.sqrt(total / (count + _FIRST_COUNT))
                self._noise[kind] = max(noise, _LEAST_NOISE[kind])
        return theta, covariance, errors

    def _notice_changes(self, rows: Observations, at: engine_fit.Places) -> bool:
        """Mark observations as stale if all the latest of their kind are off; whether any kind
        changed."""
        errors: Floats | None = None
        changed = False
        for kind, places in self._latest.items():
            if len(places) < _RUN or self._counts[kind] < _SETTLED:
                continue
            if not self.believed and kind in (STEP, LOAD):
                continue
            if errors is None:
                errors = engine_fit.errors_of(rows, self._theta, self._prior)
            off = engine_fit.middle(errors[at[list(places)]])
            if abs(off) > max(_CHANGED, _CLEARLY * self._noise[kind]):
                changed = True
                for other in _FOLLOW[kind]:
                    kept = self._latest[other] if other == kind else ()
                    stale = self._rows["kind"] == other
                    stale[list(kept)] = False
                    self._rows["stale"][stale] = 1.0
        return changed

    def _contradicted(self, rows: Observations, at: engine_fit.Places, errors: Floats) -> bool:
        """Whether the latest first tokens come when they should by the prior, not by what was
        learnt, which is off by `errors`."""
        latest = at[list(self._latest[TTFT])]
        judges = latest[rows["stale"][latest] == 0]
        if len(judges) < _JUDGES or not (self._counts[STEP] or self._counts[LOAD]):
            return False
        before = self._off(rows[judges], np.zeros_like(self._theta))
        return engine_fit.middle(np.abs(errors[judges])) > max(_WRONG, before + _WORSE)

    def _off(self, rows: Observations, theta: Floats) -> float:
        return engine_fit.middle(np.abs(engine_fit.errors_of(rows, theta, self._prior)))

    def _use(self, covariance: Floats) -> None:
        """Derive speed, overhead and certainty from the parameters."""
        announced, (values, floors, _, _), theta = self._announced, self._prior, self._theta
        found = engine_fit.constants_of(theta, values, floors)
        step, dilation = announced.step, announced.step.dilation
        constants = found.tolist()
        learnt = {
            # As announced where nothing was learnt, to the last bit.
            name: constants[k] / (float(values[k]) or dilation) * (getattr(step, name) or 1.0)
            for name, k in _STEP_PLACES.items()
        }
        self.speed = EngineSpeed(
            step=replace(step, **learnt),
            load_token_s=constants[5],
            load_fixed_s=constants[6],
            disk_token_s=constants[8],
            budget_tokens=announced.max_batch_tokens,
            capacity_tokens=(announced.device_blocks - 1) * announced.block_tokens,
            packs=announced.packs,
            step_factor=announced.step_factor,
            max_sequences=announced.max_sequences,
            factors=tuple(theta[len(constants) :].tolist()),
        )
        self.overhead_s = min(constants[7], _MOST_OVERHEAD_S)
        now_s, sd_s = engine_fit.expected(self._shown, theta, covariance, values, floors)
        self.compute_scale, self.link_scale = (now_s / self._shown_s).tolist()[:2]
        compute_sd, link_sd = (sd_s / now_s).tolist()[:2]
        self.certainty = Certainty(compute_sd, link_sd, float(sd_s[2]), float(self._noise[TTFT]))


def _prior(announced: Announcement, overhead_s: float) -> engine_fit.Prior:
    """The prior by an announcement, in real seconds."""
    step, node = announced.step, announced.node
    own = {
        "load_token_s": load_token_s(announced), "load_fixed_s": node.load_fixed_s * node.dilation,
        "overhead_s": overhead_s, "disk_token_s": disk_token_s(announced),
        "expert_idle": step.expert_idle, "exposed": step.exposed,
    }  # fmt: skip
    steps = {name: getattr(step, name) * step.dilation for name in _STEP_PLACES}
    values = np.array([(own | steps)[name] for name in engine_fit.CONSTANTS])
    dilations = [step.dilation if name in steps else node.dilation for name in engine_fit.CONSTANTS]
    dilations[7] = 1.0
    floors = np.array(_FLOORS) * np.array(dilations)
    widths = np.full(engine_fit.PARAMETERS, engine_fit.FACTOR_WIDTH)
    most = np.full(engine_fit.PARAMETERS, math.log(_MOST_FACTOR))
    paced = node.source == "paced"
    widths[: len(values)] = math.log(_PACED_WIDTH if paced else _WIDTH)
    most[: len(values)] = math.log(_MOST_MULTIPLE)
    widths[7] = math.log(_OVERHEAD_WIDTH)
    if announced.tier == "lmcache":
        # The link is announced; a server behind it is known by measuring only.
        widths[5:7] = most[5:7] = math.log(_SERVER_MULTIPLE)
    return engine_fit.Prior(values, floors, widths, most)


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
        """The expected length of an answer of at most `max_tokens` (0: no bound)."""
        return max(1, min(self._median, max_tokens) if max_tokens > 0 else self._median)
