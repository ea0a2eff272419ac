"""What a step, a load and a limit on steps take: the only place where these formulas stand.

Of scalars, compiled once; those that are typed so take arrays in Python, too. `kappa.cost` calls
them from Python, for simulated and real engines; the router's compiled loops call them over their
records (`kappa_router.ttft`, `kappa_router.engine_fit`). Seconds are those of the constants that
are given.

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
LEAST_OF_FIXED = 4.0
"""Prompts get at least this multiple of a step's fixed cost, or that would be most of the step."""
FACTORS = 14
"""How many sizes of a step, 1, 2, 4, ... tokens, have a factor of their own."""


@compiled
def chunk_pairs(new_tokens: N, context_tokens: N) -> N:
    """Pairs of query and key of new tokens behind a context: each meets all of it and, causally,
    half of the others."""
    return new_tokens * (context_tokens + 0.5 * new_tokens)


@compiled
def decode_pairs(requests: N, context_tokens: N) -> N:
    """The same of requests that decode a token each, with these contexts between them."""
    return context_tokens + 0.5 * requests


@compiled
def computing_s(tokens: N, pairs: N, token_s: float, pair_s: float) -> N:
    """Seconds of GEMMs and attention."""
    return tokens * token_s + pairs * pair_s


@compiled
def reading_s(steps: float | N, context_tokens: N, weights_s: float, context_token_s: float) -> N:
    """Seconds that `steps` steps read: the weights in each, and these tokens' KV in all."""
    return steps * weights_s + context_tokens * context_token_s


@compiled
def lasting_s(compute_s: float, read_s: float, fixed_s: float) -> float:
    """Seconds of a step: the longer of computing and reading, then the fixed cost."""
    return max(compute_s, read_s) + fixed_s


@compiled
def transfer_s(tokens: float, token_s: float, fixed_s: float) -> float:
    """Seconds of a transfer: a fixed cost and each token's; none costs nothing."""
    return fixed_s + tokens * token_s if tokens > 0 else 0.0


@compiled
def place(count: int, tokens: float) -> tuple[int, float]:
    """Between which of `count` factors a step of `tokens` lies: the first, and the next's share."""
    x = math.log2(max(tokens, 1.0))
    low = min(int(x), count - 2)
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
    return most * (step.weights_s + read_s / max(decoding, 1.0) + step.fixed_s)


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
    read_s, fixed_s = context_tokens * step.context_token_s, step.fixed_s
    longest_s = limit_s(step, most, decoding, read_s)
    beside_s = computing_s(decoding, context_tokens, step.token_s, step.pair_s)
    # Reading takes its time anyway: computing meanwhile costs those that decode nothing.
    room_s = max(longest_s, step.weights_s + read_s + fixed_s) - fixed_s - beside_s
    prompt_s = max(room_s, longest_s / 3, LEAST_OF_FIXED * fixed_s) * late
    new = prompt_s / (step.token_s + behind_tokens * step.pair_s)
    tiles = max(round((decoding + new) / TILE_TOKENS), decoding // TILE_TOKENS + 1)
    return float(tiles * TILE_TOKENS)
