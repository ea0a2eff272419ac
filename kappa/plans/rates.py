"""A model on a node, in the seconds that a load plan is made of.

Per cached token: μ to load its KV over the link, ρμ to load its activations instead and ψ to
project KV from them, φ to compute it from its token id; per pair of query and key: α. Built from a
shape and a node (the law) or from measurements (`engine.profiling` makes them); planners read only
this. Notation is that of docs/load-plans.md. All figures are totals over all layers, undilated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

from kappa.cost import (
    StepModel,
    StepWork,
    chunk_work,
    decode_work,
    load_token_s,
    step_model,
    transfer_s,
)
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes

LEAST_R2 = 0.98
"""Below this a line says too little of what it was fitted to; the paper's have 0.99."""


@dataclass(frozen=True, slots=True)
class LineFit:
    """Seconds of n tokens: `per_token_s`·n + `fixed_s` for n > 0, nothing for none.

    `r2` is the share of the samples' variance that the line explains; 1 for one from the law.
    """

    name: str
    per_token_s: float
    fixed_s: float = 0.0
    r2: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a line that cannot be seconds.

        Raises:
            ValueError: names the fit, the figure, and what to do.
        """
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
        """Seconds of `tokens`; zero for none."""
        return transfer_s(tokens, self.per_token_s, self.fixed_s)

    def scaled(self, factor: float) -> LineFit:
        """The same line where each token takes `factor` times as long."""
        return LineFit(self.name, self.per_token_s * factor, self.fixed_s, self.r2)


def require_fit(fit: LineFit) -> LineFit:
    """The fit itself, if it can be planned with.

    Raises:
        ValueError: its R² is below `LEAST_R2`; names the fit.
    """
    if not fit.r2 >= LEAST_R2:
        raise ValueError(
            f"the {fit.name} fit has R² {fit.r2:.3f}, below {LEAST_R2}: "
            "measure again on an idle machine, or with larger sizes"
        )
    return fit


@dataclass(frozen=True, slots=True)
class ComputeGrid:
    """Measured seconds of a prefill step of T new tokens behind S context tokens.

    `seconds[i][j]` belongs to `new_tokens[i]` and `context_tokens[j]`; both axes ascend.
    """

    new_tokens: tuple[float, ...]
    context_tokens: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Refuse axes that do not ascend and a table that does not fit them.

        Raises:
            ValueError: names what is wrong.
        """
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


