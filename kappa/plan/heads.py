"""How much each attention head matters and how like its queries are: what CLO decides by.

A file of head importance (JSON, `FORMAT`) holds a score in [0, 1] for each query head of each
layer, learned as in paper 004's Appendix A, and, measured, the mean cosine of neighbouring queries
for each KV head. From them come a similarity threshold for each KV head (Eq. 7-9) and how hard it
is to reuse (Eq. 11). Without a file all heads count alike, and none is known to be hard.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappa.json_file import read_json_object
from kappa.types import ModelShape

FORMAT = "kappa-head-importance/1"
"""What a file of head importance says under "format"."""

Scores = NDArray[np.float64]

LEAST_SIMILARITY = 1e-3
"""Cosines below this count as this in Eq. 10, whose harmonic mean they would turn around."""


@dataclass(frozen=True, slots=True)
class HeadProfile:
    """Scores of one model's heads.

    importance (layers, heads): of query heads, in [0, 1]. similarity (layers, kv_heads): mean
    cosine of the queries of neighbouring steps, in [-1, 1]; None where it was not measured.
    source: the file, or what they are by default.
    """

    importance: Scores
    similarity: Scores | None = None
    source: str = "all heads alike"

    def kv_importance(self, kv_heads: int) -> Scores:
        """(layers, kv_heads): of each group of query heads the most important one's."""
        layers = len(self.importance)
        most: Scores = self.importance.reshape(layers, kv_heads, -1).max(axis=2)
        return most


def equal_heads(shape: ModelShape, importance: float = 1.0) -> HeadProfile:
    """All heads of a model alike; 1, the most cautious, unless said otherwise."""
    if not 0.0 <= importance <= 1.0:
        raise ValueError(f"importance of heads is {importance}: give a score in [0, 1]")
    return HeadProfile(np.full((shape.layers, shape.heads), importance))


def read_heads(path: str | Path, shape: ModelShape) -> HeadProfile:
    """The profile in a file, which must be for a model of this shape.

    Raises:
        ValueError: names the file, the key, what is wrong with it and what it should be.
    """
    data = read_json_object(path, "head importance")
    if data.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {data.get('format')!r}: give {FORMAT!r}")
    unknown = sorted(set(data) - {"format", "model", "importance", "similarity", "note"})
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}: leave them out")
    if "importance" not in data:
        raise ValueError(f"{path}: key 'importance' is missing: give one score per query head")
    importance = _table(path, "importance", data["importance"], (shape.layers, shape.heads), 0.0)
    similarity = None
    if data.get("similarity") is not None:
        wanted = (shape.layers, shape.kv_heads)
        similarity = _table(path, "similarity", data["similarity"], wanted, -1.0)
    return HeadProfile(importance, similarity, str(path))


def heads_to_dict(profile: HeadProfile, model: str, note: str = "") -> dict[str, Any]:
    """As `read_heads` reads it, ready for JSON."""
    measured = None if profile.similarity is None else profile.similarity.tolist()
    return {
        "format": FORMAT, "model": model, "note": note,
        "importance": profile.importance.tolist(), "similarity": measured,
    }  # fmt: skip


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


def thresholds(importance: Scores, eta: float, power: float) -> Scores:
    """τ of each head (Eq. 7-9): η for importance 1, -1 (never refreshed) for importance 0.

    Args:
        importance: s, of any shape.
        eta: η, the highest threshold, a cosine.
        power: p; the higher, the fewer heads are held to a high threshold.

    Raises:
        ValueError: η is no cosine, or p is not above 0.
    """
    if not -1.0 <= eta <= 1.0 or power <= 0.0:
        raise ValueError(f"eta {eta}, power {power}: give a cosine in [-1, 1] and a power above 0")
    weight = np.asarray(importance, np.float64) ** power
    return np.cos(weight * np.arccos(eta) + (1.0 - weight) * np.pi)


def aggregate(similarity: Scores, importance: Scores) -> Scores:
    """One cosine per KV head from those of its query heads (Eq. 10): weighted harmonic mean.

    Args:
        similarity, importance: (..., heads of a group). Where all importances are 0, the mean.
    """
    clamped = np.maximum(similarity, LEAST_SIMILARITY)
    total = importance.sum(axis=-1)
    shares = (importance / clamped).sum(axis=-1)
    mean: Scores = similarity.mean(axis=-1)
    weighted = np.divide(total, shares, out=np.zeros_like(mean), where=shares > 0)
    return np.where(total > 0, weighted, mean)


def difficulty(tau: Scores, similarity: Scores, epsilon: float) -> Scores:
    """D of each KV head (Eq. 11): above 0, its queries are mostly too unlike to reuse what it has.

    epsilon: the margin ε that is granted to the measured mean.
    """
    hard: Scores = tau - (similarity - epsilon)
    return hard
