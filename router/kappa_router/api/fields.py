"""The allow-list of fields that chats and completions may set, with the bounds of each.

A body's fields are of three classes. Allowed ones have a check here and go on to an engine. Refused
ones would have an engine do what was not priced, or read what a client names: 400 with a remedy.
Dropped ones are sent innocently and mean nothing here. A name in none of them is refused, as OpenAI
does. Below the top level, fields that are not named are dropped, so that an engine, its chat
template and its schedulers never see them. `null` is as good as absent. Pure: it works on the
parsed JSON, before any schema does, so that nothing recursive or costly meets an unbounded value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kappa.protocol import MOST_PRIORITY
from kappa_router import json_body
from kappa_router.api.checks import (
    MAX_COUNT,
    MAX_DEPTH,
    MAX_INT64,
    NAME,
    TEXT,
    TOO_DEEP,
    WORD,
    WORDS,
    Check,
    FieldClasses,
    check_json,
    check_json_text,
    either,
    fields_of,
    flag,
    later,
    many,
    need,
    real,
    tagged,
    text,
    whole,
)
from kappa_router.api.errors import bad_field
from kappa_router.api.request_body import choices_in

MAX_CHOICES = 128
MAX_PARTS = 4_096
"""Of the contents of all messages together."""
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_SCHEMA_BYTES = 65_536
"""Of all grammars and schemas of a request together, those of tools that are compiled with them."""
MAX_TOOLS_BYTES = 262_144
"""Of tools that are only shown to the model."""

# -- checks of single fields ------------------------------------------------------------------


def _ids(where: str, value: list[Any]) -> Any:
    """Token ids: a prompt may have very many, so no Python runs for each."""
    if not set(map(type, value)) <= {int} or (value and (min(value) < 0 or max(value) > MAX_COUNT)):
        raise bad_field(where, f"give token ids from 0 to {MAX_COUNT}")
    return value


def _prompt(where: str, value: Any) -> Any:
    if isinstance(value, str):
        return TEXT(where, value)
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return _ids(where, value)
    if kinds not in ({str}, {list}):
        raise bad_field(where, "give a string, token ids, or a list of one kind of them")
    if len(value) > MAX_CHOICES:
        raise bad_field(where, f"give at most {MAX_CHOICES} prompts")
    check = TEXT if kinds == {str} else _ids
    return [check(f"{where}.{i}", prompt) for i, prompt in enumerate(value)]


def _bias(where: str, value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_field(where, f"give an object of at most {MAX_BIASES} token ids")
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise bad_field(where, "give token ids as keys")
    check = real(-100, 100)
    return {key: check(where, bias) for key, bias in value.items()}


_OPTION = either(NAME, real(-MAX_COUNT, MAX_COUNT))


def _template_options(where: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise bad_field(where, "give an object")
    for name, option in value.items():
        if name not in TEMPLATE_OPTIONS:
            known = ", ".join(sorted(TEMPLATE_OPTIONS))
            raise bad_field(where, f"{name[:80]!r} is none of {known}")
        if option is not None and not isinstance(option, bool):
            _OPTION(f"{where}.{name}", option)
    return value


def tool_arguments(where: str, value: Any) -> Any:
    """A tool call's arguments, JSON in a string; the engine judges anything else."""
    TEXT(where, value)
    if _brackets(value) > MAX_DEPTH and _arguments_shape(where, value).nesting > MAX_DEPTH:
        raise bad_field(where, TOO_DEEP)
    return value


def _brackets(text: str) -> int:
    return text.count("{") + text.count("[")


def _arguments_shape(where: str, text: str) -> json_body.Shape:
    try:
        return json_body.shape_of(text.encode())
    except json_body.ExcessiveError as error:
        raise bad_field(where, str(error)) from None
    except json_body.MalformedError:
        return json_body.Shape(0, 0)


def _schema(where: str, value: Any) -> Any:
    """A schema, JSON in a string or as it is."""
    if isinstance(value, str):
        text(MAX_SCHEMA_BYTES)(where, value)
        try:
            check_json_text(where, value)
        except ValueError:
            raise bad_field(where, "is not valid JSON") from None
    return value


