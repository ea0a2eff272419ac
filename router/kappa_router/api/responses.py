"""OpenAI's Responses API: what may be sent, and its bodies as chats, by which their prompts are
known; engines answer it themselves. Pure.

Nothing is kept here between requests, so a body that refers to an earlier response is refused. The
served fields, one by one: docs/api.md. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kappa_router.api.checks import (
    NAME,
    TEXT,
    FieldClasses,
    Kinds,
    choice,
    either,
    fields_of,
    flag,
    json_object,
    many,
    need,
    tagged,
    text,
    whole,
)
from kappa_router.api.errors import bad_field, refused_field
from kappa_router.api.fields import CHAT, OPERATORS, ROUTERS, media_url, tool_arguments
from kappa_router.api.parts import content_of, function_of, joined, result_of

Json = dict[str, Any]

# -- what may be sent -------------------------------------------------------------------------

_PARTS: Kinds = {
    "input_text": ({"text": TEXT}, ("text",)),
    "output_text": ({"text": TEXT}, ("text",)),
    "refusal": ({"refusal": TEXT}, ("refusal",)),
    "input_image": ({"image_url": media_url, "detail": NAME}, ("image_url",)),
}
_CONTENT = either(TEXT, many(tagged(_PARTS), 1024))
_TEXTS = many(fields_of({"text": TEXT}), 1024)
_ITEMS: Kinds = {
    "message": (
        {"role": choice("user", "assistant", "system", "developer"), "content": _CONTENT},
        ("role", "content"),
    ),
    "function_call": (
        {"call_id": NAME, "name": NAME, "arguments": tool_arguments},
        ("call_id", "name", "arguments"),
    ),
    "function_call_output": ({"call_id": NAME, "output": _CONTENT}, ("call_id", "output")),
    "reasoning": ({"summary": _TEXTS, "content": _TEXTS}, ()),
}
_check_item = tagged(_ITEMS)
_TOOL = fields_of({
    "type": NAME, "name": NAME, "description": TEXT, "parameters": json_object, "strict": flag,
})  # fmt: skip
# Agents send them by default; OpenAI would run them. The model does not see them.
_UNSHOWN_TOOLS = ("web_search", "web_search_preview")


def _item(where: str, value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") is None:
        value = {**value, "type": "message"}
    item = _check_item(where, value)
    return _as_vllm_reads_it(item) if item["type"] == "reasoning" else item


def _as_vllm_reads_it(item: Json) -> Json:
    """An item of reasoning: without an id and the types of its parts vLLM takes it for a message,
    and fails."""
    typed = {
        name: [{"type": kind, **part} for part in item.get(name) or ()]
        for name, kind in (("summary", "summary_text"), ("content", "reasoning_text"))
    }
    return {"type": "reasoning", "id": "rs_0", **typed}


def _tool(where: str, value: Any) -> Any:
    kept = _TOOL(where, value)
    if kept.get("type") in _UNSHOWN_TOOLS:
        return {"type": kept["type"]}
    if kept.get("type") != "function":
        raise bad_field(f"{where}.type", "no tools run here: give function, your own tools")
    need(kept, "name", where=f"{where}.")
    return kept


def _include(where: str, value: Any) -> Any:
    if "message.output_text.logprobs" in many(NAME, 16)(where, value):
        raise refused_field(where, "ask for logprobs with chat completions")
    return value


def _metadata(where: str, value: Any) -> Any:
    """OpenAI's bounds: 16 pairs of texts. It is only shown again."""
    if not isinstance(value, dict) or len(value) > 16:
        raise bad_field(where, "give an object of at most 16 texts")
    return {text(64)(where, name): text(512)(f"{where}.*", one) for name, one in value.items()}


