"""The dashboard "Overview": one screen to look at first when called at night.

Twelve panels: is it well (objective, errors, who is gone), what is it short of (backlogs, VRAM,
caches), is the router right (prediction). Most are panels of the other two, which say why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kappa import metrics as m
from kappa_dashboards.cluster import CLUSTER
from kappa_dashboards.panels import (
    NODE,
    RARE,
    Dashboard,
    Panel,
    PanelRow,
    Query,
    gauge,
    quantile,
    rates,
)
from kappa_dashboards.routing import ROUTING

_KNOWN = {panel.title: panel for board in (CLUSTER, ROUTING) for panel in board.panels}
_WORKERS = gauge(m.WORKERS)
_REFUSED = (
    'outcome=~"overloaded|queue_full|deadline_unmeetable|bodies_outstanding|rate_limit_exceeded|'
    'too_many_concurrent"'
)


def _again(which: str, **changes: Any) -> Panel:
    """A panel of another dashboard, in this one's size."""
    return replace(_KNOWN[which], **{"width": 6, **changes})


OVERVIEW = Dashboard(
    "kappa-overview",
    "kappa-serve: Overview",
    "What to look at first: is it well, what is it short of, is the router right.",
    (
        PanelRow(
            "Now",
            (
                _again("First token in time", height=4),
                _again("Answered", height=4),
                Panel("Workers gone", "The most workers of the last hour, less those of now.",
                      "none", (Query(f"max_over_time({_WORKERS}[1h:15s]) - {_WORKERS}", "gone"),),
                      "stat", 6, 4, thresholds=(1, 2)),
                Panel("Breakers open", "Nodes that get nothing, or a trial, because they failed.",
                      "none", (Query(f"count({m.BREAKER_OPEN.name} > 0) or vector(0)", "nodes"),),
                      "stat", 6, 4, thresholds=(1, 2)),
            ),
        ),
        PanelRow(
            "Last half hour",
            (
                _again("Requests by status"),
                Panel("Time to first token against the objective", "P50 and P99 of the seconds to "
                      "the first token, and the objective chosen above.", "s",
                      (Query(quantile(0.5, m.TTFT, (), NODE), "P50"),
                       Query(quantile(0.99, m.TTFT, (), NODE), "P99"),
                       # A constant needs a series to be drawn beside.
                       Query(f"0 * {_WORKERS} + $ttft_slo", "objective")), width=6),
                Panel("Load shedding", "Requests per second that were refused for load or for "
                      "their tenant's limits, by why.", "reqps",
                      rates(m.TENANT_REQUESTS, "outcome", where=_REFUSED), width=6,
                      stacked=True, absent=RARE),
                _again("Error of the prediction"),
                _again("Link backlog"),
                _again("GPU backlog"),
                _again("Cached tokens by tier"),
                _again("Cache in use", title="VRAM and host tier in use"),
            ),
        ),
    ),
)  # fmt: skip
