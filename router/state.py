"""What the router knows of each worker: who it is, what it forecasts, how far off it has been.

Changes only through the methods of `ClusterState`, each with its time. Calibration corrects the
announced speeds by what loads, steps and requests really took: bounded, so that no freak counts for
much, and near the announced values while little has been seen. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from kappa.protocol import Announcement, WorkerReport
from router.fleet import Fleet, load_token_s
from router.jobs import EngineSpeed
from router.shadow import Shadow

_MIN_SAMPLES = 5
_KEPT_SAMPLES = 64
_BOUND = 4.0
_SERVER_BOUND = 1000.0
_MAX_OVERHEAD_S = 2.0
_KEEP = 0.9
_PRIOR_S = 0.05
_DWARFS = 20.0


@dataclass(slots=True)
class _Scale:
    """Measured over announced seconds, of late.

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
    _link: _Scale = field(default_factory=_Scale)
    _computes: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))
    _steps: _Scale = field(default_factory=_Scale)

    def outcome(self, compute_s: float, load_s: float, actual_s: float) -> None:
        """Learn from a request that met no queue: predicted parts, and its real TTFT.

        Only a prompt whose compute dwarfs the overhead teaches the compute scale; before the
        overhead is known, and for all other prompts, what is left over is overhead.
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

    def link(self, measured_s: float, announced_s: float, bound: float = _BOUND) -> None:
        """Learn the link from some loads: their seconds as measured, and as announced."""
        self.link_scale = self._link.learn(measured_s, announced_s, bound)

    def steps(self, measured_s: float, announced_s: float) -> None:
        """Learn the gpu from the computing of some steps: better than from outcomes, which are then
        left alone."""
        self.compute_scale = self._steps.learn(measured_s, announced_s, _BOUND)


@dataclass(slots=True)
class WorkerState:
    """One worker as the router sees it."""

    announcement: Announcement
    shadow: Shadow
    calibration: Calibration
    report: WorkerReport | None = None
    seen_s: float = 0.0


def engine_speed(said: Announcement, calibration: Calibration) -> EngineSpeed:
    """What a shadow needs: the announced speeds, calibrated."""
    return EngineSpeed(
        step=said.step.computing_scaled(calibration.compute_scale),
        load_token_s=load_token_s(said) * calibration.link_scale,
        load_fixed_s=said.node.load_fixed_s * said.node.dilation,
        budget_tokens=said.max_batch_tokens,
        capacity_tokens=(said.device_blocks - 1) * said.block_tokens,
        packs=said.packs,
    )


def _speeds(said: Announcement) -> tuple[object, ...]:
    return said.node, said.step, said.kv_bytes_per_token


class ClusterState:
    """All workers of one model."""

    def __init__(self, *, calibrate: bool = True, first: float = 0.0) -> None:
        """`first`: as `Fleet` takes it."""
        self.workers: dict[str, WorkerState] = {}
        self.fleet = Fleet(first=first)
        self.calibrate = calibrate

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker announced itself, or again (after measuring anew)."""
        self.fleet.join(announcement, now_s)
        known = self.workers.get(announcement.worker)
        if known is None:
            calibration = Calibration()
            shadow = Shadow(engine_speed(announcement, calibration))
            known = WorkerState(announcement, shadow, calibration)
            self.workers[announcement.worker] = known
        elif _speeds(known.announcement) != _speeds(announcement):
            # What was learnt corrects the old figures; the overhead has nothing of them.
            known.calibration = Calibration(overhead_s=known.calibration.overhead_s)
        known.announcement, known.seen_s = announcement, now_s
        self._calibrated(known)

    def leave(self, worker: str) -> None:
        """A worker is gone, with all that was reserved there."""
        self.workers.pop(worker, None)
        self.fleet.leave(worker)

    def report(self, report: WorkerReport, now_s: float) -> None:
        """A worker measured something."""
        state = self.workers.get(report.worker)
        if state is None:
            return
        if self.calibrate and state.report is not None:
            self._learn(state, state.report, report)
        state.report, state.seen_s = report, now_s
        self.fleet.seen(report.worker, now_s)
        for a in report.admitted:
            state.shadow.correct(a.request_id, a.device_tokens, a.host_tokens, a.new_tokens, now_s)
            if self.fleet.holds(a.request_id, report.worker):
                self.fleet.correct(a.request_id, a.host_tokens, a.new_tokens)
        for request_id in report.prefilled:
            self.prefilled(request_id, state, now_s)

    def prefilled(self, request_id: str, state: WorkerState, now_s: float) -> None:
        """A request's prompt is done on its worker."""
        state.shadow.prefilled(request_id, now_s)
        # A request that was tried elsewhere since may still be reported by the first worker.
        if self.fleet.holds(request_id, state.announcement.worker):
            self.fleet.prefilled(request_id, now_s)

    def finish(self, request_id: str, worker: str, now_s: float) -> None:
        """A request ended."""
        state = self.workers.get(worker)
        if state is not None:
            state.shadow.finish(request_id, now_s)
        self.fleet.release(request_id, now_s)

    def outcome(self, worker: str, compute_s: float, load_s: float, actual_s: float) -> None:
        """A request that had met no queue got its first token."""
        state = self.workers.get(worker)
        if state is not None and self.calibrate:
            state.calibration.outcome(compute_s, load_s, actual_s)
            self._calibrated(state)

    def _learn(self, state: WorkerState, before: WorkerReport, now: WorkerReport) -> None:
        # Totals that fell belong to a worker that started anew.
        if now.steps_total < before.steps_total:
            return
        tokens = now.load_tokens_total - before.load_tokens_total
        measured_s = now.load_seconds_total - before.load_seconds_total
        announced_s = now.computed_announced_seconds_total - before.computed_announced_seconds_total
        computed_s = now.computed_seconds_total - before.computed_seconds_total
        said, learnt = state.announcement, False
        stretch = said.node.dilation
        if tokens > 0 and measured_s > 0:
            # What is announced is the link; of a server behind it only measuring tells.
            bound = _BOUND if said.tier != "lmcache" else _SERVER_BOUND
            load_s = tokens * load_token_s(said)
            state.calibration.link(measured_s / stretch, load_s / stretch, bound)
            learnt = True
        if announced_s > 0 and computed_s > 0:
            state.calibration.steps(computed_s / stretch, announced_s / stretch)
            learnt = True
        if learnt:
            self._calibrated(state)

    def _calibrated(self, state: WorkerState) -> None:
        said, learnt = state.announcement, state.calibration
        state.shadow.speed = engine_speed(said, learnt)
        self.fleet.calibrate(said, learnt.link_scale, learnt.compute_scale, learnt.overhead_s)
