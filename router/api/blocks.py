"""A chat's answer as a run of blocks, whole or as it streams: what other APIs' answers are made of.

An engine answers chats; the Messages and the Responses API show the same answer as blocks of one
kind each, opened, grown and closed one after the other. Pure: texts and dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer; text: of a call its arguments, JSON as the model wrote it."""

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class AnswerEnd:
    """How a chat's answer ended, in its own words: finish_reason, the stop string that was met, and
    usage."""

    finish_reason: str = ""
    stop: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, name: str, detail: str = "") -> int:
        """A count of its usage; zero where the engine does not say."""
        found = self.usage.get(name)
        if detail:
            found = (found or {}).get(detail)
        return int(found or 0)


class Wording(Protocol):
    """How an API words one answer: events of a stream, each ready to be sent, or all at once.

    begun: with its first event. opened, grown, closed: each block, one after the other. ended,
    failed: after which nothing comes; `error` is that of a chat's error event.
    """

    def begun(self, model: str, end: AnswerEnd) -> str: ...
    def opened(self, block: Block) -> str: ...
    def grown(self, block: Block, more: str) -> str: ...
    def closed(self, block: Block) -> str: ...
    def ended(self, blocks: Sequence[Block], end: AnswerEnd) -> str: ...
    def failed(self, error: Mapping[str, Any]) -> str: ...
    def whole(self, model: str, blocks: Sequence[Block], end: AnswerEnd) -> dict[str, Any]: ...


def joined(parts: Iterable[Mapping[str, Any]]) -> str:
    """The texts of a chat's parts as one, as vLLM joins them."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def content_of(parts: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """A message's content: one text where there is nothing else, which any template takes."""
    return joined(parts) if all(part["type"] == "text" for part in parts) else list(parts)


def result_of(call_id: str, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The message with a tool's result, of which a chat takes the texts."""
    return {"role": "tool", "tool_call_id": call_id, "content": joined(parts)}


def event(kind: str, **data: Any) -> str:
    """A server-sent event; ASCII, since a model's JSON may hold half of a surrogate pair."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data}, separators=(',', ':'))}\n\n"


def reworded(chat: Mapping[str, Any], wording: Wording) -> dict[str, Any]:
    """A whole chat answer in another API's words."""
    choice = chat["choices"][0]
    blocks = _Blocks(wording)
    blocks.add(choice["message"])
    blocks.close()
    end = AnswerEnd(usage=chat.get("usage") or {})
    _note_finish(end, choice)
    return wording.whole(str(chat.get("model")), blocks.all, end)


class RewordedStream:
    """A chat's stream in another API's words; `feed` it what comes."""

    def __init__(self, wording: Wording) -> None:
        self._wording, self._blocks = wording, _Blocks(wording)
        self._end, self._rest = AnswerEnd(), ""
        self._begun = self._over = False

    def feed(self, packet: str) -> str:
        """The events that a part of the chat's stream becomes, perhaps none."""
        *events, self._rest = (self._rest + packet).split("\n\n")
        return "".join(map(self._reword, events))

    def _reword(self, chat_event: str) -> str:
        data = chat_event.removeprefix("data:").strip()
        if self._over or not chat_event.startswith("data:"):
            return ""
        if data == "[DONE]":
            self._over = True
            closed = self._blocks.close()
            return closed + self._wording.ended(self._blocks.all, self._end)
        try:
            chunk = json.loads(data)
            error = chunk.get("error")
        except (ValueError, AttributeError):
            error = {"message": "Internal error.", "type": "server_error", "code": "internal"}
        if error is not None:
            self._over = True
            return self._wording.failed(error)
        self._end.usage = chunk.get("usage") or self._end.usage
        made = ""
        if not self._begun:
            self._begun = True
            made = self._wording.begun(str(chunk.get("model")), self._end)
        for choice in chunk.get("choices", ())[:1]:
            _note_finish(self._end, choice)
            made += self._blocks.add(choice.get("delta") or {})
        return made


def _note_finish(end: AnswerEnd, choice: Mapping[str, Any]) -> None:
    if choice.get("finish_reason"):
        end.finish_reason = choice["finish_reason"]
        # Else vLLM gives the id of a stop token.
        end.stop = choice["stop_reason"] if isinstance(choice.get("stop_reason"), str) else None


class _Blocks:
    """The blocks of an answer as it grows. Text that comes inside a call waits for the call's end:
    a block that is closed cannot go on."""

    def __init__(self, wording: Wording) -> None:
        self.all: list[Block] = []
        self._wording = wording
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        self._waiting = ""

    def add(self, message: Mapping[str, Any]) -> str:
        """Take a message, or the next part of one."""
        made = self._grow("reasoning", message.get("reasoning") or "")
        content = message.get("content") or ""
        if self._open is not None and self._open.kind == "call":
            self._waiting += content
        else:
            made += self._grow("text", content)
        for place, call in enumerate(message.get("tool_calls") or ()):
            made += self._call(int(call.get("index", place)), call)
        return made

    def close(self) -> str:
        """End the block that is open, and show what waits for that."""
        block, self._open = self._open, None
        made = self._wording.closed(block) if block is not None else ""
        waiting, self._waiting = self._waiting, ""
        return made + self._grow("text", waiting) + self.close() if waiting else made

    def _call(self, index: int, call: Mapping[str, Any]) -> str:
        function, made = call.get("function") or {}, ""
        if index not in self._calls:
            place = len(self.all)
            block = Block("call", 0, "", str(call.get("id") or f"call_{place}"))
            block.name = str(function.get("name") or "")
            made, self._calls[index] = self._begin(block), block
        block, more = self._calls[index], str(function.get("arguments") or "")
        # Engines write calls one after the other; what came for one that is closed would be lost.
        return made + self._grown(block, more) if more and block is self._open else made

    def _grow(self, kind: Kind, more: str) -> str:
        if not more:
            return ""
        made = ""
        if self._open is None or self._open.kind != kind:
            made = self._begin(Block(kind, 0))
        assert self._open is not None
        return made + self._grown(self._open, more)

    def _begin(self, block: Block) -> str:
        made = self.close()
        block.index = len(self.all)
        self.all.append(block)
        self._open = block
        return made + self._wording.opened(block)

    def _grown(self, block: Block, more: str) -> str:
        block.text += more
        return self._wording.grown(block, more)