# What a chat calls by the same name; then what does not depend on the API.
_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "prompt_cache_key",
    "seed", "stop", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
    "include_reasoning", "structured_outputs", "priority", "cache_salt", "chat_template_kwargs",
)  # fmt: skip
_FORMATS: Kinds = {
    "text": ({}, ()),
    "json_object": ({}, ()),
    "json_schema": (
        {"name": NAME, "description": TEXT, "schema": json_object, "strict": flag},
        ("name", "schema"),
    ),
}
_NOT_KEPT = ("no response is kept here: send the whole conversation in input", ())
FIELDS = FieldClasses(
    {
        **{name: CHAT[name] for name in _SAME},
        "input": either(TEXT, many(_item, 8192, least=1)), "instructions": TEXT,
        "max_output_tokens": whole(1), "metadata": _metadata, "include": _include,
        "reasoning": fields_of({"effort": NAME, "summary": NAME, "generate_summary": NAME}),
        "text": fields_of({"format": tagged(_FORMATS), "verbosity": NAME}),
        "tools": many(_tool, 128),
        "tool_choice": either(
            choice("auto", "none", "required"), tagged({"function": ({"name": NAME}, ("name",))})
        ),
    },
    {
        "previous_response_id": _NOT_KEPT, "conversation": _NOT_KEPT,
        "previous_input_messages": _NOT_KEPT,
        "store": ("no response is kept here; send false", (False,)),
        "background": ("wait for the answer, or stream it", (False,)),
        "prompt": ("no prompts are kept here: send input", ()),
        "truncation": ("shorten the input instead", ("disabled",)),
        "top_logprobs": ("ask for logprobs with chat completions", (0,)),
        "enable_response_messages": ("leave it out", (False,)),
        "request_id": ("send the header x-request-id instead", ()),
        "mm_processor_kwargs": OPERATORS,
        "media_io_kwargs": OPERATORS,
        "kv_transfer_params": ROUTERS, "ec_transfer_params": ROUTERS,
    },
    frozenset({
        "access_programs", "client_metadata", "context_management", "image", "max_tool_calls",
        "moderation", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "session_id", "stream_options", "vllm_xargs",
    }),
)  # fmt: skip
"""The fields of a Responses body; see `kappa_router.api.fields`."""

# -- a body as a chat -------------------------------------------------------------------------


def checked(body: Mapping[str, Any]) -> Json:
    """The fields of a Responses body that go on; raises ApiError 400 for one that is not known, not
    served, missing, or out of bounds."""
    kept = FIELDS.kept(body)
    need(kept, "input")
    return kept


def to_chat(kept: Mapping[str, Any]) -> Json:
    """A body, checked, as a chat's."""
    chat = {name: kept[name] for name in _SAME if name in kept}
    chat["messages"] = _messages(kept)
    if "max_output_tokens" in kept:
        chat["max_completion_tokens"] = kept["max_output_tokens"]
    effort = (kept.get("reasoning") or {}).get("effort")
    if effort:
        chat["reasoning_effort"] = effort
    wanted = dict((kept.get("text") or {}).get("format") or {"type": "text"})
    if wanted["type"] == "json_schema":
        del wanted["type"]
        chat["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif wanted["type"] == "json_object":
        chat["response_format"] = wanted
    return chat | _tools(kept)


def _tools(kept: Mapping[str, Any]) -> Json:
    shown = [tool for tool in kept.get("tools") or () if tool["type"] == "function"]
    if not shown:
        return {}
    chosen = kept.get("tool_choice") or "auto"
    if not isinstance(chosen, str):
        chosen = function_of(chosen)
    return {"tool_choice": chosen, "tools": [function_of(tool) for tool in shown]}


def _messages(kept: Mapping[str, Any]) -> list[Json]:
    """The chat's messages: instructions and the system messages after them as one, which every
    template takes; what an assistant thought, said and called in a row as one, too."""
    given, made = kept["input"], list[Json]()
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    if kept.get("instructions"):
        made.append({"role": "system", "content": kept["instructions"]})
    for item in given:
        parts = _parts(item.get("output") or item.get("content") or "")
        match item["type"], item.get("role"):
            case "function_call_output", _:
                made.append(result_of(item["call_id"], parts))
                shown = [part for part in parts if part["type"] != "text"]
                made += [{"role": "user", "content": shown}] * bool(shown)
            case "message", "user":
                made.append({"role": "user", "content": content_of(parts)})
            case "message", "system" | "developer":
                if made and all(message["role"] == "system" for message in made):
                    made[-1]["content"] += f"\n{joined(parts)}"
                else:
                    made.append({"role": "system", "content": joined(parts)})
            case _:
                if not made or made[-1]["role"] != "assistant":
                    made.append({"role": "assistant", "content": ""})
                _add_to(made[-1], item, joined(parts))
    return made


def _add_to(message: Json, item: Json, text: str) -> None:
    match item["type"]:
        case "message":
            message["content"] += text
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        case "reasoning":
            thought = text or joined(_parts(item.get("summary") or ()))
            message["reasoning"] = message.get("reasoning", "") + thought


def _parts(content: str | Iterable[Json]) -> list[Json]:
    """Items' content, output or summary as a chat's parts."""
    given = [{"text": content}] if isinstance(content, str) else content
    return [_part(part) for part in given]


def _part(part: Json) -> Json:
    if "image_url" not in part:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    image = {"url": part["image_url"], "detail": part.get("detail")}
    return {"type": "image_url", "image_url": {k: v for k, v in image.items() if v is not None}}
