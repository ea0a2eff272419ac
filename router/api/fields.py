"""Which fields a request may set, and within which bounds: an allow-list for chats and completions.

A body's fields are of three classes. Allowed ones have a check here and go on to an engine. Refused
ones would have an engine do what was not priced, or read what a client names: 400 with a remedy.
Dropped ones are sent innocently and mean nothing here. A name in none of them is refused, as OpenAI
does. Below the top level, what is not named is dropped, so that an engine, its chat template and
its schedulers never see it. `null` is as good as absent. Pure: it works on the parsed JSON, before
any schema does, so that nothing recursive or costly meets an unbounded value.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from router.api.errors import UNKNOWN_FIELD, bad_field, refused_field

Check = Callable[[str, Any], Any]
"""Takes a field's place and its value, which is not None; returns what goes on of it.

Raises ApiError 400, which names the place.
"""

MAX_CHOICES = 128
MAX_COUNT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_DEPTH = 64
MAX_SCHEMA_BYTES = 65_536
"""Of all grammars and schemas of a request together, those of tools that are compiled with them."""
MAX_TOOLS_BYTES = 262_144
"""Of tools that are only shown to the model."""

# -- checks of single values ------------------------------------------------------------------


def _whole(low: int = 0, high: int = MAX_COUNT) -> Check:
    def check(where: str, value: Any) -> Any:
        integral = type(value) is int or (type(value) is float and value.is_integer())
        if not integral or not low <= value <= high:
            raise bad_field(where, f"give a whole number from {low} to {high}")
        return int(value)

    return check


def _real(low: float, high: float) -> Check:
    def check(where: str, value: Any) -> Any:
        # A comparison holds for no NaN, and Python compares integers of any size exactly.
        if type(value) not in (int, float) or not low <= value <= high:
            raise bad_field(where, f"give a number from {low:g} to {high:g}")
        return value

    return check


def _flag(where: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise bad_field(where, "give true or false")
    return value


def _text(most_bytes: float = math.inf) -> Check:
    def check(where: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise bad_field(where, "give a string")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:
            # JSON can hold what no tokenizer can encode.
            raise bad_field(where, "is no text: it holds half a surrogate pair") from None
        if size_bytes > most_bytes:
            raise bad_field(where, f"give at most {most_bytes} bytes")
        return value

    return check


def _later(_where: str, value: Any) -> Any:
    """As it is: what is checked together with others, by `_check_schemas`, or by the schema."""
    return value


def _either(text: Check, other: Check) -> Check:
    """One check for strings, another for all else."""
    return lambda where, value: (text if isinstance(value, str) else other)(where, value)


def _many(check: Check, most: int, least: int = 0) -> Check:
    def check_all(where: str, value: Any) -> Any:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise bad_field(where, f"give a list of {least} to {most} entries")
        return [check(f"{where}.{i}", one) for i, one in enumerate(value)]

    return check_all


def _object(checks: Mapping[str, Check]) -> Check:
    def check(where: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise bad_field(where, "give an object")
        return {
            name: None if value[name] is None else checks[name](f"{where}.{name}", value[name])
            for name in value
            if name in checks
        }

    return check


def _check_json(where: str, value: Any) -> None:
    """Bound nesting, and what numbers a compiler in C++ meets, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for one in level:
            if isinstance(one, int) and abs(one) > MAX_INT64:
                raise bad_field(where, f"numbers must lie within {MAX_INT64}")
            if isinstance(one, float) and not math.isfinite(one):
                raise bad_field(where, "numbers must be finite")
        held = [one for one in level if isinstance(one, dict | list)]
        if not held:
            return
        inside = (one.values() if isinstance(one, dict) else one for one in held)
        level = [one for values in inside for one in values]
    raise bad_field(where, _TOO_DEEP)


def _check_json_text(where: str, text: str) -> None:
    """As `_check_json`, of what a text holds; raises ValueError if that is no JSON."""
    try:
        _check_json(where, json.loads(text))
    except RecursionError:
        raise bad_field(where, _TOO_DEEP) from None


_TOO_DEEP = f"is nested deeper than {MAX_DEPTH}"
_TEXT, _NAME, _WORD = _text(), _text(256), _text(1024)
_WORDS = _many(_WORD, 1024)

# -- checks of single fields ------------------------------------------------------------------


def _ids(where: str, value: list[Any]) -> Any:
    """Token ids: a prompt may have very many, so no Python runs for each."""
    if not set(map(type, value)) <= {int} or (value and (min(value) < 0 or max(value) > MAX_COUNT)):
        raise bad_field(where, f"give token ids from 0 to {MAX_COUNT}")
    return value


def _prompt(where: str, value: Any) -> Any:
    if isinstance(value, str):
        return _TEXT(where, value)
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return _ids(where, value)
    if kinds not in ({str}, {list}):
        raise bad_field(where, "give a string, token ids, or a list of one kind of them")
    if len(value) > MAX_CHOICES:
        raise bad_field(where, f"give at most {MAX_CHOICES} prompts")
    check = _TEXT if kinds == {str} else _ids
    return [check(f"{where}.{i}", prompt) for i, prompt in enumerate(value)]


