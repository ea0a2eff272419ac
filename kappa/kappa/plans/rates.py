"""A model on a node, in the seconds that a load plan is made of; by formula, or fitted to samples.

Per cached token: μ to load its KV over the link, ρμ to load its activations instead and ψ to
project KV from them, φ to compute it from its token id; per pair of query and key: α. Planners read
only this. Notation is that of docs/load-plans.md. All figures are totals over all layers, not
dilated.

HybridServe (Section 4.3) plans on two least-squares lines, seconds to load and to project n tokens,
and trusts them because R² is 0.99; here a line below `LEAST_R2` is refused by name. The seconds of
a step are no line: they are measured on a grid, and the cost model is fitted for what lies beyond.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from kappa.checks import check_not_negative, check_positive, check_share
from kappa.cost import (
    StepModel,
    chunk_work,
    decode_work,
    load_token_s,
    step_model,
    transfer_s,
)
from kappa.hardware import NodeProfile
from kappa.model import (
    ModelShape,
    activation_bytes_per_token,
    kv_bytes_per_token,
    projection_flops,
)

FORMAT = "kappa-load-rates/1"
"""The value of "format" in a file of measured rates."""

LEAST_R2 = 0.98
"""Below this a fit explains too little of what it was fitted to."""
LEAST_ATTEND_R2 = 0.95
"""The same for attention on the CPU, whose seconds bend where the CPU's caches end."""
LEAST_GAIN = 0.02
"""Least gain of a plan over a plainer one, as a share of its seconds: more than the prediction's
error."""


@dataclass(frozen=True, slots=True)
class LineFit:
    """Seconds of n tokens: `per_token_s`·n + `fixed_s` for n > 0, nothing for none.

    `r2` is the share of the samples' variance that the line explains; 1 for one by formula.
    """

    name: str
    per_token_s: float
    fixed_s: float = 0.0
    r2: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_token_s) and self.per_token_s > 0):
            raise ValueError(
                f"the {self.name} fit has {self.per_token_s} seconds per token: time must grow "
                "with tokens; measure larger sizes"
            )
        if not (math.isfinite(self.fixed_s) and self.fixed_s >= 0 and self.r2 <= 1.0):
            raise ValueError(
                f"the {self.name} fit has fixed_s {self.fixed_s} and R² {self.r2}: "
                "give a fixed cost of 0 or more and an R² of 1 or less"
            )

    def seconds(self, tokens: float) -> float:
        return transfer_s(tokens, self.per_token_s, self.fixed_s)

    def scaled(self, factor: float) -> LineFit:
        """The same line where each token takes `factor` times as long."""
        return replace(self, per_token_s=self.per_token_s * factor)

    def require(self, least_r2: float = LEAST_R2) -> None:
        """Raise ValueError if this fit is too poor to plan with."""
        if not self.r2 >= least_r2:
            raise ValueError(
                f"the {self.name} fit has R² {self.r2:.3f}, below {least_r2}: "
                "measure again on an idle machine, or with larger sizes"
            )


@dataclass(frozen=True, slots=True)
class ComputeGrid:
    """Measured seconds of a step: `seconds[i][j]` is that of `new_tokens[i]` new tokens behind
    `context_tokens[j]`. Both axes ascend."""

    new_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name in ("new_tokens", "context_tokens"):
            axis = getattr(self, name)
            if len(axis) < 2 or any(b <= a for a, b in pairwise(axis)):
                raise ValueError(f"ComputeGrid.{name} is {axis}: give two ascending values or more")
        shape = [len(row) for row in self.seconds]
        if shape != [len(self.context_tokens)] * len(self.new_tokens):
            raise ValueError(
                f"ComputeGrid.seconds has rows of {shape}: give {len(self.new_tokens)} rows "
                f"of {len(self.context_tokens)}"
            )
        if not all(math.isfinite(v) and v > 0 for row in self.seconds for v in row):
            raise ValueError("ComputeGrid.seconds: give finite times above zero")

    def clamp(self, new_tokens: float, context_tokens: float) -> tuple[float, float]:
        """The nearest point that the grid covers."""
        return (
            min(max(new_tokens, self.new_tokens[0]), self.new_tokens[-1]),
            min(max(context_tokens, self.context_tokens[0]), self.context_tokens[-1]),
        )

    def seconds_at(self, new_tokens: float, context_tokens: float) -> float:
        """Seconds, bilinear between the points; beyond the edge those of the edge."""
        new_tokens, context_tokens = self.clamp(new_tokens, context_tokens)
        i, u = _cell(self.new_tokens, new_tokens)
        j, v = _cell(self.context_tokens, context_tokens)
        low, high = self.seconds[i], self.seconds[i + 1]
        below = low[j] * (1 - v) + low[j + 1] * v
        above = high[j] * (1 - v) + high[j + 1] * v
        return below * (1 - u) + above * u

    def correction_s(
        self, modelled_s: Callable[[float, float], float], new_tokens: float, context_tokens: float
    ) -> float:
        """Measured minus modelled seconds at the nearest point."""
        point = self.clamp(new_tokens, context_tokens)
        return self.seconds_at(*point) - modelled_s(*point)


