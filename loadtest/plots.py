"""The pictures of a load test's report, as SVG that stands inside the page and takes its colours.

Lines and text of the page's own colour are drawn in a stand-in that becomes `currentColor`, so one
picture does for light and dark; the data's colours are readable on both. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadtest.figures import itl_s, timeline
from loadtest.results import Floats

_PAGE_COLOUR = "#010203"
_FAILED = "#d1495b"
_COLOURS = (
    "#4c8fd0", "#e08e45", "#4fa36c", "#b57bc4", "#c9b037", "#5fb6bd", "#a0785a", "#8c8c8c",
)  # fmt: skip
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _PAGE_COLOUR,
    "axes.labelcolor": _PAGE_COLOUR,
    "axes.edgecolor": _PAGE_COLOUR,
    "xtick.color": _PAGE_COLOUR,
    "ytick.color": _PAGE_COLOUR,
    "grid.color": _PAGE_COLOUR,
    "grid.alpha": 0.18,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_LEAST_S = 1e-4
_MOST_NODES = len(_COLOURS)
_LEGEND_LETTERS = 90
_POINTS, _MOST_FAILED = 4000, 1000


def latency_cdfs(table: pl.DataFrame) -> str:
    """Share of requests (of tokens, for ITL) within a time: TTFT, ITL and E2E side by side."""
    done = table.filter(pl.col("error") == "")
    sent_s = done["first_token_s"] - done["sent_s"]
    pictures = (
        ("TTFT", (("from when it was due", table["ttft_s"]), ("from sending", sent_s))),
        ("inter-token", (("between chunks", itl_s(table)),)),
        ("end-to-end", (("from when it was due", table["e2e_s"]),)),
    )
    with _style("cdf"):
        figure = Figure(figsize=(10.5, 2.9), layout="constrained")
        for axes, (title, curves) in zip(figure.subplots(1, 3), pictures, strict=True):
            for number, (label, values) in enumerate(curves):
                _draw_cdf(axes, values, label, number)
            _logarithmic(axes, "x")
            axes.set(title=title, xlabel="seconds", ylim=(0, 1.02))
            axes.legend(fontsize=8, loc="lower right")
        figure.axes[0].set_ylabel("share")
        return _svg(figure, "Cumulative shares of TTFT, inter-token and end-to-end times")


def _draw_cdf(axes: Any, values: pl.Series, label: str, number: int) -> None:
    seconds, shares = cdf(values)
    if not len(seconds):
        axes.plot([], [], label=f"{label}: none")
        return
    # From zero, or values that are all alike would have no line.
    seconds = np.maximum(np.concatenate((seconds[:1], seconds)), _LEAST_S)
    shares = np.concatenate(([0.0], shares))
    style = "-" if not number else "--"
    axes.step(seconds, shares, style, where="post", label=label, color=_COLOURS[number])


def ttft_over_time(table: pl.DataFrame, limit_s: float | None) -> str:
    """TTFT of each request (of a sample of many) against when it was due; errors at their end.

    limit_s: the median request's limit, None without an objective.
    """
    with _style("time"):
        figure = Figure(figsize=(10.5, 3.0), layout="constrained")
        axes = figure.subplots()
        by_node = _by_node(sampled(table.drop_nulls("ttft_s")))
        for (node, points), colour in zip(by_node, _COLOURS, strict=False):
            axes.scatter(
                points["scheduled_s"], points["ttft_s"].clip(lower_bound=_LEAST_S),
                s=7, alpha=0.55, color=colour, label=_short(node) or "requests", linewidths=0,
            )  # fmt: skip
        failed = sampled(table.filter(pl.col("error") != ""), _MOST_FAILED)
        if failed.height:
            axes.scatter(
                failed["scheduled_s"],
                (failed["ended_s"] - failed["scheduled_s"]).clip(lower_bound=_LEAST_S),
                s=26, marker="x", color=_FAILED, label="failed, after so long",
            )  # fmt: skip
        if limit_s:
            axes.axhline(limit_s, color=_PAGE_COLOUR, linewidth=0.9, linestyle=":")
            axes.annotate(
                "limit (median)", (1, limit_s), xycoords=("axes fraction", "data"),
                ha="right", va="bottom", fontsize=8,
            )  # fmt: skip
        if by_node or failed.height:
            _logarithmic(axes, "y")
            _legend_above(axes, markerscale=2)
        axes.set(xlabel="due, seconds since the start", ylabel="TTFT, s")
        return _svg(figure, "Time to first token against time, with failed requests")


def rates_over_time(table: pl.DataFrame) -> str:
    """Requests due, completed and failed per second; below, how many were in flight."""
    line = timeline(table)
    times_s = line.times_s()
    with _style("rates"):
        figure = Figure(figsize=(10.5, 4.2), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        for series, label, colour in (
            ("due", "due", _COLOURS[7]), ("completed", "completed", _COLOURS[0]),
            ("met", "within the objective", _COLOURS[2]), ("failed", "failed", _FAILED),
        ):  # fmt: skip
            rate = line.per_second(series)
            if rate.any():
                upper.step(times_s, rate, where="mid", label=label, color=colour, linewidth=1.3)
        lower.fill_between(
            times_s, line.in_flight(), step="mid", alpha=0.45, color=_COLOURS[0],
            label="in flight", linewidth=0,
        )  # fmt: skip
        waiting = line.waiting()
        if waiting.max(initial=0) > 1:
            lower.step(times_s, waiting, where="mid", color=_COLOURS[1], label="due, not yet sent")
        upper.set(ylabel="requests/s", ylim=(0, None))
        lower.set(ylabel="requests", ylim=(0, None), xlabel="seconds since the start")
        for axes in (upper, lower):
            _legend_above(axes)
        return _svg(figure, "Throughput and requests in flight over time")


def ttft_by_owner(rows: Sequence[dict[str, Any]], what: str) -> str:
    """Median, 90th and 99th percentile of TTFT of each owner (at most sixteen of them)."""
    rows = [row for row in rows if row["ttft_s"]["p50"] is not None][:16]
    if not rows:
        return ""
    with _style(what):
        figure = Figure(figsize=(5.1, 0.9 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            p50, p90, p99 = (max(row["ttft_s"][q], _LEAST_S) for q in ("p50", "p90", "p99"))
            axes.plot([p50, p99], [place, place], color=_COLOURS[0], linewidth=2.5, alpha=0.5)
            axes.plot([p50], [place], "o", color=_COLOURS[0], markersize=6)
            axes.plot([p90], [place], "|", color=_COLOURS[0], markersize=10)
            axes.plot([p99], [place], "|", color=_FAILED, markersize=10)
        axes.set_yticks(range(len(rows)), [_short(row["name"]) for row in rows])
        _logarithmic(axes, "x")
        axes.set(xlabel="TTFT, s: median (dot), p90, p99 (red)", title=f"by {what}")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        return _svg(figure, f"Time to first token by {what}")


def ratio_by_node(table: pl.DataFrame) -> str:
    """κ of the sampled requests against the node that served them, with each node's κ_crit."""
    done = table.drop_nulls(["ttft_s", "ratio"])
    by_node = _by_node(sampled(done.filter(pl.col("node") != "")))
    if not by_node:
        return ""
    with _style("ratio"):
        figure = Figure(figsize=(10.5, 0.9 + 0.55 * len(by_node)), layout="constrained")
        axes = figure.subplots()
        rng = np.random.default_rng(0)
        for place, (_, points) in enumerate(by_node):
            # No cached tokens has no logarithm: drawn at the left edge.
            ratios = points["ratio"].clip(lower_bound=1e-2)
            heights = place + rng.uniform(-0.28, 0.28, points.height)
            axes.scatter(
                ratios, heights, s=7, alpha=0.5, color=_COLOURS[place % len(_COLOURS)],
                linewidths=0,
            )  # fmt: skip
            known = points["crit"].drop_nulls()
            if len(known):
                crit = known[-1]
                axes.plot([crit, crit], [place - 0.42, place + 0.42], color=_FAILED, linewidth=1.6)
        axes.set_yticks(range(len(by_node)), [_short(node) for node, _ in by_node])
        _logarithmic(axes, "x")
        axes.set(xlabel="κ = cached / new tokens (0 at 0.01); red: the node's κ_crit")
        axes.set_ylim(len(by_node) - 0.4, -0.6)
        return _svg(figure, "Ratio of cached to new tokens against the chosen node")