def _bias(where: str, value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_field(where, f"give an object of at most {MAX_BIASES} token ids")
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise bad_field(where, "give token ids as keys")
    check = _real(-100, 100)
    return {key: check(where, bias) for key, bias in value.items()}


_OPTION = _either(_NAME, _real(-MAX_COUNT, MAX_COUNT))


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


def _arguments(where: str, value: Any) -> Any:
    """A tool call's arguments, JSON in a string; what is no JSON the engine judges."""
    _TEXT(where, value)
    if value.count("{") + value.count("[") > MAX_DEPTH:
        with contextlib.suppress(ValueError):
            _check_json_text(where, value)
    return value


def _schema(where: str, value: Any) -> Any:
    """A schema, JSON in a string or as it is."""
    if isinstance(value, str):
        _text(MAX_SCHEMA_BYTES)(where, value)
        try:
            _check_json_text(where, value)
        except ValueError:
            raise bad_field(where, "is not valid JSON") from None
    return value


def _media_url(where: str, value: Any) -> Any:
    """Inline data, or an address that the engine fetches where `allowed_media_domains` names it."""
    _TEXT(where, value)
    if not value.startswith(("data:", "https://", "http://")):
        raise bad_field(where, "give a data: URL")
    return value


def _part(where: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in PARTS:
        raise bad_field(f"{where}.type", f"give one of {', '.join(PARTS)}")
    kept, held = PARTS[kind](where, value), "text" if kind.endswith("_text") else kind
    if kept.get(held) is None:
        raise bad_field(f"{where}.{held}", "is missing")
    return kept


_MEDIA = _either(_media_url, _object({"url": _media_url, "detail": _NAME}))
_AUDIO = _object({"data": _TEXT, "format": _NAME})
_HELD = {
    "text": ("text", _TEXT), "input_text": ("text", _TEXT), "output_text": ("text", _TEXT),
    "refusal": ("refusal", _TEXT), "thinking": ("thinking", _TEXT),
    "image_url": ("image_url", _MEDIA), "audio_url": ("audio_url", _MEDIA),
    "video_url": ("video_url", _MEDIA), "input_audio": ("input_audio", _AUDIO),
}  # fmt: skip
PARTS = {kind: _object({"type": _NAME, name: check}) for kind, (name, check) in _HELD.items()}
"""The parts of a message's content, by type. None of them can name a cache entry (`uuid`) or hold
embeddings, which an engine would unpack."""

# -- the classes of fields --------------------------------------------------------------------

_FUNCTION = {"name": _NAME, "description": _TEXT, "parameters": _later, "strict": _flag}
_TOOL = _object({"type": _NAME, "function": _object(_FUNCTION)})
_CALLED = _object({"name": _NAME, "arguments": _arguments})
_MESSAGE = _object({
    "role": _NAME, "content": _either(_TEXT, _many(_part, 1024)), "name": _NAME,
    "tool_call_id": _NAME, "reasoning": _TEXT, "reasoning_content": _TEXT, "task": _NAME,
    "tool_calls": _many(_object({"id": _NAME, "type": _NAME, "function": _CALLED}), 128),
    "tools": _many(_TOOL, 128),
})  # fmt: skip
_RESPONSE_FORMAT = _object({
    "type": _NAME, "format": _later, "triggers": _WORDS,
    "structures": _many(_object({"begin": _WORD, "schema": _later, "end": _WORD}), 1024),
    "json_schema": _object(
        {"name": _NAME, "description": _TEXT, "schema": _later, "strict": _flag}
    ),
})  # fmt: skip
_STRUCTURED = _object({
    "json": _schema, "regex": _text(4096), "grammar": _text(MAX_SCHEMA_BYTES), "choice": _WORDS,
    "json_object": _flag, "disable_any_whitespace": _flag, "disable_additional_properties": _flag,
    "whitespace_pattern": _WORD, "structural_tag": _schema,
})  # fmt: skip
_PENALTY = _real(-2, 2)

TEMPLATE_OPTIONS = frozenset({
    "add_vision_id", "clear_thinking", "date_string", "enable_thinking", "low_effort",
    "model_identity", "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget",
    "thinking_mode", "tools_in_user_message", "truncate_history_thinking",
})  # fmt: skip
"""What a client may tell a model's chat template, of what known models' templates read."""

_BOTH: dict[str, Check] = {
    "model": _TEXT, "frequency_penalty": _PENALTY, "presence_penalty": _PENALTY,
    "logit_bias": _bias, "max_tokens": _whole(1), "n": _whole(1, MAX_CHOICES),
    "seed": _whole(-MAX_INT64 - 1, MAX_INT64), "stream": _flag,
    "stop": _either(_WORD, _many(_WORD, 4)),
    "stream_options": _object({"include_usage": _flag, "continuous_usage_stats": _flag}),
    "temperature": _real(0, 100), "top_p": _real(0, 1), "top_k": _whole(-1), "min_p": _real(0, 1),
    "repetition_penalty": _real(0, 100), "length_penalty": _real(-100, 100),
    "stop_token_ids": _many(_whole(), 128), "include_stop_str_in_output": _flag,
    "ignore_eos": _flag, "min_tokens": _whole(), "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag, "allowed_token_ids": _many(_whole(), 4096),
    "prompt_logprobs": _whole(0, MAX_LOGPROBS), "add_special_tokens": _flag, "echo": _flag,
    "logprob_token_ids": _many(_whole(), 128), "bad_words": _many(_WORD, 128), "user": _TEXT,
    "response_format": _RESPONSE_FORMAT, "structured_outputs": _STRUCTURED,
    "priority": _whole(-MAX_COUNT, MAX_COUNT), "return_tokens_as_token_ids": _flag,
    "return_token_ids": _flag, "return_token_offsets": _flag, "cache_salt": _WORD,
    "thinking_token_budget": _whole(-1),
    "repetition_detection": _object(
        dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), _whole(0, 1024))
    ),
    # Ours: see `router.api.request.ApiRequest`.
    "approx": _text(16), "prompt_cache_key": _TEXT,
}  # fmt: skip
CHAT: dict[str, Check] = {
    **_BOTH, "messages": _many(_MESSAGE, 4096, least=1),
    "max_completion_tokens": _whole(1), "logprobs": _flag, "top_logprobs": _whole(0, MAX_LOGPROBS),
    "tools": _many(_TOOL, 128), "parallel_tool_calls": _flag, "include_reasoning": _flag,
    "tool_choice": _either(_NAME, _object({"type": _NAME, "function": _object({"name": _NAME})})),
    "reasoning_effort": _NAME, "add_generation_prompt": _flag, "continue_final_message": _flag,
    # The schema holds them to strings.
    "documents": _many(_later, 1024),
    "chat_template_kwargs": _template_options, "return_prompt_text": _flag,
}  # fmt: skip
COMPLETION: dict[str, Check] = {
    **_BOTH, "prompt": _prompt, "logprobs": _whole(0, MAX_LOGPROBS), "suffix": _TEXT,
}  # fmt: skip