def _document(where: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise bad_field(where, "give an object")
    return {TEXT(where, name): TEXT(where, text) for name, text in value.items()}


def media_url(where: str, value: Any) -> Any:
    """Inline data, or an address that the engine fetches where `allowed_media_domains` names it."""
    TEXT(where, value)
    if not value.startswith(("data:", "https://", "http://")):
        raise bad_field(where, "give a data: URL")
    return value


_MEDIA = either(media_url, fields_of({"url": media_url, "detail": NAME}))
_AUDIO = fields_of({"data": TEXT, "format": NAME})
_HELD = {
    "text": ("text", TEXT), "input_text": ("text", TEXT), "output_text": ("text", TEXT),
    "refusal": ("refusal", TEXT), "thinking": ("thinking", TEXT),
    "image_url": ("image_url", _MEDIA), "audio_url": ("audio_url", _MEDIA),
    "video_url": ("video_url", _MEDIA), "input_audio": ("input_audio", _AUDIO),
}  # fmt: skip
PARTS = {kind: ({name: check}, (name,)) for kind, (name, check) in _HELD.items()}
"""The parts of a message's content, by type. None of them can name a cache entry (`uuid`) or hold
embeddings, which an engine would unpack."""
_PART = either(TEXT, tagged(PARTS))

# -- the classes of fields --------------------------------------------------------------------

_FUNCTION = {"name": NAME, "description": TEXT, "parameters": later, "strict": flag}
_TOOL = fields_of({"type": NAME, "function": fields_of(_FUNCTION)})
_CALLED = fields_of({"name": NAME, "arguments": tool_arguments})
_MESSAGE = fields_of({
    "role": NAME, "content": either(TEXT, many(_PART, 1024)), "name": NAME,
    "tool_call_id": NAME, "reasoning": TEXT, "reasoning_content": TEXT, "task": NAME,
    "tool_calls": many(fields_of({"id": NAME, "type": NAME, "function": _CALLED}), 128),
    "tools": many(_TOOL, 128),
})  # fmt: skip
_RESPONSE_FORMAT = fields_of({
    "type": NAME, "format": later, "triggers": WORDS,
    "structures": many(fields_of({"begin": WORD, "schema": later, "end": WORD}), 1024),
    "json_schema": fields_of(
        {"name": NAME, "description": TEXT, "schema": later, "strict": flag}
    ),
})  # fmt: skip
_STRUCTURED = fields_of({
    "json": _schema, "regex": text(4096), "grammar": text(MAX_SCHEMA_BYTES), "choice": WORDS,
    "json_object": flag, "disable_any_whitespace": flag, "disable_additional_properties": flag,
    "whitespace_pattern": WORD, "structural_tag": _schema,
})  # fmt: skip
_PENALTY = real(-2, 2)

TEMPLATE_OPTIONS = frozenset({
    "add_vision_id", "clear_thinking", "date_string", "enable_thinking", "low_effort",
    "model_identity", "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget",
    "thinking_mode", "tools_in_user_message", "truncate_history_thinking",
})  # fmt: skip
"""What a client may tell a model's chat template, of what known models' templates read."""

_BOTH: dict[str, Check] = {
    "model": TEXT, "frequency_penalty": _PENALTY, "presence_penalty": _PENALTY,
    "logit_bias": _bias, "max_tokens": whole(1), "n": whole(1, MAX_CHOICES),
    "seed": whole(-MAX_INT64 - 1, MAX_INT64), "stream": flag,
    "stop": either(WORD, many(WORD, 4)),
    "stream_options": fields_of({"include_usage": flag, "continuous_usage_stats": flag}),
    "temperature": real(0, 100), "top_p": real(0, 1), "top_k": whole(-1), "min_p": real(0, 1),
    "repetition_penalty": real(0, 100), "length_penalty": real(-100, 100),
    "stop_token_ids": many(whole(), 128), "include_stop_str_in_output": flag,
    "ignore_eos": flag, "min_tokens": whole(), "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag, "allowed_token_ids": many(whole(), 4096),
    "prompt_logprobs": whole(0, MAX_LOGPROBS), "add_special_tokens": flag, "echo": flag,
    "logprob_token_ids": many(whole(), 128), "bad_words": many(WORD, 128), "user": TEXT,
    "response_format": _RESPONSE_FORMAT, "structured_outputs": _STRUCTURED,
    "priority": whole(0, MOST_PRIORITY), "return_tokens_as_token_ids": flag,
    "return_token_ids": flag, "return_token_offsets": flag, "cache_salt": WORD,
    "thinking_token_budget": whole(-1),
    "repetition_detection": fields_of(
        dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), whole(0, 1024))
    ),
    # Ours: see `kappa_router.api.request.ApiRequest`.
    "approx": text(16), "prompt_cache_key": TEXT,
}  # fmt: skip
CHAT: dict[str, Check] = {
    **_BOTH, "messages": many(_MESSAGE, 4096, least=1),
    "max_completion_tokens": whole(1), "logprobs": flag, "top_logprobs": whole(0, MAX_LOGPROBS),
    "tools": many(_TOOL, 128), "parallel_tool_calls": flag, "include_reasoning": flag,
    "tool_choice": either(NAME, fields_of({"type": NAME, "function": fields_of({"name": NAME})})),
    "reasoning_effort": NAME, "add_generation_prompt": flag, "continue_final_message": flag,
    "documents": many(_document, 1024),
    "chat_template_kwargs": _template_options, "return_prompt_text": flag,
}  # fmt: skip
COMPLETION: dict[str, Check] = {
    **_BOTH, "prompt": _prompt, "logprobs": whole(0, MAX_LOGPROBS), "suffix": TEXT,
}  # fmt: skip

