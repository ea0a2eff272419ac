"""Which fields a request may set, and within which bounds: an allow-list for chats and completions.

A body's fields are of three classes. Allowed ones have a check here and go on to an engine. Refused
ones would have an engine do what was not priced, or read what a client names: 400 with a remedy.
Dropped ones are sent innocently and mean nothing here. A name in none of them is refused, as OpenAI
does. Below the top level, what is not named is dropped, so that an engine, its chat template and
its schedulers never see it. `null` is as good as absent. Pure: it works on the parsed JSON, before
any schema does, so that nothing recursive or costly meets an unbounded value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from router.api.errors import ApiError, bad_field, refused_field, unknown_field

Check = Callable[[str, Any], Any]
"""Takes a field's place and its value, which is not None; returns what goes on of it.

Raises ApiError 400, which names the place.
"""

MAX_CHOICES = 128
MAX_COUNT = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_WORD_BYTES = 1024
MAX_NAME_BYTES = 256
MAX_DEPTH = 64
MAX_SCHEMA_BYTES = 65_536
"""Of all grammars and schemas of a request together, those of tools that are compiled with them."""
MAX_TOOLS_BYTES = 262_144
"""Of tools that are only shown to the model."""


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


def _text(most_bytes: int | None = None) -> Check:
    def check(where: str, value: Any) -> Any:
        if not isinstance(value, str):
            raise bad_field(where, "give a string")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError:
            # JSON can hold what no tokenizer can encode.
            raise bad_field(where, "is no text: it holds half a surrogate pair") from None
        if most_bytes is not None and size_bytes > most_bytes:
            raise bad_field(where, f"give at most {most_bytes} bytes")
        return value

    return check


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


def _either(text: Check, other: Check) -> Check:
    """One check for strings, another for all else."""
    return lambda where, value: (text if isinstance(value, str) else other)(where, value)


def _later(_where: str, value: Any) -> Any:
    """As it is: what is checked together with others, by `_check_schemas`, or by the schema."""
    return value


def _ids(where: str, value: list[Any]) -> Any:
    """Token ids: a prompt may have very many, so no Python runs for each."""
    if not set(map(type, value)) <= {int} or (value and (min(value) < 0 or max(value) > MAX_COUNT)):
        raise bad_field(where, f"give token ids from 0 to {MAX_COUNT}")
    return value


def _prompt(where: str, value: Any) -> Any:
    if isinstance(value, str):
        return _text()(where, value)
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return _ids(where, value)
    if kinds not in ({str}, {list}):
        raise bad_field(where, "give a string, token ids, or a list of one kind of them")
    if len(value) > MAX_CHOICES:
        raise bad_field(where, f"give at most {MAX_CHOICES} prompts")
    check = _text() if kinds == {str} else _ids
    return [check(f"{where}.{i}", prompt) for i, prompt in enumerate(value)]


def _bias(where: str, value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_field(where, f"give an object of at most {MAX_BIASES} token ids")
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise bad_field(where, "give token ids as keys")
    return {key: _BIAS(where, bias) for key, bias in value.items()}


_BIAS = _real(-100, 100)


def _template_options(where: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise bad_field(where, "give an object")
    foreign = next((name for name in value if name not in TEMPLATE_OPTIONS), None)
    if foreign is not None:
        known = ", ".join(sorted(TEMPLATE_OPTIONS))
        raise bad_field(where, f"{foreign[:80]!r} is none of {known}")
    return {name: _scalar(f"{where}.{name}", given) for name, given in value.items()}


def _scalar(where: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    return _either(_text(MAX_NAME_BYTES), _real(-MAX_COUNT, MAX_COUNT))(where, value)


def _arguments(where: str, value: Any) -> Any:
    """A tool call's arguments, JSON in a string; what is no JSON the engine judges."""
    _text()(where, value)
    if value.count("{") + value.count("[") > MAX_DEPTH:
        try:
            _check_depth(where, json.loads(value))
        except RecursionError:
            raise _too_deep(where) from None
        except ValueError:
            pass
    return value


