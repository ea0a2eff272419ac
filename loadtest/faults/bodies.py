"""Requests that no client should send, drawn from a seed: bodies bent out of shape, odd headers.

Each starts as a good chat, completion or route request and is bent a few times: a key dropped or
renamed, a value of another type or far out of range, deep nesting, half a document, bytes that are
no text. Prompts carry a marker, so that logs can be searched for it. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/route")
_FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "n", "stream", "stream_options", "stop", "seed", "logprobs", "top_logprobs", "logit_bias",
    "presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice", "user",
    "cache_salt", "vllm_xargs", "priority", "ignore_eos", "min_tokens", "stop_token_ids", "echo",
    "best_of", "suffix", "truncate_prompt_tokens", "add_generation_prompt", "chat_template",
    "chat_template_kwargs", "structured_outputs", "kv_transfer_params", "request_id",
    "mm_processor_kwargs", "documents", "reasoning_effort", "bad_words", "allowed_token_ids",
    "prompt_logprobs",
)  # fmt: skip
_HEADERS = (
    "x-request-id", "authorization", "x-api-key", "x-kappa-pin", "x-kappa-plan", "x-kappa-approx",
    "x-kappa-deadline-ms", "content-type", "accept", "traceparent", "x-forwarded-for", "expect",
)  # fmt: skip
_HEADER_VALUES = (
    "", "x", "-1", "0", "1e309", "nan", "Bearer", "Bearer x y", "text/plain", "a" * 3000, "\xff",
)  # fmt: skip
_MOST_BENDS = 4
_DEEPEST = 600
_NO_TEXT = (b"\xff\xfe\x00", b'{"a": \x80}', b"\x00" * 40, b'{"model": "\xed\xa0\x80"}')


@dataclass(frozen=True, slots=True)
class Bad:
    """A request to send: where, what, with which headers."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]


def bad_requests(seed: int, count: int, model: str, marker: str) -> Iterator[Bad]:
    """`count` requests; the same for one seed, model and marker.

    Args:
        seed: of the draws.
        count: how many.
        model: a model that the cluster serves; most requests name it, or all would end as 404.
        marker: stands in every prompt.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        path = PATHS[int(rng.integers(len(PATHS)))]
        body = _good(rng, path, model, marker)
        for _ in range(int(rng.integers(0, _MOST_BENDS))):
            body = _bends(rng)(body)
        yield Bad(path, _encoded(rng, body), _headers(rng))


def _good(rng: np.random.Generator, path: str, model: str, marker: str) -> dict[str, Any]:
    text = f"{marker} {'word ' * int(rng.integers(0, 30))}"
    options = {
        "model": model, "max_tokens": int(rng.integers(1, 6)), "stream": bool(rng.integers(2)),
        "temperature": float(rng.uniform(0, 1)),
    }  # fmt: skip
    if path == PATHS[1]:
        prompts: list[Any] = [text, [text], [1, 2, 3], [[1, 2], [3]]]
        return {**options, "prompt": prompts[int(rng.integers(len(prompts)))]}
    content: Any = text if rng.random() < 0.8 else [{"type": "text", "text": text}]
    return {**options, "messages": [{"role": "user", "content": content}]}


def _bends(rng: np.random.Generator) -> Callable[[Any], Any]:
    ways = (_drop, _set, _set, _set, _nest, _message)
    way = ways[int(rng.integers(len(ways)))]
    return lambda body: way(rng, body) if isinstance(body, dict) else body


def _drop(rng: np.random.Generator, body: dict[str, Any]) -> dict[str, Any]:
    if body:
        body.pop(list(body)[int(rng.integers(len(body)))])
    return body


def _set(rng: np.random.Generator, body: dict[str, Any]) -> dict[str, Any]:
    body[_FIELDS[int(rng.integers(len(_FIELDS)))]] = _value(rng)
    return body


def _nest(rng: np.random.Generator, body: dict[str, Any]) -> dict[str, Any]:
    deep: Any = 1
    for _ in range(int(rng.integers(1, _DEEPEST))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    body[_FIELDS[int(rng.integers(len(_FIELDS)))]] = deep
    return body


def _message(rng: np.random.Generator, body: dict[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if isinstance(messages, list):
        key = ("role", "content", "name", "tool_calls", "tool_call_id", "audio")[
            int(rng.integers(6))
        ]
        messages.append({"role": "user", "content": "x", key: _value(rng)})
    return body


def _value(rng: np.random.Generator) -> Any:
    """A value that a field may not expect."""
    values: tuple[Any, ...] = (
        None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e308,
        float("nan"), float("inf"), "", "0", "text", "\x00", "\ud800", "é漢🙂" * 20, "x" * 5000,
        "auto", "json_object",
        [], [None], ["a"] * 50, [0] * 300, [[]], [-1], [2**40], {}, {"a": 1}, {"": None},
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": 1}},
        {"include_usage": True}, {"kappa_tenant": "root"}, {"1": 1e9}, {"-5": 1},
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}],
        [{"role": "system", "content": None}], [{"role": 5}], [{}],
    )  # fmt: skip
    return values[int(rng.integers(len(values)))]


def _encoded(rng: np.random.Generator, body: Any) -> bytes:
    draw = rng.random()
    if draw < 0.03:
        return _NO_TEXT[int(rng.integers(len(_NO_TEXT)))]
    text = json.dumps(body)
    if draw < 0.08:
        text = text[: int(rng.integers(0, len(text)))]
    elif draw < 0.10:
        text = json.dumps([body]) if draw < 0.09 else json.dumps(text)
    return text.encode()


def _headers(rng: np.random.Generator) -> tuple[tuple[str, str], ...]:
    sent = [("content-type", "application/json")]
    if rng.random() < 0.3:
        name = _HEADERS[int(rng.integers(len(_HEADERS)))]
        sent = [pair for pair in sent if pair[0] != name]
        sent.append((name, _HEADER_VALUES[int(rng.integers(len(_HEADER_VALUES)))]))
    return tuple(sent)
