"""Draws what Prometheus answered to every panel on one sheet (PNG), with matplotlib.

It shows the queries' data, panel by panel; it is no Grafana screenshot, and its caption says so.
Called by `dashboards.check`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dashboards.check import PanelAnswer

_COLUMNS = 5
_CELL_INCHES = (3.9, 2.5)
_LEGEND_LINES = 6
_UNITS = {
    "s": "s", "ms": "ms", "percentunit": "share", "percent": "%", "reqps": "requests/s",
    "cps": "1/s", "Bps": "bytes/s", "decmbytes": "MiB", "watt": "W", "none": "",
}  # fmt: skip


def draw(answers: Sequence[PanelAnswer], path: Path) -> None:
    """Write the sheet to `path`: a cell per panel, dashboards one after the other."""
    from matplotlib.figure import Figure

    boards = list(dict.fromkeys(answer.dashboard for answer in answers))
    groups = [[a for a in answers if a.dashboard == board] for board in boards]
    rows = sum(math.ceil(len(group) / _COLUMNS) for group in groups)
    figure = Figure(figsize=(_COLUMNS * _CELL_INCHES[0], rows * _CELL_INCHES[1] + 0.8))
    grid = figure.add_gridspec(rows, _COLUMNS)
    start_s = min((p[0] for a in answers for s in a.series for p in s.points[:1]), default=0.0)
    row = 0
    for group in groups:
        for number, answer in enumerate(group):
            axes = figure.add_subplot(grid[row + number // _COLUMNS, number % _COLUMNS])
            _cell(axes, answer, start_s)
        row += math.ceil(len(group) / _COLUMNS)
    figure.suptitle(
        "Panel queries evaluated in Prometheus (drawn with matplotlib; no Grafana screenshot): "
        + ", then ".join(boards),
        fontsize=11,
        y=1 - 0.25 / (rows * _CELL_INCHES[1] + 0.8),
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.4 / (rows * _CELL_INCHES[1] + 0.8)))
    figure.savefig(path, dpi=80)


def _cell(axes: Any, answer: PanelAnswer, start_s: float) -> None:
    unit = _UNITS.get(answer.unit, answer.unit)
    axes.set_title(f"{answer.title}{f' ({unit})' if unit else ''}", fontsize=7)
    axes.tick_params(labelsize=6)
    if not answer.series:
        why = answer.absent or "no data"
        axes.text(0.5, 0.5, why, ha="center", va="center", fontsize=6, wrap=True)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    {"heatmap": _heatmap, "bargauge": _bars, "stat": _stat}.get(answer.kind, _lines)(
        axes, answer, start_s
    )


def _lines(axes: Any, answer: PanelAnswer, start_s: float) -> None:
    for series in answer.series:
        times = [when - start_s for when, _ in series.points]
        values = [value for _, value in series.points]
        axes.plot(times, values, linewidth=0.9, label=series.name)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(0.0, bottom), top + 0.08 * abs(top))
    if len(answer.series) <= _LEGEND_LINES:
        axes.legend(fontsize=5, loc="upper left", framealpha=0.6)


def _stat(axes: Any, answer: PanelAnswer, start_s: float) -> None:
    _lines(axes, answer, start_s)
    axes.text(
        0.97, 0.08, f"{answer.series[0].points[-1][1]:.3g}", transform=axes.transAxes,
        ha="right", fontsize=16,
    )  # fmt: skip


def _bars(axes: Any, answer: PanelAnswer, _: float) -> None:
    names = [series.name for series in answer.series]
    axes.barh(names, [series.points[-1][1] for series in answer.series])


def _heatmap(axes: Any, answer: PanelAnswer, start_s: float) -> None:
    """Observations per bucket: Prometheus' buckets are cumulative, so neighbours are subtracted."""
    ordered = sorted(answer.series, key=lambda series: float(series.bucket or "inf"))
    times = sorted({when for series in ordered for when, _ in series.points})
    below = [0.0] * len(times)
    cells = []
    for series in ordered:
        values = dict(series.points)
        now = [values.get(when, 0.0) for when in times]
        cells.append([max(0.0, here - under) for here, under in zip(now, below, strict=True)])
        below = now
    axes.pcolormesh(
        [when - start_s for when in times], range(len(ordered)), cells, shading="nearest",
        cmap="viridis",
    )  # fmt: skip
    axes.set_yticks(range(len(ordered)), [series.bucket for series in ordered], fontsize=4)
