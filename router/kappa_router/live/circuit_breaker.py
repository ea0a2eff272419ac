"""A circuit breaker per worker: who must not be chosen now, and who may be tried again. A worker
that failed several requests in a row, or gave a sign of being gone or stalled, is *open*: nothing
is sent there. After a pause, which doubles with every further failure, it is *half open*: one
request goes there as a probe, and its outcome closes or opens the breaker. Where a sign of life is
what was missing, the pause ends with one, and never without. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ERRORS = "errors"
PROBE_S = 60.0
"""A probe without an outcome is forgotten after this."""


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """The rule by which a breaker opens, and for how long."""

    # In a row, that open it.
    failures: int = 5
    # Before the first probe; doubled each time, up to the longest.
    pause_s: float = 1.0
    longest_pause_s: float = 30.0


@dataclass(frozen=True, slots=True)
class BreakerState:
    """The view of a worker's breaker: state, why it last opened, how often it did."""

    standing: Literal["closed", "open", "half_open"] = "closed"
    why: str = ""
    failures: int = 0
    opened: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """Workers that must not be chosen. Where no other is left, one that is failing is better than
    none; one that is gone is not."""

    # Without a sign of life.
    gone: frozenset[str] = frozenset()
    # They answer, but fail.
    failing: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Open:
    """An open breaker."""

    why: str
    # Nothing is sent until then, nor, if it is silent, before a sign of life.
    until_s: float
    pause_s: float
    silent: bool
    # When each was sent, by request.
    probes: dict[str, float] = field(default_factory=dict)

    def paused(self, now_s: float) -> bool:
        return self.silent or now_s < self.until_s


_NONE = Blocked()


class Breakers:
    """The breakers of all workers; one that never failed costs nothing."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self.rule = rule or BreakerRule()
        self._failures: dict[str, int] = {}
        self._open: dict[str, _Open] = {}
        self._opened: dict[str, int] = {}

    def sent(self, worker: str, request_id: str, now_s: float) -> None:
        """A request went to a worker; on one that is half open it is the probe."""
        if worker in self._open:
            self._open[worker].probes[request_id] = now_s

    def succeeded(self, worker: str, request_id: str) -> bool:
        """The worker answered a request; True if that closed its breaker. One sent before the
        breaker opened proves nothing about the worker since."""
        state = self._open.get(worker)
        if state is not None and request_id not in state.probes:
            return False
        self._failures.pop(worker, None)
        return self._open.pop(worker, None) is not None

    def failed(self, worker: str, request_id: str, now_s: float) -> bool:
        """The worker failed a request; True if that opened its breaker, or opened it again."""
        state, pause_s = self._open.get(worker), self.rule.pause_s
        if state is not None:
            if request_id not in state.probes:
                return False
            pause_s = min(2 * state.pause_s, self.rule.longest_pause_s)
        else:
            self._failures[worker] = self._failures.get(worker, 0) + 1
            if self._failures[worker] < self.rule.failures:
                return False
        self._trip(worker, _Open(ERRORS, now_s + pause_s, pause_s, silent=False))
        return True

    def abandoned(self, worker: str, request_id: str) -> None:
        """A request ended without proving anything of the worker (client left, worker full)."""
        if worker in self._open:
            self._open[worker].probes.pop(request_id, None)

    def trip(self, worker: str, why: str, now_s: float, *, needs_sign: bool = True) -> bool:
        """The worker seems gone, or stalls; True if it was not open for that already. needs_sign:
        nothing goes there before a sign of life. Else it is probed without after the longest pause:
        an engine that has lost its work, and is well, cannot show that it moves."""
        state = self._open.get(worker)
        if state is not None and (
            state.silent or (not needs_sign and not state.probes and now_s < state.until_s)
        ):
            return False
        pause_s = self.rule.pause_s if needs_sign else self.rule.longest_pause_s
        self._trip(worker, _Open(why, now_s + pause_s, pause_s, silent=needs_sign))
        return True

    def alive(self, worker: str, now_s: float) -> bool:
        """A sign of life; True if the worker may be probed now for the first time since."""
        state = self._open.get(worker)
        if state is None or not state.paused(now_s):
            return False
        state.silent, state.until_s = False, now_s
        return True

    def leave(self, worker: str) -> None:
        for table in (self._failures, self._open, self._opened):
            table.pop(worker, None)

    def blocked(self, now_s: float) -> Blocked:
        if not self._open:
            return _NONE
        gone, failing = set(), set()
        for worker, state in self._open.items():
            state.probes = {r: at_s for r, at_s in state.probes.items() if now_s - at_s <= PROBE_S}
            if state.silent:
                gone.add(worker)
            elif state.paused(now_s) or state.probes:
                failing.add(worker)
        return Blocked(frozenset(gone), frozenset(failing))

    def state(self, worker: str, now_s: float) -> BreakerState:
        state, opened = self._open.get(worker), self._opened.get(worker, 0)
        failures = self._failures.get(worker, 0)
        if state is None:
            return BreakerState("closed", "", failures, opened)
        standing: Literal["open", "half_open"] = "open" if state.paused(now_s) else "half_open"
        return BreakerState(standing, state.why, failures, opened)

    def retry_after_s(self, now_s: float) -> float:
        """Until the first of those that are failing may be probed; 0 if there is none."""
        pauses = [s.until_s - now_s for s in self._open.values() if not s.silent]
        return max(min(pauses, default=0.0), 0.0)

    def _trip(self, worker: str, state: _Open) -> None:
        self._open[worker] = state
        self._opened[worker] = self._opened.get(worker, 0) + 1
