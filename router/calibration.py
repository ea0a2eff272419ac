"""What is learnt from outcomes: corrections of one worker's speeds, and how long streams are.

Calibration corrects the announced speeds by what loads, steps and requests really took: bounded, so
that no outlier counts for much, and near the announced values while little has been seen. Pure.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from kappa.protocol import Announcement, WorkerReport
from router.engine_queue import EngineSpeed

_MIN_SAMPLES = 5
_KEPT_SAMPLES = 64
_BOUND = 4.0
_SERVER_BOUND = 1000.0
_MAX_OVERHEAD_S = 2.0
_KEEP = 0.9
_PRIOR_S = 0.05
_DWARFS = 20.0
_OUTPUTS_KEPT = 256
_DEFAULT_OUTPUT_TOKENS = 128


@dataclass(slots=True)
class _Scale:
    """Recent measured seconds over announced ones.

    It begins as if `_PRIOR_S` had been measured just as announced, which fades. A node that is
    avoided for what it announced has few reports, and must be believed the first of them.
    """

    samples: int = 0
    _measured_s: float = _PRIOR_S
    _announced_s: float = _PRIOR_S

    def learn(self, measured_s: float, announced_s: float, bound: float) -> float:
        """Seconds are emulated ones, so that a paced node needs no more of them."""
        measured_s = min(max(measured_s, announced_s / bound), announced_s * bound)
        self._measured_s = _KEEP * self._measured_s + measured_s
        self._announced_s = _KEEP * self._announced_s + announced_s
        self.samples += 1
        return self._measured_s / self._announced_s


@dataclass(slots=True)
class Calibration:
    """Corrections of one worker's predictions, learnt from outcomes.

    overhead_s: what a request costs besides queue, load and compute (HTTP, Ray, tokens on the way).
    link_scale, compute_scale: measured over announced seconds.
    """

    overhead_s: float = 0.0
    link_scale: float = 1.0
    compute_scale: float = 1.0
    _overheads: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))
    _computes: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))
    _link: _Scale = field(default_factory=_Scale)
    _steps: _Scale = field(default_factory=_Scale)

    def outcome(self, compute_s: float, load_s: float, actual_s: float) -> None:
        """Learn from a request that met no queue: predicted parts, and its real TTFT.

        Only a prompt whose compute dwarfs the overhead teaches the compute scale; before the
        overhead is known, and for all other prompts, what is left over is overhead. Once steps are
        reported they teach the gpu better.
        """
        known = len(self._overheads) >= _MIN_SAMPLES and not self._steps.samples
        if known and compute_s > _DWARFS * self.overhead_s:
            ratio = (actual_s - load_s - self.overhead_s) / (compute_s / self.compute_scale)
            self._computes.append(min(max(ratio, 1 / _BOUND), _BOUND))
            if len(self._computes) >= _MIN_SAMPLES:
                self.compute_scale = statistics.median(self._computes)
            return
        rest_s = actual_s - load_s - compute_s
        self._overheads.append(min(max(rest_s, 0.0), _MAX_OVERHEAD_S))
        if len(self._overheads) >= _MIN_SAMPLES:
            self.overhead_s = statistics.median(self._overheads)

    def reports(self, announced: Announcement, before: WorkerReport, after: WorkerReport) -> bool:
        """Learn from what a worker did between two reports; whether there was anything to learn."""
        # Totals that fell belong to a worker that started anew.
        if after.steps_total < before.steps_total:
            return False
        dilation, learnt = announced.node.dilation, False
        tokens = after.load_tokens_total - before.load_tokens_total
        loading_s = after.load_seconds_total - before.load_seconds_total
        if tokens > 0 and loading_s > 0:
            # What is announced is the link; a server behind it is known by measuring only.
            bound = _BOUND if announced.tier != "lmcache" else _SERVER_BOUND
            expected_s = tokens * load_token_s(announced)
            self.link_scale = self._link.learn(loading_s / dilation, expected_s / dilation, bound)
            learnt = True
        announced_s = after.computed_announced_seconds_total
        announced_s -= before.computed_announced_seconds_total
        computing_s = after.computed_seconds_total - before.computed_seconds_total
        if announced_s > 0 and computing_s > 0:
            learn = self._steps.learn
            self.compute_scale = learn(computing_s / dilation, announced_s / dilation, _BOUND)
            learnt = True
        return learnt


def load_token_s(announced: Announcement) -> float:
    """Real seconds to load one token, as announced."""
    node = announced.node
    return node.dilation * announced.kv_bytes_per_token / node.h2d_bytes_per_s


def disk_token_s(announced: Announcement) -> float:
    """Real seconds that a token on disk takes besides, as announced."""
    node = announced.node
    rate = node.disk_bytes_per_s
    return node.dilation * announced.kv_bytes_per_token / rate if rate else 0.0


def engine_speed(announced: Announcement, calibration: Calibration) -> EngineSpeed:
    """The announced speeds, calibrated. Computing is corrected in FLOPs; memory is as it was."""
    node = announced.node
    return EngineSpeed(
        step=announced.step.computing_scaled(calibration.compute_scale),
        load_token_s=load_token_s(announced) * calibration.link_scale,
        load_fixed_s=node.load_fixed_s * node.dilation,
        disk_token_s=disk_token_s(announced),
        budget_tokens=announced.max_batch_tokens,
        capacity_tokens=(announced.device_blocks - 1) * announced.block_tokens,
        packs=announced.packs,
    )


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