def _cell(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """Index of the cell that holds `value`, and how far into it (0 to 1)."""
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True, slots=True)
class PlanRates:
    """The rates of one model on one node."""

    name: str
    layers: int
    # Bytes of a token, over all layers.
    kv_bytes: float
    activation_bytes: float
    # Seconds of n tokens over all layers: to load their KV over the link, and to project it from
    # activations on the device.
    load: LineFit
    project: LineFit
    # A prefill step: the cost model, which a measured grid overrides inside its edges.
    step: StepModel
    grid: ComputeGrid | None = None
    # The share of the shorter of link and gpu time that hides behind the longer: 0 loads before
    # computing, 1 hides it all. None: by layers, 1 - 1/layers, as one layer's load is waited for
    # and one layer's computing is left over.
    overlap: float | None = None
    # Seconds of the CPU, over all layers, to attend from one query to n tokens' KV in host memory;
    # None where it is not measured.
    attend: LineFit | None = None
    # While it attends, the share of the link's bandwidth that remains; while the link loads, the
    # share of the CPU's speed that remains.
    h2d_attending: float = 1.0
    attend_loading: float = 1.0
    # Measured decoding steps; the axes are sequences, and the context tokens of all of them.
    decode: ComputeGrid | None = None
    # The same with contexts that come from host memory to a pass's buffers at every step, all as
    # KV and all as activations; their crossing is not in these seconds.
    from_kv: ComputeGrid | None = None
    from_acts: ComputeGrid | None = None
    # In which the weights that lie in host memory cross the link, at every step; it is beside
    # `step` and the grids, whose seconds are those of computing alone.
    weights_s: float = 0.0
    # Seconds of the CPU, over all layers, for FC1 of n tokens; None where it is not measured.
    multiply: LineFit | None = None
    # Of one layer's matrices that cross: queries, keys and values; output; FC1; FC2.
    matrix_bytes: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        self.load.require()
        self.project.require()
        if self.attend is not None:
            self.attend.require(LEAST_ATTEND_R2)
        check_positive(self, "layers", "kv_bytes", "activation_bytes")
        check_share(self, "h2d_attending", "attend_loading")
        check_not_negative(self, "weights_s")
        if self.overlap is not None and not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"PlanRates.overlap is {self.overlap}: give a share in [0, 1]")

    @property
    def load_token_s(self) -> float:
        """μ."""
        return self.load.per_token_s

    @property
    def project_token_s(self) -> float:
        """ψ."""
        return self.project.per_token_s

    @property
    def token_s(self) -> float:
        """φ: gpu seconds of one token's GEMMs, attention apart."""
        return self.step.token_s

    @property
    def activation_ratio(self) -> float:
        """ρ: bytes of a token's activations over bytes of its KV."""
        return self.activation_bytes / self.kv_bytes

    @property
    def h2d_bytes_per_s(self) -> float:
        """B: from the load fit's slope."""
        return self.kv_bytes / self.load_token_s

    @property
    def attend_bytes_per_s(self) -> float:
        """B_c: KV that the CPU attends to; 0 where it is not measured."""
        return self.kv_bytes / self.attend.per_token_s if self.attend is not None else 0.0

    @property
    def served_step(self) -> StepModel:
        """The step as it is served: no shorter than its weights take to cross."""
        return replace(self.step, weights_s=max(self.step.weights_s, self.weights_s))

    @property
    def serial_share(self) -> float:
        """1 - overlap: what of the shorter of link and gpu time is not hidden."""
        return 1.0 / self.layers if self.overlap is None else 1.0 - self.overlap

    def prefill_s(self, new_tokens: float, context_tokens: float) -> float:
        """t_gpu(T, S): gpu seconds of a prefill step; at least one token is computed."""
        new_tokens = max(1.0, new_tokens)
        seconds = self.modelled_prefill_s(new_tokens, context_tokens)
        if self.grid is not None:
            seconds += self.grid.correction_s(self.modelled_prefill_s, new_tokens, context_tokens)
        return max(0.0, seconds)

    def modelled_prefill_s(self, new_tokens: float, context_tokens: float) -> float:
        """Gpu seconds of a prefill step by the cost model alone, without the grid."""
        return self.step.work_s(chunk_work(new_tokens, context_tokens))

    def decode_gpu_s(self, batch: int, context_tokens: float) -> float:
        """Gpu seconds of a decoding step of `batch` sequences with all KV on the device."""
        return self._decode_s(self.decode, batch, context_tokens)

    def _decode_s(
        self, grid: ComputeGrid | None, batch: int, context_tokens: float, projected: float = 0.0
    ) -> float:
        """Gpu seconds of a decoding step by the law, which a measured grid overrides inside its
        edges. projected: the share of the contexts that comes from activations."""

        def modelled_s(sequences: float, tokens: float) -> float:
            step_s = self.step.work_s(decode_work(sequences, tokens))
            return step_s + self.project.seconds(projected * tokens)

        at = float(batch), batch * context_tokens
        corrected_s = 0.0 if grid is None else grid.correction_s(modelled_s, *at)
        return max(0.0, modelled_s(*at) + corrected_s)

    def decode_s(
        self, batch: int, context_tokens: int, activations: float = 0.0
    ) -> tuple[float, float]:
        """(link, gpu) seconds of a decoding step of `batch` sequences that loads all context again:
        `activations` of each one's `context_tokens` from activations, the rest as KV; the weights
        that lie in host memory cross beside them.
        """
        loaded = context_tokens - activations + self.activation_ratio * activations
        gpu_s = self._decode_s(self.from_kv or self.decode, batch, context_tokens)
        if self.from_kv is None or self.from_acts is None:
            gpu_s += self.project.seconds(batch * activations)
        elif activations:
            all_s = self._decode_s(self.from_acts, batch, context_tokens, 1.0)
            gpu_s += activations / context_tokens * max(all_s - gpu_s, 0.0)
        return self.weights_s + self.load.seconds(batch * loaded), gpu_s

    def attending(self) -> PlanRates:
        """The same node while its CPU attends and its link loads: each slows the other down."""
        attend = self.attend
        return replace(
            self,
            load=self.load.scaled(1.0 / self.h2d_attending),
            attend=None if attend is None else attend.scaled(1.0 / self.attend_loading),
            multiply=(
                None if self.multiply is None else self.multiply.scaled(1.0 / self.attend_loading)
            ),
            weights_s=self.weights_s / self.h2d_attending,
            h2d_attending=1.0,
            attend_loading=1.0,
        )


def rates_from_law(
    shape: ModelShape, node: NodeProfile, *, overlap: float | None = None
) -> PlanRates:
    """Rates by formula, for a node known by bandwidth and FLOP/s alone. overlap: as in
    `PlanRates`."""
    weights_s = node.host_weight_bytes / node.h2d_bytes_per_s
    # Of our engines, whose computing has seconds of its own: they read what crossed, too.
    node = replace(node, host_weight_bytes=0.0)
    return PlanRates(
        name=f"{shape.name} on {node.name}",
        layers=shape.layers,
        kv_bytes=kv_bytes_per_token(shape),
        activation_bytes=activation_bytes_per_token(shape),
        load=LineFit("load", load_token_s(shape, node), node.load_fixed_s),
        project=LineFit(
            "KV projection", projection_flops(shape) / (node.gemm_flops_per_s or node.flops_per_s)
        ),
        step=step_model(shape, node),
        overlap=overlap,
        weights_s=weights_s,
    )
