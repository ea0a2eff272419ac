"""Requests as other tools write them: JSON lines of chats or prompts, with their texts.

`messages` of the chat API, alone or in the `body` of a batch request; vLLM's custom data set
(`prompt`, `output_tokens`) and Spec-Bench (`turns` of texts); aiperf's single_turn (`text`),
multi_turn (`turns`) and mooncake_trace with texts (`text_input`). A file is of one format, which
its first line shows. A line that ends with an answer is a whole talk, each answer of which is a
turn; any other line is one request. Lines with the same `session_id` are turns of one session.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kappa_workload.miniswe import shapes_of
from kappa_workload.reading import (
    DEFAULT,
    DEFAULT_OUTPUT_TOKENS,
    ReadAs,
    Seconds,
    SomeTokens,
    WorkloadError,
    at,
    json_lines,
)
from kappa_workload.sessions import Session, Turn
from kappa_workload.shapes import Message, SessionShape, Texts, Workload

FORMATS = {
    "messages": "chats of `messages`, one a line",
    "body": "OpenAI batch requests",
    "turns": "conversations of `turns` (aiperf multi_turn, Spec-Bench)",
    "text_input": "aiperf mooncake_trace with texts",
    "text": "aiperf single_turn",
    "texts": "aiperf single_turn",
    "prompt": "a vLLM custom data set",
}
"""What a file is, by the field that its first line has."""

_NOT_TEXT = "images, audio or video"
_NO_TEXT = "no text of a user"
_ASSUMED_LENGTH = f"requests without a length of the answer: {DEFAULT_OUTPUT_TOKENS} tokens assumed"
_NO_ANSWERS = "conversations without answers: later turns are sent without them"
_TOOLS = "tool calls and results, sent as plain text"


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None


class _ChatLine(msgspec.Struct):
    """A line or one of its turns; `timestamp` and `delay` are milliseconds."""

    messages: list[_ChatMessage] | None = None
    body: _ChatLine | None = None
    turns: list[str | _ChatLine] | None = None
    text_input: str | None = None
    text: str | None = None
    texts: list[str] | None = None
    prompt: str | None = None
    role: str = "user"
    session_id: str | int | None = None
    timestamp: Seconds | None = None
    delay: Seconds | None = None
    output_tokens: SomeTokens | None = None
    output_length: SomeTokens | None = None
    max_tokens: SomeTokens | None = None
    max_completion_tokens: SomeTokens | None = None
    image: Any = None
    images: Any = None
    audio: Any = None
    audios: Any = None
    video: Any = None
    videos: Any = None

    @property
    def answer_tokens(self) -> int | None:
        """The requested length of its answer, under any of its names."""
        given = self.output_tokens, self.output_length, self.max_completion_tokens, self.max_tokens
        return next(filter(None, given), None)

    @property
    def words(self) -> str:
        """Its text, under any of its names."""
        return self.text or self.text_input or self.prompt or "\n".join(self.texts or ())

    @property
    def is_text(self) -> bool:
        media = (self.image, self.images, self.audio, self.audios, self.video, self.videos)
        return not any(media)


@dataclass(slots=True)
class _Found:
    """A session while it is read: its turns, and the messages of each."""

    arrival_ms: float | None = None  # of its first turn
    turns: list[Turn] = field(default_factory=list)
    chats: list[tuple[Message, ...]] = field(default_factory=list)

    def add(self, request: _ChatLine, sent: list[Message], answer: str = "") -> None:
        """Add a turn, at its own time or with its delay after the turn before."""
        if not self.turns:
            self.arrival_ms, t_s = request.timestamp, 0.0
        elif request.timestamp is not None and self.arrival_ms is not None:
            t_s = max(self.turns[-1].t_s, (request.timestamp - self.arrival_ms) / 1e3)
        else:
            t_s = self.turns[-1].t_s + (request.delay or 0.0) / 1e3
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in sent)
        tokens = None if answer else request.answer_tokens or DEFAULT_OUTPUT_TOKENS
        self.turns.append(Turn(t_s, text, answer, tokens))
        self.chats.append(tuple(sent))


def read_chats(path: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read a file in one of `FORMATS`, at most `how.limit` lines.

    `source` names the format; `notes` count omissions and assumptions. Expected reuse is that of
    common beginnings, in texts without a chat template.

    Raises:
        WorkloadError: the file is absent or damaged, a line breaks the format, or none is of use.
    """
    sessions: dict[str, _Found] = {}
    left_out: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    kind = ""
    for where, fields in islice(json_lines(path, dict[str, Any]), how.limit):
        kind = kind or next((name for name in FORMATS if fields.get(name) is not None), "")
        with at(where):
            request = _request(fields, kind)
            key = where if request.session_id is None else str(request.session_id)
            found = sessions.get(key) or _Found()
            reason = (_add_talk if request.messages else _add_turns)(found, request, notes)
        if reason:
            left_out[reason] += 1
        else:
            sessions[key] = found
    reasons = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
    if not sessions:
        raise WorkloadError(f"{path}: no line has a text to send: {reasons}")
    recorded = [Session(key, tuple(found.turns)) for key, found in sessions.items()]
    read, chats = shapes_of(recorded, how), [found.chats for found in sessions.values()]
    return replace(
        read,
        name=path.stem,
        source=FORMATS[kind],
        sessions=_arriving(read.sessions, [found.arrival_ms for found in sessions.values()]),
        notes=(
            *([f"{left_out.total()} lines left out: {reasons}"] if left_out else []),
            *(f"{count} {what}" for what, count in notes.items() if count),
        ),
        texts=Texts(lambda session, turn: chats[session][turn]),
    )


