"""How long the steps of a paced node last: by its law, or by a table of real GPUs. Where steps
leave the table its law goes on, which the log says once for each part of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from kappa.cost import StepModel
from kappa.hardware import NodeProfile
from kappa.silicon import SiliconTable, silicon_table

log = structlog.get_logger(__name__)


class PacedSteps:
    """Steps of one engine. pace: `kappa_workers.vllm.arguments.Pace.steps`.

    Raises:
        ValueError: an unknown or unusable table, or constants that are none.
    """

    def __init__(self, pace: Mapping[str, Any]) -> None:
        self._steps: SiliconTable | StepModel
        self._said: set[str] = set()
        if "node" in pace:
            node = NodeProfile.from_dict(pace["node"])
            self._steps = silicon_table(node.silicon).on(node)
        else:
            self._steps = StepModel.from_dict(pace)

    def real_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Real seconds of one step over [(new tokens, context tokens before them)]."""
        seconds = self._steps.real_s(chunks)
        if isinstance(self._steps, SiliconTable) and (new := self._steps.beyond - self._said):
            self._said |= new
            parts = " and ".join(sorted(new))
            log.warning("silicon_exceeded", table=self._steps.name, continued_by_law=parts)
        return seconds
