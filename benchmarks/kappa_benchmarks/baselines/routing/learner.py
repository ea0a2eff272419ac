"""Routers that learn TTFT from their own requests: Lodestar, and llm-d's predicted latency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kappa_benchmarks.baselines.routing.base import Baseline, random_least
from kappa_router.decision import Choice, Estimates, Floats

_FEATURES = 8
_KILO = 1e-3
_RIDGE = 1e-3
_SWEEPS = 20
# Fitting is dear next to a decision; a fit of a few samples ago serves as well.
_FIT_EVERY = 8
_RANGE_S = 1e-12


class Ridge:
    """Least squares with a small penalty, of samples that fade: seconds of a row of features.

    No weight is below 0 (by coordinate descent): more of anything is never sooner. Without that,
    features that go together get weights of either sign, and a jammed worker, which no first token
    comes from, looks like the soonest.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._moments: NDArray[np.float64] = np.zeros((_FEATURES, _FEATURES))
        self._sums = np.zeros(_FEATURES)
        self._weights = np.zeros(_FEATURES)
        self.samples = 0

    def learn(self, row: Floats, seconds: float) -> None:
        self._moments = self._keep * self._moments + np.outer(row, row)
        self._sums = self._keep * self._sums + row * seconds
        self.samples += 1
        if self.samples % _FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        weights = self._weights
        for feature in range(_FEATURES * _SWEEPS):
            at = feature % _FEATURES
            row, own = self._moments[at], float(self._moments[at, at])
            left = float(self._sums[at] - row @ weights) + own * float(weights[at])
            weights[at] = max(left, 0.0) / (own + _RIDGE)

    def seconds(self, rows: Floats) -> Floats:
        """Predicted, of each row."""
        predicted: Floats = rows @ self._weights
        return predicted


def features(estimates: Estimates) -> Floats:
    """Facts of the request and of the queue that need no model of the nodes.

    Returns:
        Shape (workers, 8): 1; thousands of tokens to compute, to load, held on the device, queued,
        resident; requests waiting, in flight.
    """
    return np.column_stack([
        np.ones(len(estimates)), estimates.new_tokens * _KILO, estimates.cached_tokens * _KILO,
        estimates.device_tokens * _KILO, estimates.queued_tokens * _KILO,
        estimates.resident_tokens * _KILO, estimates.waiting, estimates.in_flight,
    ])  # fmt: skip


@dataclass(eq=False)
class Learner(Baseline):
    """The base of both: the features of requests in flight, and models that see their TTFT.

    memory: samples after which one counts 1/e. warm_up: samples before a model is asked.
    """

    memory: float = 500.0
    warm_up: int = 32
    least: ClassVar = {"memory": 2.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._models: defaultdict[str, Ridge] = defaultdict(lambda: Ridge(self.memory))
        self._sent: dict[str, tuple[str, float, Floats]] = {}

    def model_of(self, worker: str) -> Ridge:
        """The model that learns from a worker."""
        return self._models[worker]

    def ready(self, workers: Iterable[str]) -> bool:
        return all(self.model_of(worker).samples >= self.warm_up for worker in workers)

    def ttft_s(self, estimates: Estimates) -> Floats:
        rows = features(estimates)
        parts = [
            self.model_of(worker).seconds(rows[row]) for row, worker in enumerate(estimates.workers)
        ]
        return np.array(parts, dtype=np.float64)

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        worker = estimates.workers[index]
        self._sent[request_id] = worker, estimates.now_s, features(estimates)[index]

    def progressed(self, request_id: str, now_s: float, *, ended: bool) -> None:
        worker, sent_s, row = self._sent.pop(request_id, ("", 0.0, np.zeros(0)))
        if worker and not ended:
            self.model_of(worker).learn(row, now_s - sent_s)

    def left(self, worker: str) -> None:
        self._sent = {name: sent for name, sent in self._sent.items() if sent[0] != worker}
        self._models.pop(worker, None)


@dataclass(eq=False)
class Lodestar(Learner):
    """Least TTFT, predicted by a model of each worker that learns online. Reimplemented.

    In the manner of the paper, of which the abstract was read: its predictor, features and
    exploration are not known here. This one is linear in `features`, a worker each, least squares
    over its last requests; now and then (explore) any worker. Until all models have seen warm_up
    requests: least (tokens to prefill) · (requests), the heuristic of its kind.
    """

    name = "lodestar"
    source = "in the manner of Lim et al., Lodestar (arXiv 2606.00946), abstract"

    explore: float = 0.01

    def choose(self, estimates: Estimates) -> Choice:
        if not self.ready(estimates.workers):
            product = estimates.new_tokens * (estimates.in_flight + 1.0)
            return Choice(random_least(self.rng, product), "learning")
        if self.rng.random() < self.explore:
            return Choice(self.rng.randrange(len(estimates)), "explored")
        return Choice(random_least(self.rng, self.ttft_s(estimates)), "least_predicted")


@dataclass(eq=False)
class LlmDLatency(Learner):
    """llm-d's predicted latency, no objectives in the requests' headers. Reimplemented.

    One model for all pods ("assumes a single pod shape"), of TTFT. Pods that hold 0.99 of the
    prompt, else 0.80, are the only candidates, unless the best of them is predicted max_penalty_s
    later than the best of the others. Of these the idle ones if there are any; then a random one,
    by weight from 1 at the least TTFT down to 0.01 at the greatest. The original's trees are least
    squares here, over its features but the generated tokens; its TPOT model has no weight here, and
    its fallback until the model is there is llm-d's sum of scores, here the pod with the fewest
    requests. Host blocks count as held.
    """

    name = "llm_d_latency"
    source = (
        "llm-d/llm-d-router: config/charts/routerlib/templates/_config.yaml, pkg/epp/framework/"
        "plugins/scheduling/{filter/prefixcacheaffinity,scorer/latency} (commit ebab687)"
    )

    max_penalty_s: float = 5.0

    def model_of(self, worker: str) -> Ridge:
        return self._models[""]

    def choose(self, estimates: Estimates) -> Choice:
        if not self.ready(estimates.workers):
            return Choice(random_least(self.rng, estimates.in_flight), "learning")
        ttft_s, rows = self.ttft_s(estimates), np.arange(len(estimates))
        tokens = max(len(estimates.prefix_hashes) * estimates.block_tokens, 1)
        held = (estimates.device_tokens + estimates.cached_tokens) / tokens
        for threshold in (0.99, 0.80):
            rows = sticky(rows, held >= threshold, ttft_s, self.max_penalty_s)
        idle = rows[estimates.in_flight[rows] == 0]
        rows = idle if len(idle) else rows
        seconds = ttft_s[rows]
        span_s = float(seconds.max() - seconds.min())
        part = (seconds - seconds.min()) / span_s if span_s > _RANGE_S else np.full(len(rows), 0.5)
        weights = ((1.0 - part) * 100).astype(int) + 1
        (row,) = self.rng.choices(rows.tolist(), weights.tolist())
        return Choice(row, "weighted_by_ttft")


def sticky(
    rows: NDArray[np.intp], holds: NDArray[np.bool_], wait_s: Floats, max_penalty_s: float
) -> NDArray[np.intp]:
    """Those of `rows` that hold the prompt; all rows if none does, or if they are too late."""
    with_it, without = rows[holds[rows]], rows[~holds[rows]]
    if not len(with_it):
        return rows
    if len(without) and wait_s[with_it].min() - wait_s[without].min() > max_penalty_s:
        return rows
    return with_it
