"""CLO's budgets: how many heads stay on the device, and what a prefix left in host memory costs.

Of a context in host memory each KV head of each layer attends to a choice of k tokens, which stay
on the device until its query has moved too far (paper 004). Missing keys are loaded one layer
ahead. Of the heads that miss often, those that a layer's computation cannot hide keep all their KV
on the device. Figures only: the engine's half is `kappa_engine.sparse`. Changes the model's output.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kappa.checks import read_json_object
from kappa.model import ModelShape
from kappa.plans import head_codes
from kappa.plans.load_plan import LoadPlan, Segment
from kappa.plans.rates import PlanRates

FORMAT = "kappa-head-importance/1"
"""The value of "format" in a file of head importance."""
_KEYS = {"format", "model", "importance", "similarity", "codes", "note"}

Scores = NDArray[np.float64]

SPARED_SHARE = 0.25
"""Of query heads, those that `gates` finds to matter least."""
LEAST_SIMILARITY = 1e-3
"""Least cosine in Eq. 10, since smaller ones would invert its harmonic mean."""


# --- Importance and similarity of heads ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadProfile:
    """Scores of one model's heads."""

    importance: Scores  # of query heads, shape (layers, heads), in [0, 1]
    # Mean cosine of the queries of neighbouring steps, shape (layers, kv_heads), in [-1, 1]; None
    # where it was not measured.
    similarity: Scores | None = None
    source: str = "all heads alike"  # or the file
    # Maps of queries and keys before their codes; None: codes are of both as they are.
    codes: head_codes.CodeMaps | None = None

    def kv_importance(self, kv_heads: int) -> Scores:
        """The highest importance in each group of query heads, shape (layers, kv_heads)."""
        most: Scores = self.importance.reshape(len(self.importance), kv_heads, -1).max(axis=2)
        return most


def equal_heads(shape: ModelShape) -> HeadProfile:
    """A profile with importance 1 for all heads, which is the most cautious."""
    return HeadProfile(np.ones((shape.layers, shape.heads)))


def read_heads(path: str | Path, shape: ModelShape) -> HeadProfile:
    """The profile in a file, for a model of this shape; `ValueError` names file, key and remedy."""
    data = read_json_object(path, "head importance")
    if data.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {data.get('format')!r}: give {FORMAT!r}")
    unknown = sorted(set(data) - _KEYS)
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}: leave them out")
    if "importance" not in data:
        raise ValueError(f"{path}: key 'importance' is missing: give one score per query head")
    importance = _table(path, "importance", data["importance"], (shape.layers, shape.heads), 0.0)
    similarity = None
    if data.get("similarity") is not None:
        wanted = (shape.layers, shape.kv_heads)
        similarity = _table(path, "similarity", data["similarity"], wanted, -1.0)
    codes = None
    if data.get("codes") is not None:
        try:
            codes = head_codes.from_json(
                data["codes"], shape.layers, shape.kv_heads, shape.head_dim
            )
        except ValueError as error:
            raise ValueError(f"{path}: codes: {error}") from None
    return HeadProfile(importance, similarity, str(path), codes)


def _table(path: str | Path, key: str, value: Any, wanted: tuple[int, int], least: float) -> Scores:
    layers, heads = wanted
    expected = f"give {layers} layers of {heads} numbers in [{least:g}, 1]"
    try:
        table = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: {key} is no table of numbers: {expected}") from None
    if table.shape != wanted:
        raise ValueError(f"{path}: {key} has the shape {table.shape}: {expected}")
    wrong = np.argwhere(~((table >= least) & (table <= 1.0)))
    if len(wrong):
        layer, head = (int(i) for i in wrong[0])
        raise ValueError(
            f"{path}: {key} of layer {layer}, head {head} is {table[layer, head]:g}: {expected}"
        )
    return table


