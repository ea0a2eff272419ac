"""OpenAI's Responses API: its bodies as chats, and chats' answers in its words. Pure.

Nothing is kept here between requests, so what refers to an earlier response is refused. What of it
is served, field by field: docs/api.md. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.api.blocks import AnswerEnd, Block, content_of, event, joined, result_of
from router.api.checks import (
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
from router.api.errors import bad_field, refused_field
from router.api.fields import CHAT, media_url, tool_arguments

Json = dict[str, Any]

# -- what may be sent -------------------------------------------------------------------------

_PARTS: Kinds = {
    "input_text": ({"text": TEXT}, ("text",)), "output_text": ({"text": TEXT}, ("text",)),
    "refusal": ({"refusal": TEXT}, ("refusal",)),
    "input_image": ({"image_url": media_url, "detail": NAME}, ("image_url",)),
}  # fmt: skip
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
    return _check_item(where, value)


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
    "text": ({}, ()), "json_object": ({}, ()),
    "json_schema": (
        {"name": NAME, "description": TEXT, "schema": json_object, "strict": flag},
        ("name", "schema"),
    ),
}  # fmt: skip
_ROUTERS = ("the router sets it; leave it out", ())
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
        "mm_processor_kwargs": ("the operator sets it; leave it out", ()),
        "media_io_kwargs": ("the operator sets it; leave it out", ()),
        "kv_transfer_params": _ROUTERS, "ec_transfer_params": _ROUTERS,
    },
    frozenset({
        "access_programs", "client_metadata", "context_management", "image", "max_tool_calls",
        "moderation", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "session_id", "stream_options", "vllm_xargs",
    }),
)  # fmt: skip
"""The fields of a Responses body; see `router.api.fields`."""

# -- a body as a chat -------------------------------------------------------------------------


def checked(body: Mapping[str, Any]) -> Json:
    """What goes on of a Responses body; raises ApiError 400 for a field that is not known, not
    served, missing, or out of bounds."""
    kept = {name: value for name, value in FIELDS.kept(body).items() if value is not None}
    need(kept, "input")
    return kept


def to_chat(kept: Mapping[str, Any]) -> Json:
    """A body, checked, as a chat's."""
    chat = {name: kept[name] for name in _SAME if name in kept}
    chat["messages"] = _messages(kept)
    if "max_output_tokens" in kept:
        chat["max_completion_tokens"] = kept["max_output_tokens"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
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
    names = ("name", "description", "parameters", "strict")
    chosen = kept.get("tool_choice") or "auto"
    if not isinstance(chosen, str):
        chosen = {"type": "function", "function": {"name": chosen["name"]}}
    return {
        "tool_choice": chosen,
        "tools": [
            {"type": "function", "function": {n: tool[n] for n in names if n in tool}}
            for tool in shown
        ],
    }


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


# -- an answer in its words -------------------------------------------------------------------


class ResponseAnswer:
    """A `router.api.blocks.Wording`: one answer as a response, which shows its request again."""

    def __init__(self, request_id: str, kept: Mapping[str, Any], created_s: float) -> None:
        self._id, self._kept, self._created_s = request_id, kept, int(created_s)
        self._model, self._sent, self._closed = "", 0, list[Json]()

    def begun(self, model: str, end: AnswerEnd) -> str:
        self._model = model
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: Block) -> str:
        empty = replace(block, text="")
        item = self._item(empty, "in_progress") | ({} if block.kind == "call" else {"content": []})
        made = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return made
        return made + self._of_part("response.content_part.added", block, part=_part_of(empty))

    def grown(self, block: Block, more: str) -> str:
        return self._of_part(f"{_EVENTS[block.kind]}.delta", block, delta=more)

    def closed(self, block: Block) -> str:
        item, name = self._item(block, "completed"), f"{_EVENTS[block.kind]}.done"
        self._closed.append(item)
        if block.kind == "call":
            made = self._of_part(name, block, arguments=block.text, name=block.name)
        else:
            made = self._of_part(name, block, text=block.text)
            made += self._of_part("response.content_part.done", block, part=_part_of(block))
        return made + self._event("response.output_item.done", output_index=block.index, item=item)

    def ended(self, blocks: Sequence[Block], end: AnswerEnd) -> str:
        response = self.whole(self._model, blocks, end)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: Mapping[str, Any]) -> str:
        why = {"code": "server_error", "message": str(error.get("message", ""))}
        response = self._response("failed", self._closed) | {"error": why}
        return self._event("response.failed", response=response)

    def whole(self, model: str, blocks: Sequence[Block], end: AnswerEnd) -> Json:
        self._model = model
        cut = end.finish_reason == "length"
        items = [self._item(block, "completed") for block in blocks]
        response = self._response("incomplete" if cut else "completed", items)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response | {"usage": _usage(end)}

    def _response(self, status: str, output: list[Json]) -> Json:
        kept = self._kept
        shown = (
            "instructions", "max_output_tokens", "temperature", "top_p", "user", "prompt_cache_key"
        )  # fmt: skip
        return {
            "id": f"resp_{self._id}", "object": "response", "created_at": self._created_s,
            "status": status, "model": self._model, "output": output, "error": None,
            "incomplete_details": None, "usage": None, "background": False, "store": False,
            "previous_response_id": None, "truncation": "disabled", "top_logprobs": 0,
            "metadata": kept.get("metadata", {}), "tools": kept.get("tools", []),
            "tool_choice": kept.get("tool_choice", "auto"),
            "parallel_tool_calls": kept.get("parallel_tool_calls", True),
            "text": {"format": {"type": "text"}} | kept.get("text", {}),
            "reasoning": {"effort": None, "summary": None} | kept.get("reasoning", {}),
            **{name: kept.get(name) for name in shown},
        }  # fmt: skip

    def _item(self, block: Block, status: str) -> Json:
        named = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "reasoning":
                return {**named, "type": "reasoning", "summary": [], "content": [_part_of(block)]}
            case "text":
                said = {"role": "assistant", "content": [_part_of(block)]}
                return {**named, "type": "message", **said}
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {**named, "type": "function_call", **call}

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self._id}_{block.index}"

    def _of_part(self, kind: str, block: Block, **data: Any) -> str:
        place: Json = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if kind.startswith("response.output_text."):
            place["logprobs"] = []
        return self._event(kind, **place, **data)

    def _event(self, kind: str, **data: Any) -> str:
        self._sent += 1
        return event(kind, sequence_number=self._sent - 1, **data)


_EVENTS = {
    "reasoning": "response.reasoning_text", "text": "response.output_text",
    "call": "response.function_call_arguments",
}  # fmt: skip


def _part_of(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(end: AnswerEnd) -> Json:
    read = end.tokens("prompt_tokens_details", "cached_tokens")
    wrote = end.tokens("prompt_tokens_details", "created_cache_tokens")
    thought = end.tokens("completion_tokens_details", "reasoning_tokens")
    prompt, generated = end.tokens("prompt_tokens"), end.tokens("completion_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": wrote},
        "output_tokens": generated, "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + generated,
    }  # fmt: skip