def _json_text(where: str, value: Any) -> Any:
    """A schema, JSON in a string or as it is."""
    if isinstance(value, str):
        _text(MAX_SCHEMA_BYTES)(where, value)
        try:
            _check_depth(where, json.loads(value))
        except RecursionError:
            raise _too_deep(where) from None
        except ValueError:
            raise bad_field(where, "is not valid JSON") from None
    return value


def _media_url(where: str, value: Any) -> Any:
    """Inline data, or an address that the engine fetches where `allowed_media_domains` names it."""
    _text()(where, value)
    if not value.startswith(("data:", "https://", "http://")):
        raise bad_field(where, "give a data: URL")
    return value


def _content(where: str, value: Any) -> Any:
    return _text()(where, value) if isinstance(value, str) else _PARTS_LIST(where, value)


def _part(where: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    check = PARTS.get(kind) if isinstance(kind, str) else None
    if check is None or not isinstance(kind, str):
        raise bad_field(f"{where}.type", f"give one of {', '.join(PARTS)}")
    kept, held = check(where, value), "text" if kind.endswith("_text") else kind
    if kept.get(held) is None:
        raise bad_field(f"{where}.{held}", "is missing")
    return kept


_MEDIA = _either(_media_url, _object({"url": _media_url, "detail": _text(MAX_NAME_BYTES)}))
_KIND = {"type": _text(MAX_NAME_BYTES)}
PARTS: dict[str, Check] = {
    "text": _object({**_KIND, "text": _text()}),
    "input_text": _object({**_KIND, "text": _text()}),
    "output_text": _object({**_KIND, "text": _text()}),
    "refusal": _object({**_KIND, "refusal": _text()}),
    "thinking": _object({**_KIND, "thinking": _text()}),
    "image_url": _object({**_KIND, "image_url": _MEDIA}),
    "audio_url": _object({**_KIND, "audio_url": _MEDIA}),
    "video_url": _object({**_KIND, "video_url": _MEDIA}),
    "input_audio": _object(
        {**_KIND, "input_audio": _object({"data": _text(), "format": _text(MAX_NAME_BYTES)})}
    ),
}
"""The parts of a message's content, by type. None of them can name a cache entry (`uuid`) or hold
embeddings, which an engine would unpack."""
_PARTS_LIST = _many(_part, 1024)

_NAME = _text(MAX_NAME_BYTES)
_FUNCTION = {"name": _NAME, "description": _text(), "parameters": _later, "strict": _flag}
_TOOL = _object({"type": _NAME, "function": _object(_FUNCTION)})
_CALL = _object(
    {"id": _NAME, "type": _NAME, "function": _object({"name": _NAME, "arguments": _arguments})}
)
_MESSAGE = _object({
    "role": _NAME, "content": _content, "name": _NAME, "tool_call_id": _NAME,
    "tool_calls": _many(_CALL, 128), "reasoning": _text(),
    "reasoning_content": _text(), "task": _NAME, "tools": _many(_TOOL, 128),
})  # fmt: skip
_TAG = _object({"begin": _text(MAX_WORD_BYTES), "schema": _later, "end": _text(MAX_WORD_BYTES)})
_RESPONSE_FORMAT = _object({
    "type": _NAME, "format": _later, "structures": _many(_TAG, 1024),
    "triggers": _many(_text(MAX_WORD_BYTES), 1024),
    "json_schema": _object(
        {"name": _NAME, "description": _text(), "schema": _later, "strict": _flag}
    ),
})  # fmt: skip
_STRUCTURED = _object({
    "json": _json_text, "regex": _text(4096), "grammar": _text(MAX_SCHEMA_BYTES),
    "choice": _many(_text(MAX_WORD_BYTES), 1024), "json_object": _flag,
    "disable_any_whitespace": _flag, "disable_additional_properties": _flag,
    "whitespace_pattern": _text(MAX_WORD_BYTES), "structural_tag": _json_text,
})  # fmt: skip
_PENALTY = _real(-2, 2)
_TOKEN_IDS = _many(_whole(), 4096)

TEMPLATE_OPTIONS = frozenset({
    "add_vision_id", "clear_thinking", "date_string", "enable_thinking", "low_effort",
    "model_identity", "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget",
    "thinking_mode", "tools_in_user_message", "truncate_history_thinking",
})  # fmt: skip
"""What a client may tell a model's chat template, of what known models' templates read."""

_BOTH: dict[str, Check] = {
    "model": _text(), "frequency_penalty": _PENALTY, "presence_penalty": _PENALTY,
    "logit_bias": _bias, "max_tokens": _whole(1), "n": _whole(1, MAX_CHOICES),
    "seed": _whole(-MAX_INT64 - 1, MAX_INT64), "stream": _flag,
    "stop": _either(_text(MAX_WORD_BYTES), _many(_text(MAX_WORD_BYTES), 4)),
    "stream_options": _object({"include_usage": _flag, "continuous_usage_stats": _flag}),
    "temperature": _real(0, 100), "top_p": _real(0, 1), "top_k": _whole(-1), "min_p": _real(0, 1),
    "repetition_penalty": _real(0, 100), "length_penalty": _real(-100, 100),
    "stop_token_ids": _many(_whole(), 128), "include_stop_str_in_output": _flag,
    "ignore_eos": _flag, "min_tokens": _whole(), "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag, "allowed_token_ids": _TOKEN_IDS,
    "prompt_logprobs": _whole(0, MAX_LOGPROBS), "add_special_tokens": _flag, "echo": _flag,
    "logprob_token_ids": _many(_whole(), 128),
    "bad_words": _many(_text(MAX_WORD_BYTES), 128), "user": _text(),
    "response_format": _RESPONSE_FORMAT, "structured_outputs": _STRUCTURED,
    "priority": _whole(-MAX_COUNT, MAX_COUNT), "return_tokens_as_token_ids": _flag,
    "return_token_ids": _flag, "return_token_offsets": _flag, "cache_salt": _text(1024),
    "thinking_token_budget": _whole(-1),
    "repetition_detection": _object({
        "max_pattern_size": _whole(0, 1024), "min_pattern_size": _whole(0, 1024),
        "min_count": _whole(0, 1024),
    }),
    # Ours: see `router.api.request.ApiRequest`.
    "approx": _text(16), "prompt_cache_key": _text(),
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
    **_BOTH, "prompt": _prompt, "logprobs": _whole(0, MAX_LOGPROBS), "suffix": _text(),
}  # fmt: skip

_ROUTERS = "the router sets it; leave it out"
_OPERATORS = "the operator sets it; leave it out"
_SHORTEN = "shorten the prompt instead"
_GUIDED = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "guided_whitespace_pattern",
)  # fmt: skip
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "chat_template": ("the served model's own template is used; leave it out", ()),
    "use_beam_search": ("use n with a temperature instead", (False,)),
    "best_of": ("use n", (1,)),
    "stream_interval": ("every token is streamed as it comes; leave it out", (1,)),
    "kv_transfer_params": (_ROUTERS, ()),
    "ec_transfer_params": (_ROUTERS, ()),
    "kv_cache_report_mode": (_ROUTERS, ()),
    "prompt_embeds": ("give the prompt as text or token ids", ()),
    "mm_processor_kwargs": (_OPERATORS, ()),
    "media_io_kwargs": (_OPERATORS, ()),
    "request_id": ("send the header x-request-id instead", ()),
    "truncate_prompt_tokens": (_SHORTEN, ()),
    "truncation_side": (_SHORTEN, ()),
    "routed_experts_prompt_start": ("leave it out", (0,)),
    "return_assistant_tokens_mask": ("leave it out", (False,)),
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none", "auto")),
    **dict.fromkeys(_GUIDED, ("use structured_outputs or response_format", ())),
}
"""What is refused: a remedy, and the values that ask for nothing."""

