"""What a grid of routing runs shows: quantiles with spread, and us against the best other system.

Ratios are paired by seed: the same traffic under two policies. An interval is Student's t on the
logarithms of the ratios, 95%; with one seed there is none. The best peer (other system) of a cell
has the least geometric mean over the seeds of the quantile in question. A cell is *lost* if the
whole interval lies above the limit, and *held* if all of it lies at or below; else it is open.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import finite, paired

Row = dict[str, Any]
Seeds = dict[int, Row]

LIMITS = {"p99": 1.02, "p50": 1.05}
"""Most that our quantile may be of the best peer's."""


class CellKey(NamedTuple):
    """The facts of a row that make its cell."""

    cluster: str
    trace: str
    load: float
    warm: bool
    faults: str
    admission: bool

    def words(self, *, load: bool = True) -> str:
        """A cell in words, or its family: the cell without its load."""
        parts = [Path(self.cluster).name, Path(self.trace).name]
        parts += [f"{self.load:g}"] if load else []
        parts.append("warm" if self.warm else "cold")
        parts += [self.faults] if self.faults != "none" else []
        return " ".join([*parts, *(["admission"] if self.admission else [])])


Cells = dict[CellKey, dict[str, Seeds]]


def by_cell(rows: Iterable[Row]) -> Cells:
    """Rows by cell, policy and seed; cells in order."""
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = CellKey(*(row[name] for name in CellKey._fields))
        cells[key][row["policy"]][row["seed"]] = row
    return {cell: dict(cells[cell]) for cell in sorted(cells)}


def summary(rows: Sequence[Row], us: str, ours: Sequence[str]) -> dict[str, Any]:
    """All comparisons, their counts, and what faults do, ready for JSON."""
    cells = by_cell(rows)
    found: list[Row] = []
    for cell, policies in cells.items():
        found += [
            compared
            for quantile in LIMITS
            if (compared := _compared(cell, policies, quantile, us, ours)) is not None
        ]
    counts = Counter((one["quantile"], one["verdict"]) for one in found)
    return {
        "us": us, "cells": len(cells),
        "counts": {
            quantile: {word: counts[quantile, word] for word in ("held", "open", "lost")}
            for quantile in LIMITS
        },
        "verdicts": found, "faults": _fault_costs(cells),
    }  # fmt: skip


def _compared(
    cell: CellKey, policies: dict[str, Seeds], quantile: str, us: str, ours: Sequence[str]
) -> Row | None:
    """How `us` did against the best peer; None without a peer, or seeds in common with it."""
    seeds = sorted(policies.get(us, ()))
    mine = [_ttft_s(policies[us][seed], quantile) for seed in seeds]
    # A peer that skipped some of the seeds has not run the same race.
    peers = {
        name: [_ttft_s(rows[seed], quantile) for seed in seeds]
        for name, rows in policies.items()
        if name not in ours and seeds and rows.keys() >= set(seeds)
    }
    if not peers or not np.isfinite(mine).all():
        return None
    best = min(peers, key=lambda name: float(np.log(peers[name]).mean()))
    ratio = paired(mine, peers[best])
    word = "held" if ratio.high <= LIMITS[quantile] else "open"
    return {
        "cell": cell.words(), "quantile": quantile, "peer": best, "ratio": ratio.mean,
        "low": finite(ratio.low), "high": finite(ratio.high), "seeds": ratio.count,
        "verdict": "lost" if ratio.low > LIMITS[quantile] else word,
    }  # fmt: skip


def _ttft_s(row: Row, quantile: str) -> float:
    """A TTFT quantile; infinite where nothing was served."""
    value = row["ttft_s"][quantile]
    return math.inf if value is None else max(float(value), 1e-9)


def _mean(rows: Seeds, of: Callable[[Row], float]) -> float:
    return float(np.mean([of(row) for row in rows.values()]))


