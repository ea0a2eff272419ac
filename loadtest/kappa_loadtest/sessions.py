"""Replays chat sessions against a cluster of ours, and gets its decision on each turn.

Sessions run at once, the turns of one in order, each after its pause: the way agents talk. Called
by `kappa demo` and `kappa dashboards`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kappa_loadtest.client import Endpoint, EndpointError, EndpointSettings
from kappa_loadtest.cluster import survey
from kappa_loadtest.run_folder import RequestRecord
from kappa_workload.sessions import Session, as_messages
from kappa_workload.shapes import Message

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


def chat_sessions(
    recorded: Sequence[Session], count: int, longest_pause_s: float = 1.0
) -> list[ChatSession]:
    """`count` chats from recorded sessions; further ones are copies under a system message.

    The assistant's turns are the recorded ones, so that each prompt extends the one before. Agents
    think for seconds; pauses are bounded, since a demo with longer ones shows nothing more.
    """
    chats = []
    for number in range(count):
        copy, index = divmod(number, len(recorded))
        session = recorded[index]
        first = [{"role": "system", "content": f"Replay {copy + 1}."}] if copy else []
        replies = [turn.output_text for turn in session.turns]
        turns, last_s = [], 0.0
        for place, turn in enumerate(session.turns):
            messages = (*first, *as_messages(turn, replies[:place]))
            turns.append(ChatTurn(messages, min(turn.t_s - last_s, longest_pause_s)))
            last_s = turn.t_s
        chats.append(ChatSession(session.id[:6] + (f"+{copy}" if copy else ""), tuple(turns)))
    return chats


async def replay(
    url: str,
    sessions: Sequence[ChatSession],
    max_tokens: int,
    on_record: Callable[[RequestRecord], None] = lambda _: None,
) -> list[RequestRecord]:
    """Replay `sessions`, all at once, and return every turn's record in order of completion.

    Turns count from 1; a session ends at its first one that fails. max_tokens: of each answer.
    on_record: called on the event loop as each turn ends.

    Raises:
        EndpointError: no answer at `url`, or it serves no model.
    """
    records: list[RequestRecord] = []
    settings = EndpointSettings(url, (await survey(url)).models[0])
    async with Endpoint(settings, time.monotonic) as endpoint:

        async def run(session: ChatSession) -> None:
            for number, turn in enumerate(session.turns, start=1):
                await asyncio.sleep(turn.pause_s)
                record = RequestRecord(session.name, number)
                await endpoint.send(settings.prepare(turn.messages, max_tokens), record)
                await _decide(endpoint, record)
                records.append(record)
                on_record(record)
                if record.error:
                    return

        await asyncio.gather(*(run(session) for session in sessions))
    return records


async def node_rows(url: str) -> tuple[dict[str, Any], ...]:
    """The cluster's nodes (`GET /v1/nodes`).

    Raises:
        EndpointError: no answer, or it is no cluster of ours.
    """
    nodes = (await survey(url, timeout_s=_NODES_TIMEOUT_S)).nodes
    if not nodes:
        raise EndpointError(f"{url} is not a kappa cluster: it reports no nodes")
    return nodes


async def _decide(endpoint: Endpoint, record: RequestRecord) -> None:
    """Put the decision on the record, waiting shortly for its engine's report."""
    for _ in range(_ADMISSION_TRIES):
        try:
            rows = msgspec.json.decode(await endpoint.decisions(_DECISIONS_READ))["decisions"]
            row = next(row for row in rows if row["request_id"] == record.request_id)
            record.predicted, record.actual = row["predicted"], row["actual"]
            if row["actual"]["new_tokens"] is not None:
                return
        except (msgspec.DecodeError, KeyError, TypeError, StopIteration):
            return
        await asyncio.sleep(_ADMISSION_PAUSE_S)
