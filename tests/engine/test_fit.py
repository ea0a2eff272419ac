"""Plans made to fit what host memory has."""

import pytest

from engine.fitted import fit
from kappa.plan.segments import LoadPlan, layout


@pytest.mark.parametrize(
    ("plan", "kv", "act", "fitted"),
    [
        (layout(16), [1, 2, 3, 4], [-1] * 4, "KKKK"),
        (layout(16), [1, -1, 3, -1], [5, 6, -1, 8], "KAKA"),
        (layout(16, activations=16), [1, -1, 3, -1], [5, 6, -1, 8], "AAKA"),
        (layout(16, recompute=6), [1, 2, 3, -1], [-1, -1, -1, 8], "RRKA"),
        (layout(16, recompute=4, activations=4), [1, -1, 3, 4], [-1, 6, -1, -1], "RAKK"),
        # The scheduler computes a recomputed tail, so blocks end before the plan does.
        (layout(16, recompute=8, tail=True), [1, 2], [-1, -1], "KK"),
    ],
)
def test_every_block_comes_in_a_form_that_is_there(plan, kv, act, fitted: str) -> None:
    segments = fit(LoadPlan(plan), 4, kv, act)
    assert "".join(s.kind * ((s.end_tokens - s.start_tokens) // 4) for s in segments) == fitted
