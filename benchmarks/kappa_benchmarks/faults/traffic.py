"""Load that goes on during faults: clients that send, wait, send again, and note every request.

Each client asks for one document after the other, some streamed and some not, over plain HTTP and
without retries of its own: what it sees is what the cluster did. Prompts come from a seed; most
repeat, so that caches are used, and some never do, so that engines store and evict to the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np


@dataclass(frozen=True, slots=True)
class Observed:
    """One request as its client saw it; times by one monotonic clock."""

    sent_s: float
    # Of its first token, or of the whole answer if it was not streamed; None: it had none.
    first_s: float | None
    ended_s: float
    status: int
    streamed: bool
    complete: bool
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the client got all that it asked for."""
        return self.status == 200 and self.complete


def first_answer_s(requests: Sequence[Observed], at_s: float) -> float | None:
    """Seconds from `at_s` to the earliest first token of requests that were sent from then on."""
    answers = [r.first_s for r in requests if r.sent_s >= at_s and r.ok and r.first_s is not None]
    return min(answers) - at_s if answers else None


def reasons(requests: Sequence[Observed]) -> dict[str, int]:
    """Failed requests by reason, the most frequent first."""
    failed = Counter(one.error or str(one.status) for one in requests if not one.ok)
    return dict(failed.most_common())


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests of a load."""

    # At a time.
    clients: int = 12
    # Of the requests.
    streamed_share: float = 0.4
    # Of the clients' requests: with a prompt that no other has.
    fresh_share: float = 0.2
    # Different prompts, of up to `words` words.
    documents: int = 24
    words: int = 500
    # Of an answer.
    max_tokens: int = 12
    # Between two requests of a client.
    pause_s: float = 0.0
    # Of a request.
    timeout_s: float = 120.0


class Traffic:
    """Use as an asynchronous context manager; `seen` grows until it ends, `settle` awaits the open
    ones."""

    def __init__(
        self, url: str, model: str, mix: Mix, seed: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self.seen: list[Observed] = []
        self._url, self._model, self._mix = f"{url}/v1/chat/completions", model, mix
        self._headers = dict(headers or {})
        self._rng = np.random.default_rng(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._going = True
        self._written = 0
        self._documents = [self._document() for _ in range(mix.documents)]

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
        """One request about a document that repeats, noted in `seen`."""
        return await self._ask(self._documents[document], streamed)

    async def _ask(self, text: str, streamed: bool) -> Observed:
        body = {
            "model": self._model, "max_tokens": self._mix.max_tokens, "temperature": 0.0,
            "messages": [{"role": "user", "content": text}],
            "ignore_eos": True, "stream": streamed,
        }  # fmt: skip
        self.seen.append(await self._send(body, streamed))
        return self.seen[-1]

    def _document(self) -> str:
        """One more, unlike all before."""
        rng, longest = self._rng, self._mix.words
        words = rng.integers(0, 997, int(rng.integers(longest // 4, longest))).tolist()
        self._written += 1
        return f"Document {self._written}. {' '.join(f'{word} counts.' for word in words)}"

    async def _client(self) -> None:
        mix = self._mix
        while self._going:
            streamed = bool(self._rng.random() < mix.streamed_share)
            fresh = self._rng.random() < mix.fresh_share
            repeated = int(self._rng.integers(mix.documents))
            text = self._document() if fresh else self._documents[repeated]
            seen = await self._ask(text, streamed)
            # One that fails at once must not become a flood.
            await asyncio.sleep(max(mix.pause_s, 0.0 if seen.ok else 0.05))

    async def _send(self, body: dict[str, Any], streamed: bool) -> Observed:
        sent_s = time.monotonic()
        status, first_s = 0, None
        complete, announced, error = False, False, ""
        try:
            async with self._session.post(self._url, json=body, headers=self._headers) as answer:
                status = answer.status
                if streamed and status == 200:
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            first_s = first_s or time.monotonic()
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
        ended_s = time.monotonic()
        return Observed(sent_s, first_s, ended_s, status, streamed, complete, error)


def _code(text: str, status: int) -> str:
    """An error by its code, as OpenAI's shape has it; else by status alone, and saying so."""
    with suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(text)['error']['code']}"
    return f"{status} in another shape"


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds of one client's requests beside others' traffic."""

    requests: int
    # By reason.
    failed: dict[str, int]
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, seen: Sequence[Observed], *, first_token: bool) -> Beside:
        """Seconds until the first token or until the end; failures have none."""
        fine = [r for r in seen if r.ok and r.first_s is not None]
        taken = [(r.first_s if first_token and r.first_s else r.ended_s) - r.sent_s for r in fine]
        values = np.quantile(taken, [0.5, 0.9, 0.99, 1.0]) if taken else [float("inf")] * 4
        return cls(len(seen), reasons(seen), *map(float, values))