def gates(damage: Scores, spared_share: float = SPARED_SHARE) -> Scores:
    """Importance of heads by what each one's ablation loses, shaped as `damage`, in [0, 1).

    The gate α that paper 004's training (Eq. 14, after DuoAttention) would settle at if heads did
    not act on each other: a loss grows as (1-α)²·d, the penalty as λ·α, least at 1 - λ/2d. λ/2 is
    taken such that `spared_share` of the heads have gate 0; all have where none loses anything.
    """
    spared = float(np.quantile(damage, spared_share))
    nonzero = np.maximum(damage, np.finfo(np.float64).tiny)
    return np.where(damage > spared, 1.0 - spared / nonzero, 0.0)


def group_similarity(cosines: Scores, importance: Scores, kv_heads: int) -> Scores:
    """ŝ of Eq. 11: the mean over steps of the cosines of neighbouring queries, joined within each
    group as a look-up joins them (Eq. 10; without importance all heads of a group count alike).

    Args:
        cosines: shape (steps, layers, heads).
        importance: shape (layers, heads).

    Returns:
        Shape (layers, kv_heads).
    """
    steps, layers = cosines.shape[:2]
    weights = importance.reshape(layers, kv_heads, -1)
    weights = np.where(weights.any(axis=2, keepdims=True), weights, 1.0)
    each = np.maximum(cosines, LEAST_SIMILARITY).reshape(steps, layers, kv_heads, -1)
    joined: Scores = (weights.sum(axis=2) / (weights / each).sum(axis=3)).mean(axis=0)
    return np.minimum(joined, 1.0)


def heads_json(profile: HeadProfile, model: str, note: str) -> str:
    """The content of a file of head importance, to six digits behind the point."""
    similarity = profile.similarity
    content = {
        "format": FORMAT,
        "model": model,
        "note": note,
        "importance": profile.importance.round(6).tolist(),
        "similarity": None if similarity is None else similarity.round(6).tolist(),
        "codes": profile.codes and head_codes.to_json(profile.codes),
    }
    return json.dumps(content)


def thresholds(importance: Scores, eta: float, power: float) -> Scores:
    """τ of each head (Eq. 7-9), shaped as `importance`: η for importance 1, -1 (never refreshed)
    for 0. The higher `power`, the fewer heads have a high threshold."""
    weight = np.asarray(importance, np.float64) ** power
    return np.cos(weight * np.arccos(eta) + (1.0 - weight) * np.pi)


# --- Budgets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CloConfig:
    """The parameters of the method; defaults are those of the paper."""

    # Chosen tokens k as a share of the context's.
    share: float = 0.1
    # Tokens that are always on the device.
    sink_tokens: int = 4
    recent_tokens: int = 64
    # Of Eq. 7-9.
    eta: float = 0.8
    power: float = 3.0
    # Of Eq. 11.
    epsilon: float = 0.1
    # Bits of a key's hash code; 0 where the retriever needs none.
    code_bits: int = 256

    def chosen_tokens(self, context_tokens: int) -> int:
        """k: ⌈share · context⌉, no more than there are behind the sinks."""
        most = max(0, context_tokens - self.sink_tokens)
        # A product that is whole but for its rounding is that whole number.
        return min(math.ceil(self.share * context_tokens - 1e-9), most)


@dataclass(frozen=True, slots=True)
class SparseSettings:
    """Settings of an engine's sparse decoding."""

    # The parameters of paper 004.
    clo: CloConfig = field(default_factory=CloConfig)
    # Sequences that decode sparsely at a time, and the most tokens of each.
    slots: int = 4
    max_tokens: int = 8192
    # "oracle" scores keys themselves, "hash" their codes.
    retriever: Literal["oracle", "hash"] = "hash"
    # Look up one layer ahead, with the query that the layer before predicts; else with the actual
    # query, and wait.
    prefetch: bool = True
    # Steps after which a choice is replaced whatever its similarity; 0: never (as in the paper).
    max_age: int = 0
    # New tokens computed together behind a prefix that stays in host memory.
    chunk_tokens: int = 128


def head_bytes(shape: ModelShape, tokens: float) -> float:
    """KV bytes of one KV head of one layer over `tokens` tokens."""
    return tokens * 2 * shape.head_dim * shape.kv_dtype_bytes


