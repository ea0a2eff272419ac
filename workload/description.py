"""What a workload is like: counts and quantiles, above all how much of it could be reused.

For reports, and to check a reader against figures known of its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from workload.reuse import matched_blocks
from workload.shapes import TurnShape, Workload


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of one quantity over all requests."""

    mean: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class Description:
    """One workload in numbers.

    cached_tokens: of each prompt, how many full blocks' tokens an unlimited cache held already.
    kappa: cached tokens over new ones. reused_share: cached tokens over all prompt tokens.
    distinct_blocks: blocks that the cache held in the end. think_s: pauses before later turns.
    """

    name: str
    block_tokens: int
    sessions: int
    requests: int
    input_tokens: Spread
    output_tokens: Spread
    think_s: Spread
    cached_tokens: Spread
    kappa: Spread
    reused_share: float
    distinct_blocks: int

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)


def describe(workload: Workload, *, outputs_kept: bool = True) -> Description:
    """Describe one copy of a workload, its sessions one after the other with an unlimited cache.

    Args:
        workload: what to describe.
        outputs_kept: whether the cache keeps the blocks of outputs too, as engines do.
    """
    turns = [turn for session in workload.sessions for turn in session.turns]
    if not turns:
        raise ValueError(f"workload {workload.name!r} has no requests to describe")
    later = [turn for session in workload.sessions for turn in session.turns[1:]]
    input_tokens = np.array([turn.input_tokens for turn in turns])
    held_blocks, distinct_blocks = _replay(turns, outputs_kept)
    cached_tokens = held_blocks * workload.block_tokens
    new_tokens = np.maximum(input_tokens - cached_tokens, 1)  # an engine computes one at least
    return Description(
        name=workload.name,
        block_tokens=workload.block_tokens,
        sessions=len(workload.sessions),
        requests=len(turns),
        input_tokens=_spread(input_tokens),
        output_tokens=_spread([turn.output_tokens for turn in turns]),
        think_s=_spread([turn.after_s for turn in later] or [0.0]),
        cached_tokens=_spread(cached_tokens),
        kappa=_spread(cached_tokens / new_tokens),
        reused_share=float(cached_tokens.sum() / input_tokens.sum()),
        distinct_blocks=distinct_blocks,
    )


def _replay(turns: Sequence[TurnShape], outputs_kept: bool) -> tuple[np.ndarray, int]:
    """Blocks of each prompt that an unlimited cache held, and how many it holds in the end."""
    seen: set[int] = set()
    held: list[int] = []
    for turn in turns:
        matched = matched_blocks(turn.blocks, seen)
        held.append(matched)
        new = (turn.kept_blocks if outputs_kept else turn.blocks)[matched:]
        seen.update(new.tolist())
    return np.array(held), len(seen)


def _spread(values: Sequence[float] | np.ndarray) -> Spread:
    p50, p90 = np.quantile(values, [0.5, 0.9])
    return Spread(mean=float(np.mean(values)), p50=float(p50), p90=float(p90))
