"""A circuit breaker per worker: who must not be chosen now, and who may be tried again.

A worker that failed several requests in a row, or gave a sign of being gone (its stream broke, it
fell silent, its engine stalled), is *open*: nothing is sent there. After a pause, which doubles
with every further failure, it is *half open*: one request goes there as a probe, and its outcome
closes or opens the breaker. Where a sign of life is what was missing, the pause ends with one, and
never without. Pure: each call takes the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Standing = Literal["closed", "open", "half_open"]

ERRORS = "errors"


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """failures: so many in a row open it; pause_s: before the first probe, doubled each time up to
    longest_pause_s; probe_s: a probe without an outcome is forgotten after this."""

    failures: int = 5
    pause_s: float = 1.0
    longest_pause_s: float = 30.0
    probe_s: float = 60.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ValueError(f"failures is {self.failures}; give 1 or more")
        if not 0 < self.pause_s <= self.longest_pause_s:
            raise ValueError(
                f"pause_s is {self.pause_s} and longest_pause_s {self.longest_pause_s}; "
                "give 0 < pause_s <= longest_pause_s"
            )
        if not self.probe_s > 0:
            raise ValueError(f"probe_s is {self.probe_s}; give more than 0")


@dataclass(frozen=True, slots=True)
class BreakerState:
    """What is shown of a worker's breaker: standing, why it last opened, how often it did."""

    standing: Standing = "closed"
    why: str = ""
    failures: int = 0
    opened: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """Workers that must not be chosen. gone: no sign of life; failing: they answer, but fail.

    Where nobody else is left, one that is failing is better than nobody; one that is gone is not.
    """

    gone: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Open:
    why: str
    until_s: float
    pause_s: float
    silent: bool
    probes: dict[str, float] = field(default_factory=dict)


_NOBODY = Blocked()


class Breakers:
    """The breakers of all workers; one that never failed costs nothing."""

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self.rule = rule or BreakerRule()
        self._failures: dict[str, int] = {}
        self._open: dict[str, _Open] = {}
        self._opened: dict[str, int] = {}

    # -- what happens -------------------------------------------------------------------------

    def sent(self, worker: str, request_id: str, now_s: float) -> None:
        """A request went to a worker; on one that is half open it is the probe."""
        state = self._open.get(worker)
        if state is not None:
            state.probes[request_id] = now_s

    def succeeded(self, worker: str, request_id: str) -> bool:
        """A request of it was answered; True if that closed its breaker.

        One that was sent before the breaker opened says nothing about the worker since.
        """
        state = self._open.get(worker)
        if state is None:
            self._failures.pop(worker, None)
            return False
        if request_id not in state.probes:
            return False
        del self._open[worker]
        self._failures.pop(worker, None)
        return True

    def failed(self, worker: str, request_id: str, now_s: float) -> bool:
        """The worker failed a request; True if that opened its breaker, or opened it anew."""
        state = self._open.get(worker)
        if state is not None:
            if request_id not in state.probes:
                return False
            pause_s = min(2 * state.pause_s, self.rule.longest_pause_s)
            self._opens(worker, ERRORS, now_s, pause_s, silent=False)
            return True
        failures = self._failures.get(worker, 0) + 1
        self._failures[worker] = failures
        if failures < self.rule.failures:
            return False
        self._opens(worker, ERRORS, now_s, self.rule.pause_s, silent=False)
        return True

    def abandoned(self, worker: str, request_id: str) -> None:
        """A request ended without saying anything of the worker (its client left, it was full)."""
        state = self._open.get(worker)
        if state is not None:
            state.probes.pop(request_id, None)

    def trip(self, worker: str, why: str, now_s: float, *, needs_sign: bool = True) -> bool:
        """The worker seems gone, or stands still; True if it was not open for that already.

        needs_sign: nothing goes there before it gave a sign of life. Else one is waited for, too,
        but after the longest pause it is probed without: an engine that has lost its work, and is
        well, cannot show that it moves.
        """
        state = self._open.get(worker)
        if state is not None and (
            state.silent or (not needs_sign and not state.probes and now_s < state.until_s)
        ):
            return False
        pause_s = self.rule.pause_s if needs_sign else self.rule.longest_pause_s
        self._opens(worker, why, now_s, pause_s, silent=needs_sign)
        return True

    def alive(self, worker: str, now_s: float) -> bool:
        """A sign of life; True if the worker may be probed now for the first time since."""
        state = self._open.get(worker)
        if state is None or not (state.silent or now_s < state.until_s):
            return False
        state.silent, state.until_s = False, now_s
        return True

    def leave(self, worker: str) -> None:
        """The worker is gone for good."""
        for table in (self._failures, self._open, self._opened):
            table.pop(worker, None)

    # -- what is asked ------------------------------------------------------------------------

    def blocked(self, now_s: float) -> Blocked:
        """Who must not be chosen now."""
        if not self._open:
            return _NOBODY
        gone, failing = set(), set()
        for worker, state in self._open.items():
            if state.silent:
                gone.add(worker)
            elif now_s < state.until_s or self._probing(state, now_s):
                failing.add(worker)
        return Blocked(frozenset(gone), frozenset(failing))

    def state(self, worker: str, now_s: float) -> BreakerState:
        """How a worker's breaker stands."""
        state, opened = self._open.get(worker), self._opened.get(worker, 0)
        failures = self._failures.get(worker, 0)
        if state is None:
            return BreakerState("closed", "", failures, opened)
        waits = state.silent or now_s < state.until_s
        return BreakerState("open" if waits else "half_open", state.why, failures, opened)

    def retry_after_s(self, now_s: float) -> float:
        """Until the first of those that are failing may be probed; 0 if there is none."""
        pauses = [s.until_s - now_s for s in self._open.values() if not s.silent]
        return max(min(pauses, default=0.0), 0.0)

    def _probing(self, state: _Open, now_s: float) -> bool:
        late = [r for r, sent_s in state.probes.items() if now_s - sent_s > self.rule.probe_s]
        for request_id in late:
            del state.probes[request_id]
        return bool(state.probes)

    def _opens(self, worker: str, why: str, now_s: float, pause_s: float, *, silent: bool) -> None:
        self._open[worker] = _Open(why, now_s + pause_s, pause_s, silent)
        self._opened[worker] = self._opened.get(worker, 0) + 1
