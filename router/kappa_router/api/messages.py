"""Anthropic's Messages API: what may be sent, and its bodies as chats, by which their prompts are
known; engines answer it themselves. Pure.

The served fields, one by one: docs/api.md. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kappa_router.api.checks import (
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
from kappa_router.api.errors import bad_field
from kappa_router.api.fields import CHAT, ROUTERS, media_url
from kappa_router.api.parts import content_of, function_of, joined, result_of

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
FIELDS = FieldClasses(
    _FIELDS,
    {
        "container": ("no code runs here; leave it out", ()),
        "mcp_servers": ("no MCP client runs here; give their tools in tools", ([],)),
        "kv_transfer_params": ROUTERS, "ec_transfer_params": ROUTERS,
    },
    frozenset({
        "betas", "cache_control", "context_management", "diagnostics", "inference_geo",
        "service_tier", "speed", "user_profile_id", "vllm_xargs", "workspace_id",
    }),
)  # fmt: skip
"""The fields of a Messages body; see `kappa_router.api.fields`."""

# -- a body as a chat -------------------------------------------------------------------------


def checked(body: Mapping[str, Any], *, counted: bool = False) -> Json:
    """The fields of a Messages body that go on; `counted`: only its tokens are wanted. Raises
    ApiError 400 for one that is not known, not served, missing, or out of bounds."""
    kept = FIELDS.kept(body)
    need(kept, *("messages",) if counted else ("max_tokens", "messages"))
    return kept


def to_chat(kept: Json) -> Json:
    """A body, checked, as a chat's."""
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
    return chat | _tools(kept) | _thinking(kept)


def _tools(kept: Json) -> Json:
    if not kept.get("tools"):
        return {}
    tools = [function_of(tool, parameters=tool["input_schema"]) for tool in kept["tools"]]
    chosen = kept.get("tool_choice") or {"type": "auto"}
    ours = {"auto": "auto", "any": "required", "none": "none", "tool": function_of(chosen)}
    made: Json = {"tools": tools, "tool_choice": ours[chosen["type"]]}
    if chosen.get("disable_parallel_tool_use"):
        made["parallel_tool_calls"] = False
    return made


def _thinking(kept: Json) -> Json:
    """Thinking by the names of models' templates; without the field a model follows its habit."""
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
