"""Step times of real GPUs, from tables of kernels that were measured on them.

A table holds one model on one GPU, or on several under tensor parallelism, by the name
`system/model/tpN` (data/README.md has the source and what is measured). Nothing of our cost law is
in its numbers, so they judge it. Steps between the points of a table are bilinear; a step of
prompts and decoding requests is made of its parts: products of all its tokens, then the attention
of each. Beyond the points a part goes on as the law has it, and the table notes so in `beyond`.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kappa.checks import unknown_name
from kappa.cost import Floats, StepModel, StepWork, chunk_work, decode_work, step_model
from kappa.hardware import REACHED, NodeProfile, node_profile
from kappa.model import ModelShape
from kappa.shapes import model_shape

DATA = Path(__file__).parent / "data" / "silicon.npz"

SYSTEMS = {
    "h100_sxm": "h100-pcie5", "h200_sxm": "h200-pcie5", "a100_sxm": "a100-pcie4",
    "gb200": "gb200-c2c", "l40s": "l40s-pcie4",
}  # fmt: skip
"""The node of the catalogue that has a system's GPU."""

_FIGURES = (
    "gpu", "flops_per_s", "hbm_bytes_per_s", "hbm_bytes", *REACHED, "exposed", "fp8_speedup",
    "fp4_speedup", "gpus", "peer_bytes_per_s", "peer_fixed_s",
)  # fmt: skip
# What of a node is the GPUs' alone.

_PARTS = {
    "prefill": ("new", "cached"), "prefill_attention": ("new", "cached"),
    "decode": ("batch", "context"), "decode_attention": ("batch", "context"),
}  # fmt: skip
# Decoding steps of more tokens of context than this are left out of the tables.
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class SiliconTable:
    """Seconds of steps: of a prompt's new tokens behind cached ones, shape (new, cached), and of
    requests that decode over a context each, shape (batch, context); the attention in them.

    law: what our law says of the same model and GPUs, for what lies beyond. beyond: which parts of
    steps did, so far. fixed_s: of the host in each step, which no table has.
    """

    name: str
    law: StepModel
    new: Floats
    cached: Floats
    batch: Floats
    context: Floats
    prefill: Floats
    prefill_attention: Floats
    decode: Floats
    decode_attention: Floats
    beyond: set[str] = field(default_factory=set)
    fixed_s: float = 0.0

    def on(self, node: NodeProfile) -> SiliconTable:
        """The table's steps on a node, with its host's seconds, in real (dilated) seconds."""
        parts = {part: node.dilation * getattr(self, part) for part in _PARTS}
        return replace(self, **parts, fixed_s=node.dilation * node.step_fixed_s)

    def step_s(
        self, chunks: Iterable[tuple[int, int]], requests: int = 0, context_tokens: float = 0
    ) -> float:
        """Seconds of one step over [(new tokens, context tokens before them)] and requests that
        decode with so much context between them; ValueError if any is NaN or below zero."""
        chunks = list(chunks)
        each = context_tokens / requests if requests else 0.0
        for value in (requests, context_tokens, *(n for chunk in chunks for n in chunk)):
            if not 0 <= value < np.inf:
                raise ValueError(f"a step of {value} tokens: give finite counts, zero or more")
        tokens = requests + sum(new for new, _ in chunks)
        if not tokens:
            return 0.0
        own, axis = (self.prefill - self.prefill_attention)[:, 0], self.new
        if not chunks:
            own, axis = (self.decode - self.decode_attention)[:, 0], self.batch
        seconds = self._part(
            "products", own[:, None], (axis, _POINT), (tokens, 0.0),
            lambda n, _: self.law.work_s(StepWork(n, 0.0, 0.0)),
        )  # fmt: skip
        for new, before in chunks:
            seconds += self._part(
                "attention of prompts", self.prefill_attention, (self.new, self.cached),
                (new, before), lambda n, c: self._attention_s(chunk_work(n, c)),
            )  # fmt: skip
        if requests:
            seconds += self._part(
                "attention of those that decode", self.decode_attention,
                (self.batch, self.context), (requests, each),
                lambda b, c: self._attention_s(decode_work(b, b * c)),
            )  # fmt: skip
        return seconds + self.fixed_s

    def real_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """`step_s` of [(new tokens, context tokens before them)], as `StepModel.real_s` takes them:
        a single token behind a context decodes."""
        chunks = list(chunks)
        contexts = [before for new, before in chunks if new == 1 and before]
        prompts = [chunk for chunk in chunks if chunk[0] != 1 or not chunk[1]]
        return self.step_s(prompts, len(contexts), sum(contexts))

    def _attention_s(self, work: StepWork[float]) -> float:
        attention = StepWork(0.0, work.pairs, work.reads)
        return self.law.work_s(attention) - self.law.work_s(StepWork(0.0, 0.0, 0.0))

    def _part(
        self, what: str, table: Floats, axes: tuple[Floats, Floats], point: tuple[float, float],
        law: Callable[[float, float], float],
    ) -> float:  # fmt: skip
        """A part's seconds at a point; beyond the points of the table those at the nearest one,
        times what the law says of the way."""
        x, y = (min(max(at, axis[0]), axis[-1]) for at, axis in zip(point, axes, strict=True))
        seconds = _bilinear(table, axes, x, y)
        while np.isnan(seconds):
            # The table ends where contexts are too long for so many requests.
            y = axes[1][np.searchsorted(axes[1], y) - 1]
            seconds = _bilinear(table, axes, x, y)
        if (x, y) == point or law(x, y) <= 0:
            return seconds
        if any(at > axis[-1] for at, axis in zip(point, axes, strict=True)) or y < point[1]:
            self.beyond.add(what)
        return seconds * law(*point) / law(x, y)


