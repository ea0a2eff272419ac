"""An endpoint's reports: about itself before a load test, and about each request afterwards.

Before: models, nodes and options. vLLM, SGLang and clusters of ours are recognised by their
reports; other endpoints get plain OpenAI requests. Afterwards: a cluster of ours reports its
prediction for each request and the outcome (`/v1/decisions`).
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

from kappa.keys import bearer
from kappa_loadtest.client import (
    NETWORK_ERRORS,
    PROBE_S,
    EndpointError,
    base_url,
    detail_of,
)
from kappa_loadtest.run_folder import RequestDecision

_EOS_OWNERS = ("vllm", "sglang")
# Decisions that a cluster of ours remembers; router/kappa_router/live/live_router.py.
_REMEMBERED = 4096
_BATCH = 256
_POLL_S = 1.0
# Others may use the same cluster; their decisions lie between ours.
_SLACK = 64
_SETTLE_S = 0.5
# Workers report about once a second: reports that have not come by then never will.
_PATIENCE_S = 5.0
# Outcomes that are known when the worker has reported the request's prompt.
_REPORTED_LAST = ("new_tokens", "compute_s")


@dataclass(frozen=True, slots=True)
class Surveyed:
    """An endpoint's report about itself."""

    models: tuple[str, ...]
    contexts: dict[str, int]  # tokens, by model, where it gives them
    nodes: tuple[dict[str, Any], ...]  # empty unless it is a cluster of ours
    takes_ignore_eos: bool  # known to take vLLM's option; then it takes token ids, too


class _Card(msgspec.Struct):
    id: str
    owned_by: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Card]


async def survey(url: str, key: str = "", timeout_s: float = PROBE_S) -> Surveyed:
    """Find out what an endpoint is, without generating anything.

    Raises:
        EndpointError: no answer, a refused key, or no model.
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
    """Collects decisions during a run. fetch: gives the last n as JSON; write: keeps one.

    A cluster remembers a few thousand, newest last. They are fetched while the run goes on, a few
    hundred at a time, so that neither side is busy with it for long. A decision may be completed
    until `patience_s` after its request has ended, and is then kept as it is; missing ones are
    counted.
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
        self.lost = 0

    def ticket(self) -> int:
        """A request is sent; returns its place in the order of decisions."""
        self._made += 1
        return self._made

    def want(self, request_id: str, ticket: int) -> None:
        """A request has ended: fetch its decision."""
        self._wanted[request_id] = (ticket, time.monotonic() + self._patience_s)
        if len(self._wanted) >= _BATCH:
            self._enough.set()

    @property
    def missing(self) -> int:
        """The number of requests without their decision, lost or still to be fetched."""
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
            done = decision and all(decision.actual.get(n, 0) is not None for n in _REPORTED_LAST)
            if decision is not None and (is_last or done):
                decision.predicted = _figures(decision.predicted)
                decision.actual = _figures(decision.actual)
                self._write(decision)
            elif is_last:
                self.lost += 1
            else:
                continue
            del self._wanted[request_id]


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a decision, None included, which a report adds up."""
    return {
        name: value
        for name, value in found.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
