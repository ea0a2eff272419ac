"""The second act of `kappa demo`: long documents that many ask about, and fresh prompts between.

Its nodes are those of the mission: an A100 behind PCIe 4 and a GH200, both paced by tables of real
GPUs, with device caches that hold one document. Documents are read first, unmeasured, which leaves
each in the host memory of the node that read it. Then questions and fresh prompts come at random
times that no answer delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kappa.settings.cluster import ClusterSettings
from kappa_deploy.commands.demo_rows import Worth
from kappa_loadtest.run_folder import RequestRecord
from kappa_loadtest.sessions import ChatSession, ChatTurn
from kappa_workload.prompts import filler

# A word is 1.7 tokens of the tiny model: documents of 14,500, fresh prompts of 1,600.
_DOCUMENTS, _DOCUMENT_WORDS = 8, 8_400
_REQUESTS, _FRESH_SHARE, _FRESH_WORDS, _QUESTION_WORDS = 80, 0.25, 900, 24
# Requests per second of the nodes' own time.
_RATE_RPS = 25.0
_DILATION = 6.0
_TIE = 1.15

NODES = (
    {"name": "pcie", "profile": "a100-pcie4", "silicon": "a100_sxm/llama-3.1-8b/tp1"},
    {"name": "c2c", "profile": "gh200-c2c", "silicon": "h100_sxm/llama-3.1-8b/tp1"},
)
_ENGINE = {"max_context_tokens": 16_384, "device_blocks": 576, "host_bytes": 192 << 20}


def demo_settings() -> dict[str, Any]:
    """Overrides of a cluster file's defaults: the demo's nodes and sizes."""
    return {"nodes": NODES, "dilation": _DILATION, "engine": _ENGINE}


class Act(NamedTuple):
    """What is sent: chats that are read first, unmeasured, and those that count."""

    read: Sequence[ChatSession]
    asked: Sequence[ChatSession]


def documents_act(settings: ClusterSettings, seed: int = 0) -> Act:
    """Questions about documents, and fresh prompts between them, at random times."""
    rng = np.random.default_rng(seed)
    texts = [filler(f"document {n}", _DOCUMENT_WORDS) for n in range(_DOCUMENTS)]
    read = [_request(f"read-{n}", 0.0, text, "Read this.") for n, text in enumerate(texts)]
    gaps_s = rng.exponential(settings.dilation / _RATE_RPS, _REQUESTS)
    asked = []
    for number, at_s in enumerate(np.cumsum(gaps_s).tolist()):
        if rng.random() < _FRESH_SHARE:
            text, name = filler(f"fresh {number}", _FRESH_WORDS), "fresh"
        else:
            place = int(rng.integers(_DOCUMENTS))
            text, name = texts[place], f"doc{place}"
        question = filler(f"question {number}", _QUESTION_WORDS)
        asked.append(_request(f"{name}-{number}", at_s, text, question))
    return Act(read, asked)


def _request(name: str, at_s: float, *messages: str) -> ChatSession:
    """A chat of one turn, sent after `at_s` seconds."""
    said = tuple({"role": "user", "content": content} for content in messages)
    return ChatSession(name, (ChatTurn(said, at_s),))


def memory_bound_on(node: str, records: Sequence[RequestRecord]) -> float | None:
    """The share of requests with κ of at least the node's κ_crit; None if it served nothing."""
    crit = next((r.crit for r in records if r.node == node and r.crit is not None), None)
    ratios = [record.ratio for record in records if record.ratio is not None]
    if crit is None or not ratios:
        return None
    return sum(ratio >= crit for ratio in ratios) / len(ratios)


def gained(act: str, compared: Sequence[Worth], why: str = "") -> str:
    """A sentence: what ours, the first, got against the best of the others; losses are said to
    be."""
    ours, *others = compared
    answered = [each for each in others if each.p99_s is not None]
    if ours.p99_s is None or not answered:
        return f"{act}: nothing to compare."
    nearest = min(answered, key=lambda each: each.p99_s or 0.0)
    richest = max(answered, key=lambda each: each.goodput_rps)
    p99 = ours.p99_s / (nearest.p99_s or 1.0)
    more = ours.goodput_rps / max(richest.goodput_rps, 1e-9)
    verdict = "a tie"
    if max(p99, 1 / max(p99, 1e-9), more, 1 / max(more, 1e-9)) > _TIE:
        verdict = "a gain" if p99 <= 1 <= more else "a loss" if p99 >= 1 >= more else "mixed"
    return (
        f"{act}: {verdict}: p99 TTFT is {p99:.2f} of the best other's ({nearest.policy}), "
        f"goodput {more:.2f} times the best other's ({richest.policy}){why}."
    )
