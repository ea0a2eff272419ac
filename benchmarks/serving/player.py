"""Plays traffic of `kappa bench predict` against one endpoint, and keeps its load near a target."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from benchmarks.harness import note
from benchmarks.serving.cluster_client import ClusterClient
from benchmarks.serving.scoring import CLASSES, Outcome, outcome_from, usage
from benchmarks.serving.traffic import Act, Ask, Governor, Traffic

_WINDOW_S = 20.0
_WATCH_EVERY_S = 2.0
_TELL_EVERY_S = 15.0
_MAX_IN_FLIGHT = 14
# Decisions fetched while a phase runs: few, since the ingress that makes them is being measured.
_RECENT = 64
_READING = 4
_DOCUMENTS = 24
_WARM_UP_DOCUMENTS = 6
_WARM_UP_TOKENS = (40, 700, 60, 900, 100, 800)


@dataclass(slots=True)
class Phase:
    """What was sent in one phase: outcomes by the end, client's TTFT by request id, failures."""

    outcomes: list[Outcome] = field(default_factory=list)
    client_ttft_s: dict[str, float] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    nodes_before: list[dict[str, Any]] = field(default_factory=list)
    nodes_after: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Player:
    """Plays acts against one endpoint, one phase at a time."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._phase = Phase()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._counted: Counter[str] = Counter()

    async def warm_up(self, traffic: Traffic, requests: int, governor: Governor) -> Phase:
        """Calibrate: pairs on idle nodes first, then every kind of act, `requests` in all."""
        phase = self._begin()
        for tokens in _WARM_UP_TOKENS * 2:
            await self._play(traffic.pair(tokens))
        await self._read_documents(traffic, _WARM_UP_DOCUMENTS)
        names = ("revisit", "ask", "agent", "burst")
        sent = 0
        while len(phase.client_ttft_s) + len(self._tasks) < requests:
            act = traffic.act(names[sent % len(names)])
            self._spawn(act)
            sent += 1
            await self._pause(governor.gap_s(act))
        return await self._finish()

    async def prepare(self, traffic: Traffic) -> Phase:
        """Have the documents read that `measure` will come back to."""
        self._begin()
        await self._read_documents(traffic, _DOCUMENTS)
        return await self._finish()

    async def _read_documents(self, traffic: Traffic, count: int) -> None:
        for act in traffic.first_visits(count):
            while len(self._tasks) >= _READING:
                await asyncio.sleep(0.05)
            self._spawn(act)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._in_flight >= _MAX_IN_FLIGHT:
            await asyncio.sleep(0.02)

    async def measure(
        self,
        traffic: Traffic,
        governor: Governor,
        random: Random,
        *,
        requests: int,
        per_class: int,
        limit_s: float,
    ) -> Phase:
        """Send until there are `requests` in all and `per_class` of each class, or time is up."""
        phase = self._begin()
        phase.nodes_before = await self._client.nodes()
        start_s = time.monotonic()
        watcher = asyncio.create_task(self._watch(governor))
        try:
            while time.monotonic() - start_s < limit_s and not self._enough(requests, per_class):
                act = traffic.next_act(self._counted, per_class)
                self._spawn(act)
                await self._pause(random.expovariate(1 / governor.gap_s(act)))
        finally:
            watcher.cancel()
        # Before the last requests drain: an emptying cluster is not under load.
        phase.nodes_after = await self._client.nodes()
        phase.seconds = time.monotonic() - start_s
        return await self._finish()

    def _begin(self) -> Phase:
        self._phase = Phase()
        self._counted = Counter()
        return self._phase

    async def _finish(self) -> Phase:
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._phase.outcomes = await self._outcomes(len(self._phase.client_ttft_s) + _RECENT)
        return self._phase

    def _enough(self, requests: int, per_class: int) -> bool:
        return sum(self._counted.values()) >= requests and all(
            self._counted[kind] >= per_class for kind in CLASSES
        )

    def _spawn(self, act: Act) -> None:
        task = asyncio.create_task(self._play(act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, act: Act) -> None:
        if not act.chained:
            await asyncio.gather(*(self._ask(ask) for ask in act.asks))
            return
        for ask in act.asks:
            await asyncio.sleep(ask.wait_s)
            if not await self._ask(ask):
                return

    async def _ask(self, ask: Ask) -> bool:
        self._in_flight += 1
        try:
            record = await self._client.send(self._client.prepare(ask.prompt, ask.max_tokens))
        finally:
            self._in_flight -= 1
        if record.error or record.first_token_s is None:
            self._phase.failures[record.error] += 1
            return False
        self._phase.client_ttft_s[record.request_id] = record.first_token_s - record.sent_s
        return True

    async def _outcomes(self, limit: int) -> list[Outcome]:
        outcomes = map(outcome_from, await self._client.decisions(limit))
        mine = self._phase.client_ttft_s
        return [o for o in outcomes if o is not None and o.request_id in mine]

    async def _watch(self, governor: Governor) -> None:
        """Keep the governor and the counts up to date; say now and then how far it is."""
        seen = [await self._client.nodes()]
        kinds: dict[str, str] = {}
        keep = round(_WINDOW_S / _WATCH_EVERY_S)
        start_s = told_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                seen.append(await self._client.nodes())
                load = usage(seen[0], seen[-1]).load
                recent = await self._outcomes(_RECENT)
            except (httpx.HTTPError, ValueError):
                continue
            del seen[:-keep]
            governor.observe(load)
            kinds.update((o.request_id, o.kind) for o in recent)
            self._counted = Counter(kinds.values())
            now_s = time.monotonic()
            if now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
                counts = ", ".join(f"{self._counted[kind]} {kind}" for kind in CLASSES)
                note(f"{now_s - start_s:4.0f} s  load {load:.2f}  {counts}")
