"""Distributions of new and cached tokens and of their ratio, as Figure 3 of paper 001 has them.

Requests are counted as by their source: cached is the document or the talk so far, even for the
first reader, and new is the question, to the token. The engine's view stands beside it: full blocks
in an unlimited cache that is empty at first. `kappa workload` prints both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappa.cost import QUESTION_TOKENS, TokenCounts, idle_cost, kappa_eff
from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa_workload.replay import ENGINE_BLOCK_TOKENS, Reuse
from kappa_workload.shapes import Workload

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """New and cached tokens of every request, in the order of the workload; shape (requests,)."""

    new_tokens: Numbers
    cached_tokens: Numbers

    @property
    def kappa(self) -> Numbers:
        """Cached tokens over new ones; a request without new tokens counts one, as engines do."""
        return self.cached_tokens / np.maximum(self.new_tokens, 1)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Quantiles of the three."""
        return {
            "new": quantiles(self.new_tokens),
            "cached": quantiles(self.cached_tokens),
            "kappa": quantiles(self.kappa),
        }


def quantiles(values: Numbers) -> dict[str, float]:
    """The quantiles `QUANTILES` of some values."""
    found = np.quantile(values, list(QUANTILES.values()))
    return dict(zip(QUANTILES, map(float, found), strict=True))


def source_ratios(workload: Workload) -> Ratios:
    """Ratios as the source counts: to the token, with a document cached before its first question.

    Where the source has only blocks (Mooncake), cached is what an unlimited cache of prompts holds.
    """
    reuse = Reuse(workload.block_tokens, workload.block_tokens, outputs_kept=False)
    return _ratios(workload, reuse, as_source=True)


def engine_ratios(workload: Workload, *, block_tokens: int = ENGINE_BLOCK_TOKENS) -> Ratios:
    """Ratios in an engine: full blocks of an unlimited cache that keeps answers, empty at first.

    Sessions come one after the other. Blocks smaller than the workload's own can be told apart only
    at the end of a document: give a workload that was read with blocks of this size.
    """
    return _ratios(workload, Reuse(workload.block_tokens, block_tokens, outputs_kept=True))


def _ratios(workload: Workload, reuse: Reuse, *, as_source: bool = False) -> Ratios:
    """Ratios by `reuse`; as_source: by the source where it counts new tokens."""
    new: list[int] = []
    cached: list[int] = []
    for session in workload.sessions:
        for number, turn in enumerate(session.turns):
            if as_source and turn.new_tokens is not None:
                new.append(turn.new_tokens)
                cached.append(turn.input_tokens - turn.new_tokens)
            else:
                cached.append(reuse.visit(session, number))
                new.append(turn.input_tokens - cached[-1])
    if not new:
        raise ValueError(f"workload {workload.name!r} has no requests to analyse")
    return Ratios(np.array(new, dtype=np.float64), np.array(cached, dtype=np.float64))


def memory_bound_share(
    ratios: Ratios, shape: ModelShape, nodes: Mapping[str, NodeProfile]
) -> dict[str, float]:
    """The share of requests that are memory-bound on each node when it is idle."""
    tokens = np.stack([ratios.cached_tokens, ratios.new_tokens], axis=1).astype(int)
    kinds, counts = np.unique(tokens, axis=0, return_counts=True)

    @functools.cache
    def share(node: NodeProfile) -> float:
        costs = [idle_cost(TokenCounts(0, *kind), shape, node) for kind in kinds.tolist()]
        return float(np.average([cost.bound == "memory" for cost in costs], weights=counts))

    # Nodes of a kind differ in their names.
    return {name: share(replace(node, name="")) for name, node in nodes.items()}


