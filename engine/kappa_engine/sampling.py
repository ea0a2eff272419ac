"""The next token from its logits: greedy, or drawn at a temperature from the likeliest.

Every request draws from its own seeded generator, so what it says does not depend on who else is in
its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Colder than this is greedy: logits divided by it would leave single precision.
_COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of tokens, and the end of an answer."""

    # 0, or next to it, takes the likeliest token.
    temperature: float = 0.0
    # Tokens are drawn among the likeliest that together have this probability.
    top_p: float = 1.0
    # Of the draws; None: drawn, too.
    seed: int | None = None
    # Each ends the answer, as its last token.
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}: give a finite number, 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0, at most 1")


GREEDY = Sampling()


def sample(
    logits: Tensor, samplings: Sequence[Sampling], rngs: Sequence[np.random.Generator]
) -> list[int]:
    """One token for each row of finite logits (rows, vocabulary).

    samplings, rngs: one per row; a greedy row leaves its generator as it is.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature >= _COLDEST]
    if not drawn:
        return tokens

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    temperature = column([samplings[row].temperature for row in drawn])
    top_p, uniform = (
        column([samplings[r].top_p for r in drawn]),
        column([rngs[r].random() for r in drawn]),
    )
    # In single precision at least: half has not the digits to add up a vocabulary.
    rows = logits[drawn].to(torch.promote_types(logits.dtype, torch.float32))
    likely, order = torch.softmax(rows / temperature, dim=-1).sort(dim=-1, descending=True)
    kept = torch.where(likely.cumsum(dim=-1) - likely < top_p, likely, 0.0)
    mass = kept.cumsum(dim=-1)
    place = torch.searchsorted(mass, (uniform * mass[:, -1:]).to(mass.dtype), right=True)
    # Rounding may point behind the last that was kept; of logits that are no numbers, none is.
    place = torch.minimum(place, (kept > 0).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    for row, token in zip(drawn, order.gather(1, place)[:, 0].tolist(), strict=True):
        tokens[row] = token
    return tokens
