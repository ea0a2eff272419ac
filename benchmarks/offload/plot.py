"""The picture of `kappa bench offload`: every cell's policies, measured with their predictions.

One panel per cell. A bar is a policy's median latency with its interquartile range; the diamond is
what the rates predicted for it; the dashed line is the baseline. Written as PNG, without a display.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_WIDE = 3
_CHOSEN, _BASELINE, _OTHER = "#228833", "#4477aa", "#bbbbbb"


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw the rows of a result; returns `path`.

    Raises:
        ValueError: there are no rows.
    """
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        # The link alone is no policy.
        if row["policy"] != "link-alone":
            key = tuple(row[name] for name in ("setting", "system", "model", "cell"))
            cells.setdefault(key, []).append(row)
    if not cells:
        raise ValueError("there are no rows to draw: every cell was left out")
    wide = min(_WIDE, len(cells))
    high = -(-len(cells) // wide)
    figure = Figure(figsize=(5.2 * wide, 4.4 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False).ravel()
    for axes, (key, rows) in zip(panels, cells.items(), strict=False):
        _panel(axes, rows)
        axes.set_title(" ".join(key), fontsize=9)
    for axes in panels[len(cells) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"{result['device']}, {result['date']}: median and IQR; diamonds: predicted; "
        "green: chosen by the planner; blue: baseline",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    chosen = {row["same_as"] or row["policy"] for row in rows if row["chosen"]}
    # What is the same plan has the same bar.
    rows = [row for row in rows if not row["same_as"]]
    places = range(len(rows))
    axes.barh(
        places, [1e3 * row["latency_s"] for row in rows],
        xerr=[0.5e3 * row["latency_iqr_s"] for row in rows],
        color=[_color(row, chosen) for row in rows], capsize=2,
    )  # fmt: skip
    known = [(i, 1e3 * row["predicted_s"]) for i, row in enumerate(rows) if row["predicted_s"]]
    axes.plot([x for _, x in known], [i for i, _ in known], "D", color="#cc3311", markersize=5)
    base = next((row for row in rows if row["policy"] == row["baseline"]), None)
    if base is not None:
        axes.axvline(1e3 * base["latency_s"], color=_BASELINE, linestyle="--", linewidth=1)
    axes.set_yticks(list(places), [row["policy"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_xlim(left=0)


def _color(row: dict[str, Any], chosen: set[str]) -> str:
    if row["policy"] in chosen:
        return _CHOSEN
    return _BASELINE if row["policy"] == row["baseline"] else _OTHER
