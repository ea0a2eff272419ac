"""Which engines stand still: they have work, and nothing of what they count has risen for long.

How long is long follows from what was expected: an engine may load or compute for seconds before
its next sign, so each look comes with its patience. An engine without work is never still. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappa.protocol import WorkerReport

Marks = tuple[float, ...]


def marks(report: WorkerReport) -> Marks:
    """What rises while an engine works."""
    return (
        report.steps_total,
        report.iterations_total,
        report.load_tokens_total,
        report.step_tokens_total,
    )


@dataclass(slots=True)
class _Seen:
    marks: Marks
    moved_s: float


class StallWatch:
    """Remembers of each worker when it last moved."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def still_s(self, worker: str, now: Marks, *, busy: bool, now_s: float) -> float:
        """For how long the worker has stood still, given its marks; `busy`: it has work to do."""
        seen = self._seen.get(worker)
        if seen is None or not busy or now != seen.marks:
            self._seen[worker] = _Seen(now, now_s)
            return 0.0
        return now_s - seen.moved_s

    def leave(self, worker: str) -> None:
        """The worker is gone."""
        self._seen.pop(worker, None)
