"""Values that no field should get: by JSON type, by the field's name, and drawn from a JSON schema.

A value that JSON's writer cannot write (a number of 5,000 digits, 20,000 brackets) is a word of
`RAW`, which `written` replaces. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

Schema = Mapping[str, Any]

RAW = {
    "zq-raw-digits": "9" * 5000,
    "zq-raw-exponent": "1e999999",
    "zq-raw-lists": "[" * 20_000 + "]" * 20_000,
    "zq-raw-objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "zq-raw-twice": '{"a": 1, "a": [2], "a": {}}',
}
_NUMBERS = (
    0, -1, 1, 2, 7, 128, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63),
    2**70, -(2**70), 10**400, 0.0, -0.0, -0.5, 0.1, 2.0, 1e-320, 1e308, -1e308, float("nan"),
    float("inf"), -float("inf"), "zq-raw-digits", "zq-raw-exponent",
)  # fmt: skip
_TEXTS = (
    "", " ", "0", "-1", "1e400", "nan", "null", "text", "auto", "none", "required", "json_object",
    "\x00", "\r\nx: y", "\ud800", "\udfff\ud800", "é漢🙂" * 20, "\u202e\u0000\ufeff", "x" * 5000,
    "<|im_start|>system\n", "</s>" * 50, "{{ 1/0 }}", "%s%n%x", "../../../etc/passwd",
    "file:///etc/passwd", "http://127.0.0.1:1/x.png", "data:image/png;base64,AAAA", "AAAA",
    "(((a{1,40}){1,40}){1,40}){1,40}", "(?=a)b", "[", "(" * 500,
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None, True, False, [], [None], [[]], [{}], ["a"] * 200, [0] * 300, [-1], [2**40], {},
    {"": None}, {"a": 1}, {"a": {"b": [{"c": None}]}}, {"type": "json_object"}, {"1": 1e9},
    {"__proto__": {}}, "zq-raw-lists", "zq-raw-objects", "zq-raw-twice",
)  # fmt: skip
# A second of work at most if somebody does run it.
_LOOP = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
_TEMPLATES = (
    _LOOP, "{{ 'a' * 300000 }}", "{{ messages.__class__.__mro__ }}", "{% include 'x' %}", "{{", "",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('x') }}",
)  # fmt: skip
_JSON_SCHEMAS: tuple[Any, ...] = (
    {"type": "nothing"}, {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "string", "pattern": "["}, {"type": "string", "pattern": "(a{1,200}){1,200}"},
    {"type": "string", "minLength": 20_000, "maxLength": 40_000}, {"enum": []},
    {"enum": [{}, None]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    {"anyOf": [{"type": "object", "required": [f"p{i}"]} for i in range(200)]},
    {"type": "array", "minItems": 200, "maxItems": 400, "items": {"type": "integer"}},
    {"type": "integer", "multipleOf": 0}, {"type": "integer", "minimum": 2**70}, {"allOf": [False]},
    {"$ref": "http://127.0.0.1:1/schema"}, {"type": ["string", 7]}, True, "not a schema", "{",
)  # fmt: skip
_GRAMMARS = (
    'root ::= "a" root', "root ::= root", "root ::= nobody", "", "root ::=",
    'root ::= ("a"|"b"){1,9999}', "root ::= " + " | ".join(f'"x{i}"' for i in range(500)),
    "start: " + "(" * 300, "%import x",
)  # fmt: skip
_STRUCTURED: tuple[Any, ...] = (
    *({"json": schema} for schema in _JSON_SCHEMAS),
    *({"grammar": grammar} for grammar in _GRAMMARS),
    *({"regex": text} for text in ("(((a{1,40}){1,40}){1,40}){1,40}", "[", "(?=a)", "", "\\1",
        "a{99999}")),
    {"choice": [f"x{i}" for i in range(2000)]}, {"choice": []}, {"choice": [""]},
    {"choice": ["\ud800"]}, {"json_object": True, "regex": "a"}, {"json_object": False}, {},
    {"structural_tag": "{}"}, {"structural_tag": '{"structures": [], "triggers": []}'},
    {"_backend": "x", "regex": "a"}, {"json": {"type": "object"}, "whitespace_pattern": "["},
    {"regex": "a", "_backend": "outlines"},
)  # fmt: skip
_TRANSFERS: tuple[Any, ...] = (
    "x", 7, 0.5, [1, 2],
    {"do_remote_prefill": True, "remote_block_ids": [2**40], "remote_port": -1},
    {"do_remote_decode": True}, {"do_remote_prefill": True, "name": "../../x", "blocks": -1},
    {"a": "b"}, {"do_remote_prefill": True, "remote_engine_id": None, "remote_host": "127.0.0.1"},
)  # fmt: skip
_XARGS: tuple[Any, ...] = (
    *({name: value} for name in ("kv_transfer_params",
        "ec_transfer_params") for value in _TRANSFERS),
    *({f"kappa_{name}": value} for name in ("tenant", "weight", "request_id", "prompt", "charges",
        "gpu_s")
        for value in ("root", -1, float("nan"), ["x"], "AAAA")),
    {"kv_cache_report_mode": "full"}, {"": ""}, {"x" * 3000: 1}, {f"k{i}": i for i in range(500)},
    {"priority": -(2**63)}, {"extra_args": [1]}, {"cache_salt": "x"}, {"a": 10**400},
    {"a": ["b"] * 3000},
)  # fmt: skip
_FUNCTIONS: tuple[Any, ...] = tuple(
    [{"type": "function", "function": {"name": name, "parameters": schema}}]
    for name in ("f", "")
    for schema in _JSON_SCHEMAS
)
_URL = "http://127.0.0.1:1/x.png"
_PARTS: tuple[Any, ...] = (
    {"type": "image_url", "image_url": {"url": _URL}}, {"type": "image_url", "image_url": _URL},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": "text"},
    {"type": None}, {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"text": "x"}, {}, {"type": "video_url", "video_url": {"url": _URL}},
    {"type": "prompt_embeds", "data": "AAAA"}, {"type": "audio_embeds", "audio_embeds": "AAAA"},
    {"type": "image_embeds", "image_embeds": {"a": "A"}},
    {"type": "file", "file": {"file_id": "x"}}, {"type": "refusal", "refusal": "x"}, "x",
)  # fmt: skip
_CALLS: tuple[Any, ...] = tuple(
    {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    for function in (
        {"name": "f", "arguments": "{"}, {"name": "f", "arguments": "[" * 900}, {"name": "f"}, {},
        None,
        {"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": "7"},
    )
)  # fmt: skip
_MESSAGES: tuple[Any, ...] = (
    [], {}, [None], [{}], [{"role": 5}], [{"role": "system", "content": None}], [{"role": "tool"}],
    [{"role": "developer", "content": "x"}], [{"role": "user", "content": "x"}] * 400,
    [{"role": "\ud800", "content": "x"}], [{"role": "user", "content": "\ud800"}],
    *([{"role": "user", "content": [part]}] for part in _PARTS),
    *([{"role": "user", "content": "x"}, call] for call in _CALLS),
)  # fmt: skip
_PROMPTS: tuple[Any, ...] = (
    "", [], [[]], [""], ["a"] * 300, [[1]] * 300, [-1], [2**31], [2**63], [10**400], [1, "a"],
    ["a", [1]], [[1, 2], []], [0.5], [True], "a" * 30_000, [7] * 5000, ["a", "b" * 20_000],
    "\ud800", None, {"a": 1},
)  # fmt: skip
BY_FIELD: Mapping[str, tuple[Any, ...]] = {
    "messages": _MESSAGES, "prompt": _PROMPTS,
    "prompt_embeds": ("", "AAAA", ["AAAA", "AAAA"], [""] * 50, "gAJjcG9zaXgKc3lzdGVtCg==", "é"),
    "chat_template": _TEMPLATES,
    "chat_template_kwargs": (
        *({"chat_template": template} for template in _TEMPLATES), {"messages": []},
        {"tokenize": True}, {"tools": 7}, {"conversation": [1]}, {"return_dict": True},
        {"add_generation_prompt": [1]}, {"enable_thinking": "x" * 3000},
        {"truncation": True, "max_length": -1}, {"self": 1}, {"": 1}, {"return_tensors": "pt"},
        {"padding": True}, {"documents": [7]}, {"tokenizer_kwargs": {"a": 1}},
    ),
    "vllm_xargs": _XARGS, "kv_transfer_params": _TRANSFERS, "ec_transfer_params": _TRANSFERS,
    "structured_outputs": _STRUCTURED,
    "response_format": (
        {"type": "json_object"}, {"type": "json_schema"}, {"type": "x"},
        {"type": "json_schema", "json_schema": {"name": 1}},
        *({"type": "json_schema", "json_schema": {"name": "a",
            "schema": schema}} for schema in _JSON_SCHEMAS),
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "structural_tag", "format": {}},
        {"type": "structural_tag", "structures": [{"begin": "<", "end": ""}], "triggers": ["<"]},
    ),
    "tools": (
        *_FUNCTIONS, [{}], [{"type": "function"}],
        [{"type": "function", "function": {"name": "f"}}] * 300,
    ),
    "tool_choice": (
        "auto", "required", "none", {"type": "function", "function": {"name": "g"}}, {},
    ),
    "logit_bias": (
        {"1": float("nan")}, {"1": 1e308}, {"-5": 1}, {"999999999": 1}, {str(2**70): 1}, {"a": 1},
        {str(i): 1 for i in range(3000)}, {"1": 10**400}, {"1.5": 1}, {"": 1},
    ),
    "allowed_token_ids": ([], [-1], [10**9], [2**70], list(range(3000)), [0] * 3000),
    "logprob_token_ids": ([], [-1], [10**9], [2**70], list(range(3000))),
    "stop_token_ids": ([-1], [2**70], list(range(3000))),
    "stop": ("", [""], ["a"] * 5, ["a" * 5000] * 4, ["\ud800"], [None]),
    "bad_words": ([""], ["a"] * 300, ["\ud800"], [" "], ["x" * 5000]),
    "n": (0, -1, 2, 128, 129, 10_000, 2**70), "best_of": (0, 2, 2**70), "use_beam_search": (True,),
    "stream_interval": (1, 2, 100_000, 2**70, 0, -1),
    "stream_options": (
        {"include_usage": True}, {"continuous_usage_stats": True}, {"include_usage": 7}, {},
    ),
    "truncate_prompt_tokens": (-1, 0, 1, 2**62, 2**70, -2),
    "truncation_side": ("left", "right", "up"), "min_tokens": (0, 1, 10_000, 2**70, -1),
    "max_tokens": (0, -1, 2**31, 2**63, 2**64, 2**70, 10**400),
    "cache_salt": ("", "x", "x" * 5000, "\ud800", 0), "priority": (-(2**63), 2**63, 2**70, -1),
    "request_id": ("", "x\r\ny: z", "a" * 3000, "job-1", "a-prefill"),
    "seed": (-1, 2**63, 2**64, 2**70), "logprobs": (True, -1, 0, 20, 21, 10**6),
    "top_logprobs": (-1, 0, 20, 21, 10**6), "prompt_logprobs": (-1, 0, 1, 20, 10**6),
    "top_k": (-2, 0, 2**63, 2**70), "thinking_token_budget": (-1, 0, 2**70),
    "reasoning_effort": ("none", "high", "x"),
    "documents": ([{"a": "b"}] * 50, [{}], [{"text": "\ud800"}]),
    "media_io_kwargs": ({"image": {"a": 1}}, {"x": {}}),
    "mm_processor_kwargs": ({"a": 1}, {"max_pixels": 2**70}),
    "repetition_detection": (
        {"max_pattern_size": 2**70}, {"min_count": -1}, {"max_pattern_size": 5, "min_count": 2},
    ),
}  # fmt: skip
_DEEPEST = 6
_OPTIONAL_SHARE = 0.4


def pick(rng: np.random.Generator, values: tuple[Any, ...]) -> Any:
    return values[int(rng.integers(len(values)))]


def anything(rng: np.random.Generator) -> Any:
    """A number, a text or something else that a field may not expect."""
    return pick(rng, pick(rng, (_NUMBERS, _TEXTS, _OTHERS)))


def hostile(rng: np.random.Generator, field: str, schema: Schema, root: Schema) -> Any:
    """A value for a field: one known to be dangerous there, one that its schema takes, perhaps with
    a place spoilt, or one of no meaning.

    Args:
        rng: draws.
        field: the field's name.
        schema: its JSON schema; empty if none is known.
        root: the schema with the `$defs` that it refers to.
    """
    way = float(rng.random())
    if way < 0.45 and field in BY_FIELD:
        return pick(rng, BY_FIELD[field])
    if way < 0.8 and schema:
        value = fitting(rng, schema, root)
        return spoilt(rng, value) if rng.random() < 0.6 else value
    return anything(rng)


def fitting(rng: np.random.Generator, schema: Schema, root: Schema, depth: int = 0) -> Any:
    """A value that a JSON schema takes, as far as types, names and choices go."""
    if "$ref" in schema:
        schema = root["$defs"][str(schema["$ref"]).rpartition("/")[2]]
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return pick(rng, tuple(schema["enum"]))
    if "anyOf" in schema:
        return fitting(rng, pick(rng, tuple(schema["anyOf"])), root, depth)
    kind = schema.get("type")
    if kind == "object":
        return _object(rng, schema, root, depth)
    if kind == "array":
        count = int(rng.integers(0, 4)) if depth < _DEEPEST else 0
        return [fitting(rng, schema.get("items", {}), root, depth + 1) for _ in range(count)]
    plain = {
        "string": pick(rng, ("a", "user", "text", "f", "x y", "{}")), "null": None,
        "boolean": bool(rng.integers(2)), "integer": int(rng.integers(0, 8)),
        "number": float(rng.uniform(0, 2)),
    }  # fmt: skip
    return plain[str(kind)] if kind in plain else anything(rng)


def spoilt(rng: np.random.Generator, value: Any) -> Any:
    """The value with one of its places, or the whole value, replaced by something else."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return anything(rng)
    if isinstance(value, list):
        at = int(rng.integers(len(value)))
        return [spoilt(rng, each) if i == at else each for i, each in enumerate(value)]
    name = pick(rng, tuple(value))
    if rng.random() < 0.2:
        return {key: each for key, each in value.items() if key != name}
    known = BY_FIELD.get(name)
    changed = pick(rng, known) if known and rng.random() < 0.4 else spoilt(rng, value[name])
    return {**value, name: changed}


def written(body: Any) -> str:
    """A body as JSON, with the words of `RAW` replaced by their values."""
    text = json.dumps(body)
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text


def _object(rng: np.random.Generator, schema: Schema, root: Schema, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    made = {
        name: fitting(rng, inner, root, depth + 1)
        for name, inner in schema.get("properties", {}).items()
        if name in required or (depth < _DEEPEST and rng.random() < _OPTIONAL_SHARE)
    }
    more = schema.get("additionalProperties")
    if isinstance(more, dict) and depth < _DEEPEST:
        made |= {f"k{i}": fitting(rng, more, root, depth + 1) for i in range(int(rng.integers(3)))}
    return made
