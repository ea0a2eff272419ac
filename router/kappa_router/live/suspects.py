"""Requests that may have killed an engine, and the consequences for them. Pure.

A death is known by the requests in the engine: one that was alone there is not passed on;
among several each may be innocent, and is passed on once. A content that two dead engines had in
them, and none served in between, is refused. See docs/adr/0008-a-request-that-kills-engines.md."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

Blame = Literal["retry", "alone", "killer"]

DEATHS = 2
"""Deaths of engines by one content, which is refused from then on."""

MEMORY = 1024
KEPT_S = 600.0
# An engine may die of a request that ended a moment ago: GPU errors come late.
_RECENT_S = 10.0
# All who were in an engine learn of its death within this.
_DEATH_S = 10.0
# An idle engine that died within this blames its machine.
_IDLE_DEATH_S = 60.0


@dataclass(frozen=True, slots=True)
class _Death:
    at_s: float
    alone: bool
    blameless: bool


@dataclass(frozen=True, slots=True)
class _Strikes:
    """Deaths that a content was in, when it was last blamed, and for which of them."""

    count: int
    at_s: float
    death: _Death


class Suspects:
    """Deaths of engines, and contents that were in them; at most `MEMORY`, for `KEPT_S`."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[str, _Death] = OrderedDict()
        self._ended_s: dict[str, float] = {}
        self._idle_deaths_s: dict[str, float] = {}
        self._strikes: OrderedDict[str, _Strikes] = OrderedDict()

    def __len__(self) -> int:
        """Contents that are remembered."""
        return len(self._strikes)

    def ended(self, worker: str, now_s: float) -> None:
        self._ended_s[worker] = now_s

    def died(self, worker: str, node: str, in_flight: int, now_s: float) -> None:
        """A worker's engine died, or its process, with `in_flight` requests there; only the first
        sign counts."""
        known = self._deaths.get(worker)
        if known is not None and now_s - known.at_s <= _DEATH_S:
            return
        recent = now_s - self._ended_s.pop(worker, float("-inf")) <= _RECENT_S
        if in_flight == 0 and not recent:
            self._idle_deaths_s[node] = now_s
        blameless = now_s - self._idle_deaths_s.get(node, float("-inf")) <= _IDLE_DEATH_S
        self._deaths[worker] = _Death(now_s, in_flight == 1 and not recent, blameless)
        self._deaths.move_to_end(worker)
        self._forget(now_s)

    def left(self, worker: str) -> None:
        """A worker is gone; only requests that were in it learn of its death."""
        self._ended_s.pop(worker, None)

    def blame(self, worker: str, digest: str, now_s: float) -> Blame:
        """A request of that content (empty: unknown) was lost with a worker. retry: it may be tried
        elsewhere; alone: it may not, though its content may be sent again; killer: its content is
        refused from now on."""
        death = self._deaths.get(worker)
        if death is None or now_s - death.at_s > _DEATH_S or death.blameless:
            return "retry"
        if digest:
            count = self._count(digest, now_s)
            # Several requests of one content may be lost with one engine: that is one death.
            if not count or self._strikes[digest].death is not death:
                count += 1
                self._strikes[digest] = _Strikes(count, now_s, death)
                self._strikes.move_to_end(digest)
            self._forget(now_s)
            if count >= DEATHS:
                return "killer"
        return "alone" if death.alone else "retry"

    def served(self, digest: str) -> None:
        """An engine answered that content and lives: it was not what killed the other."""
        self._strikes.pop(digest, None)

    def refused(self, digest: str, now_s: float) -> bool:
        return self._count(digest, now_s) >= DEATHS

    def _count(self, digest: str, now_s: float) -> int:
        strikes = self._strikes.get(digest)
        return strikes.count if strikes is not None and now_s - strikes.at_s <= KEPT_S else 0

    def _forget(self, now_s: float) -> None:
        strikes, deaths, idle = self._strikes, self._deaths, self._idle_deaths_s
        while strikes and (
            len(strikes) > MEMORY or now_s - next(iter(strikes.values())).at_s > KEPT_S
        ):
            strikes.popitem(last=False)
        while deaths and now_s - next(iter(deaths.values())).at_s > _DEATH_S:
            deaths.popitem(last=False)
        self._idle_deaths_s = {n: s for n, s in idle.items() if now_s - s <= _IDLE_DEATH_S}
