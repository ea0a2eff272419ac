"""An OpenAI endpoint that answers as its prompts say: well, late, half, or not at all.

A prompt's first word is what to do; the rest names the request. A real HTTP server in the test's
own event loop, for tests of the load-test client.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from kappa_workload.replay import Prompt, ReplaySession, Request


def token(text: str = " a", reason: str | None = None) -> bytes:
    """An event of a completion."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


def event(data: dict[str, Any]) -> bytes:
    """Any event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"


class Rude:
    """received: names of requests, in order; bodies, headers: theirs. most_at_once: of answers that
    were under way; gate: what `wait` waits for."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[str] = []
        self.answered: list[str] = []
        self.log: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.gate = asyncio.Event()
        self.arrived = asyncio.Event()
        self.expected = 0
        self.most_at_once = self._now = 0
        self._times: Counter[str] = Counter()

    async def until_received(self, count: int) -> None:
        """Until `count` requests have come."""
        self.expected = count
        while len(self.received) < count:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 30)

    async def post(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat."""
        body = await request.json()
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        words = str(prompt).split()
        what, name = words[0], " ".join(words[1:])
        self._times[str(prompt)] += 1
        self.received.append(name)
        self.log.append(("came", name))
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        self.arrived.set()
        try:
            return await self._answer(what, self._times[str(prompt)], request)
        finally:
            self._now -= 1
            self.answered.append(name)
            self.log.append(("ended", name))

    async def _answer(self, what: str, time: int, request: web.Request) -> web.StreamResponse:
        if what.isdecimal():
            return refusal(int(what))
        if what.startswith("once-") and time == 1:
            return refusal(int(what.removeprefix("once-")))
        if what.startswith("later-"):
            await self.gate.wait()
            return refusal(int(what.removeprefix("later-")))
        if what == "repeats-key":
            return refusal(401, f"no such key:\n{request.headers['Authorization']}")
        if what == "json":
            return web.json_response({"choices": [{"text": "all at once"}]})
        if what == "drop":
            assert request.transport is not None
            request.transport.abort()
        headers = {"content-type": "text/event-stream", "x-request-id": f"id-{len(self.received)}"}
        if what == "ours":
            headers |= OURS
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        if what in ("wait", "hang"):
            await answer.write(token())
            await self.gate.wait()
        for piece in PIECES.get(what, PIECES["well"]):
            await answer.write(piece)
        if what == "reset":
            assert request.transport is not None
            request.transport.abort()
        return answer


def refusal(status: int, message: str = "") -> web.Response:
    """An error in OpenAI's shape."""
    headers = {"retry-after": "0.2"} if status in (429, 503) else {}
    body = {
        "error": {"message": message or f"says {status}", "type": "t", "param": None, "code": None}
    }
    return web.json_response(body, status=status, headers=headers)


OURS = {
    "x-kappa-node": "pcie", "x-kappa-paced": "true", "x-kappa-ratio": "12.50",
    "x-kappa-crit": "3.00", "x-kappa-reason": "cached", "x-kappa-predicted-ttft-ms": "250.0",
}  # fmt: skip

PIECES: dict[str, list[bytes]] = {
    "well": [token(), token() + token("", None)[:9], token("", None)[9:], USAGE, DONE],
    "cut": [token(), token()],
    "half": [token(), token()[:20]],
    "reset": [token()],
    "empty": [DONE],
    "nothing": [],
    "garbage": [b"<html>what?</html>\n"],
    "badjson": [token(), b"data: {not json\n\n", DONE],
    "told": [token(), event({"error": {"message": "the engine died", "code": 500}}), DONE],
    "finish": [token(), token(" b", "length")],
}


@asynccontextmanager
async def rude(
    routes: dict[str, Callable[[web.Request], Any]] | None = None,
) -> AsyncIterator[Rude]:
    """The endpoint, listening on a free port; `routes` are further GETs."""
    server = Rude()
    app = web.Application()
    app.router.add_post("/v1/completions", server.post)
    app.router.add_post("/v1/chat/completions", server.post)
    for path, handler in (routes or {}).items():
        app.router.add_get(path, handler)
    # What a handler waits for may never come once its client is gone.
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.gate.set()
        await runner.cleanup()


def session(
    name: str, *prompts: Prompt, arrival_s: float = 0.0, after_s: float = 0.0, tenant: str = ""
) -> ReplaySession:
    """A session with a turn for each of these prompts."""
    made = tuple(
        Request(
            name, turn, tenant, after_s if turn else 0.0, 10, 3, 4, 6,
            lambda prompt=prompt: prompt,
        )
        for turn, prompt in enumerate(prompts)
    )  # fmt: skip
    return ReplaySession(name, arrival_s, made)
