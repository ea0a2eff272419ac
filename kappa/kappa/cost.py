"""The cost model: seconds of a step, of a load, of a prompt on a node.

A step computes GEMMs of 2P FLOPs per new token while it reads its weights, of a mixture those of
the experts that its tokens touch; then it attends, 4·L·n_q·d per pair of query and key while it
reads the KV of every context. Under tensor parallelism each token is summed over the GPUs twice a
layer. Beyond paper 001 (``kappa.paper``: F = 2P) attention, reads and sums count. Numbers may be
arrays, except where a docstring says otherwise. The formulas stand in ``kappa.step_seconds``, which
the router's compiled loops call, too. Seconds are a node's own, undilated, unless a name says
``real``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kappa import step_seconds
from kappa.checks import check_not_negative, check_positive, record_from, refusal
from kappa.compiled import interpreted
from kappa.hardware import NodeProfile
from kappa.model import (
    ModelShape,
    all_reduce_bytes,
    attention_flops,
    expert_params,
    gemm_flops,
    kv_bytes,
    weight_bytes,
)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """A request's prompt on one node: held in VRAM, held in a slower tier, still to compute; and of
    those in a slower tier, those on disk alone."""

    device_tokens: int
    cached_tokens: int
    new_tokens: int
    disk_tokens: int = 0

    def __post_init__(self) -> None:
        check_not_negative(self, "device_tokens", "cached_tokens", "new_tokens", "disk_tokens")

    @property
    def ratio(self) -> float:
        """κ = cached / new. An engine computes at least the last token, so new is at least 1."""
        return self.cached_tokens / max(1, self.new_tokens)

    @property
    def total_tokens(self) -> int:
        return self.device_tokens + self.cached_tokens + self.new_tokens


Floats = NDArray[np.float64]

N = TypeVar("N", float, Floats)

Bound = Literal["memory", "compute"]

_chunk_pairs = interpreted(step_seconds.chunk_pairs)
_computing_s, _steps_s = interpreted(step_seconds.computing_s), interpreted(step_seconds.steps_s)
_weights_s = interpreted(step_seconds.weights_read_s)
_transfer_s = interpreted(step_seconds.transfer_s)
_limited = interpreted(step_seconds.limited_tokens)
_steps_arrays_s: Any = interpreted(step_seconds.steps_s, max=np.maximum)

# A context so long that the pairs among the new tokens do not count.
_FAR_TOKENS = 1_000_000.0
_MOST_RATIO, _RATIO_ERROR = 2.0**40, 1e-12
# A link may be learnt to take nothing for a token; ratios stay finite.
_LEAST_TOKEN_S = 1e-12

QUESTION_TOKENS = 128
"""The κ_crit of a worker alone is that of a request with this many new tokens."""

USUAL_BLOCK_TOKENS = 16
"""Of a block of KV: what most of vLLM's backends for GPUs choose."""
SMALL_COPY_BYTES = 28 * 1024
"""Below it copies are small: vLLM's own bound between its kernel and the copy engine."""


class StepWork(NamedTuple, Generic[N]):
    """New tokens, pairs of query and key, and tokens whose KV is read."""

    tokens: N
    pairs: N
    reads: N


def chunk_work(new_tokens: N, context_tokens: N) -> StepWork[N]:
    """Compute new tokens behind a context: each meets all of it and, causally, half the others."""
    return StepWork(
        new_tokens, _chunk_pairs(new_tokens, context_tokens), context_tokens + new_tokens
    )


def decode_work(requests: N, context_tokens: N) -> StepWork[N]:
    """Decode a token for each of `requests` with `context_tokens` between them: of its own pair a
    token counts half, as in a chunk."""
    return StepWork(requests, context_tokens + 0.5 * requests, context_tokens + requests)


def batch_work(
    chunks: Iterable[tuple[float, float]], requests: float = 0, context_tokens: float = 0
) -> StepWork[float]:
    """What one step over [(new tokens, context tokens before them)] and decoding requests does."""
    tokens, pairs, reads = decode_work(requests, context_tokens)
    for new, context in chunks:
        tokens += new
        pairs += _chunk_pairs(new, context)
        reads += context + new
    return StepWork(tokens, pairs, reads)


