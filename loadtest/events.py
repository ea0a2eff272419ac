"""What a stream of an OpenAI endpoint says: server-sent events, read piece by piece. Pure.

A piece may hold several events or a part of one. An event counts as output if it carries text, or
if it is a choice that neither announces the role nor ends the answer: engines send tokens without
text, too (special tokens, halves of a character).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_LONGEST_EVENT_BYTES = 4 << 20
_DONE = b"[DONE]"


class StreamFault(Exception):
    """The stream is not what it should be; `kind` is one of the kinds of errors of a record."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class _Delta(msgspec.Struct):
    role: str | None = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None


# What a table's column of integers holds.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Stream:
    """Reads one answer. `outputs` counts events with output; token counts are None until told."""

    __slots__ = ("_rest", "completion_tokens", "done", "finished", "outputs", "prompt_tokens")

    def __init__(self) -> None:
        self._rest = b""
        self.outputs = 0
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finished = self.done = False

    def feed(self, piece: bytes) -> int:
        """Read on; returns how many events with output ended in this piece.

        Raises:
            StreamFault: an event that is no JSON of OpenAI's, an error told by the endpoint, or
                bytes without end that are no events.
        """
        before = self.outputs
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _LONGEST_EVENT_BYTES:
            raise StreamFault("protocol", f"an event longer than {_LONGEST_EVENT_BYTES} bytes")
        return self.outputs - before

    def end(self) -> int:
        """The stream ended: read a last line without its end; returns as `feed`.

        A last line that cannot be read is a stream cut in the middle, which its lack of an end
        tells already.
        """
        before = self.outputs
        rest, self._rest = self._rest, b""
        try:
            self._line(rest)
        except StreamFault as fault:
            if fault.kind == "stream_error":
                raise
        return self.outputs - before

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            if not line.strip() or line.startswith((b":", b"event:", b"id:", b"retry:")):
                return
            raise StreamFault("protocol", f"expected server-sent events, got {_shown(line)}")
        payload = line[5:].strip()
        if payload == _DONE:
            self.done = True
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            raise StreamFault("bad_json", f"{error}: {_shown(payload)}") from None
        if event.error is not None:
            raise StreamFault("stream_error", error_message(event.error))
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
        if event.choices:
            self._choice(event.choices[0])

    def _choice(self, choice: _Choice) -> None:
        ends = choice.finish_reason is not None
        self.finished = self.finished or ends
        delta = choice.delta
        if delta is None:
            has_text, announces = bool(choice.text), choice.text is None
        else:
            has_text = bool(
                delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
            )
            announces = delta.role is not None
        # The only event of an answer of one token may have no text and end it.
        if has_text or (not announces and (not ends or not self.outputs)):
            self.outputs += 1


def error_message(error: Any) -> str:
    """What OpenAI's error object says, in a line."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        error = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(error).replace("\n", " ")[:300]


def _shown(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))