def prefetchable_heads(
    shape: ModelShape, config: CloConfig, context_tokens: int, layer_s: float, link: float
) -> float:
    """N_p of Eq. 12: heads with choices that cross the link (bytes/s) while a layer of a decoding
    step is computed, T_comp · B / mem_head; as printed it divides by B."""
    return layer_s * link / head_bytes(shape, max(1, config.chosen_tokens(context_tokens)))


Persistent = tuple[tuple[int, ...], ...]


def persistent_heads(
    shape: ModelShape, config: CloConfig, profile: HeadProfile, prefetchable: float, *,
    most_heads: int | None = None,
) -> Persistent:  # fmt: skip
    """KV heads of each layer that keep all their KV on the device (Eq. 13).

    All heads of the first layer, which nothing can be prefetched for. In each other layer N_d heads
    have a difficulty D = τ - (similarity - ε) (Eq. 11) above 0; the layer before hides N_p of them,
    and the N_d - N_p most difficult are kept. Without measured similarities none is difficult.

    Args:
        prefetchable: N_p; rounded down.
        most_heads: heads of all layers that fit device memory; the first layer's come first, then
            those with the largest D. None: all fit.
    """
    wanted = [(math.inf, 0, head) for head in range(shape.kv_heads)]
    if profile.similarity is not None:
        tau = thresholds(profile.kv_importance(shape.kv_heads), config.eta, config.power)
        hard = tau - (profile.similarity - config.epsilon)
        others: list[tuple[float, int, int]] = []
        for layer in range(1, shape.layers):
            order = np.argsort(-hard[layer], kind="stable")
            count = max(int((hard[layer] > 0).sum()) - math.floor(prefetchable), 0)
            others += [(float(hard[layer, h]), layer, int(h)) for h in order[:count]]
        wanted += sorted(others, key=lambda one: (-one[0], one[1], one[2]))
    if most_heads is not None:
        wanted = wanted[: max(0, most_heads)]
    kept: list[list[int]] = [[] for _ in range(shape.layers)]
    for _, layer, head in wanted:
        kept[layer].append(head)
    return tuple(tuple(sorted(heads)) for heads in kept)


def persistent_share(shape: ModelShape, persistent: Persistent) -> float:
    """The share of all KV heads of all layers that keep their KV on the device."""
    return sum(len(heads) for heads in persistent) / (shape.layers * shape.kv_heads)


# --- Seconds -------------------------------------------------------------------------------------


def layer_seconds(rates: PlanRates, config: CloConfig, batch: int, context_tokens: int) -> float:
    """T_comp by a node's rates: a layer of a decoding step that attends to resident tokens."""
    resident = config.sink_tokens + config.recent_tokens + config.chosen_tokens(context_tokens)
    return rates.decode_gpu_s(batch, min(resident, context_tokens)) / rates.layers


def sparse_plan(
    rates: PlanRates, settings: SparseSettings, share: float, cached_tokens: int, new_tokens: int
) -> LoadPlan:
    """A prefix that stays in host memory (one segment S): its choice is loaded for every chunk.

    Seconds by the rates: sinks, recent tokens and persistent heads (`share` of all) once, the
    choice of the other heads with each chunk of new tokens; computing attends to resident tokens.
    """
    config, chunk_tokens = settings.clo, settings.chunk_tokens
    chosen = config.chosen_tokens(cached_tokens)
    resident = min(config.sink_tokens + config.recent_tokens, cached_tokens)
    once = (1.0 - share) * resident + share * cached_tokens
    chunks = math.ceil(new_tokens / chunk_tokens)
    crossing = once + chunks * (1.0 - share) * chosen
    load_s = rates.load.seconds(crossing)
    seen = min(resident + chosen, cached_tokens)
    whole, rest = divmod(new_tokens, chunk_tokens)
    compute_s = whole * rates.prefill_s(chunk_tokens, seen)
    compute_s += rates.prefill_s(rest, seen) if rest else 0.0
    return LoadPlan(
        (Segment("S", 0, cached_tokens),),
        ttft_s=max(load_s, compute_s) + rates.serial_share * min(load_s, compute_s),
        load_s=load_s,
        compute_s=compute_s,
        load_bytes=crossing * rates.kv_bytes,
        exact=False,
        why="as the request allowed",
    )