def _fault_costs(cells: Cells) -> list[Row]:
    """Each policy's p99 with faults over its own without, in the same cell."""
    costs = []
    for cell, policies in cells.items():
        plain = cells.get(cell._replace(faults="none"))
        if cell.faults == "none" or plain is None:
            continue
        for policy, rows in policies.items():
            seeds = sorted(set(rows) & set(plain.get(policy, {})))
            faulty = [_ttft_s(rows[seed], "p99") for seed in seeds]
            sound = [_ttft_s(plain[policy][seed], "p99") for seed in seeds]
            if not seeds or not np.isfinite([*faulty, *sound]).all():
                continue
            ratio = paired(faulty, sound)
            costs.append({
                "cell": cell.words(), "policy": policy, "p99_ratio": ratio.mean,
                "low": finite(ratio.low), "high": finite(ratio.high),
            })  # fmt: skip
    return costs


# Tables -------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], us: str, ours: Sequence[str]) -> str:
    """Tables for the documentation."""
    facts = summary(rows, us, ours)
    parts = [_comparison(facts)]
    parts += [_cell_table(cell, policies) for cell, policies in by_cell(rows).items()]
    if facts["faults"]:
        ratios = [(r["cell"], r["policy"], _interval(r["p99_ratio"], r)) for r in facts["faults"]]
        title = "p99 TTFT with faults over the same policy's without:"
        parts.append(_table(title, ("cell", "policy", "p99 ratio"), ratios))
    return "\n\n".join(parts) + "\n"


def _table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    words = ("cell", "policy", "best peer")
    rules = ["---" if name in words else "--:" for name in columns]
    table = [columns, rules, *lines]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in table)])


def _interval(ratio: float, row: Row) -> str:
    lost = " **lost**" if row.get("verdict") == "lost" else ""
    if row["low"] is None:
        return f"{ratio:.3f}{lost}"
    return f"{ratio:.3f} [{row['low']:.3f}, {row['high']:.3f}]{lost}"


def _comparison(facts: dict[str, Any]) -> str:
    counted = " ".join(
        f"{quantile} (limit {LIMITS[quantile]:g}): {counts['held']} held, {counts['open']} open, "
        f"{counts['lost']} lost."
        for quantile, counts in facts["counts"].items()
    )
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in facts["verdicts"]:
        found[row["cell"]][row["quantile"]] = row
    lines = []
    for cell, quantiles in found.items():
        line = [cell]
        for quantile in LIMITS:
            compared = quantiles.get(quantile)
            if compared is None:
                line += ["-", "-"]
            else:
                line += [_interval(compared["ratio"], compared), compared["peer"]]
        lines.append(line)
    columns = ("cell", "p99", "best peer", "p50", "best peer")
    title = (
        f"TTFT of `{facts['us']}` over the best peer's, geometric mean of paired seeds with 95% "
        f"interval. {counted}"
    )
    return _table(title, columns, lines)


def _cell_table(cell: CellKey, policies: dict[str, Seeds]) -> str:
    lines = []
    for policy, rows in policies.items():
        p50_s, p99_s = ([_ttft_s(row, q) for row in rows.values()] for q in ("p50", "p99"))
        rejected = _mean(rows, lambda row: row["rejected"] / max(row["requests"], 1))
        line = (
            policy, *(f"{np.mean(s):.3g} [{min(s):.3g}, {max(s):.3g}]" for s in (p50_s, p99_s)),
            f"{100 * _mean(rows, lambda row: row['slo']['met']):.1f}%",
            f"{_mean(rows, lambda row: row['goodput_rps']):.2f}", f"{100 * rejected:.1f}%",
        )  # fmt: skip
        lines.append((float(np.mean(p99_s)), line))
    columns = ("policy", "TTFT p50 s", "TTFT p99 s", "SLO met", "goodput req/s", "rejected")
    title = f"{cell.words()}: mean over seeds, least to greatest in brackets"
    ordered = [line for _, line in sorted(lines, key=lambda one: one[0])]
    return _table(title, columns, ordered)
