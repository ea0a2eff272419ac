"""Plans fitted to what host memory has: each block in a form in which it is there, cut at blocks.

Planners know tokens and seconds; which block is held as KV, as activations or as both is known here
only when its host blocks are held.
"""

from __future__ import annotations

from kappa.plan.segments import Kind, LoadPlan, Segment, from_runs


def loaded_tokens(plan: LoadPlan) -> int:
    """Cached tokens that come back before the new ones are computed: all but a recomputed tail.

    A tail, and a plan that recomputes all, are no load: the scheduler computes them like new
    tokens, in chunks that it counts.
    """
    if plan.segments and plan.segments[-1].kind == "R":
        return plan.segments[-1].start_tokens
    return plan.cached_tokens


def fit(plan: LoadPlan, block_tokens: int, kv: list[int], act: list[int]) -> tuple[Segment, ...]:
    """The plan's segments with every block in a form that host memory has, cut at blocks.

    Args:
        plan: of any planner; it may cover more tokens than there are blocks.
        kv, act: the host block of each, -1 where there is none; each block has one of them.
    """
    runs: list[tuple[Kind, int]] = []
    segments = iter(plan.segments)
    segment = next(segments)
    for index in range(len(kv)):
        while segment.end_tokens <= index * block_tokens:
            segment = next(segments)
        kind: Kind = segment.kind if segment.kind in ("A", "R") else "K"
        if kind != "R":
            wanted = act[index] if kind == "A" else kv[index]
            kind = kind if wanted >= 0 else ("K" if kind == "A" else "A")
        runs.append((kind, block_tokens))
    return from_runs(runs)
