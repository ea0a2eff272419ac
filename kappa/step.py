"""How long one engine iteration takes on a node: the sum over a batch, not one request.

A step computes `new` tokens of each scheduled request behind `context` tokens. Its FLOPs are
2P per token plus attention, 4 L n_q d per query-key pair; its bytes are the weights once and every
context's KV. It lasts the longer of the two, plus a fixed cost. Paced nodes sleep by this; the
router predicts by it. Sources: paper 001 (F = 2P), with attention and the weight-read floor that
the paper leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from kappa.model import attention_flops, kv_bytes_per_token, weight_read_bytes
from kappa.types import ModelShape, NodeProfile

# A step that took so many times as long as its reading did not wait for memory.
_CLEARLY = 1.25


class StepParts(NamedTuple):
    """Seconds that a step consists of: the longer of computing and reading, then the fixed."""

    compute_s: float
    read_s: float
    fixed_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return max(self.compute_s, self.read_s) + self.fixed_s

    def dilated(self, dilation: float) -> StepParts:
        """Each part `dilation` times as long."""
        return StepParts(*(part_s * dilation for part_s in self))

    def computed_s(self, took_s: float) -> float:
        """Seconds of computing in a step with these announced parts that took `took_s`.

        0 where its length does not tell: it may have waited for memory. Where computing is the
        longer part by the announced rates, though the step took no longer than reading, the true
        seconds are at most what is returned.
        """
        rest_s = took_s - self.fixed_s
        told = rest_s > _CLEARLY * self.read_s or self.compute_s >= self.read_s
        return max(rest_s, 0.0) if told else 0.0


@dataclass(frozen=True, slots=True)
class StepModel:
    """The constants of a step on one node, for one model.

    token_s: seconds of GEMM per new token; pair_s: seconds of attention per (query, key) pair;
    weights_s: seconds to read the weights once; context_token_s: seconds to read one token's KV;
    fixed_s: launch and scheduling; dilation: real seconds per emulated second.
    """

    token_s: float
    pair_s: float
    weights_s: float
    context_token_s: float
    fixed_s: float = 0.0
    dilation: float = 1.0

    def __post_init__(self) -> None:
        """Refuse constants that cannot be seconds."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0) or (
                field.name == "dilation" and not value
            ):
                least = "above zero" if field.name == "dilation" else "zero or more"
                raise ValueError(
                    f"StepModel.{field.name} is {value}: give a finite number, {least}"
                )

    def parts(self, work: Iterable[tuple[int, int]]) -> StepParts:
        """Undilated parts of one step over [(new tokens, context tokens before them)]."""
        compute_s = 0.0
        read_s = self.weights_s
        for new, context in work:
            compute_s += new * self.token_s + new * (context + 0.5 * new) * self.pair_s
            read_s += (context + new) * self.context_token_s
        return StepParts(compute_s, read_s, self.fixed_s)

    def step_s(self, work: Iterable[tuple[int, int]]) -> float:
        """Undilated seconds of one step; `work` as in `parts`."""
        return self.parts(work).step_s

    def real_s(self, work: Iterable[tuple[int, int]]) -> float:
        """Real seconds of one step: `step_s` times the dilation."""
        return self.step_s(work) * self.dilation

    def real_parts(self, work: Iterable[tuple[int, int]]) -> StepParts:
        """Real seconds of one step's parts."""
        return self.parts(work).dilated(self.dilation)

    def scaled(self, factor: float) -> StepModel:
        """The same node, `factor` times as slow."""
        return replace(self, dilation=self.dilation * factor) if factor != 1.0 else self

    def to_dict(self) -> dict[str, float]:
        """A JSON-ready copy of the constants."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepModel:
        """Rebuild from `to_dict`; raises ValueError on an unknown or missing constant."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(
                f"StepModel: {error}; expected {[f.name for f in fields(cls)]}"
            ) from None


def step_model(shape: ModelShape, node: NodeProfile) -> StepModel:
    """The step constants of `shape` on `node`, in seconds.

    Attention is priced per (query, key) pair at its asymptotic cost; a mixture of experts reads
    the experts that one token touches: `kappa.model.compute_s` has the batch-dependent floor.
    """
    attention_flops_per_s = node.attention_flops_per_s or node.flops_per_s
    pair_flops = attention_flops(shape, 1.0, 1_000_000.0) / 1_000_000.5
    return StepModel(
        token_s=2.0 * shape.params_active / node.flops_per_s,
        pair_s=pair_flops / attention_flops_per_s,
        weights_s=weight_read_bytes(shape, 1.0) / node.hbm_bytes_per_s,
        context_token_s=kv_bytes_per_token(shape) / node.hbm_bytes_per_s,
        fixed_s=node.step_fixed_s,
        dilation=node.dilation,
    )
