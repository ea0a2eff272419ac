"""What the router knows of each worker: who it is, what it forecasts, how far off it has been.

Changes only through the methods of `ClusterState`, each with its time. Calibration corrects the
announced speeds by what requests really took: bounded, from medians, and back to the announced
values when there are too few samples. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from kappa.report import Announcement, WorkerReport
from router.jobs import EngineSpeed
from router.shadow import Shadow

_MIN_SAMPLES = 5
_KEPT_SAMPLES = 64
_BOUND = 4.0
_MAX_OVERHEAD_S = 2.0
_KEEP = 0.9
_DWARFS = 20.0


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
    _link_samples: int = 0
    _link_measured_s: float = 0.0
    _link_announced_s: float = 0.0
    _computes: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))

    def outcome(self, compute_s: float, load_s: float, actual_s: float) -> None:
        """Learn from a request that met no queue: predicted parts, and its real TTFT.

        Only a prompt whose compute dwarfs the overhead teaches the compute scale; before the
        overhead is known, and for all other prompts, what is left over is overhead.
        """
        known = len(self._overheads) >= _MIN_SAMPLES
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

    def link(self, measured_s: float, announced_s: float) -> None:
        """Learn the link from some loads: their seconds as measured, and as announced."""
        self._link_measured_s = _KEEP * self._link_measured_s + measured_s
        self._link_announced_s = _KEEP * self._link_announced_s + announced_s
        self._link_samples += 1
        if self._link_announced_s > 0 and self._link_samples >= _MIN_SAMPLES:
            scale = self._link_measured_s / self._link_announced_s
            self.link_scale = min(max(scale, 1 / _BOUND), _BOUND)


@dataclass(slots=True)
class WorkerState:
    """One worker as the router sees it."""

    announcement: Announcement
    shadow: Shadow
    calibration: Calibration
    report: WorkerReport | None = None
    seen_s: float = 0.0


def load_token_s(said: Announcement) -> float:
    """Real seconds to load one token, as announced."""
    return said.node.dilation * said.kv_bytes_per_token / said.node.h2d_bytes_per_s


def engine_speed(said: Announcement, calibration: Calibration) -> EngineSpeed:
    """What a shadow needs: the announced speeds, calibrated."""
    return EngineSpeed(
        step=said.step.scaled(calibration.compute_scale),
        load_token_s=load_token_s(said) * calibration.link_scale,
        load_fixed_s=said.node.load_fixed_s * said.node.dilation,
        budget_tokens=said.max_batch_tokens,
        capacity_tokens=(said.device_blocks - 1) * said.block_tokens,
    )


def _speeds(said: Announcement) -> tuple[object, ...]:
    return said.node, said.step, said.kv_bytes_per_token


class ClusterState:
    """All workers of one model."""

    def __init__(self, *, calibrate: bool = True) -> None:
        self.workers: dict[str, WorkerState] = {}
        self.calibrate = calibrate

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker announced itself, or again (after measuring anew)."""
        known = self.workers.get(announcement.worker)
        if known is not None:
            if _speeds(known.announcement) != _speeds(announcement):
                # What was learnt corrects the old figures; the overhead has nothing of them.
                known.calibration = Calibration(overhead_s=known.calibration.overhead_s)
            known.announcement, known.seen_s = announcement, now_s
            known.shadow.speed = engine_speed(announcement, known.calibration)
            return
        calibration = Calibration()
        shadow = Shadow(engine_speed(announcement, calibration))
        self.workers[announcement.worker] = WorkerState(
            announcement, shadow, calibration, seen_s=now_s
        )

    def leave(self, worker: str) -> None:
        """A worker is gone, with all that was reserved there."""
        self.workers.pop(worker, None)

    def report(self, report: WorkerReport, now_s: float) -> None:
        """A worker measured something."""
        state = self.workers.get(report.worker)
        if state is None:
            return
        if self.calibrate and state.report is not None:
            self._learn_link(state, state.report, report)
        state.report, state.seen_s = report, now_s
        for a in report.admitted:
            state.shadow.correct(a.request_id, a.device_tokens, a.host_tokens, a.new_tokens, now_s)
        for request_id in report.prefilled:
            state.shadow.prefilled(request_id, now_s)

    def outcome(self, worker: str, compute_s: float, load_s: float, actual_s: float) -> None:
        """A request that had met no queue got its first token."""
        state = self.workers.get(worker)
        if state is not None and self.calibrate:
            state.calibration.outcome(compute_s, load_s, actual_s)
            state.shadow.speed = engine_speed(state.announcement, state.calibration)

    @staticmethod
    def _learn_link(state: WorkerState, before: WorkerReport, now: WorkerReport) -> None:
        tokens = now.load_tokens_total - before.load_tokens_total
        measured_s = now.load_seconds_total - before.load_seconds_total
        # Totals that fell belong to a worker that started anew.
        if tokens > 0 and measured_s > 0 and now.steps_total >= before.steps_total:
            state.calibration.link(measured_s, tokens * load_token_s(state.announcement))
            state.shadow.speed = engine_speed(state.announcement, state.calibration)
