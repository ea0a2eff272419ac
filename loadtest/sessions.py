"""Replays chat sessions against an OpenAI endpoint of ours, and notes what became of each turn.

Sessions run at once, the turns of one in order, each after its pause: the way agents talk. A
decision is fetched from the cluster afterwards. Called by `kappa demo` and `kappa dashboards`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadtest.client import Endpoint, EndpointError, EndpointSettings
from loadtest.cluster import survey
from loadtest.journal import RequestRecord

Message = dict[str, str]

_NODES_TIMEOUT_S = 30.0
_DECISIONS_READ = 256
_ADMISSION_TRIES = 20
_ADMISSION_PAUSE_S = 0.1


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
class TurnOutcome:
    """What became of one turn, from 1. Seconds are the client's own; `error` is empty on success.

    `decision` is the cluster's record of it (`GET /v1/decisions`), empty if it has none.
    """

    session: str
    turn: int
    request_id: str = ""
    node: str = ""
    paced: bool = False
    predicted_ttft_s: float = 0.0
    ttft_s: float = 0.0
    error: str = ""
    decision: dict[str, Any] = field(default_factory=dict)


async def replay(
    url: str,
    sessions: Sequence[ChatSession],
    max_tokens: int,
    on_outcome: Callable[[TurnOutcome], None] = lambda _: None,
) -> list[TurnOutcome]:
    """Replay `sessions`, all at once, and return every turn's outcome in order of completion.

    Args:
        url: base of the cluster, without `/v1`.
        sessions: what to send; a session ends at its first turn that fails.
        max_tokens: bound on each answer.
        on_outcome: called on the event loop as each turn ends.

    Raises:
        EndpointError: nobody answers at `url`, or it serves no model.
    """
    outcomes: list[TurnOutcome] = []
    settings = EndpointSettings(url, (await survey(url)).models[0])
    async with Endpoint(settings, time.monotonic) as endpoint:

        async def run(session: ChatSession) -> None:
            for number, turn in enumerate(session.turns, start=1):
                await asyncio.sleep(turn.pause_s)
                record = RequestRecord(session.name, number)
                await endpoint.send(settings.prepare(turn.messages, max_tokens), record)
                outcome = _outcome(record)
                outcome.decision = await _decision(endpoint, record.request_id)
                outcomes.append(outcome)
                on_outcome(outcome)
                if outcome.error:
                    return

        await asyncio.gather(*(run(session) for session in sessions))
    return outcomes


async def node_rows(url: str) -> tuple[dict[str, Any], ...]:
    """The cluster's nodes (`GET /v1/nodes`).

    Raises:
        EndpointError: nobody answers, or it is no cluster of ours.
    """
    nodes = (await survey(url, timeout_s=_NODES_TIMEOUT_S)).nodes
    if not nodes:
        raise EndpointError(f"{url} is not a kappa cluster: it reports no nodes")
    return nodes


def _outcome(record: RequestRecord) -> TurnOutcome:
    first_s, error = record.first_token_s, ""
    if record.error:
        kind = f"HTTP {record.status}" if record.status not in (0, 200) else record.error
        error = f"{kind}: {record.error_detail}"
    return TurnOutcome(
        record.session,
        record.turn,
        record.request_id,
        record.node,
        record.paced,
        predicted_ttft_s=record.predicted_ttft_s or 0.0,
        ttft_s=0.0 if first_s is None else first_s - record.sent_s,
        error=error,
    )


async def _decision(endpoint: Endpoint, request_id: str) -> dict[str, Any]:
    """The record of a request, waiting shortly for what its engine reports of the admission."""
    found: dict[str, Any] = {}
    for _ in range(_ADMISSION_TRIES):
        try:
            rows = msgspec.json.decode(await endpoint.decisions(_DECISIONS_READ))["decisions"]
            found = next((row for row in rows if row["request_id"] == request_id), {})
            if not found or found["actual"]["new_tokens"] is not None:
                break
        except (msgspec.DecodeError, KeyError, TypeError):
            break
        await asyncio.sleep(_ADMISSION_PAUSE_S)
    return found
