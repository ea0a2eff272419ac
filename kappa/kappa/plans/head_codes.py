"""Calibrated hash codes: maps of queries and keys before the random projections of their codes.

Codes are bits of angles, and a choice is by products. A q · A⁻¹(k - μ) orders the keys of a head as
q · k does, whatever the positive definite A and the centre μ: so both are chosen such that angles
tell the most. μ is the keys' mean, and A makes the second moments of both sides equal, so that no
direction in which queries are small takes up bits of the keys. Stands beside HATA's trained
projections, which paper 004 uses.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_STORED = np.dtype("<f2")
# Of the mean variance, added to every direction: what was seen of a rare one is not all there is.
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class CodeMaps:
    """The maps of all KV heads of a model."""

    # μ, shape (layers, kv_heads, head_dim).
    centre: Floats
    # A, shape (layers, kv_heads, head_dim, head_dim), of largest eigenvalue 1.
    balance: Floats

    def inverse(self) -> Floats:
        """A⁻¹, scaled to a largest eigenvalue of 1, as codes keep signs alone."""
        return _unit(_power(self.balance, -1.0))


@dataclass(slots=True)
class Moments:
    """Sums over what was seen of queries and keys, by layer and KV head."""

    # Σqqᵀ and Σkkᵀ, shape (layers, kv_heads, head_dim, head_dim); Σk without the last axis.
    queries: Floats
    keys: Floats
    sums: Floats
    # Keys of each head.
    count: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.queries + other.queries, self.keys + other.keys, self.sums + other.sums,
            self.count + other.count,
        )  # fmt: skip


def code_maps(seen: Moments) -> CodeMaps:
    """The maps that fit what was seen."""
    centre = seen.sums / seen.count
    spread = seen.keys / seen.count - centre[..., :, None] * centre[..., None, :]
    return CodeMaps(centre, balanced(seen.queries, spread))


def balanced(queries: Floats, keys: Floats) -> Floats:
    """A with A Σq A = A⁻¹ Σk A⁻¹ up to a factor, for second moments Σ (..., d, d) of either side:
    A² is the geometric mean of Σq⁻¹ and Σk. Scaled to a largest eigenvalue of 1."""
    queries, keys = _ridged(queries), _ridged(keys)
    half, back = _power(queries, 0.5), _power(queries, -0.5)
    square = back @ _power(half @ keys @ half, 0.5) @ back
    return _unit(_power(square, 0.5))


def _ridged(moments: Floats) -> Floats:
    size = moments.shape[-1]
    mean = moments.trace(axis1=-2, axis2=-1)[..., None, None] / size
    # A head that is always zero gets the unit map.
    return moments / np.maximum(mean, np.finfo(np.float64).tiny) + _RIDGE * np.eye(size)


def _power(matrix: Floats, power: float) -> Floats:
    values, vectors = np.linalg.eigh((matrix + np.swapaxes(matrix, -1, -2)) / 2)
    raised = np.maximum(values, np.finfo(np.float64).tiny) ** power
    return np.asarray((vectors * raised[..., None, :]) @ np.swapaxes(vectors, -1, -2))


def _unit(matrix: Floats) -> Floats:
    return np.asarray(matrix / np.linalg.eigvalsh(matrix)[..., -1:, None])


# -- in a file ------------------------------------------------------------------------------------


def to_json(maps: CodeMaps) -> dict[str, str]:
    """Base64 of half-precision numbers: centres, and the lower triangles of the balances."""
    rows, columns = np.tril_indices(maps.balance.shape[-1])
    parts = {"centre": maps.centre, "balance": maps.balance[..., rows, columns]}
    return {
        name: base64.b64encode(part.astype(_STORED).tobytes()).decode()
        for name, part in parts.items()
    }


def from_json(data: Any, layers: int, kv_heads: int, head_dim: int) -> CodeMaps:
    """What `to_json` wrote, for a model of these sizes.

    Raises:
        ValueError: it is something else; names the key and what belongs there.
    """
    rows, columns = np.tril_indices(head_dim)
    sizes = {"centre": head_dim, "balance": len(rows)}
    if not isinstance(data, dict) or set(data) != set(sizes):
        raise ValueError(f"give {' and '.join(sizes)}, as `kappa heads` writes them")
    found = {}
    for name, size in sizes.items():
        count = layers * kv_heads * size
        try:
            raw = base64.b64decode(data[name], validate=True)
        except (TypeError, ValueError, binascii.Error):
            raw = b""
        values = np.frombuffer(raw, _STORED) if len(raw) == count * _STORED.itemsize else None
        if values is None or not np.isfinite(values).all():
            raise ValueError(
                f"{name} is no base64 of {count} finite half-precision numbers, {size} for each of "
                f"{layers} layers of {kv_heads} KV heads: measure it with `kappa heads`"
            )
        found[name] = values.astype(np.float64).reshape(layers, kv_heads, size)
    balance = np.zeros((layers, kv_heads, head_dim, head_dim))
    balance[..., rows, columns] = balance[..., columns, rows] = found["balance"]
    return CodeMaps(found["centre"], balance)
