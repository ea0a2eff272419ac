"""The parts of a dashboard, before Grafana's JSON: rows of panels with their queries.

The helpers write the PromQL that recurs, so that counters only ever stand inside a rate and
histograms are merged before a quantile is taken. `NODE` restricts a query to the nodes chosen in
the dashboard's variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kappa.metrics import Metric
from kappa_dashboards import names

PanelKind = Literal["timeseries", "stat", "heatmap", "bars"]

WINDOW = "$__rate_interval"
NODE = 'node=~"$node"'
RARE = "a counter with labels appears with its first event"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = "timeseries"
    # In Grafana's grid units; a row is 24 wide.
    width: int = 8
    height: int = 8
    top: float | None = None  # of the axis; None: as the data
    thresholds: tuple[float, ...] = ()  # from these values on orange, then red
    falling: bool = False  # low values are bad
    stacked: bool = False
    # Why its queries may return nothing on a healthy cluster; empty: they never may.
    absent: str = ""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; `uid` is its name in links and files."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, top to bottom."""
        return tuple(panel for row in self.rows for panel in row.panels)


def rate(
    metric: Metric | str, by: Sequence[str] = (), where: str = "", part: str = "", how: str = "rate"
) -> str:
    """The summed rate of a counter (or of a part of a histogram), by labels."""
    return f"sum{_by(by)} ({how}({names.of(metric, part)}{_braces(where)}[{WINDOW}]))"


def gauge(metric: Metric | str, how: str = "sum", by: Sequence[str] = (), where: str = "") -> str:
    """A gauge, aggregated over all labels but those of `by`."""
    return f"{how}{_by(by)} ({names.of(metric)}{_braces(where)})"


def quantile(q: float, metric: Metric | str, by: Sequence[str] = (), where: str = "") -> str:
    """A quantile of a histogram over the window."""
    return f"histogram_quantile({q:g}, {rate(metric, (*by, 'le'), where, 'bucket')})"


def mean(metric: Metric | str, by: Sequence[str] = (), where: str = "") -> str:
    """The mean of a histogram over the window."""
    return f"{rate(metric, by, where, 'sum')} / {rate(metric, by, where, 'count')}"


def spread(metric: Metric | str, where: str = "", with_mean: bool = True) -> tuple[Query, ...]:
    """P50, P90 and P99 of a histogram, and its mean."""
    queries = [Query(quantile(q, metric, (), where), f"P{100 * q:g}") for q in (0.5, 0.9, 0.99)]
    return (*queries, Query(mean(metric, (), where), "mean")) if with_mean else tuple(queries)


def heat(metric: Metric | str, where: str = "") -> tuple[Query, ...]:
    """A histogram's buckets, for a heatmap: observations in the window."""
    return (Query(rate(metric, ("le",), where, "bucket", how="increase"), "{{le}}"),)


def rate_by_node(metric: Metric | str, legend: str = "{{node}}") -> Query:
    return Query(rate(metric, ("node",), NODE), legend)


def gauge_by_node(metric: Metric | str, legend: str = "{{node}}") -> Query:
    return Query(gauge(metric, "max", ("node",), NODE), legend)


def rates(metric: Metric | str, *labels: str, where: str = "") -> tuple[Query]:
    """A counter's rate by labels; their values name the series."""
    return (Query(rate(metric, labels, where), _legend(labels)),)


def gauges(metric: Metric | str, *labels: str, how: str = "sum", where: str = "") -> tuple[Query]:
    """A gauge by labels; their values name the series."""
    return (Query(gauge(metric, how, labels, where), _legend(labels)),)


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _braces(where: str) -> str:
    return f"{{{where}}}" if where else ""
