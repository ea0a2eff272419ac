"""What an endpoint reports of itself: before a load test, and of each request afterwards.

Before: models, nodes, what options it takes. vLLM, SGLang and clusters of ours are recognised by
what they report; an endpoint that is none of these gets plain OpenAI requests. Afterwards: what a
cluster of ours predicted of each request and what became of that (`/v1/decisions`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kappa_loadtest.client import (
    NETWORK_ERRORS,
    PROBE_S,
    EndpointError,
    base_url,
    bearer,
    detail_of,
)
from kappa_loadtest.run_folder import RequestDecision

_EOS_OWNERS = ("vllm", "sglang")
# What a cluster of ours remembers; router/kappa_router/live/live_router.py.
_REMEMBERED = 4096
_BATCH = 256
_POLL_S = 1.0
# Others may use the same cluster; their decisions lie between ours.
_SLACK = 64
_SETTLE_S = 0.5
# Workers report about once a second; what they have not reported by then they never will.
_PATIENCE_S = 5.0
# Of what really happened: known when the worker has reported the request's prompt.
_REPORTED_LAST = ("new_tokens", "compute_s")


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What an endpoint reports.

    models; contexts: of those for which it gives one; nodes: none unless it is a cluster of ours;
    takes_ignore_eos: whether it is known to, which those do that take token ids.
    """

    models: tuple[str, ...]
    contexts: dict[str, int]
    nodes: tuple[dict[str, Any], ...]
    takes_ignore_eos: bool


class _Card(msgspec.Struct):
    id: str
    owned_by: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Card]


async def survey(url: str, key: str = "", timeout_s: float = PROBE_S) -> Surveyed:
    """Find out what an endpoint is, without generating anything.

    Raises:
        EndpointError: nobody answers, the key is refused, or it serves no model.
    """
    base, timeout = base_url(url), aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(headers=bearer(key), timeout=timeout) as session:
        cards = await _cards(session, base)
        rows = (await _object_at(session, f"{base}/v1/nodes")).get("nodes")
        is_ours = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        nodes = tuple(rows or ()) if is_ours else ()
        takes = bool(nodes) or any(card.owned_by in _EOS_OWNERS for card in cards)
        takes = takes or "version" in await _object_at(session, f"{base}/version")
    contexts = {c.id: c.max_model_len for c in cards if isinstance(c.max_model_len, int)}
    return Surveyed(tuple(card.id for card in cards), contexts, nodes, takes)


async def _cards(session: aiohttp.ClientSession, base: str) -> list[_Card]:
    try:
        async with session.get(f"{base}/v1/models") as response:
            if response.status != 200:
                hint = "; give its key with --key" if response.status in (401, 403) else ""
                raise EndpointError(f"{base}/v1/models answers {response.status}{hint}")
            cards = msgspec.json.decode(await response.read(), type=_Models).data
    except NETWORK_ERRORS as error:
        raise EndpointError(f"nobody answers at {base}: {detail_of(error)}") from None
    except msgspec.DecodeError as error:
        raise EndpointError(f"{base}/v1/models is not OpenAI's list of models: {error}") from None
    if not cards:
        raise EndpointError(f"{base} serves no model")
    return cards


async def _object_at(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The JSON object at `url`; empty if there is none."""
    try:
        async with session.get(url) as response:
            found = msgspec.json.decode(await response.read()) if response.status == 200 else {}
    except (*NETWORK_ERRORS, msgspec.DecodeError):
        return {}
    return found if isinstance(found, dict) else {}


# -- decisions, afterwards ------------------------------------------------------------------------


class _Answer(msgspec.Struct):
    decisions: list[RequestDecision]


class Decisions:
    """Decisions still to be fetched. `fetch` gives the last so many as JSON; `write` keeps one.

    A cluster remembers a few thousand, newest last: they are fetched while the run goes on, a few
    hundred at a time, so that neither side is busy with it for long. A decision is waited for
    `patience_s` after its request has ended, and then kept as it is; what is not found is counted.
    """

    def __init__(
        self,
        fetch: Callable[[int], Awaitable[bytes]],
        write: Callable[[RequestDecision], None],
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

    @property
    def missing(self) -> int:
        """Requests whose decision was not found, or is still wanted."""
        return self.lost + len(self._wanted)

    async def follow(self) -> None:
        """Fetch while the run goes on, until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), _POLL_S)
            self._enough.clear()
            if self._wanted:
                await self.poll()
                # Not more often than this, whatever is wanted.
                await asyncio.sleep(_POLL_S / 4)

    async def settle(self) -> None:
        """Fetch the rest: admissions are reported a moment after an answer."""
        while self._wanted:
            await asyncio.sleep(min(_SETTLE_S, self._patience_s))
            await self.poll()

    async def poll(self) -> None:
        """Fetch once as many decisions as reach back to the oldest one wanted."""
        oldest = min(ticket for ticket, _ in self._wanted.values())
        answer = await self._fetch(min(self._made - oldest + 1 + _SLACK, _REMEMBERED))
        found: dict[str, RequestDecision] = {}
        with suppress(msgspec.DecodeError):
            decisions = msgspec.json.decode(answer, type=_Answer).decisions
            found = {decision.request_id: decision for decision in decisions}
        now_s = time.monotonic()
        for request_id, (ticket, until_s) in list(self._wanted.items()):
            decision = found.get(request_id)
            is_last = now_s >= until_s or self._made - ticket >= _REMEMBERED
            if decision is not None and (is_last or is_complete(decision.actual)):
                decision.predicted = _figures(decision.predicted)
                decision.actual = _figures(decision.actual)
                self._write(decision)
                self.written += 1
            elif is_last:
                self.lost += 1
            else:
                continue
            del self._wanted[request_id]


def is_complete(actual: dict[str, Any]) -> bool:
    """Whether a request's worker has reported what became of its prompt."""
    return all(actual.get(name, 0) is not None for name in _REPORTED_LAST)


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    """Numbers, and what is not known: a report counts with them."""
    return {
        name: value
        for name, value in found.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