_POINT = np.zeros(1)


def _bilinear(table: Floats, axes: tuple[Floats, Floats], x: float, y: float) -> float:
    """The value at (x, y), which lie within the axes."""
    (i, u), (j, v) = _cell(axes[0], x), _cell(axes[1], y)
    row = table[i] if not u else (1 - u) * table[i] + u * table[i + 1]
    return float(row[j] if not v else (1 - v) * row[j] + v * row[j + 1])


def _cell(axis: Floats, value: float) -> tuple[int, float]:
    """The place of the last point not above a value, and how far it is on the way to the next."""
    i = int(np.searchsorted(axis, value, side="right")) - 1
    return i, (value - axis[i]) / (axis[i + 1] - axis[i]) if value > axis[i] else 0.0


def silicon_names() -> list[str]:
    """Every table by name."""
    return sorted(_arrays(DATA)[0])


@functools.cache
def silicon_table(name: str, path: Path = DATA) -> SiliconTable:
    """The table with this name.

    Raises:
        ValueError: there is none (the near ones are listed); or one that lacks something.
    """
    arrays, node = _arrays(path)[1], silicon_node(name)
    axes = {axis: arrays[axis].astype(float) for axis in ("new", "cached", "batch", "context")}
    parts = {}
    for part, (rows, columns) in _PARTS.items():
        found = arrays.get(f"{name}/{part}")
        shape = len(axes[rows]), len(axes[columns])
        if found is None or found.shape != shape:
            raise ValueError(f"{path}: {name} has no {part} of {shape}: derive the tables again")
        parts[part] = 1e-3 * found.astype(float)
        needed = np.ones(shape, bool)
        if rows == "batch":
            needed = np.outer(axes[rows], axes[columns]) <= _MOST_TOKENS
        if not (parts[part][needed] > 0).all():
            row, column = np.argwhere(needed & ~(parts[part] > 0))[0]
            where = f"{rows} {axes[rows][row]:g}, {columns} {axes[columns][column]:g}"
            raise ValueError(f"{path}: {name} has a hole in {part} at {where}: derive it again")
    law = step_model(silicon_shape(name.split("/")[1]), node)
    return SiliconTable(name, law, **axes, **parts)


def silicon_node(name: str) -> NodeProfile:
    """The node of the catalogue, or several as one, that a table's GPUs are, without the host, of
    which tables know nothing; ValueError for a name that no table has."""
    if name not in silicon_names():
        raise unknown_name("table of silicon", name, silicon_names(), "choose one")
    system, _, tp = name.split("/")
    node = node_profile(SYSTEMS[system]).times(int(tp.removeprefix("tp")))
    return replace(node, step_fixed_s=0.0)


def silicon_figures(name: str) -> dict[str, Any]:
    """What a node's profile has of a table's GPUs: the law that a router starts from is theirs.
    ValueError for a name that no table has."""
    node = silicon_node(name)
    return {figure: getattr(node, figure) for figure in _FIGURES} | {"silicon": name}


def silicon_of(shape: ModelShape, name: str) -> SiliconTable:
    """The table with this name; ValueError if it is of another model than the shape's, too."""
    table = silicon_table(name)
    if name.split("/")[1] != shape.name:
        own = ", ".join(each for each in silicon_names() if each.split("/")[1] == shape.name)
        remedy = f"choose one of its own ({own})" if own else "it has none, so name no table"
        raise ValueError(f"{name} is a table of another model than {shape.name}: {remedy}")
    return table


def silicon_shape(model: str) -> ModelShape:
    """The shape of a table's model."""
    if model.endswith("-fp8"):
        whole = model_shape(model.removesuffix("-fp8"))
        return replace(whole, name=model, weight_dtype_bytes=1.0, gemm_bytes=1.0)
    return model_shape(model)


@functools.cache
def _arrays(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Names of tables, and all arrays of a file of them."""
    try:
        with np.load(path) as data:
            arrays = {key: data[key] for key in data.files}
        return list(json.loads(str(arrays["about"]))["cells"]), arrays
    except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: no tables of silicon can be read ({error!r})") from None