def cdf(values: pl.Series, points: int = 400) -> tuple[Floats, Floats]:
    """Values in order, and the share of all that is at most each; at most `points` of them."""
    ordered = np.sort(values.drop_nulls().to_numpy().astype(np.float64))
    if not len(ordered):
        return ordered, ordered
    at = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).astype(np.int64))
    return ordered[at], (at + 1) / len(ordered)


def sampled(table: pl.DataFrame, most: int = _POINTS) -> pl.DataFrame:
    """Every n-th row, at most so many."""
    return table.gather_every(max(-(-table.height // most), 1))


def _logarithmic(axes: Any, name: str) -> None:
    """Scale what is drawn by decades, with plain numbers so few that they do not meet."""
    axes.set(**{f"{name}scale": "log"})
    low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
    decades = np.log10(high / low)
    steps = (1,) if decades > 2.5 else (1, 3) if decades > 1.5 else (1, 2, 5)
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=steps if decades > 0.5 else tuple(range(1, 10))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend_above(axes: Any, **options: Any) -> None:
    """Where it hides no data."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        is_short = sum(map(len, labels)) <= _LEGEND_LETTERS
        axes.legend(
            fontsize=8,
            ncols=len(labels) if is_short else 4,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.2,
            **options,
        )


def _by_node(points: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    """Points by node, those with most first; what has no colour of its own shares the last."""
    found = points.partition_by("node", as_dict=True)
    ordered = sorted(
        ((str(name[0]), rows) for name, rows in found.items()),
        key=lambda pair: (-pair[1].height, pair[0]),
    )
    if len(ordered) <= _MOST_NODES:
        return ordered
    rest = pl.concat([rows for _, rows in ordered[_MOST_NODES - 1 :]])
    return [*ordered[: _MOST_NODES - 1], ("all other nodes", rest)]


def _short(name: str) -> str:
    name = name if len(name) <= 28 else f"{name[:25]}…"
    # A dollar sign would start mathematics.
    return name.replace("$", r"\$")


def _style(salt: str) -> Any:
    """The report's style, for a `with`; the salt keeps pictures' ids apart, and the same again."""
    style: Any = {**_STYLE, "svg.hashsalt": salt}
    return mpl.rc_context(style)


def _svg(figure: Figure, title: str) -> str:
    text = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.S)
    found = found.replace(_PAGE_COLOUR, "currentColor")
    return found.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
