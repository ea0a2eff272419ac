"""Pictures of a grid of routing runs: every cell, TTFT distributions, regret, κ against the node.

Drawn from a grid's rows, from the per-request records that it keeps for its first seed, and from
the rows of a regret run. Written as PNG, without a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm

from benchmarks.harness import new_figure, save_figure
from benchmarks.routing.report import LIMITS, Row, Verdict, by_cell, verdicts

_OURS = "priced"
# Three times as slow as the best peer, or as fast, has the full colour (as a power of two).
_FULL_COLOUR = 1.5
_COLOURS = (
    "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#000000",
)  # fmt: skip
_STYLES = ("-", "--", ":", "-.")


def draw_all(directory: Path) -> list[Path]:
    """Pictures of every cell whose records are in `directory`; returns the files written."""
    written = []
    for cell in sorted(p for p in (directory / "records").glob("*") if p.is_dir()):
        records = {path.stem: dict(np.load(path)) for path in sorted(cell.glob("*.npz"))}
        if not records:
            continue
        written.append(draw_ttft(records, directory / f"ttft_{cell.name}.png", cell.name))
        if _OURS in records:
            path = directory / f"kappa_{cell.name}.png"
            written.append(draw_kappa(records[_OURS], path, f"{cell.name}, {_OURS}"))
    return written


def draw_cells(rows: Sequence[Row], path: Path, us: str, ours: Sequence[str]) -> Path | None:
    """Our quantiles over the best peer's, one square per cell; none where nothing compares.

    Down: clusters and traces. Across: loads, with warm and with cold caches, then what else a grid
    has. Bold: the whole interval is over the limit; grey: it holds the limit.
    """
    found = verdicts(by_cell(rows), us, ours)
    if not found:
        return None
    down = sorted({v.cell[:2] for v in found})
    across = sorted({v.cell[2:] for v in found}, key=lambda c: (c[3], c[2], not c[1], c[0]))
    figure = new_figure(1.6 + 0.62 * len(across) * len(LIMITS), 1.8 + 0.3 * len(down))
    for axes, quantile in zip(figure.subplots(1, len(LIMITS), sharey=True), LIMITS, strict=True):
        ratios = np.full((len(down), len(across)), np.nan)
        for v in found:
            if v.quantile == quantile:
                at = down.index(v.cell[:2]), across.index(v.cell[2:])
                ratios[at] = v.ratio.mean
                _write(axes, at, v)
        axes.imshow(
            np.log2(ratios), cmap="RdYlGn_r", aspect="auto",
            norm=TwoSlopeNorm(0.0, -_FULL_COLOUR, _FULL_COLOUR),
        )  # fmt: skip
        axes.set_title(f"TTFT {quantile}, times the best peer's", fontsize=9)
        axes.set_xticks(range(len(across)), [_column(cell) for cell in across], fontsize=7)
        axes.set_yticks(range(len(down)), [" ".join(cell) for cell in down], fontsize=7)
    return save_figure(figure, path)


def _write(axes: Any, at: tuple[int, int], v: Verdict) -> None:
    axes.text(
        at[1], at[0], f"{v.ratio.mean:.2f}" if v.ratio.mean < 10 else f"{v.ratio.mean:.0f}",
        ha="center", va="center", fontsize=7,
        fontweight="bold" if v.verdict == "lost" else "normal",
        color="#606060" if v.verdict == "open" else "black",
    )  # fmt: skip


def _column(cell: tuple[float, bool, str, bool]) -> str:
    load, warm, faults, admission = cell
    extra = [faults] * (faults != "none") + ["admission"] * admission
    return "\n".join([f"{load:g}", "warm" if warm else "cold", *extra])


def draw_ttft(records: dict[str, dict[str, Any]], path: Path, title: str) -> Path:
    """Share of requests that had their first token within a time, per policy."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for i, (policy, record) in enumerate(records.items()):
        ttft_s = np.sort(record["ttft_s"][~np.isnan(record["ttft_s"])])
        if not len(ttft_s):
            continue
        # Rejected requests never get one, so the curve ends below 1.
        share = np.arange(1, len(ttft_s) + 1) / len(record["ttft_s"])
        ours = policy == _OURS
        axes.step(
            np.maximum(ttft_s, 1e-3), share, where="post", label=policy,
            color="#cc3311" if ours else _COLOURS[i % len(_COLOURS)],
            linestyle="-" if ours else _STYLES[i // len(_COLOURS) % len(_STYLES)],
            linewidth=2.2 if ours else 1.1, zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    return save_figure(figure, path)


def draw_kappa(record: dict[str, Any], path: Path, title: str) -> Path:
    """The ratio of cached to new tokens of the requests that each kind of node served."""
    kinds: dict[str, list[int]] = {}
    for index, name in enumerate(record["nodes"].tolist()):
        kinds.setdefault(str(name).rpartition("-")[0] or str(name), []).append(index)
    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    for place, indices in enumerate(kinds.values()):
        mine = np.isin(record["node"], indices) & ~np.isnan(record["kappa"])
        # No cached tokens has no logarithm: shown at the left edge.
        kappa = np.maximum(record["kappa"][mine], 1e-2)
        if not len(kappa):
            continue
        rng = np.random.default_rng(0)
        height = place + rng.uniform(-0.3, 0.3, len(kappa))
        axes.scatter(kappa, height, s=2, alpha=0.15, color=_COLOURS[place % len(_COLOURS)])
        axes.boxplot(
            kappa, positions=[place], orientation="horizontal", widths=0.5, showfliers=False,
            whis=(5, 95),
        )  # fmt: skip
    labels = [f"{kind} ({len(indices)})" for kind, indices in kinds.items()]
    axes.set_yticks(range(len(kinds)), labels)
    axes.set(xscale="log", xlabel="κ = cached / new tokens (0 drawn at 0.01)", title=title)
    axes.grid(alpha=0.3, axis="x")
    return save_figure(figure, path)


def draw_regret(rows: Sequence[dict[str, Any]], path: Path, title: str) -> Path:
    """Each policy's p99 TTFT over the reference plan's, or over the bound where there is none."""
    rows = sorted(rows, key=lambda row: float(row["regret"]))
    figure = new_figure(7, 0.6 + 0.32 * len(rows))
    axes = figure.subplots()
    colours = ["#cc3311" if row["policy"] == _OURS else _COLOURS[0] for row in rows]
    bars = axes.barh([r["policy"] for r in rows], [r["regret"] for r in rows], color=colours)
    axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="p99 TTFT, times the reference's", title=title)
    axes.invert_yaxis()
    return save_figure(figure, path)
