"""What a step, a load and a limit on steps take: the only place where these formulas stand.

Of scalars, compiled once; those that are typed so take arrays in Python, too. `kappa.cost` calls
them from Python, for simulated and real engines; the router's compiled loops call them over their
records (`kappa_router.ttft`, `kappa_router.engine_fit`). Seconds are those of the constants that
are given.

A step computes GEMMs and reads weights beside each other, then attends: its computing and its KV
reads overlap neither with GEMMs nor with weight reads. Held against tables of real GPUs in
docs/silicon.md; why the soft maximum is a line and no norm: docs/adr/0174.

A `step` is anything with the constants of a step as attributes: a `kappa.cost.StepModel`, a
worker's record. No class of ours is an argument of compiled code: what was compiled could not be
read back once the class is renamed.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled

N = TypeVar("N", float, NDArray[np.float64])

TILE_TOKENS = 128
"""GEMMs compute whole tiles of tokens."""
READS_WORTH = 0.9
"""Products of a prompt in a step last at least this multiple of the experts' reads that it adds."""
LATE_S = 0.25
"""A short prompt that waited for so long is on the way to be late, and gets more of each step."""
FACTORS = 14
"""How many sizes of a step, 1, 2, 4, ... tokens, have a factor of their own."""


@compiled
def chunk_pairs(new_tokens: N, context_tokens: N) -> N:
    """Pairs of query and key of new tokens behind a context: each meets all of it and, causally,
    half of the others."""
    return new_tokens * (context_tokens + 0.5 * new_tokens)


@compiled
def computing_s(tokens: N, pairs: N, token_s: float, pair_s: float) -> N:
    """Seconds of GEMMs and attention."""
    return tokens * token_s + pairs * pair_s


@compiled
def weights_read_s(step: Any, steps: N, tokens: N) -> N:
    """Seconds in which `steps` steps that have `tokens` between them read the weights: those that
    every step needs, and the experts that its tokens touch, E·(1 - (1 - k/E)^T) of E."""
    seconds = steps * step.weights_s
    if step.experts_s > 0:
        seconds += steps * step.experts_s * (1.0 - step.expert_idle ** (tokens / steps))
    return seconds


@compiled
def steps_s(step: Any, steps: N, tokens: N, pairs: N, reads: N) -> N:
    """Seconds of `steps` steps alike, one or more, that have so many tokens, pairs of query and
    key, and tokens whose KV is read, between them.

    The longer of GEMMs and weight reads counts, and the share of the shorter that it does not hide;
    then the longer of attention's computing and its KV reads; then sums over GPUs; then what is
    fixed.
    """
    gemm_s, weights_s = tokens * step.token_s, weights_read_s(step, steps, tokens)
    longer_s = max(gemm_s, weights_s)
    beside_s = longer_s + step.exposed * (gemm_s + weights_s - longer_s)
    attention_s = max(pairs * step.pair_s, reads * step.context_token_s)
    return beside_s + attention_s + tokens * step.comm_token_s + steps * step.fixed_s


@compiled
def transfer_s(tokens: float, token_s: float, fixed_s: float) -> float:
    """Seconds of a transfer: a fixed cost and each token's; none costs nothing."""
    return fixed_s + tokens * token_s if tokens > 0 else 0.0


@compiled
def place(count: int, tokens: float) -> tuple[int, float]:
    """Between which of `count` factors a step of `tokens` lies: the first, and the next's share."""
    # In this order NaN, of no tokens in no steps, counts as 1; only a finite number has an integer.
    x = math.log2(max(1.0, tokens))
    low = int(min(x, count - 2.0))
    return low, min(x - low, 1.0)


@compiled
def factor(factors: Any, tokens: float) -> float:
    """What a step of `tokens` takes over what its constants say.

    factors: logarithms, shape (sizes,), at steps of 1, 2, 4, ... tokens.
    """
    low, share = place(len(factors), tokens)
    return math.exp((1 - share) * factors[low] + share * factors[low + 1])


@compiled
def limit_s(step: Any, most: float, decoding: float, read_s: float) -> float:
    """What a step may last for those that decode in it, whose contexts take `read_s` to read:
    `most` times what it would last for one of them alone."""
    weights_s = weights_read_s(step, 1.0, 1.0)
    return most * (weights_s + read_s / max(decoding, 1.0) + step.fixed_s)


@compiled
def least_mixed_s(step: Any, decoding: float) -> float:
    """What a step takes in which a mixture's prompt is worth the reads that it adds to those of
    `decoding` requests; 0 for a dense model."""
    if step.experts_s <= 0:
        return 0.0
    own_s, all_s = weights_read_s(step, 1.0, decoding), step.weights_s + step.experts_s
    return all_s + max(own_s, READS_WORTH * (all_s - own_s)) + step.fixed_s


@compiled
def limited_tokens(
    step: Any, most: float, decoding: float, context_tokens: float, behind_tokens: float,
    late: float,
) -> float:  # fmt: skip
    """Tokens of a step in which `decoding` requests decode over `context_tokens`, these included;
    the others are a prompt's, behind `behind_tokens`. Infinite where nothing bounds it.

    most: as `limit_s` has it; late: a prompt that is late gets this multiple (1: in time).
    """
    if decoding <= 0 or most <= 0 or step.token_s <= 0:
        return math.inf
    read_s = context_tokens * step.context_token_s
    longest_s = limit_s(step, most, decoding, read_s)
    token_s = step.token_s + step.comm_token_s
    attend_s = max(context_tokens * step.pair_s, read_s)
    # A prompt's tokens touch all experts.
    weights_s, own_s = step.weights_s + step.experts_s, weights_read_s(step, 1.0, decoding)
    room_s = longest_s - step.fixed_s - attend_s - step.exposed * weights_s
    # What they read anyway: GEMMs as long as that are granted whatever the limit says.
    room_s = max(room_s, own_s) - decoding * token_s
    prompt_s = max(room_s, longest_s / 3, READS_WORTH * (weights_s - own_s)) * late
    new = prompt_s / (token_s + behind_tokens * step.pair_s)
    tiles = max(round((decoding + new) / TILE_TOKENS), decoding // TILE_TOKENS + 1)
    return float(tiles * TILE_TOKENS)
