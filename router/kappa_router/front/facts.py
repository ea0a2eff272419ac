"""Facts that a server tells of itself: its models, the sizes of its caches, its load. Pure.

Read from `/v1/models` and from `/metrics` as vLLM, SGLang and TensorRT-LLM write them (llm-d's
`plugin-metric-protocol.md` lists their names); of any other server only the models are known. What
cannot be read is left out, never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

_LONGEST_NAME = 512
_MOST_MODELS = 1024

# One pattern, since a whole exposition takes a parser ten milliseconds of the event loop.
_NAMES = {
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
    "vllm:num_requests_waiting": "waiting",
    "sglang:num_queue_reqs": "waiting",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:prompt_tokens_total": "tokens",
    "sglang:prompt_tokens_total": "tokens",
    "vllm:generation_tokens_total": "tokens",
    "sglang:generation_tokens_total": "tokens",
    "vllm:kv_offload_load_bytes_total": "load_bytes",
    "vllm:kv_offload_load_time_total": "load_s",
    "vllm:kv_offload_load_size_count": "loads",
    "sglang:max_total_num_tokens": "device_tokens",
    "trtllm_num_requests_running": "running",
    "trtllm_num_requests_waiting": "waiting",
    "trtllm_kv_cache_tokens_per_block": "block_tokens",
    "trtllm_kv_cache_max_blocks": "blocks",
}
# Of metrics that a label tells apart, as Triton has them.
_KINDED = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_KINDS = {
    'request_type="scheduled"': "running",
    'request_type="waiting"': "waiting",
    'kv_cache_block_type="tokens_per"': "block_tokens",
    'kv_cache_block_type="max"': "blocks",
}
_INFO = "vllm:cache_config_info", "sglang:cache_config_info"
_LINE = re.compile(
    rf"^({'|'.join(map(re.escape, (*_NAMES, *_KINDED, *_INFO)))})(\{{[^\n]*\}})? +([^\s]+)",
    re.MULTILINE,
)
_KIND = re.compile("|".join(_KINDS))
_LABEL = re.compile(r'(block_size|page_size|num_gpu_blocks|num_pages)="(\d+)"')
_ENGINE = re.compile(r'[{,]engine="(\d+)"')


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that a server lists."""

    name: str
    # The path or hub id that was loaded; empty: not told.
    root: str = ""
    # Of an adapter, its base; else empty.
    parent: str = ""
    # Its context; 0: not told.
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """A server's load by its metrics; totals since it started."""

    block_tokens: int = 0
    # Of its KV cache; 0: not told.
    device_tokens: int = 0
    running: int = 0
    waiting: int = 0
    # Of its engine.
    steps: int = 0
    tokens: int = 0
    # From its host tier.
    loads: int = 0
    load_bytes: float = 0.0
    load_s: float = 0.0

    def loads_since(self, before: LoadFacts) -> tuple[float, float] | None:
        """Bytes and seconds of an average load since; None if there was none, or a restart."""
        loads, size = self.loads - before.loads, self.load_bytes - before.load_bytes
        seconds = self.load_s - before.load_s
        return (size / loads, seconds / loads) if min(loads, size, seconds) > 0 else None


def models_in(body: bytes) -> tuple[ModelFacts, ...]:
    """The models of a `/v1/models` answer; ValueError says what is wrong with it."""
    try:
        data = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        raise ValueError("/v1/models answered something that is not JSON") from None
    cards = data.get("data") if isinstance(data, dict) else None
    if not isinstance(cards, list) or not cards:
        raise ValueError("/v1/models answered no list of models")
    found = tuple(_model(card) for card in cards[:_MOST_MODELS] if isinstance(card, dict))
    named = tuple(one for one in found if 0 < len(one.name) <= _LONGEST_NAME)
    if not named:
        raise ValueError("/v1/models answered models without an id")
    return named


def _model(card: Mapping[str, Any]) -> ModelFacts:
    name, root, parent = (card.get(key) for key in ("id", "root", "parent"))
    longest = card.get("max_model_len")
    return ModelFacts(
        name if isinstance(name, str) else "",
        root if isinstance(root, str) else "",
        parent if isinstance(parent, str) else "",
        longest if type(longest) is int and longest > 0 else 0,
    )


def load_in(exposition: str, rank: int | None = None) -> LoadFacts:
    """The load that a `/metrics` answer tells; counts of several engines are added up, or only
    those of one data-parallel rank, where lines name it."""
    sums = dict.fromkeys(_NAMES.values(), 0.0)
    for name, labels, text in _LINE.findall(exposition):
        engine = _ENGINE.search(labels) if rank is not None else None
        if engine is not None and int(engine[1]) != rank:
            continue
        if name in _INFO:
            sizes = {label: int(value) for label, value in _LABEL.findall(labels)}
            sums["blocks"] += sizes.get("num_gpu_blocks", sizes.get("num_pages", 0))
            size = sizes.get("block_size", sizes.get("page_size", 0))
            sums["block_tokens"] = size or sums["block_tokens"]
            continue
        kind = _KIND.search(labels) if name in _KINDED else None
        told = _NAMES.get(name) or (_KINDS[kind[0]] if kind else None)
        if told is None:
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            # Each engine's blocks are of one size.
            sums[told] = max(sums[told], value) if told == "block_tokens" else sums[told] + value
    whole = {key: int(value) for key, value in sums.items() if not key.startswith("load_")}
    blocks = whole.pop("blocks")
    whole["device_tokens"] = blocks * whole["block_tokens"] or whole["device_tokens"]
    return LoadFacts(**whole, load_bytes=sums["load_bytes"], load_s=sums["load_s"])


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer, as its server says."""

    prompt_tokens: int
    completion_tokens: int
    # Of the prompt; None: not told.
    cached_tokens: int | None = None


_DECODER = msgspec.json.Decoder(dict[str, Any])
_USAGE = b'"usage"'
_BRACKETS = re.compile(rb"[{}]")


def usage_in(tail: bytes) -> Usage | None:
    """The usage in the end of an answer, streamed or whole; None if there is none to be read."""
    at = tail.rfind(_USAGE)
    start = tail.find(b"{", at)
    if at < 0 or start < 0 or tail[at + len(_USAGE) : start].strip() != b":":
        return None
    depth = 0
    for bracket in _BRACKETS.finditer(tail, start):
        depth += 1 if bracket[0] == b"{" else -1
        if not depth:
            return _usage(tail[start : bracket.end()])
    return None


def _usage(text: bytes) -> Usage | None:
    try:
        given = _DECODER.decode(text)
    except ValueError:
        return None
    # Of chats and completions, and of responses.
    names = ("prompt", "completion") if "prompt_tokens" in given else ("input", "output")
    details = given.get(f"{names[0]}_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, generated = (given.get(f"{name}_tokens") for name in names)
    generated = generated or 0
    if not _is_count(prompt) or not _is_count(generated):
        return None
    return Usage(prompt, generated, min(cached, prompt) if _is_count(cached) else None)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 40