_ROUTERS = ("the router sets it; leave it out", ())
_OPERATORS = ("the operator sets it; leave it out", ())
_SHORTEN = ("shorten the prompt instead", ())
_GUIDED = ("use structured_outputs or response_format", ())
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "chat_template": ("the served model's own template is used; leave it out", ()),
    "use_beam_search": ("use n with a temperature instead", (False,)),
    "best_of": ("use n", (1,)),
    "stream_interval": ("every token is streamed as it comes; leave it out", (1,)),
    "kv_transfer_params": _ROUTERS, "ec_transfer_params": _ROUTERS,
    "kv_cache_report_mode": _ROUTERS,
    "prompt_embeds": ("give the prompt as text or token ids", ()),
    "mm_processor_kwargs": _OPERATORS, "media_io_kwargs": _OPERATORS,
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
"""What is refused: a remedy, and the values that ask for nothing."""

DROPPED = frozenset({
    "audio", "metadata", "modalities", "moderation", "prediction", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store",
    "verbosity", "vllm_xargs", "web_search_options",
})  # fmt: skip
"""What clients of OpenAI send that means nothing here; and `vllm_xargs`, which are the router's."""

# -- whole bodies -----------------------------------------------------------------------------


def _checked(allowed: Mapping[str, Check], body: Any) -> Any:
    """A body with the fields that may go on; raises ApiError 400."""
    if not isinstance(body, dict):
        return body  # The schema says so.
    kept = {}
    for name, value in body.items():
        if name in allowed:
            kept[name] = None if value is None else allowed[name](name, value)
        elif value is None or name in DROPPED:
            continue
        elif name not in REFUSED:
            raise UNKNOWN_FIELD(name=name[:80])
        elif value not in REFUSED[name][1]:
            raise refused_field(name, REFUSED[name][0])
    choices = choices_in(kept)
    if choices > MAX_CHOICES:
        raise bad_field("n", f"asks for {choices} answers; ask for {MAX_CHOICES} at most, which "
                        "are n for every prompt")  # fmt: skip
    _check_schemas(kept)
    return kept


checked_chat = partial(_checked, CHAT)
checked_completion = partial(_checked, COMPLETION)


def choices_in(body: Mapping[str, Any]) -> int:
    """How many answers a body asks for: `n` for every prompt."""
    prompt = body.get("prompt")
    # A list of numbers is one prompt, in tokens.
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return int(body.get("n") or 1) * (len(prompt or ()) if several else 1)


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


def _json_bytes(where: str, value: Any, most_bytes: int) -> int:
    """Bytes of JSON, which is neither too long nor too deep."""
    try:
        size = len(json.dumps(value, separators=(",", ":"), allow_nan=False))
    except RecursionError:
        raise bad_field(where, _TOO_DEEP) from None
    except ValueError:
        raise bad_field(where, "numbers must be finite") from None
    if size > most_bytes:
        raise bad_field(where, f"is {size} bytes of JSON; {most_bytes} are left for it, of "
                        f"{MAX_SCHEMA_BYTES} for all schemas of a request")  # fmt: skip
    _check_json(where, value)
    return size
