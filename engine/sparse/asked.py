"""What is asked of an engine's lanes and what they give: plan by name, counts, a round's results.

`engine.sparse.serving` does the work; the loop checks what a request asks here before it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.sequence import Sequence
from kappa.plan.planners import Planner, Planning

SPARSE = "sparse"
"""The name of the plan that leaves a prefix in host memory."""


@dataclass(slots=True)
class SparseCounts:
    """Requests that moved into a lane, that began in one, and that had to leave one; tokens that
    were computed sparsely; passes that failed."""

    moved: int = 0
    begun: int = 0
    expelled: int = 0
    tokens: int = 0
    failed: int = 0


@dataclass(slots=True)
class Done:
    """What a round of sparse passes gave: logits of each request's last token; those that cannot go
    on in their lane; and of those that began, seconds of link and bytes."""

    logits: dict[Sequence, Tensor] = field(default_factory=dict)
    lost: list[Sequence] = field(default_factory=list)
    begun: dict[Sequence, tuple[float, int]] = field(default_factory=dict)


def check_asked(
    approx: bool, planner: str | Planner | None, lanes: bool, planning: Planning
) -> None:
    """Do nothing for a request whose planner there is, and a lane if it may be approximate.

    Raises:
        ValueError: there is none; says which planners there are, or what a lane needs.
    """
    if approx and not lanes:
        raise ValueError(
            "approximate answers were asked of an engine without lanes: set engine.approx"
        )
    if not (approx and planner == SPARSE):
        planning.check(planner)