def analyse(
    workload: Workload, shape: ModelShape, nodes: Mapping[str, NodeProfile]
) -> dict[str, Any]:
    """The output of `kappa workload --json`, for a model and nodes by name. κ_crit is that of a
    request of `kappa.cost.QUESTION_TOKENS`, None where it is never memory-bound.

    Give the workload uncut, with blocks of `ENGINE_BLOCK_TOKENS` where its reader allows.
    """
    ratios = source_ratios(workload)
    engine = engine_ratios(workload)
    critical = {name: kappa_eff(shape, node, QUESTION_TOKENS) for name, node in nodes.items()}
    return {
        "workload": workload.name,
        "source": workload.source,
        "built_in": workload.built_in,
        "notes": list(workload.notes),
        "sessions": len(workload.sessions),
        "requests": len(ratios.new_tokens),
        **ratios.to_dict(),
        "kappa_crit": {k: v if math.isfinite(v) else None for k, v in critical.items()},
        "share_above": memory_bound_share(ratios, shape, nodes),
        "engine": {
            "block_tokens": ENGINE_BLOCK_TOKENS,
            **engine.to_dict(),
            "share_above": memory_bound_share(engine, shape, nodes),
        },
        "paper": compared(workload, ratios),
        "why_ours_differ": WHY_OURS_DIFFER.get(workload.name, "") if workload.built_in else "",
    }


PAPER_FIGURES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "sharegpt": ("§4.1", {
        "new mean": 53, "new p50": 20, "new p90": 133, "output mean": 187, "cached p50": 3_200,
        "cached p90": 30_000, "kappa p50": 100, "kappa above 1000": 0.2,
    }),
    "narrativeqa": ("§4.2", {
        "new mean": 12, "document p50": 57_000, "document least": 15_000, "document most": 190_000,
        "kappa p25": 2_400, "kappa p50": 5_000, "kappa p75": 11_000,
    }),
    "finqa": ("§4.2", {
        "new mean": 23, "document p50": 167_000, "document least": 60_000,
        "document most": 450_000, "kappa p25": 5_000, "kappa p50": 10_000, "kappa p75": 17_000,
    }),
}  # fmt: skip
"""Section of paper 001 and what it prints there, by workload: in tokens of Llama 3.1 but for the
ratio; a mean, a quantile, least, most, or the share above a number."""

WHY_OURS_DIFFER: dict[str, str] = {
    "sharegpt": "ours is a sample of 570 pieces, of about 2,000 tokens each as their source cut "
    "them, with the history before a cut estimated; the paper has all 685,000 turns uncut. Llama-2 "
    "tokens, of which a text has more than of the paper's Llama-3.1 tokens: this explains the "
    "longer outputs only in part.",
    "narrativeqa": "ours has the 264 documents whose questions are at hand, of 1,572, at 1.268 "
    "Llama-2 tokens a word; the paper's median would be 4.4 bytes a token of the median file, so "
    "it may have counted the files with their white space and markup. Its range is probably one "
    "of percentiles: by words, the source's documents have 4,212 to 545,224 tokens.",
    "finqa": "ours are 174 filings of FinanceBench, quarterly and current reports among them, not "
    "the 801 of DocFinQA, and their pairing with questions is drawn. Llama-2 tokens, which split "
    "every digit. The paper's median κ disagrees with its own lengths: 167,000/23 is 7,300.",
}


def compared(workload: Workload, ratios: Ratios) -> list[dict[str, Any]]:
    """The paper's figures beside ours, by workload name; empty if the paper has none."""
    where, printed = PAPER_FIGURES.get(workload.name, ("", {}))
    rows = []
    for name, value in printed.items():
        quantity, _, statistic = name.partition(" ")
        ours = _statistic(_values(workload, ratios, quantity), statistic)
        row = {"quantity": quantity, "statistic": statistic, "paper": value, "ours": ours}
        rows.append(row | {"where": where})
    return rows


def _values(workload: Workload, ratios: Ratios, quantity: str) -> Numbers:
    if quantity == "document":
        lengths = {s.id.rpartition("/")[0]: s.document_tokens for s in workload.sessions}
        return np.array(list(lengths.values()), dtype=np.float64)
    if quantity == "output":
        outputs = [turn.output_tokens for s in workload.sessions for turn in s.turns]
        return np.array(outputs, dtype=np.float64)
    return {"new": ratios.new_tokens, "cached": ratios.cached_tokens, "kappa": ratios.kappa}[
        quantity
    ]


def _statistic(values: Numbers, statistic: str) -> float:
    if statistic.startswith("above "):
        return float(np.mean(values > float(statistic.removeprefix("above "))))
    if statistic.startswith("p"):
        return float(np.quantile(values, float(statistic[1:]) / 100))
    if statistic == "mean":
        return float(np.mean(values))
    return float(np.min(values) if statistic == "least" else np.max(values))