ROUTERS = ("the router sets it; leave it out", ())
OPERATORS = ("the operator sets it; leave it out", ())
_SHORTEN = ("shorten the prompt instead", ())
_GUIDED = ("use structured_outputs or response_format", ())
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "chat_template": ("the served model's own template is used; leave it out", ()),
    "use_beam_search": ("use n with a temperature instead", (False,)),
    "best_of": ("use n", (1,)),
    "stream_interval": ("every token is streamed as it comes; leave it out", (1,)),
    "kv_transfer_params": ROUTERS, "ec_transfer_params": ROUTERS,
    "kv_cache_report_mode": ROUTERS,
    "prompt_embeds": ("give the prompt as text or token ids", ()),
    "mm_processor_kwargs": OPERATORS, "media_io_kwargs": OPERATORS,
    "request_id": ("send the header x-request-id instead", ()),
    "truncate_prompt_tokens": _SHORTEN, "truncation_side": _SHORTEN,
    "routed_experts_prompt_start": ("leave it out", (0,)),
    "return_assistant_tokens_mask": ("leave it out", (False,)),
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none", "auto")),
    "guided_json": _GUIDED, "guided_regex": _GUIDED, "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED, "guided_decoding_backend": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
}  # fmt: skip
"""Refused fields: a remedy, and the values that ask for nothing."""

DROPPED = frozenset({
    "audio", "metadata", "modalities", "moderation", "prediction", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store",
    "verbosity", "vllm_xargs", "web_search_options",
})  # fmt: skip
"""What clients of OpenAI send that means nothing here; and `vllm_xargs`, which are the router's."""

# -- whole bodies -----------------------------------------------------------------------------


CHAT_FIELDS = FieldClasses(CHAT, REFUSED, DROPPED)
COMPLETION_FIELDS = FieldClasses(COMPLETION, REFUSED, DROPPED)


def _checked(classes: FieldClasses, body: Mapping[str, Any]) -> dict[str, Any]:
    """A body with the fields that may go on; raises ApiError 400."""
    kept = classes.kept(body)
    choices = choices_in(kept)
    if choices > MAX_CHOICES:
        raise bad_field("n", f"asks for {choices} answers; ask for {MAX_CHOICES} at most, which "
                        "are n for every prompt")  # fmt: skip
    _check_schemas(kept)
    _check_messages(kept.get("messages") or ())
    return kept


checked_chat = partial(_checked, CHAT_FIELDS)
checked_completion = partial(_checked, COMPLETION_FIELDS)


def _check_schemas(body: Mapping[str, Any]) -> None:
    """Bound what an engine compiles: it does so in few threads that all requests share."""
    left_bytes = MAX_SCHEMA_BYTES
    for name in ("response_format", "structured_outputs"):
        if body.get(name) is not None:
            left_bytes -= _json_bytes(name, body[name], left_bytes)
    tools = body.get("tools")
    if tools:
        strict = any((tool.get("function") or {}).get("strict") for tool in tools)
        compiled = strict or body.get("tool_choice") not in (None, "none", "auto")
        _json_bytes("tools", tools, left_bytes if compiled else MAX_TOOLS_BYTES)
    for i, message in enumerate(body.get("messages") or ()):
        if message.get("tools"):
            _json_bytes(f"messages.{i}.tools", message["tools"], MAX_TOOLS_BYTES)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Bound what all messages hold together: an engine's schema takes 12 us for a part, templates
    and engines parse the arguments of every tool call."""
    for i, one in enumerate(messages):
        need(one, "role", where=f"messages.{i}.")
    contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    parts = sum(map(len, contents))
    if parts > MAX_PARTS:
        raise bad_field("messages", f"hold {parts} parts of content; {MAX_PARTS} are read: join "
                        "texts that follow one another")  # fmt: skip
    where, most = "messages.*.tool_calls.*.function.arguments", json_body.MAX_CONTAINERS
    calls = (call for one in messages for call in one.get("tool_calls") or ())
    texts = [(call.get("function") or {}).get("arguments") or "" for call in calls]
    if sum(map(_brackets, texts)) > most:
        held = sum(_arguments_shape(where, text).containers for text in texts)
        if held > most:
            raise bad_field(where, f"hold {held} lists and objects together; {most} are read")


def _json_bytes(where: str, value: Any, most_bytes: int) -> int:
    """Bytes of JSON, which is neither too long nor too deep."""
    try:
        size = len(json.dumps(value, separators=(",", ":"), allow_nan=False))
    except RecursionError:
        raise bad_field(where, TOO_DEEP) from None
    except ValueError:
        raise bad_field(where, "numbers must be finite") from None
    if size > most_bytes:
        raise bad_field(where, f"is {size} bytes of JSON; {most_bytes} are left for it, of "
                        f"{MAX_SCHEMA_BYTES} for all schemas of a request")  # fmt: skip
    check_json(where, value)
    return size