class StepParts(NamedTuple, Generic[N]):
    """Seconds that steps spend on GEMMs and attention, on reading weights and KV, and besides.
    Computing and reading overlap in part: a step lasts the longer of the two at the least."""

    compute_s: N
    read_s: N
    fixed_s: float | N


@dataclass(frozen=True, slots=True)
class StepModel:
    """The constants of a step on one node, for one model.

    token_s: seconds of GEMM per new token; pair_s: seconds of attention per (query, key) pair;
    weights_s: seconds to read the weights that every step needs; context_token_s: seconds to read
    one token's KV; fixed_s: launch and scheduling; dilation: real seconds per emulated second.
    experts_s: seconds to read all experts of a mixture; expert_idle: the chance that a token leaves
    an expert alone. exposed: the share of the shorter of GEMMs and weight reads that the longer
    does not hide, from 0 (the step lasts the longer) to 1 (their sum). comm_token_s: seconds to sum
    one token's activations over the GPUs of tensor parallelism.
    """

    token_s: float
    pair_s: float
    weights_s: float
    context_token_s: float
    fixed_s: float = 0.0
    dilation: float = 1.0
    experts_s: float = 0.0
    expert_idle: float = 0.0
    exposed: float = 0.0
    comm_token_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "dilation")
        check_not_negative(self, *(field.name for field in fields(self)))
        for name in ("expert_idle", "exposed"):
            if getattr(self, name) > 1:
                raise refusal(self, name, getattr(self, name), "give a share from 0 to 1")

    def parts(self, work: StepWork[N], steps: float | N = 1) -> StepParts[N]:
        """Parts of `steps` steps that have this work between them."""
        tokens, pairs, reads = work
        compute_s = _computing_s(tokens, pairs, self.token_s, self.pair_s)
        # Of no steps nothing is read, whatever the tokens of each.
        weights_s = _weights_s(self, np.maximum(steps, 1e-300), tokens)
        fixed_s = tokens * self.comm_token_s + steps * self.fixed_s
        return StepParts(compute_s, weights_s + reads * self.context_token_s, fixed_s)

    def work_s(self, work: StepWork[N]) -> N:
        """Seconds of one step with this work."""
        # Forecasts and simulations live in this call.
        if isinstance(work[0], np.ndarray):
            return _steps_arrays_s(self, 1.0, *work)
        return _steps_s(self, 1.0, *work)

    def step_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of one step over [(new tokens, context tokens before them)]."""
        return self.work_s(batch_work(chunks))

    def real_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Real seconds of one step: `step_s` times the dilation."""
        return self.step_s(chunks) * self.dilation

    def real(self) -> StepModel:
        """The same node with constants in real seconds."""
        seconds = {name: getattr(self, name) * self.dilation for name in STEP_SECONDS}
        return replace(self, **seconds, dilation=1.0)

    def scaled(self, factor: float) -> StepModel:
        """The same node, `factor` times as slow."""
        return replace(self, dilation=self.dilation * factor) if factor != 1.0 else self

    def computing_scaled(self, factor: float) -> StepModel:
        """The same node with FLOPs that take `factor` times as long; memory is as it was."""
        return replace(self, token_s=self.token_s * factor, pair_s=self.pair_s * factor)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepModel:
        """Rebuild from `to_dict`; raises ValueError on an unknown or missing constant."""
        return record_from(cls, data, "StepModel")


STEP_SECONDS = tuple(each.name for each in fields(StepModel) if each.name.endswith("_s"))
"""Constants of a step that are seconds; the others are shares, and the dilation."""

# A prompt is on the way to be late once it took so many times its own computing, or `LATE_S`.
_LATE_FACTOR = 2.5


