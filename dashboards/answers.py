"""What a live Prometheus answered to a panel: a series for each query and set of labels."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: its name, and its points (seconds since the epoch, value)."""

    name: str
    points: tuple[tuple[float, float], ...]
    bucket: str = ""


@dataclass(slots=True)
class Answer:
    """What Prometheus says to one panel.

    empty: the panel's queries that returned no series with a number. absent: why that may be so.
    """

    dashboard: str
    title: str
    kind: str
    unit: str
    series: list[Series] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    absent: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether a query that must return something returned nothing."""
        return bool(self.empty) and not self.absent
