"""Anthropic's Messages API: its bodies as chats, and chats' answers in its words. Pure.

What of it is served, field by field: docs/api.md. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.api.blocks import AnswerEnd, Block, content_of, event, joined, result_of
from router.api.checks import (
    NAME,
    TEXT,
    WORD,
    FieldClasses,
    Kinds,
    choice,
    either,
    fields_of,
    flag,
    json_object,
    many,
    need,
    real,
    tagged,
    text,
    whole,
)
from router.api.errors import bad_field
from router.api.fields import CHAT, media_url

Json = dict[str, Any]

# -- what may be sent -------------------------------------------------------------------------

_IMAGE_TYPES = choice("image/jpeg", "image/png", "image/gif", "image/webp")
_SOURCE = tagged({
    "base64": ({"media_type": _IMAGE_TYPES, "data": TEXT}, ("media_type", "data")),
    "url": ({"url": media_url}, ("url",)),
})  # fmt: skip
_TEXT_BLOCK: Kinds = {"text": ({"text": TEXT}, ("text",))}
_SHOWN = {**_TEXT_BLOCK, "image": ({"source": _SOURCE}, ("source",))}
_RESULT = {
    "tool_use_id": NAME, "content": either(TEXT, many(tagged(_SHOWN), 1024)), "is_error": flag,
}  # fmt: skip
_TOOL_USE = {"id": NAME, "name": NAME, "input": json_object}
_BLOCKS_OF: dict[str, Kinds] = {
    "user": {**_SHOWN, "tool_result": (_RESULT, ("tool_use_id",))},
    "assistant": {
        **_TEXT_BLOCK, "tool_use": (_TOOL_USE, tuple(_TOOL_USE)),
        "thinking": ({"thinking": TEXT}, ("thinking",)), "redacted_thinking": ({}, ()),
    },
    "system": _TEXT_BLOCK,
}  # fmt: skip
_CONTENTS = {role: either(TEXT, many(tagged(kinds), 1024)) for role, kinds in _BLOCKS_OF.items()}
_ROLE = choice(*_CONTENTS)
_TOOL = fields_of({
    "type": NAME, "name": NAME, "description": TEXT, "input_schema": json_object, "strict": flag,
})  # fmt: skip
_CHOICES = {kind: {"disable_parallel_tool_use": flag} for kind in ("auto", "any", "none", "tool")}


def _message(where: str, value: Any) -> Any:
    kept = fields_of({"role": _ROLE})(where, value)
    need(kept, "role", where=f"{where}.")
    need(value, "content", where=f"{where}.")
    kept["content"] = _CONTENTS[kept["role"]](f"{where}.content", value["content"])
    return kept


def _tool(where: str, value: Any) -> Any:
    kept = _TOOL(where, value)
    if kept.get("type") not in (None, "custom"):
        raise bad_field(
            f"{where}.type", "no tools run here: give tools of your own, with an input_schema"
        )
    need(kept, "name", "input_schema", where=f"{where}.")
    return kept


# What a chat calls by the same name.
_SAME = (
    "model", "max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt",
    "chat_template_kwargs",
)  # fmt: skip
_FIELDS = {
    **{name: CHAT[name] for name in _SAME},
    "messages": many(_message, 4096, least=1),
    "system": either(TEXT, many(tagged(_TEXT_BLOCK), 1024)),
    "stop_sequences": many(WORD, 4), "temperature": real(0, 1),
    "metadata": fields_of({"user_id": text(1024)}),
    "tools": many(_tool, 128),
    "tool_choice": tagged({
        kind: (({**given, "name": NAME}, ("name",)) if kind == "tool" else (given, ()))
        for kind, given in _CHOICES.items()
    }),
    "thinking": tagged({
        "enabled": ({"budget_tokens": whole(1)}, ()), "adaptive": ({}, ()), "disabled": ({}, ()),
    }),
    "output_config": fields_of({
        "effort": NAME, "format": tagged({"json_schema": ({"schema": json_object}, ("schema",))}),
    }),
}  # fmt: skip
_ROUTERS = ("the router sets it; leave it out", ())
FIELDS = FieldClasses(
    _FIELDS,
    {
        "container": ("no code runs here; leave it out", ()),
        "mcp_servers": ("no MCP client runs here; give their tools in tools", ([],)),
        "kv_transfer_params": _ROUTERS, "ec_transfer_params": _ROUTERS,
    },
    frozenset({
        "betas", "cache_control", "context_management", "diagnostics", "inference_geo",
        "service_tier", "speed", "user_profile_id", "vllm_xargs", "workspace_id",
    }),
)  # fmt: skip
"""The fields of a Messages body; see `router.api.fields`."""

# -- a body as a chat -------------------------------------------------------------------------


def to_chat(body: Mapping[str, Any], *, counted: bool = False) -> Json:
    """A Messages body as a chat's; `counted`: only its tokens are wanted.

    Raises:
        ApiError: 400, a field is not known, not served, missing, or out of bounds.
    """
    kept = {name: value for name, value in FIELDS.kept(body).items() if value is not None}
    need(kept, *("messages",) if counted else ("max_tokens", "messages"))
    chat = {name: kept[name] for name in _SAME if name in kept}
    chat["messages"] = _messages(kept)
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last.get("content") and "tool_calls" not in last:
        # The answer's beginning, which it goes on from.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if kept.get("stop_sequences"):
        chat["stop"] = kept["stop_sequences"]
    if (kept.get("metadata") or {}).get("user_id"):
        chat["user"] = kept["metadata"]["user_id"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return chat | _tools(kept) | _thinking(kept)


def _tools(kept: Json) -> Json:
    if not kept.get("tools"):
        return {}
    made: Json = {"tools": []}
    for tool in kept["tools"]:
        function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        made["tools"].append(
            {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
        )
    chosen = kept.get("tool_choice") or {"type": "auto"}
    named = {"type": "function", "function": {"name": chosen.get("name")}}
    ours = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    made["tool_choice"] = ours[chosen["type"]]
    if chosen.get("disable_parallel_tool_use"):
        made["parallel_tool_calls"] = False
    return made


def _thinking(kept: Json) -> Json:
    """What models' templates call it; without the field a model does as it is used to."""
    made: Json = {}
    if "thinking" in kept:
        thinks = kept["thinking"]["type"] != "disabled"
        given = kept.get("chat_template_kwargs") or {}
        made["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **given}
    output = kept.get("output_config") or {}
    if output.get("effort"):
        made["reasoning_effort"] = output["effort"]
    if output.get("format"):
        schema = {"name": "answer", "schema": output["format"]["schema"]}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made


def _messages(kept: Json) -> list[Json]:
    """The chat's messages. All system texts go first, where every template takes them."""
    system, rest = _parts(kept.get("system") or ()), []
    for message in kept["messages"]:
        match message["role"]:
            case "system":
                system += _parts(message["content"])
            case "assistant":
                rest.append(_assistant(message["content"]))
            case _:
                rest += _user(message["content"])
    # An agent's first one differs each time: nothing after it would be found in a cache.
    system = [one for one in system if not one["text"].startswith("x-anthropic-billing-header")]
    return [{"role": "system", "content": joined(system)}] * bool(system) + rest


def _assistant(content: Any) -> Json:
    blocks = _blocks(content)
    thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
    said = "".join(block["text"] for block in blocks if block["type"] == "text")
    more = {"reasoning": thought, "tool_calls": calls}
    return {"role": "assistant", "content": said} | {k: v for k, v in more.items() if v}


def _user(content: Any) -> list[Json]:
    """Results of tools, then what else the user says, the results' images with it."""
    results, shown = [], []
    for block in _blocks(content):
        if block["type"] != "tool_result":
            shown += _parts([block])
            continue
        parts = _parts(block.get("content") or ())
        results.append(result_of(block["tool_use_id"], parts))
        shown += [part for part in parts if part["type"] != "text"]
    if results and not shown:
        return results
    return [*results, {"role": "user", "content": content_of(shown)}]


def _parts(content: str | Iterable[Json]) -> list[Json]:
    """Blocks of texts and images as a chat's parts."""
    parts = []
    for block in _blocks(content):
        if block["type"] == "image":
            source = block["source"]
            url = source.get("url") or f"data:{source['media_type']};base64,{source['data']}"
            block = {"type": "image_url", "image_url": {"url": url}}
        parts.append(block)
    return parts


def _blocks(content: str | Iterable[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


# -- an answer in its words -------------------------------------------------------------------

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


class MessageAnswer:
    """A `router.api.blocks.Wording`: one answer as a message."""

    def __init__(self, request_id: str) -> None:
        self._id = f"msg_{request_id}"

    def begun(self, model: str, end: AnswerEnd) -> str:
        return event("message_start", message=self._of(model, [], end))

    def opened(self, block: Block) -> str:
        empty = self._content(replace(block, text=""), "")
        return event("content_block_start", index=block.index, content_block=empty)

    def grown(self, block: Block, more: str) -> str:
        kind, name = _DELTAS[block.kind]
        return self._delta(block, {"type": kind, name: more})

    def closed(self, block: Block) -> str:
        signed = {"type": "signature_delta", "signature": self._id}
        made = self._delta(block, signed) if block.kind == "reasoning" else ""
        return made + event("content_block_stop", index=block.index)

    def ended(self, blocks: Sequence[Block], end: AnswerEnd) -> str:
        ended = event("message_delta", delta=_stop(blocks, end), usage=_usage(end))
        return ended + event("message_stop")

    def failed(self, error: Mapping[str, Any]) -> str:
        ours = error.get("type") == "server_error"
        kind = "api_error" if ours else "invalid_request_error"
        return event("error", error={"type": kind, "message": str(error.get("message", ""))})

    def whole(self, model: str, blocks: Sequence[Block], end: AnswerEnd) -> Json:
        """The message; one without any text has an empty one, since clients look at the first."""
        shown = blocks or [Block("text", 0)]
        content = [self._content(block, self._id) for block in shown]
        return self._of(model, content, end) | _stop(blocks, end)

    def _of(self, model: str, content: list[Json], end: AnswerEnd) -> Json:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": model,
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": _usage(end),
        }  # fmt: skip

    def _delta(self, block: Block, delta: Json) -> str:
        return event("content_block_delta", index=block.index, delta=delta)

    def _content(self, block: Block, signature: str) -> Json:
        match block.kind:
            case "reasoning":
                return {"type": "thinking", "thinking": block.text, "signature": signature}
            case "text":
                return {"type": "text", "text": block.text}
        given = {"id": block.call_id, "name": block.name, "input": _input(block.text)}
        return {"type": "tool_use", **given}


def _input(arguments: str) -> Json:
    """A call's arguments; what a model wrote that is no JSON object stands under a name that no
    tool has, so that the client's check of its tool's schema says so to the model."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"_not_a_json_object": arguments}


def _stop(blocks: Sequence[Block], end: AnswerEnd) -> Json:
    if end.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    calls = any(block.kind == "call" for block in blocks)
    reason = "tool_use" if calls else "end_turn"
    return {
        "stop_reason": "max_tokens" if end.finish_reason == "length" else reason,
        "stop_sequence": None,
    }


def _usage(end: AnswerEnd) -> dict[str, int]:
    """Anthropic counts what a cache gave apart from the other input."""
    read = end.tokens("prompt_tokens_details", "cached_tokens")
    wrote = end.tokens("prompt_tokens_details", "created_cache_tokens")
    return {
        "input_tokens": max(end.tokens("prompt_tokens") - read - wrote, 0),
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": wrote,
        "output_tokens": end.tokens("completion_tokens"),
    }