class StepLimit(NamedTuple):
    """How long a step may last for those that decode in it, as tokens that fit.

    A prompt that fills a step's token budget holds up everybody who decodes there by all of its
    computing. Computed in parts, it fills the GPU as well, and each part comes with a token for
    everyone (Agrawal et al., Sarathi-Serve, OSDI 2024, section 4). What bounds a part here is
    seconds, by the engine's cost model.

    factor: while requests decode, a step lasts at most so many times what it would for one of them
    alone; 0: nothing but the token budget bounds it.
    """

    step: StepModel
    factor: float

    def tokens(
        self, requests: int, context_tokens: float, behind_tokens: float = 0.0,
        left_tokens: int = 0, waited_s: float = 0.0,
    ) -> float:  # fmt: skip
        """Tokens of a step in which `requests` decode over so many tokens, these included, and the
        others are a prompt's, behind so many of it; infinite where nobody decodes.

        left_tokens, waited_s: of that prompt, whose seconds grow once it is late. Prompts get a
        third of the limit at the least, and a tile's tokens.
        """
        late = max(self.lateness(left_tokens, waited_s), 1.0)
        return _limited(self.step, self.factor, requests, context_tokens, behind_tokens, late)

    def lateness(self, prompt_tokens: int, waited_s: float) -> float:
        """What a prompt waited so far, over what it may before those that decode wait for it."""
        token_s = self.step.token_s + self.step.comm_token_s
        own_s = _computing_s(
            prompt_tokens, _chunk_pairs(prompt_tokens, 0), token_s, self.step.pair_s
        )
        return waited_s / (max(step_seconds.LATE_S, _LATE_FACTOR * own_s) * self.step.dilation)


def step_model(
    shape: ModelShape,
    node: NodeProfile,
    new_tokens: float = 1.0,
    context_tokens: float = _FAR_TOKENS,
) -> StepModel:
    """The step constants of a model on a node; counts are plain numbers.

    MLA's attention per pair depends on the step: it is that of one that computes `new_tokens`
    behind `context_tokens`, by default of decoding.
    """
    pairs = chunk_work(new_tokens, context_tokens).pairs
    gemm_flops_per_s = node.gemm_flops_per_s or node.flops_per_s
    attention_flops_per_s = node.attention_flops_per_s or node.flops_per_s
    weights_bytes_per_s = node.weights_bytes_per_s or node.hbm_bytes_per_s
    kv_bytes_per_s = node.kv_bytes_per_s or node.hbm_bytes_per_s
    in_experts, idle = expert_params(shape)
    expert_bytes = in_experts * shape.weight_dtype_bytes
    # What crosses is read as it comes, whatever its experts.
    crossing = node.host_weight_bytes
    here = max(weight_bytes(shape) - expert_bytes - crossing, 0.0)
    sums = 2 * shape.layers if node.gpus > 1 else 0
    return StepModel(
        token_s=gemm_flops(shape) / (gemm_flops_per_s * node.gemm_speedup(shape.gemm_bytes)),
        pair_s=attention_flops(shape, new_tokens, context_tokens) / pairs / attention_flops_per_s,
        weights_s=here / weights_bytes_per_s + crossing / node.h2d_bytes_per_s,
        context_token_s=kv_bytes(shape, 1.0, node.gpus) / kv_bytes_per_s,
        fixed_s=node.step_fixed_s + sums * node.peer_fixed_s,
        dilation=node.dilation,
        experts_s=expert_bytes / weights_bytes_per_s,
        expert_idle=idle,
        # Experts are small products one after another, of which reads hide nothing.
        exposed=1.0 if in_experts else node.exposed,
        comm_token_s=(
            all_reduce_bytes(shape, node.gpus) / node.peer_bytes_per_s
            if node.peer_bytes_per_s else 0.0
        ),
    )  # fmt: skip


def loading_node(
    shape: ModelShape, node: NodeProfile, block_tokens: int = USUAL_BLOCK_TOKENS
) -> NodeProfile:
    """The node with the link rates that copies of this model's KV reach; one that has them, as
    every measured node does, stays as it is.

    As vLLM lays KV out, a copy is a block of one layer on one GPU. One of n bytes takes
    √((n / rate)² + copy_fixed_s²): the host submits the next one while it crosses the link.
    """
    if not node.copy_fixed_s and not node.small_copy_bytes_per_s:
        return node
    copy_bytes = kv_bytes(shape, block_tokens, node.gpus) / shape.kv_layers / node.gpus
    small = node.small_copy_bytes_per_s if copy_bytes < SMALL_COPY_BYTES else 0.0

    def reached(bytes_per_s: float) -> float:
        copy_s = math.hypot(copy_bytes * node.gpus / bytes_per_s, node.copy_fixed_s)
        return node.gpus * min(copy_bytes / copy_s, small or math.inf)

    return replace(
        node,
        h2d_bytes_per_s=reached(node.h2d_bytes_per_s),
        d2h_bytes_per_s=reached(node.store_bytes_per_s),
        copy_fixed_s=0.0,
        small_copy_bytes_per_s=0.0,
    )


