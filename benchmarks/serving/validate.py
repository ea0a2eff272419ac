"""The HTTP side of `kappa bench validate`: plays scripts at a cluster, notes what each request saw.

Prompts are turned into bodies before a run starts and answers are read without parsing, so that
the client takes little of the machine that it measures; what it took is part of the result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.predict import usage
from benchmarks.serving.validate_traffic import FORCED_TOKEN, Ask, Script

_TIMEOUT_S = 300.0
_LEAD_S = 0.3
# Reports of the last steps, and with them admissions, follow a moment later.
_SETTLE_S = 1.2
_MORE_DECISIONS = 64


@dataclass(slots=True)
class Answered:
    """One request: seconds are real ones of the client's clock, from the start of the run.

    `error` is empty on success. Token counts are the engine's own; None if it told none.
    """

    session: str
    turn: int
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    request_id: str = ""
    node: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: str = ""
    decided_after_s: float | None = None
    engine_ttft_s: float | None = None
    predicted_s: float | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    new_tokens: int | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Answered:
        """Rebuild from a record."""
        return cls(**data)


@dataclass(slots=True)
class Played:
    """One run: every request in order of sending, and what the run took of client and nodes.

    `client_cpu_share`: of one core, this whole process; `busy_share`: of the nodes' gpu time until
    the last answer; `overrun_share`: steps that could not keep their pace.
    """

    answers: list[Answered] = field(default_factory=list)
    seconds: float = 0.0
    client_cpu_share: float = 0.0
    busy_share: float = 0.0
    overrun_share: float = 0.0

    def ttfts_s(self) -> NDArray[np.float64]:
        """TTFTs of the requests that were answered."""
        return np.array([answer.ttft_s for answer in self.answers if not answer.error])

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Played:
        """Rebuild from `to_dict`."""
        return cls(**{**data, "answers": [Answered.from_dict(a) for a in data["answers"]]})


class Replayer:
    """Plays scripts at one endpoint, one run at a time."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model

    async def play(self, scripts: Sequence[Script]) -> Played:
        """Send every session at its time, each turn a pause after the answer before it."""
        bodies = [[self._body(ask) for ask in script.asks] for script in scripts]
        before = await self.nodes()
        played = Played()
        start_s = time.monotonic() + _LEAD_S
        cpu_s = time.process_time()
        await asyncio.gather(
            *(
                self._session(script, sent, start_s, played)
                for script, sent in zip(scripts, bodies, strict=True)
            )
        )
        played.seconds = time.monotonic() - start_s
        played.client_cpu_share = (time.process_time() - cpu_s) / (played.seconds + _LEAD_S)
        await asyncio.sleep(_SETTLE_S)
        used = usage(before, await self.nodes())
        elapsed_s = played.seconds + _LEAD_S
        # Reports are taken over a longer time than the run: idle seconds do not count.
        played.busy_share = used.load * (elapsed_s + _SETTLE_S) / elapsed_s
        played.overrun_share = used.overrun_share
        played.answers.sort(key=lambda answer: answer.sent_s)
        await self._add_decisions(played, start_s)
        return played

    async def nodes(self) -> list[dict[str, Any]]:
        """Every worker, as `GET /v1/nodes` tells it."""
        answer = await self._client.get("/v1/nodes")
        answer.raise_for_status()
        rows: list[dict[str, Any]] = answer.json()["nodes"]
        return rows

    def _body(self, ask: Ask) -> bytes:
        body = {
            "model": self._model,
            "prompt": ask.prompt.tolist(),
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "allowed_token_ids": [FORCED_TOKEN],
            "stream": True,
        }
        return json.dumps(body, separators=(",", ":")).encode()

    async def _session(
        self, script: Script, bodies: Sequence[bytes], start_s: float, played: Played
    ) -> None:
        next_s = start_s + script.start_s
        for turn, (ask, body) in enumerate(zip(script.asks, bodies, strict=True)):
            await asyncio.sleep(next_s + (ask.after_s if turn else 0.0) - time.monotonic())
            sent_s = time.monotonic()
            answer = Answered(
                script.session, turn, sent_s - start_s, len(ask.prompt), ask.output_tokens
            )
            played.answers.append(answer)
            await self._send(body, answer, sent_s)
            next_s = sent_s + answer.total_s
            if answer.error:
                return

    async def _send(self, body: bytes, answer: Answered, sent_s: float) -> None:
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream(
                "POST", "/v1/completions", content=body, headers=headers
            ) as response:
                answer.request_id = response.headers.get("x-request-id", "")
                answer.node = response.headers.get("x-kappa-node", "")
                if response.status_code != 200:
                    answer.error = f"HTTP {response.status_code}"
                async for piece in response.aiter_raw():
                    if not answer.ttft_s and piece.startswith(b"data: {"):
                        answer.ttft_s = time.monotonic() - sent_s
        except httpx.HTTPError as error:
            answer.error = type(error).__name__
        answer.total_s = time.monotonic() - sent_s
        if not answer.ttft_s and not answer.error:
            answer.error = "empty"

    async def _add_decisions(self, played: Played, start_s: float) -> None:
        limit = len(played.answers) + _MORE_DECISIONS
        reply = await self._client.get("/v1/decisions", params={"limit": limit})
        records = {r["request_id"]: r for r in reply.raise_for_status().json()["decisions"]}
        # The cluster is on this machine: its wall clock and ours are one.
        wall_s = time.time() - time.monotonic() + start_s
        for answer in played.answers:
            record = records.get(answer.request_id)
            if record is None:
                continue
            actual = record["actual"]
            answer.decided_after_s = record["time_s"] - wall_s - answer.sent_s
            answer.engine_ttft_s = actual["ttft_s"]
            answer.predicted_s = record["predicted"]["ttft_s"]
            answer.device_tokens = actual["device_tokens"]
            answer.host_tokens = actual["cached_tokens"]
            answer.new_tokens = actual["new_tokens"]


def client(url: str) -> httpx.AsyncClient:
    """An HTTP client for a cluster at `url`, with room for a saturated run."""
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits)
