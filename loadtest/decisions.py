"""Asks our cluster what it predicted of each request and what became of that (`/v1/decisions`).

The cluster remembers a few thousand decisions, newest last. They are fetched while the run goes
on, a few hundred at a time, so that neither side is busy with it for long, and once more at the
end. What is not found any more is counted. Called by the runner and by `kappa replay`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

# What a cluster of ours remembers; router/live/live_router.py.
_REMEMBERED = 4096
_BATCH = 256
_POLL_S = 1.0
# Others may ask the same cluster; their decisions lie between ours.
_SLACK = 64
_SETTLE_S = 0.5
# Workers report about once a second; what they have not said by then they never will.
_PATIENCE_S = 5.0
# Of what really happened: known when the worker has reported the request's prompt.
_TOLD_LAST = ("new_tokens", "compute_s")


class _Decision(msgspec.Struct):
    request_id: str
    predicted: dict[str, Any]
    actual: dict[str, Any]


class _Decisions(msgspec.Struct):
    decisions: list[_Decision]


Write = Callable[[str, dict[str, Any], dict[str, Any]], None]


class Decisions:
    """What is still to be asked. `fetch` gives the last so many decisions as JSON; `write` keeps
    one: request id, predicted, actual. A decision is waited for `patience_s` after its request has
    ended, and then kept as it is."""

    def __init__(
        self,
        fetch: Callable[[int], Awaitable[bytes]],
        write: Write,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._fetch, self._write, self._patience_s = fetch, write, patience_s
        self._made = 0
        self._wanted: dict[str, tuple[int, float]] = {}
        self._enough = asyncio.Event()
        self.written = self.lost = 0

    def ticket(self) -> int:
        """Call as a request is sent: its place in the order of decisions."""
        self._made += 1
        return self._made

    def want(self, request_id: str, ticket: int) -> None:
        """A request has ended: its decision is to be fetched."""
        self._wanted[request_id] = (ticket, time.monotonic() + self._patience_s)
        if len(self._wanted) >= _BATCH:
            self._enough.set()

    async def follow(self) -> None:
        """Fetch while the run goes on, until cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._enough.wait(), _POLL_S)
            except TimeoutError:
                pass
            else:
                self._enough.clear()
            if self._wanted:
                await self.poll()
                # Not more often than this, whatever is wanted.
                await asyncio.sleep(_POLL_S / 4)

    @property
    def untold(self) -> int:
        """Requests whose decision was not found, or is still wanted."""
        return self.lost + len(self._wanted)

    async def settle(self) -> None:
        """Fetch the rest: admissions are reported a moment after an answer."""
        while self._wanted:
            await asyncio.sleep(min(_SETTLE_S, self._patience_s))
            await self.poll()

    async def poll(self) -> None:
        """Fetch once as many decisions as reach back to the oldest one wanted."""
        oldest = min(ticket for ticket, _ in self._wanted.values())
        limit = min(self._made - oldest + 1 + _SLACK, _REMEMBERED)
        answer = await self._fetch(limit)
        try:
            told = msgspec.json.decode(answer, type=_Decisions).decisions if answer else []
        except msgspec.DecodeError:
            told = []
        by_id = {decision.request_id: decision for decision in told}
        now_s = time.monotonic()
        for request_id, (ticket, until_s) in list(self._wanted.items()):
            decision = by_id.get(request_id)
            is_last = now_s >= until_s or self._made - ticket >= _REMEMBERED
            if decision is not None and (is_last or _is_complete(decision)):
                self._write(request_id, _figures(decision.predicted), _figures(decision.actual))
                self.written += 1
            elif is_last:
                self.lost += 1
            else:
                continue
            del self._wanted[request_id]


def _figures(told: dict[str, Any]) -> dict[str, Any]:
    """Numbers, and what is not known: a report counts with them."""
    return {name: value for name, value in told.items() if value is None or _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_complete(decision: _Decision) -> bool:
    return all(decision.actual.get(name, 0) is not None for name in _TOLD_LAST)
