"""Replays chat sessions against an OpenAI endpoint of ours, and notes what became of each turn.

Sessions run at once, the turns of one in order, each after its pause: the way agents talk. Speaks
HTTP only, through the official client; what a decision was is asked of the cluster afterwards.
Called by `kappa demo`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

Message = dict[str, str]

_TIMEOUT_S = 300.0
_DECISIONS_ASKED = 256
_ADMISSION_TRIES = 20
_ADMISSION_PAUSE_S = 0.1


class ClusterError(RuntimeError):
    """The endpoint cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request: the whole chat so far, sent `pause_s` after the turn before has ended."""

    messages: tuple[Message, ...]
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChatSession:
    """A conversation; turns are sent in order."""

    name: str
    turns: tuple[ChatTurn, ...]


@dataclass(slots=True)
class Outcome:
    """What became of one turn. Seconds are the client's own; `error` is empty on success.

    `decision` is the cluster's record of it (`GET /v1/decisions`), empty if it has none.
    """

    session: str
    turn: int
    request_id: str = ""
    node: str = ""
    paced: bool = False
    predicted_ttft_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    output_chunks: int = 0
    error: str = ""
    decision: dict[str, Any] = field(default_factory=dict)


async def replay(
    url: str,
    sessions: Sequence[ChatSession],
    max_tokens: int,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Replay `sessions`, all at once, and return every turn's outcome in order of completion.

    Args:
        url: base of the cluster, without `/v1`.
        sessions: what to send; a session ends at its first turn that fails.
        max_tokens: bound on each answer.
        on_outcome: called on the event loop as each turn ends.

    Raises:
        ClusterError: nobody answers at `url`, or it serves no model.
    """
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        on_outcome(outcome)

    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S
        ) as client,
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http,
    ):
        model = await _served_model(client, url)

        async def run(session: ChatSession) -> None:
            for number, turn in enumerate(session.turns, start=1):
                await asyncio.sleep(turn.pause_s)
                outcome = Outcome(session.name, number)
                await _send(client, model, turn, max_tokens, outcome)
                outcome.decision = await _decision(http, outcome.request_id)
                note(outcome)
                if outcome.error:
                    return

        await asyncio.gather(*(run(session) for session in sessions))
    return outcomes


async def node_rows(url: str) -> list[dict[str, Any]]:
    """The cluster's nodes (`GET /v1/nodes`).

    Raises:
        ClusterError: nobody answers, or not in our words.
    """
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            answer = await http.get("/v1/nodes")
            answer.raise_for_status()
            rows: list[dict[str, Any]] = answer.json()["nodes"]
            return rows
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ClusterError(f"{url} is not a kappa cluster that answers: {error!r}") from None


async def _served_model(client: openai.AsyncOpenAI, url: str) -> str:
    try:
        models = (await client.models.list()).data
    except openai.OpenAIError as error:
        raise ClusterError(f"{url}: {error}") from None
    if not models:
        raise ClusterError(f"{url} serves no model")
    return models[0].id


async def _send(
    client: openai.AsyncOpenAI, model: str, turn: ChatTurn, max_tokens: int, outcome: Outcome
) -> None:
    start_s = time.perf_counter()
    try:
        raw: Any = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=list(turn.messages),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
        )
        headers = raw.headers
        outcome.request_id = headers.get("x-request-id", "")
        outcome.node = headers.get("x-kappa-node", "")
        outcome.paced = headers.get("x-kappa-paced") == "true"
        outcome.predicted_ttft_s = float(headers.get("x-kappa-predicted-ttft-ms", 0.0)) / 1e3
        async for chunk in raw.parse():
            # The first chunk tells the role; the engine sends it with its first token.
            if not outcome.ttft_s:
                outcome.ttft_s = time.perf_counter() - start_s
            outcome.output_chunks += bool(chunk.choices and chunk.choices[0].delta.role is None)
        if not outcome.output_chunks:
            outcome.error = "the stream ended without a token"
    except openai.APIStatusError as error:
        outcome.request_id = error.response.headers.get("x-request-id", "")
        outcome.error = f"HTTP {error.status_code}: {error.message}"
    except (openai.OpenAIError, httpx.HTTPError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.total_s = time.perf_counter() - start_s


async def _decision(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    """The record of a request, waiting shortly for what its engine reports of the admission."""
    found: dict[str, Any] = {}
    for _ in range(_ADMISSION_TRIES):
        try:
            answer = await http.get("/v1/decisions", params={"limit": _DECISIONS_ASKED})
            records = answer.raise_for_status().json()["decisions"]
        except (httpx.HTTPError, ValueError, KeyError):
            return found
        found = next((r for r in records if r["request_id"] == request_id), {})
        if not found or found["actual"]["new_tokens"] is not None:
            break
        await asyncio.sleep(_ADMISSION_PAUSE_S)
    return found