def _cell(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """Index of the cell that holds `value`, and how far into it (0 to 1)."""
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True, slots=True)
class PlanRates:
    """The rates of one model on one node.

    `load` and `project` are seconds of n tokens over all layers: to bring their KV over the link,
    and to project it from activations that are there. `step` and `grid` give a prefill step; the
    grid, where there is one, overrides the law inside its edges. `overlap` is the share of the
    shorter of link and gpu time that hides behind the longer: 0 loads before computing, 1 hides it
    all; None means by layers, 1 - 1/layers, one layer's load being waited for and one layer's
    computing being left over. `h2d_while_storing` and `h2d_cpu_busy` are shares of the bandwidth
    that remain while the device stores, and while the CPU computes. `weights_load_s` is what
    streaming all layers' weights takes, for engines that keep them in host memory.

    `attend` is seconds of the CPU, over all layers, to attend from one query to n tokens' KV in
    host memory; None where it is not measured. While it does, `h2d_attending` of the link's
    bandwidth remains, and `attend_loading` of its own while the link loads. `decode` is a measured
    grid of decoding steps, its axes sequences and the context tokens of all of them.

    `step.weights_s` reads all weights; of them `experts_s` are experts that a token leaves alone
    with probability `expert_idle` each, so that a short step reads fewer.
    """

    name: str
    layers: int
    kv_bytes: float
    activation_bytes: float
    load: LineFit
    project: LineFit
    step: StepModel
    grid: ComputeGrid | None = None
    overlap: float | None = None
    h2d_while_storing: float = 1.0
    h2d_cpu_busy: float = 1.0
    weights_load_s: float = 0.0
    experts_s: float = 0.0
    expert_idle: float = 0.0
    attend: LineFit | None = None
    h2d_attending: float = 1.0
    attend_loading: float = 1.0
    decode: ComputeGrid | None = None

    def __post_init__(self) -> None:
        """Refuse figures that cannot be, and fits too poor to plan with.

        Raises:
            ValueError: names the figure or the fit, and the remedy.
        """
        require_fit(self.load)
        require_fit(self.project)
        if self.attend is not None:
            require_fit(self.attend)
        for name in ("layers", "kv_bytes", "activation_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"PlanRates.{name} is {value!r}: give a finite number above zero")
        for name in ("h2d_while_storing", "h2d_cpu_busy", "h2d_attending", "attend_loading"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(
                    f"PlanRates.{name} is {getattr(self, name)!r}: give a share in (0, 1]"
                )
        if self.overlap is not None and not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"PlanRates.overlap is {self.overlap}: give a share in [0, 1]")
        if not (math.isfinite(self.weights_load_s) and self.weights_load_s >= 0):
            raise ValueError(f"PlanRates.weights_load_s is {self.weights_load_s}: give 0 or more")
        if not (0.0 <= self.experts_s <= self.step.weights_s and 0.0 <= self.expert_idle < 1.0):
            raise ValueError(
                f"PlanRates.experts_s is {self.experts_s} of {self.step.weights_s}, expert_idle "
                f"{self.expert_idle}: give a part of the weights' seconds, and a share in [0, 1)"
            )

    @property
    def load_token_s(self) -> float:
        """μ: link seconds of one token's KV."""
        return self.load.per_token_s

    @property
    def project_token_s(self) -> float:
        """ψ: gpu seconds to project one token's KV from its activations."""
        return self.project.per_token_s

    @property
    def token_s(self) -> float:
        """φ: gpu seconds of one token's GEMMs, attention apart."""
        return self.step.token_s

    @property
    def pair_s(self) -> float:
        """α: gpu seconds of one pair of query and key."""
        return self.step.pair_s

    @property
    def activation_ratio(self) -> float:
        """ρ: bytes of a token's activations over bytes of its KV."""
        return self.activation_bytes / self.kv_bytes

    @property
    def h2d_bytes_per_s(self) -> float:
        """B: bytes/s of the link, from the load fit's slope."""
        return self.kv_bytes / self.load_token_s

    @property
    def attend_bytes_per_s(self) -> float:
        """B_c: bytes/s of KV that the CPU attends to; 0 where it is not measured."""
        return self.kv_bytes / self.attend.per_token_s if self.attend is not None else 0.0

    @property
    def serial_share(self) -> float:
        """1 - overlap: what of the shorter of link and gpu time is not hidden."""
        return 1.0 / self.layers if self.overlap is None else 1.0 - self.overlap

    def prefill_s(self, new_tokens: float, context_tokens: float) -> float:
        """t_gpu(T, S): gpu seconds of a prefill step; at least one token is computed."""
        tokens = max(1.0, new_tokens)
        return max(0.0, self.law_s(tokens, context_tokens) + self.excess_s(tokens, context_tokens))

    def law_s(self, new_tokens: float, context_tokens: float) -> float:
        """Gpu seconds of a prefill step by the cost model alone, without the grid."""
        return self.step_s(chunk_work(new_tokens, context_tokens))

    def step_s(self, work: StepWork[float]) -> float:
        """Seconds of a step by the cost model; it reads all KV, and of experts those touched."""
        parts = self.step.parts(work)
        return parts._replace(read_s=parts.read_s - self.idle_experts_s(work.tokens)).step_s

    def idle_experts_s(self, tokens: float) -> float:
        """Seconds that a step of `tokens` saves: the experts that none of them touches."""
        return self.experts_s * self.expert_idle**tokens if self.experts_s else 0.0

    def excess_s(self, new_tokens: float, context_tokens: float) -> float:
        """What the grid measured above the law (below: negative) at the nearest covered point."""
        if self.grid is None:
            return 0.0
        point = self.grid.clamp(new_tokens, context_tokens)
        return self.grid.seconds_at(*point) - self.law_s(*point)

    def attending(self) -> PlanRates:
        """The same node while its CPU attends and its link loads: each slows the other down."""
        attend = self.attend
        return replace(
            self,
            load=self.load.scaled(1.0 / self.h2d_attending),
            attend=None if attend is None else attend.scaled(1.0 / self.attend_loading),
            h2d_attending=1.0,
            attend_loading=1.0,
        )

    def under(self, *, storing: bool = False, cpu_busy: bool = False) -> PlanRates:
        """The same node with a link that shares: while it stores, while the CPU works."""
        share = (self.h2d_while_storing if storing else 1.0) * (
            self.h2d_cpu_busy if cpu_busy else 1.0
        )
        if share == 1.0:
            return self
        return replace(
            self,
            load=self.load.scaled(1.0 / share),
            weights_load_s=self.weights_load_s / share,
            h2d_while_storing=1.0 if storing else self.h2d_while_storing,
            h2d_cpu_busy=1.0 if cpu_busy else self.h2d_cpu_busy,
            # A processor that is busy already takes no more of the link by attending.
            h2d_attending=min(1.0, self.h2d_attending / share) if cpu_busy else self.h2d_attending,
        )


def activation_bytes_per_token(shape: ModelShape, dtype_bytes: float = 0.0) -> float:
    """Bytes of one token's layer inputs over all layers: L·h·p.

    Args:
        shape: the model.
        dtype_bytes: of an activation; 0 means the KV's own, but no less than two: a KV cache in
            eight bits is made from activations in sixteen.
    """
    return shape.layers * shape.hidden * (dtype_bytes or max(2.0, shape.kv_dtype_bytes))


def projection_flops(shape: ModelShape) -> float:
    """FLOPs to make one token's KV from its layer inputs, over all layers.

    4·h·n_kv·d per layer, which for one KV head per query head is KVPR's 4h² (Eq. 9); for MLA the
    product that gives the latent and its rotary part.
    """
    if shape.attention == "mla":
        width = float(shape.kv_lora_rank + shape.rope_head_dim)
    else:
        width = 2.0 * shape.kv_heads * shape.head_dim
    return 2.0 * shape.layers * shape.hidden * width


def rates_from_law(
    shape: ModelShape,
    node: NodeProfile,
    *,
    tp: int = 1,
    overlap: float | None = None,
    activation_dtype_bytes: float = 0.0,
) -> PlanRates:
    """Rates by formula, for a node of which only bandwidth and FLOP/s are known.

    Args:
        shape: the model.
        node: where it runs; its rates are the sum over `tp` ranks.
        tp: tensor-parallel ranks. Each needs the whole activations to project its KV heads from.
        overlap: as `PlanRates.overlap`.
        activation_dtype_bytes: as in `activation_bytes_per_token`.
    """
    token_kv_bytes = kv_bytes(shape, 1, tp)
    all_weights_bytes = shape.params_total * shape.weight_dtype_bytes
    experts_bytes = idle = 0.0
    if shape.experts > shape.experts_active:
        idle = 1.0 - shape.experts_active / shape.experts
        # total - active is what one token leaves alone of them (kappa.model.weight_read_bytes).
        experts_bytes = (shape.params_total - shape.params_active) / idle * shape.weight_dtype_bytes
    step = step_model(shape, node)
    heads_flops = projection_flops(shape) * token_kv_bytes / kv_bytes(shape, 1)
    return PlanRates(
        name=f"{shape.name} on {node.name}",
        layers=shape.layers,
        kv_bytes=token_kv_bytes,
        activation_bytes=tp * activation_bytes_per_token(shape, activation_dtype_bytes),
        load=LineFit("load", load_token_s(shape, node, tp), node.load_fixed_s),
        project=LineFit("KV projection", heads_flops / node.flops_per_s),
        step=replace(step, weights_s=all_weights_bytes / node.hbm_bytes_per_s),
        overlap=overlap,
        weights_load_s=all_weights_bytes / node.h2d_bytes_per_s,
        experts_s=experts_bytes / node.hbm_bytes_per_s,
        expert_idle=idle,
    )


def decode_s(
    rates: PlanRates,
    batch: int,
    context_tokens: int,
    activations: float = 0.0,
    *,
    streamed: bool = False,
) -> tuple[float, float]:
    """(link, gpu) seconds of a decoding step over all layers.

    Args:
        rates: the model on the node.
        batch: sequences, a new token each.
        context_tokens: of each sequence, all in host memory.
        activations: of them, how many per sequence come from activations; the rest is loaded.
        streamed: weights come over the link too, once per step.

    Raises:
        ValueError: no sequence, or more activations than context.
    """
    if batch < 1 or not 0 <= activations <= context_tokens:
        raise ValueError(
            f"batch {batch}, activations {activations} of {context_tokens} context tokens: give "
            "one sequence or more, and no more activations than context"
        )
    loaded = context_tokens - activations + rates.activation_ratio * activations
    link_s = rates.load.seconds(batch * loaded) + (rates.weights_load_s if streamed else 0.0)
    step_s = decode_gpu_s(rates, batch, context_tokens)
    return link_s, step_s + rates.project.seconds(batch * activations)


def decode_gpu_s(rates: PlanRates, batch: int, context_tokens: float) -> float:
    """Gpu seconds of a decoding step with all keys and values there.

    By the cost model; where decoding steps are measured, what they last longer (or shorter) than
    it has at the nearest measured point is added, as of a prefill step's grid.
    """
    resident = batch * context_tokens
    modelled_s = rates.step_s(decode_work(float(batch), resident))
    if rates.decode is None:
        return modelled_s
    point = rates.decode.clamp(batch, resident)
    excess_s = rates.decode.seconds_at(*point) - rates.step_s(decode_work(*point))
    return max(0.0, modelled_s + excess_s)


def tbt_s(
    rates: PlanRates,
    batch: int,
    context_tokens: int,
    activations: float = 0.0,
    *,
    streamed: bool = False,
    ahead: bool = False,
) -> float:
    """Seconds between tokens of a decoding step; arguments as for `decode_s`.

    `ahead` says that the engine loads for the next step's first layer while this step's last one
    computes, so that no layer's load is waited for; else each step fills the pipeline anew.
    """
    link_s, gpu_s = decode_s(rates, batch, context_tokens, activations, streamed=streamed)
    if ahead:
        return max(link_s, gpu_s)
    return max(link_s, gpu_s) + rates.serial_share * min(link_s, gpu_s)