def _request(fields: Mapping[str, Any], kind: str) -> _ChatLine:
    """A line as a request; for a batch request its body, with the line's times."""
    if fields.get(kind) is None:
        raise ValueError(f"has no {kind!r}, which the first line has: give one format a file")
    try:
        line = msgspec.convert(fields, _ChatLine)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}: correct the line or remove it") from None
    if line.body is None:
        return line
    return msgspec.structs.replace(
        line.body, session_id=line.session_id, timestamp=line.timestamp, delay=line.delay
    )


def _arriving(
    shapes: Sequence[SessionShape], times_ms: Sequence[float | None]
) -> tuple[SessionShape, ...]:
    """The sessions with their arrivals from the first on, if every one of them has a time."""
    known_ms = [time_ms for time_ms in times_ms if time_ms is not None]
    if len(known_ms) < len(times_ms):
        return tuple(shapes)
    return tuple(
        replace(shape, arrival_s=(time_ms - min(known_ms)) / 1e3)
        for shape, time_ms in zip(shapes, known_ms, strict=True)
    )


def _add_turns(found: _Found, line: _ChatLine, notes: Counter[str]) -> str:
    """Add a line of texts to its session; returns the reason if it is left out, else empty."""
    turns = [_ChatLine(text=t) if isinstance(t, str) else t for t in line.turns or (line,)]
    if not all(turn.is_text for turn in turns):
        return _NOT_TEXT
    texts = [turn.words for turn in turns]
    if not all(texts) or all(turn.role == "system" for turn in turns):
        return _NO_TEXT
    sent = list(found.chats[-1]) if found.chats and line.turns else []
    for turn, text in zip(turns, texts, strict=True):
        sent.append({"role": turn.role, "content": text})
        if turn.role != "system":
            found.add(turn, sent)
            notes[_ASSUMED_LENGTH] += turn.answer_tokens is None
    notes[_NO_ANSWERS] += len(turns) > 1
    return ""


def _add_talk(found: _Found, request: _ChatLine, notes: Counter[str]) -> str:
    """Add a chat's turns: one per answer, or one for the answer that it asks for; returns as
    `_add_turns`."""
    talk: list[Message] = []
    for message in request.messages or ():
        parts = message.content if isinstance(message.content, list) else ()
        if any(part.type not in ("text", "input_text") for part in parts):
            return _NOT_TEXT
        text = "".join(part.text for part in parts) if parts else str(message.content or "")
        if message.tool_calls:
            text += json.dumps(message.tool_calls)
        is_result = message.role in ("tool", "function")
        notes[_TOOLS] += bool(is_result or message.tool_calls)
        talk.append({"role": "user" if is_result else message.role, "content": text})
    users = [place for place, m in enumerate(talk) if m["role"] == "user" and m["content"]]
    if not users:
        return _NO_TEXT
    if talk[-1]["role"] != "assistant":
        found.add(request, talk)
        notes[_ASSUMED_LENGTH] += request.answer_tokens is None
        return ""
    answers = [place for place, m in enumerate(talk) if m["role"] == "assistant"]
    for place in (place for place in answers if place > users[0]):
        found.add(request, talk[:place], talk[place]["content"])
    return "" if answers[-1] > users[0] else _NO_TEXT
