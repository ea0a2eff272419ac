"""Plays sessions against a router and writes down what the client saw.

A target is either asked where a request goes (and the client sends it there), or is a proxy that
takes the request itself. All times in outcomes are emulated seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx

from benchmarks.routing.peers.sidecar import Sidecar, SidecarError
from benchmarks.routing.peers.traffic import Arrival
from benchmarks.routing.peers.wire import NODE_HEADER, SHAPE_KEY, prompt_text
from workload.shapes import TurnShape

MODEL = "emulated"


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; seconds since the run began, or since it was sent.

    route_s: until it was known where it goes (wall seconds; nan behind a proxy). matched_tokens:
    what the router believed to be held where it sent it, or -1.
    """

    request: str
    start_s: float
    input_tokens: int
    output_tokens: int
    node: str = ""
    ttft_s: float = float("nan")
    e2e_s: float = float("nan")
    route_s: float = float("nan")
    matched_tokens: int = -1
    error: str = ""


class Target(Protocol):
    """Where requests go."""

    async def url_of(self, outcome: Outcome, turn: TurnShape, session: str) -> str:
        """The base URL to send a request to."""
        ...

    def first(self, outcome: Outcome) -> None:
        """Its first token came."""
        ...

    def done(self, outcome: Outcome) -> None:
        """It ended, or failed."""
        ...


class Proxy:
    """A router that forwards requests itself."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def url_of(self, outcome: Outcome, turn: TurnShape, session: str) -> str:
        """Always the proxy."""
        return self._url

    def first(self, outcome: Outcome) -> None:
        """It sees for itself."""

    def done(self, outcome: Outcome) -> None:
        """It sees for itself."""


class Asked:
    """A router in a helper process that says where requests go."""

    def __init__(self, sidecar: Sidecar, urls: Mapping[str, str]) -> None:
        self._sidecar, self._urls = sidecar, dict(urls)

    async def url_of(self, outcome: Outcome, turn: TurnShape, session: str) -> str:
        """Ask, and say who was chosen."""
        start_s = time.perf_counter()
        answer = await self._sidecar.ask(
            {
                "op": "route",
                "request": outcome.request,
                "session": session,
                "blocks": turn.blocks.tolist(),
                "tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
            }
        )
        outcome.route_s = time.perf_counter() - start_s
        outcome.matched_tokens = int(answer.get("matched_tokens", -1))
        return self._urls[answer["worker"]]

    def first(self, outcome: Outcome) -> None:
        """Tell it."""
        self._sidecar.tell({"op": "first", "request": outcome.request})

    def done(self, outcome: Outcome) -> None:
        """Tell it."""
        told = {"op": "done", "request": outcome.request, "output_tokens": outcome.output_tokens}
        self._sidecar.tell(told)


class Player:
    """Plays one run. `dilation`: wall seconds per emulated one."""

    def __init__(self, client: httpx.AsyncClient, target: Target, dilation: float) -> None:
        self.outcomes: list[Outcome] = []
        self._client, self._target, self._dilation = client, target, dilation
        self._origin_s = 0.0

    async def play(self, found: Sequence[Arrival], seconds: float, drain_s: float) -> None:
        """Play the sessions for `seconds`, then let what is under way end for `drain_s`.

        Turns that would start after `seconds` are left out; what is then still under way has the
        error "unfinished".
        """
        self._origin_s = time.monotonic()
        tasks = [asyncio.create_task(self._session(arrival, seconds)) for arrival in found]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=(seconds + drain_s) * self._dilation)
        for task in late:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in self.outcomes:
            if not outcome.error and outcome.e2e_s != outcome.e2e_s:
                outcome.error = "unfinished"
        for result in results:
            if isinstance(result, Exception):
                raise result

    @property
    def _now_s(self) -> float:
        return (time.monotonic() - self._origin_s) / self._dilation

    async def _session(self, arrival: Arrival, seconds: float) -> None:
        at_s = arrival.start_s
        for number, turn in enumerate(arrival.session.turns):
            await asyncio.sleep(max(at_s + turn.after_s - self._now_s, 0.0) * self._dilation)
            if self._now_s >= seconds:
                return
            outcome = Outcome(
                f"{arrival.session.id}#{number}", self._now_s, turn.input_tokens, turn.output_tokens
            )
            self.outcomes.append(outcome)
            await self._request(outcome, turn, arrival.session.id)
            at_s = self._now_s

    async def _request(self, outcome: Outcome, turn: TurnShape, session: str) -> None:
        start_s = self._now_s
        body = {
            "model": MODEL,
            "prompt": prompt_text(turn.blocks.tolist(), outcome.request),
            "max_tokens": turn.output_tokens,
            "stream": True,
            SHAPE_KEY: {
                "request": outcome.request,
                "tokens": turn.input_tokens,
                "kept": [f"{b:x}" for b in turn.kept_blocks[len(turn.blocks) :].tolist()],
            },
        }
        try:
            url = await self._target.url_of(outcome, turn, session)
        except SidecarError as error:
            outcome.error = str(error)
            raise
        try:
            await self._stream(outcome, url, body, start_s)
        except httpx.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            self._target.done(outcome)

    async def _stream(
        self, outcome: Outcome, url: str, body: Mapping[str, object], start_s: float
    ) -> None:
        complete = False
        async with self._client.stream("POST", f"{url}/v1/completions", json=body) as response:
            outcome.node = response.headers.get(NODE_HEADER, "")
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"status {response.status_code}: {text[:200]}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if outcome.ttft_s != outcome.ttft_s:
                    outcome.ttft_s = self._now_s - start_s
                    self._target.first(outcome)
                complete = line == "data: [DONE]"
        if complete:
            outcome.e2e_s = self._now_s - start_s
        else:
            outcome.error = "the stream ended early"
