"""Requests that no client should send, drawn from a seed and from the request models' JSON schemas.

Each starts as a good chat, completion or route request; then some of its fields, any that a model
knows and some that none does, get hostile values (`hostile_values`). Keys are dropped, documents
cut or made of bytes that are no text, headers bent. Prompts carry a marker, so that logs can be
searched for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kappa_benchmarks.faults.hostile_values import (
    BY_FIELD,
    Schema,
    anything,
    hostile,
    pick,
    written,
)

CHAT, COMPLETION, ROUTE = PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/route")
_OTHER_PATHS = (
    "/v1/decisions", "/v1/decisions?limit=-1", "/v1/decisions?limit=99999999999999999999999",
    "/v1/decisions/%00", "/v1/decisions/../nodes", "/v1/models/%ff", "/v1/models/x%2f..",
    "/v1/nodes", "/v1/tenants", "/metrics", "/%2e%2e/metrics", "/v1/nodes/profile", "/nowhere",
    "/v1/embeddings", "/tokenize", "/-/routes", "/sleep?level=1", "/v1/load_lora_adapter",
    "/reset_prefix_cache",
)  # fmt: skip
_STRANGE_FIELDS = (
    "approx", "prompt_cache_key", "best_of", "guided_json", "guided_regex", "kappa_tenant",
    "tenant", "logits_processors", "prompt_token_ids", "sampling_params", "extra_args",
    "lora_request", "",
)  # fmt: skip
_HEADERS = (
    "x-request-id", "authorization", "x-api-key", "x-kappa-pin", "x-kappa-plan", "x-kappa-approx",
    "x-kappa-deadline-ms", "x-kappa-pool", "x-session-id", "content-type", "accept", "traceparent",
    "x-forwarded-for", "expect", "serve_multiplexed_model_id", "content-encoding", "cookie",
)  # fmt: skip
_HEADER_VALUES = (
    "", "x", "-1", "0", "1", "1e309", "nan", "9" * 400, "Bearer", "Bearer x y", "text/plain",
    "gzip", "a" * 3000, "\xff", "kappa-tiny", "00-" + "0" * 32 + "-" + "f" * 16 + "-01", "job-1",
    "100-continue",
)  # fmt: skip
_NO_TEXT = (b"\xff\xfe\x00", b'{"a": \x80}', b"\x00" * 40, b'{"model": "\xed\xa0\x80"}', b"")
# Good in most of its fields, or the first fault would hide all others.
_MOST_CHANGES = 4


@dataclass(frozen=True, slots=True)
class Bad:
    """A request to send: how, where, what, with which headers. fields: that got hostile values."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    method: str = "POST"
    fields: tuple[str, ...] = ()


def bad_requests(
    seed: int, count: int, model: str, marker: str, schemas: Mapping[str, Schema]
) -> Iterator[Bad]:
    """`count` requests; the same for one seed, model, marker and schemas.

    Args:
        seed: of the draws.
        count: how many.
        model: a model that the cluster serves; most requests name it, or all would end as 404.
        marker: stands in every prompt.
        schemas: JSON schemas of chat and completion requests, by path.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        if rng.random() < 0.02:
            method = pick(rng, ("GET", "GET", "POST", "DELETE", "PUT"))
            yield Bad(pick(rng, _OTHER_PATHS), b"", _headers(rng), method)
            continue
        path = pick(rng, PATHS)
        kind = pick(rng, (CHAT, COMPLETION)) if path == ROUTE else path
        body = _good(rng, kind, f"{marker} {'word ' * int(rng.integers(0, 30))}")
        body["model"] = model
        changes = range(int(rng.integers(_MOST_CHANGES)))
        fields = [name for _ in changes if (name := _changed(rng, body, schemas[kind])) is not None]
        yield Bad(path, _encoded(rng, body), _headers(rng), fields=tuple(filter(None, fields)))


def fields_known(schemas: Mapping[str, Schema]) -> set[str]:
    """Names of all fields that some request model has."""
    return {name for schema in schemas.values() for name in schema["properties"]}


def _good(rng: np.random.Generator, kind: str, text: str) -> dict[str, Any]:
    options = {
        "max_tokens": int(rng.integers(1, 6)),
        "stream": bool(rng.integers(2)),
        "temperature": float(rng.uniform(0, 1)),
    }
    if kind == COMPLETION:
        return {**options, "prompt": pick(rng, (text, [text], [1, 2, 3], [[1, 2], [3]]))}
    content: Any = text if rng.random() < 0.8 else [{"type": "text", "text": text}]
    return {**options, "messages": [{"role": "user", "content": content}]}


def _changed(rng: np.random.Generator, body: dict[str, Any], schema: Schema) -> str | None:
    """Change one field in place; its name if it got a hostile value."""
    way = float(rng.random())
    if way < 0.04 and body:
        # Without a bound an answer is as long as the context: rare, or nothing else is tried.
        body.pop(pick(rng, tuple(body)))
        return None
    if way < 0.12:
        name = str(pick(rng, _STRANGE_FIELDS))
        body[name] = anything(rng)
        return name
    # Also those that only the other model has.
    known = tuple(schema["properties"])
    name = str(pick(rng, known if way < 0.95 else tuple(BY_FIELD)))
    body[name] = hostile(rng, name, schema["properties"].get(name, {}), schema)
    return name


def _encoded(rng: np.random.Generator, body: Any) -> bytes:
    draw = rng.random()
    if draw < 0.01:
        return bytes(pick(rng, _NO_TEXT))
    text = written(body)
    if draw < 0.03:
        text = text[: int(rng.integers(0, len(text)))]
    elif draw < 0.05:
        doubled = f"{text[:-1]}, {text[1:]}"
        text = pick(rng, (written([body]), written(text), doubled, f"\ufeff{text}"))
    return text.encode()


def _headers(rng: np.random.Generator) -> tuple[tuple[str, str], ...]:
    sent = {"content-type": "application/json"}
    if rng.random() < 0.15:
        sent[pick(rng, _HEADERS)] = pick(rng, _HEADER_VALUES)
    return tuple(sent.items())
