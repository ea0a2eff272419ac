"""The microbenchmark's picture: overhead against κ with both fits, measured against fitted TTFT.

One column per node. Above: the paper's overhead at each point, the curve of Eq. 8 that the paper's
method fits to it, and the curves of the recovered and the configured κ_crit. Below: the median TTFT
of each point and arm against the TTFT of the regression. Written as PNG, without a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kappa.paper import pcie_overhead

_ARMS = (("new", "o", "#4477aa"), ("device", "s", "#228833"), ("host", "^", "#cc3311"))


def draw(nodes: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the rows of `result.node_result`; returns `path`."""
    figure = Figure(figsize=(5.2 * len(nodes), 8), layout="constrained")
    panels = figure.subplots(2, len(nodes), squeeze=False)
    for column, row in enumerate(nodes):
        _overhead(panels[0][column], row)
        _ttft(panels[1][column], row)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _overhead(axes: Axes, row: dict[str, Any]) -> None:
    published, isolated = row["paper_fit"], row["paper_fit_device_baseline"]
    kappas = [point["kappa"] for point in published["points"]]
    axes.errorbar(
        kappas, [point["overhead"] for point in published["points"]],
        [point["deviation"] for point in published["points"]],
        fmt="o", color="#cc3311", capsize=2, label="against new tokens only (paper)",
    )  # fmt: skip
    axes.plot(
        kappas, [point["overhead"] for point in isolated["points"]],
        "s", color="#228833", markersize=4, label="against a device hit",
    )  # fmt: skip
    grid = np.geomspace(min(kappas) / 2, max(kappas) * 2, 200)
    recovered = row["recovered"]["kappa_crit"]["value"]
    for critical, style, label in (
        (published["kappa_crit"], "--", "paper's fit"),
        (recovered, "-", "regression"),
        (row["configured"]["kappa_crit"], ":", "configured"),
    ):
        if critical is not None:
            axes.plot(
                grid, [pcie_overhead(kappa, critical) for kappa in grid], style,
                color={"--": "#cc3311", "-": "#4477aa", ":": "black"}[style],
                label=f"{label}: κ_crit {critical:.1f}",
            )  # fmt: skip
    axes.set(
        xscale="log", xlabel="κ = C/N", ylabel="link's share of TTFT", ylim=(0, 1),
        title=f"{row['node']} (paced)",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _ttft(axes: Axes, row: dict[str, Any]) -> None:
    for arm, marker, colour in _ARMS:
        cells = [cell for cell in row["cells"] if cell["arm"] == arm]
        axes.plot(
            [1e3 * cell["ttft_fit_s"] for cell in cells],
            [1e3 * cell["ttft_median_s"] for cell in cells],
            marker, color=colour, label={"new": "new tokens only"}.get(arm, f"{arm} hit"),
        )  # fmt: skip
    most = max(1e3 * cell["ttft_median_s"] for cell in row["cells"])
    axes.plot([0, most], [0, most], color="black", linewidth=0.8)
    axes.set(xlabel="fitted TTFT, ms", ylabel="measured TTFT, ms (median)")
    axes.set_title(
        f"R² {row['r_squared']:.4f} of requests, {row['cells_r_squared']:.5f} of medians"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