DROPPED = frozenset({
    "audio", "metadata", "modalities", "moderation", "prediction", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "session_id", "store",
    "verbosity", "vllm_xargs", "web_search_options",
})  # fmt: skip
"""What clients of OpenAI send that means nothing here; and `vllm_xargs`, which are the router's."""


def checked_chat(body: Any) -> Any:
    """A chat's body with the fields that may go on; raises ApiError 400."""
    return _checked(body, CHAT)


def checked_completion(body: Any) -> Any:
    """As `checked_chat`, a completion's."""
    return _checked(body, COMPLETION)


def choices_in(body: Mapping[str, Any]) -> int:
    """How many answers a body asks for: `n` for every prompt."""
    prompt = body.get("prompt")
    # A list of numbers is one prompt, in tokens.
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return int(body.get("n") or 1) * (len(prompt or ()) if several else 1)


def _checked(body: Any, allowed: Mapping[str, Check]) -> Any:
    if not isinstance(body, dict):
        # The schema says so.
        return body
    kept = {}
    for name, value in body.items():
        check = allowed.get(name)
        if check is not None:
            kept[name] = None if value is None else check(name, value)
        elif value is not None and name not in DROPPED:
            _refuse(name, value)
    choices = choices_in(kept)
    if choices > MAX_CHOICES:
        raise bad_field("n", f"asks for {choices} answers; ask for {MAX_CHOICES} at most, which "
                        "are n for every prompt")  # fmt: skip
    _check_schemas(kept)
    return kept


