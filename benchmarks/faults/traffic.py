"""Load that goes on while things go wrong: clients who ask, wait, and ask again, and note all.

Each client asks for one document after the other, some streamed and some not, over plain HTTP and
without retries of its own: what it sees is what the cluster did. Prompts come from a seed and
repeat, so that caches on all tiers have work.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from benchmarks.faults.evaluation import Observed

_NODE_HEADER = "x-kappa-node"


@dataclass(frozen=True, slots=True)
class Mix:
    """What is asked for. clients: at once; streamed_share: of the requests; documents: different
    prompts, of up to so many words; max_tokens: of an answer; pause_s: between two requests of a
    client; timeout_s: of a request."""

    clients: int = 12
    streamed_share: float = 0.4
    documents: int = 24
    words: int = 500
    max_tokens: int = 12
    pause_s: float = 0.0
    timeout_s: float = 120.0


class Traffic:
    """Use as an asynchronous context manager; `seen` grows until it ends, `settle` awaits the open
    ones."""

    def __init__(
        self, url: str, model: str, mix: Mix, seed: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self.seen: list[Observed] = []
        self._url, self._model, self._mix = url, model, mix
        self._headers = dict(headers or {})
        self._rng = np.random.default_rng(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._going = True
        self._documents = [self._document(i) for i in range(mix.documents)]

    async def __aenter__(self) -> Traffic:
        timeout = aiohttp.ClientTimeout(total=self._mix.timeout_s)
        # A connection for each client: none waits for another's.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._mix.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.settle()
        await self._session.close()

    async def settle(self) -> None:
        """Send nothing more; return when all that is open has ended."""
        self._going = False
        await asyncio.gather(*self._tasks)

    async def ask(self, document: int, streamed: bool) -> Observed:
        """One request, noted in `seen`."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._documents[document]}],
            "max_tokens": self._mix.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": streamed,
        }
        sent_s = time.monotonic()
        seen = await self._send(body, sent_s, streamed)
        self.seen.append(seen)
        return seen

    def _document(self, number: int) -> str:
        count = int(self._rng.integers(self._mix.words // 4, self._mix.words))
        words = self._rng.integers(0, 997, count).tolist()
        return f"Document {number}. " + " ".join(f"{word} counts." for word in words)

    async def _client(self) -> None:
        mix = self._mix
        while self._going:
            streamed = bool(self._rng.random() < mix.streamed_share)
            await self.ask(int(self._rng.integers(mix.documents)), streamed)
            # One that fails at once must not become a storm.
            failed = not self.seen[-1].ok
            await asyncio.sleep(max(mix.pause_s, 0.05 if failed else 0.0))

    async def _send(self, body: dict[str, Any], sent_s: float, streamed: bool) -> Observed:
        status, node, first_s = 0, "", None
        complete, announced, error = False, False, ""
        try:
            url = f"{self._url}/v1/chat/completions"
            async with self._session.post(url, json=body, headers=self._headers) as answer:
                status, node = answer.status, answer.headers.get(_NODE_HEADER, "")
                if streamed and status == 200:
                    async for line in answer.content:
                        if not line.startswith(b"data: "):
                            continue
                        if first_s is None:
                            first_s = time.monotonic()
                        complete = complete or line.startswith(b"data: [DONE]")
                        announced = announced or line.startswith(b'data: {"error"')
                else:
                    text = await answer.text()
                    first_s = time.monotonic()
                    complete = status == 200
                    error = "" if complete else _code(text, status)
        except (TimeoutError, aiohttp.ClientError, OSError) as failure:
            error = type(failure).__name__
        if announced:
            complete, error = False, error or "error event"
        return Observed(
            sent_s, first_s, time.monotonic(), status, streamed, complete, announced, node, error
        )


def _code(text: str, status: int) -> str:
    """An error by its code, as OpenAI's shape has it; else by status alone, and saying so."""
    with suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(text)['error']['code']}"
    return f"{status} in another shape"
