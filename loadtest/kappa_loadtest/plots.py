"""The pictures of a load test's report, as inline SVG in the page's colours.

Lines and text of the page's own colour are drawn in a stand-in that becomes `currentColor`, so one
picture does for light and dark; the data's colours are readable on both. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kappa_loadtest.figures import itl_s
from kappa_loadtest.results import Floats

_PAGE_COLOUR = "#010203"
_FAILED = "#d1495b"
COLOURS = (
    "#4c8fd0", "#e08e45", "#4fa36c", "#b57bc4", "#c9b037", "#5fb6bd", "#a0785a", "#8c8c8c",
)  # fmt: skip
_PAGE_COLOURED = (
    "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color",
)  # fmt: skip
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9.5,
    "grid.alpha": 0.18, "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, **dict.fromkeys(_PAGE_COLOURED, _PAGE_COLOUR),
}  # fmt: skip
_WIDTH_IN = 10.5
_LEAST_S = 1e-4
_LEGEND_LETTERS = 90
_POINTS, _MOST_FAILED = 4000, 1000


Summary = Mapping[str, Any]


def pictures(table: pl.DataFrame, summary: Summary) -> dict[str, str]:
    """The pictures of a run with requests, by name; empty ones are left out."""
    found = {}
    for name, draw, title in (
        ("cdf", _latency_cdfs, "Cumulative shares of TTFT, inter-token and end-to-end times"),
        ("time", _ttft_over_time, "Time to first token against time, with failed requests"),
        ("rates", _rates_over_time, "Throughput and requests in flight over time"),
        ("ratio", _ratio_by_node, "Ratio of cached to new tokens against the chosen node"),
    ):
        if drawn := picture(name, partial(draw, table=table, summary=summary), title):
            found[name] = drawn
    return found


def picture(name: str, draw: Callable[[Figure], None], title: str) -> str:
    """The SVG of a figure, empty if `draw` draws nothing; `name` is unique within a page."""
    # The salt makes ids unique among pictures, and the same for every run.
    style: Any = {**_STYLE, "svg.hashsalt": name}
    text = io.StringIO()
    with mpl.rc_context(style):
        figure = Figure(layout="constrained")
        draw(figure)
        if not figure.axes:
            return ""
        FigureCanvasSVG(figure)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.S)
    found = found.replace(_PAGE_COLOUR, "currentColor")
    return found.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _latency_cdfs(figure: Figure, table: pl.DataFrame, summary: Summary) -> None:
    """Share of requests (of tokens, for ITL) within a time: TTFT, ITL and E2E side by side."""
    done = table.filter(pl.col("error") == "")
    sent_s = done["first_token_s"] - done["sent_s"]
    panels: tuple[tuple[str, dict[str, pl.Series]], ...] = (
        ("TTFT", {"from when it was due": table["ttft_s"], "from sending": sent_s}),
        ("inter-token", {"between chunks": itl_s(table)}),
        ("end-to-end", {"from when it was due": table["e2e_s"]}),
    )
    figure.set_size_inches(_WIDTH_IN, 2.9)
    for axes, (title, curves) in zip(figure.subplots(1, 3), panels, strict=True):
        for number, (label, values) in enumerate(curves.items()):
            seconds, shares = cdf(values)
            if not len(seconds):
                axes.plot([], [], label=f"{label}: none")
                continue
            # From zero, or values that are all alike would have no line.
            seconds = np.maximum(np.concatenate((seconds[:1], seconds)), _LEAST_S)
            shares = np.concatenate(([0.0], shares))
            look = {"linestyle": "--" if number else "-", "color": COLOURS[number]}
            axes.step(seconds, shares, where="post", label=label, **look)
        logarithmic(axes, "x")
        axes.set(title=title, xlabel="seconds", ylim=(0, 1.02))
        axes.legend(fontsize=8, loc="lower right")
    figure.axes[0].set_ylabel("share")


def _ttft_over_time(figure: Figure, table: pl.DataFrame, summary: Summary) -> None:
    """TTFT of each request (of a sample of many) against when it was due; errors at their end."""
    figure.set_size_inches(_WIDTH_IN, 3.0)
    limit_s = summary["slo"]["ttft_limit_s_p50"]
    axes = figure.subplots()
    by_node = _by_node(sampled(table.drop_nulls("ttft_s")))
    for (node, points), colour in zip(by_node, COLOURS, strict=False):
        ttft_s, label = points["ttft_s"].clip(_LEAST_S), _short(node) or "requests"
        look: Any = {"s": 7, "alpha": 0.55, "color": colour, "linewidths": 0}
        axes.scatter(points["scheduled_s"], ttft_s, label=label, **look)
    failed = sampled(table.filter(pl.col("error") != ""), _MOST_FAILED)
    if failed.height:
        after_s = (failed["ended_s"] - failed["scheduled_s"]).clip(_LEAST_S)
        look = {"s": 26, "marker": "x", "color": _FAILED, "label": "failed, after so long"}
        axes.scatter(failed["scheduled_s"], after_s, **look)
    if limit_s:
        axes.axhline(limit_s, color=_PAGE_COLOUR, linewidth=0.9, linestyle=":")
        place: Any = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate("limit (median)", (1, limit_s), fontsize=8, **place)
    if by_node or failed.height:
        logarithmic(axes, "y")
        _legend_above(axes, markerscale=2)
    axes.set(xlabel="due, seconds since the start", ylabel="TTFT, s")


def _rates_over_time(figure: Figure, table: pl.DataFrame, summary: Summary) -> None:
    """Requests due, completed and failed per second; below, how many were in flight."""
    figure.set_size_inches(_WIDTH_IN, 4.2)
    timeline, bin_s = summary["timeline"], summary["timeline"]["bin_s"]
    times_s = (np.arange(len(timeline["due"])) + 0.5) * bin_s
    upper, lower = figure.subplots(2, 1, sharex=True)
    for series, label, colour in (
        ("due", "due", COLOURS[7]),
        ("completed", "completed", COLOURS[0]),
        ("met", "within the objective", COLOURS[2]),
        ("failed", "failed", _FAILED),
    ):
        rate = np.array(timeline[series]) / bin_s
        if rate.any():
            upper.step(times_s, rate, where="mid", label=label, color=colour, linewidth=1.3)
    look: Any = {"step": "mid", "alpha": 0.45, "color": COLOURS[0], "linewidth": 0}
    lower.fill_between(times_s, timeline["in_flight"], label="in flight", **look)
    waiting = timeline["waiting"]
    if max(waiting) > 1:
        lower.step(times_s, waiting, where="mid", color=COLOURS[1], label="due, not yet sent")
    upper.set(ylabel="requests/s", ylim=(0, None))
    lower.set(ylabel="requests", ylim=(0, None), xlabel="seconds since the start")
    for axes in (upper, lower):
        _legend_above(axes)


def _ratio_by_node(figure: Figure, table: pl.DataFrame, summary: Summary) -> None:
    """κ over κ_crit of the sampled requests, by the node that served them."""
    done = table.drop_nulls(["ttft_s", "ratio", "crit"])
    by_node = _by_node(sampled(done.filter(pl.col("node") != "")))
    if not by_node:
        return
    figure.set_size_inches(_WIDTH_IN, 0.9 + 0.55 * len(by_node))
    axes = figure.subplots()
    rng = np.random.default_rng(0)
    for place, (_, points) in enumerate(by_node):
        # No cached tokens has no logarithm: drawn at the left edge; κ_crit of 0: at the right one.
        ratios = (points["ratio"] / points["crit"]).clip(1e-3, 1e3)
        heights = place + rng.uniform(-0.28, 0.28, points.height)
        axes.scatter(ratios, heights, s=7, alpha=0.5, color=COLOURS[place], linewidths=0)
    axes.set_yticks(range(len(by_node)), [_short(node) for node, _ in by_node])
    logarithmic(axes, "x")
    axes.set_ylim(len(by_node) - 0.4, -0.6)
    axes.axvline(1.0, color=_FAILED, linewidth=1.6)
    axes.set(xlabel="κ / κ_crit, from 0.001 to 1,000; right of the red line: memory-bound")


def cdf(values: pl.Series, points: int = 400) -> tuple[Floats, Floats]:
    """Values in order, and the share of all that is at most each; at most `points` of them."""
    ordered = np.sort(values.drop_nulls().to_numpy().astype(np.float64))
    if not len(ordered):
        return ordered, ordered
    at = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).astype(np.int64))
    return ordered[at], (at + 1) / len(ordered)


def sampled(table: pl.DataFrame, most: int = _POINTS) -> pl.DataFrame:
    """Every n-th row, at most `most` rows."""
    return table.gather_every(max(-(-table.height // most), 1))


def _by_node(points: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    """Points by node, those with most first; nodes beyond the last colour are merged."""
    found = points.partition_by("node", as_dict=True)
    ordered = sorted(
        ((str(name[0]), rows) for name, rows in found.items()),
        key=lambda pair: (-pair[1].height, pair[0]),
    )
    own = len(COLOURS) - 1
    if len(ordered) <= own + 1:
        return ordered
    return [*ordered[:own], ("all other nodes", pl.concat([rows for _, rows in ordered[own:]]))]


def logarithmic(axes: Any, name: str) -> None:
    """Make an axis logarithmic, with few enough plain numbers that they do not overlap."""
    axes.set(**{f"{name}scale": "log"})
    low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
    decades = np.log10(high / low)
    steps = (1,) if decades > 2.5 else (1, 3) if decades > 1.5 else (1, 2, 5)
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=steps if decades > 0.5 else tuple(range(1, 10))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend_above(axes: Any, **options: Any) -> None:
    """A legend above the axes, where it hides no data."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = len(labels) if sum(map(len, labels)) <= _LEGEND_LETTERS else 4
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(fontsize=8, ncols=columns, **place, **options)


def _short(name: str) -> str:
    name = name if len(name) <= 28 else f"{name[:25]}…"
    # A dollar sign would start mathematics.
    return name.replace("$", r"\$")