def _refuse(name: str, value: Any) -> None:
    if name not in REFUSED:
        raise unknown_field(name)
    remedy, harmless = REFUSED[name]
    if value not in harmless:
        raise refused_field(name, remedy)


def _check_schemas(body: Mapping[str, Any]) -> None:
    """Bound what an engine compiles: it does so in few threads that all requests share."""
    used = 0
    for name in ("response_format", "structured_outputs"):
        if body.get(name) is not None:
            used += _json_bytes(name, body[name], MAX_SCHEMA_BYTES - used)
    tools = body.get("tools")
    if tools:
        most_bytes = MAX_SCHEMA_BYTES - used if _compiles(body) else MAX_TOOLS_BYTES
        _json_bytes("tools", tools, most_bytes)
    for i, message in enumerate(body.get("messages") or ()):
        if message.get("tools"):
            _json_bytes(f"messages.{i}.tools", message["tools"], MAX_TOOLS_BYTES)


def _compiles(body: Mapping[str, Any]) -> bool:
    """Whether the tools' schemas become a grammar."""
    strict = any((tool.get("function") or {}).get("strict") for tool in body["tools"])
    return strict or body.get("tool_choice") not in (None, "none", "auto")


def _json_bytes(where: str, value: Any, most_bytes: int) -> int:
    """Bytes of JSON, which is neither too long nor too deep."""
    try:
        size = len(json.dumps(value, separators=(",", ":"), allow_nan=False))
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError:
        raise bad_field(where, "numbers must be finite") from None
    if size > most_bytes:
        raise bad_field(where, f"is {size} bytes of JSON; {most_bytes} are left for it, of "
                        f"{MAX_SCHEMA_BYTES} for all schemas of a request")  # fmt: skip
    _check_depth(where, value)
    return size


def _check_depth(where: str, value: Any) -> None:
    """Bound nesting, and what numbers a compiler in C++ meets, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for one in level:
            _check_number(where, one)
        held = [one for one in level if isinstance(one, dict | list)]
        if not held:
            return
        level = [
            inner for one in held for inner in (one.values() if isinstance(one, dict) else one)
        ]
    raise _too_deep(where)


def _check_number(where: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_INT64:
        raise bad_field(where, f"numbers must lie within {MAX_INT64}")
    if isinstance(value, float) and not math.isfinite(value):
        raise bad_field(where, "numbers must be finite")


def _too_deep(where: str) -> ApiError:
    return bad_field(where, f"is nested deeper than {MAX_DEPTH}")
