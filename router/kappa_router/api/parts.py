"""Parts of a chat, into which the bodies of other APIs are turned. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def joined(parts: Iterable[Mapping[str, Any]]) -> str:
    """The texts of a chat's parts as one, as vLLM joins them."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def content_of(parts: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """A message's content: one text where there is nothing else, which any template takes."""
    return joined(parts) if all(part["type"] == "text" for part in parts) else list(parts)


def result_of(call_id: str, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The message with a tool's result, of which a chat takes the texts."""
    return {"role": "tool", "tool_call_id": call_id, "content": joined(parts)}


def function_of(tool: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A tool of a chat, or the choice of one by its name."""
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if n in tool} | more}