def load_token_s(shape: ModelShape, node: NodeProfile) -> float:
    """Seconds of link time to bring the KV of one token to the device, to all its GPUs if they are
    several; in usual blocks where the node's rates are not those of this model's copies
    (`loading_node`)."""
    return kv_bytes(shape, 1.0, node.gpus) / loading_node(shape, node).h2d_bytes_per_s


def transfer_s(tokens: N, token_s: float, fixed_s: float) -> N:
    """Seconds of link time for `tokens`: a fixed cost and so much for each; none costs nothing."""
    if isinstance(tokens, np.ndarray):
        return np.where(tokens > 0, fixed_s + tokens * token_s, 0.0)
    return _transfer_s(tokens, token_s, fixed_s)


def load_s(shape: ModelShape, node: NodeProfile, cached_tokens: N) -> N:
    """Seconds of link time to bring ``cached_tokens`` to the device; none costs nothing."""
    return transfer_s(cached_tokens, load_token_s(shape, node), node.load_fixed_s)


def prompt_s(step: StepModel, new: Floats, context: Floats, budget_tokens: int) -> Floats:
    """Seconds to compute prompts, each alone on its node, in steps of the token budget.

    new, context: shape (requests,); at least one token of each is computed.
    """
    left = np.maximum(new, 1.0)
    total = np.zeros_like(left)
    while np.any(left > 0):
        chunk = np.minimum(left, budget_tokens)
        total += np.where(left > 0, step.work_s(chunk_work(chunk, context)), 0.0)
        context, left = context + chunk, left - chunk
    return total


def compute_s(
    shape: ModelShape, node: NodeProfile, new_tokens: float, context_tokens: float
) -> float:
    """Gpu seconds of one prefill step of at least one token; counts are plain numbers."""
    tokens = max(new_tokens, 1)
    step = step_model(shape, node, tokens, context_tokens)
    return step.work_s(chunk_work(tokens, context_tokens))


def bound(loading_s: float, computing_s: float) -> Bound:
    """What bounds a request: `memory` if loading takes as long as computing, or longer."""
    return "memory" if loading_s >= computing_s else "compute"


def kappa_crit(counts: TokenCounts, loading_s: float, computing_s: float, token_s: float) -> float:
    """κ_crit of a request: the κ at which loading would take the seconds that computing takes
    behind the context that the request has. Its own κ is at or above it where it is memory-bound.

    token_s: seconds by which a further cached token lengthens the load.
    """
    level = counts.cached_tokens + (computing_s - loading_s) / max(token_s, _LEAST_TOKEN_S)
    return max(level, 0.0) / max(1, counts.new_tokens)


class IdleCost(NamedTuple):
    """A request on an idle node: seconds of its load and of computing its new tokens in one step,
    and what follows from these two."""

    load_s: float
    compute_s: float
    kappa_crit: float
    bound: Bound

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token (paper 001, Eq. 3): the load, then the step."""
        return self.load_s + self.compute_s


def idle_cost(counts: TokenCounts, shape: ModelShape, node: NodeProfile) -> IdleCost:
    """The cost of a request on an idle node, by the law."""
    context_tokens = counts.device_tokens + counts.cached_tokens
    seconds = (
        load_s(shape, node, counts.cached_tokens),
        compute_s(shape, node, counts.new_tokens, context_tokens),
    )
    critical = kappa_crit(counts, *seconds, load_token_s(shape, node))
    return IdleCost(*seconds, critical, bound(*seconds))


def kappa_eff(shape: ModelShape, node: NodeProfile, new_tokens: float) -> float:
    """The least κ, fractional, at which loading takes as long as computing, attention to the loaded
    tokens included; as `least_ratio` has it."""
    new = max(new_tokens, 1)
    return least_ratio(
        lambda ratio: load_s(shape, node, ratio * new) >= compute_s(shape, node, new, ratio * new)
    )


def least_ratio(bound: Callable[[float], bool]) -> float:
    """The least κ from which on a request is memory-bound, by doubling and halving, to nine digits.

    0 where it is at almost none; infinity where computing grows with the context as fast as
    bringing it back does, so that no request is.
    """
    if bound(_RATIO_ERROR):
        return 0.0
    low, high = 0.0, 1.0
    while not bound(high):
        low, high = high, 2.0 * high
        if high > _MOST_RATIO:
            return math.inf
    while high - low > _RATIO_ERROR * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high
