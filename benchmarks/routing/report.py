"""What a grid of routing runs says: quantiles with their spread, and us against the best peer.

Ratios are paired by seed: the same traffic under two policies. An interval is Student's t on the
logarithms of the ratios, 95%; with one seed there is none. The best peer of a cell is the one with
the least geometric mean over the seeds of the quantile in question. A cell is *lost* if the whole
interval lies above the limit, and *held* if all of it lies at or below; else it is open.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Interval, finite, paired

Row = dict[str, Any]
CellKey = tuple[str, str, float, bool, str, bool]
Family = tuple[str, str, bool, str, bool]
"""A cell without its load."""

LIMITS = {"p99": 1.02, "p50": 1.05}
"""Most that our quantile may be of the best peer's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Us against the best peer in one cell, by one quantile. verdict: lost, held or open."""

    cell: CellKey
    quantile: str
    peer: str
    ratio: Interval
    verdict: str


def cell_key(row: Row) -> CellKey:
    """The cell that a row belongs to."""
    return (
        row["cluster"], row["trace"], row["load"], row["warm"], row["faults"], row["admission"]
    )  # fmt: skip


def family_of(cell: CellKey) -> Family:
    """The cell without its load."""
    cluster, trace, _, warm, faults, admission = cell
    return (cluster, trace, warm, faults, admission)


def by_cell(rows: Iterable[Row]) -> dict[CellKey, dict[str, dict[int, Row]]]:
    """Rows by cell, policy and seed; cells in order."""
    cells: dict[CellKey, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        cells[cell_key(row)][row["policy"]][row["seed"]] = row
    return {cell: dict(cells[cell]) for cell in sorted(cells)}


def verdict(
    cell: CellKey,
    policies: dict[str, dict[int, Row]],
    quantile: str,
    us: str,
    ours: Sequence[str],
) -> Verdict | None:
    """How `us` did against the best peer; None without a peer, or seeds in common with it."""
    mine = {seed: _quantile(row, quantile) for seed, row in policies.get(us, {}).items()}
    best: tuple[float, str] | None = None
    for name, rows in policies.items():
        if name in ours:
            continue
        values = [_quantile(rows[seed], quantile) for seed in mine if seed in rows]
        # A peer that skipped some of the seeds has not run the same race.
        if not values or len(values) < len(mine):
            continue
        mean = float(np.mean(np.log(values)))
        if best is None or mean < best[0]:
            best = (mean, name)
    if best is None or not all(math.isfinite(value) for value in mine.values()):
        return None
    theirs = policies[best[1]]
    seeds = sorted(mine)
    ratio = paired([mine[s] for s in seeds], [_quantile(theirs[s], quantile) for s in seeds])
    return Verdict(cell, quantile, best[1], ratio, _judge(ratio, LIMITS[quantile]))


def verdicts(
    cells: dict[CellKey, dict[str, dict[int, Row]]], us: str, ours: Sequence[str]
) -> list[Verdict]:
    """How `us` did in every cell that compares, by every quantile."""
    return [
        v
        for cell, policies in cells.items()
        for quantile in LIMITS
        if (v := verdict(cell, policies, quantile, us, ours)) is not None
    ]


def _judge(ratio: Interval, limit: float) -> str:
    if ratio.low > limit:
        return "lost"
    if ratio.high <= limit:
        return "held"
    return "open"


def _quantile(row: Row, quantile: str) -> float:
    """A TTFT quantile; infinite where nothing was served."""
    value = row["ttft_s"][quantile]
    return math.inf if value is None else max(float(value), 1e-9)


def summary(rows: Sequence[Row], us: str, ours: Sequence[str]) -> dict[str, Any]:
    """All verdicts, their counts, and what overload does, ready for JSON."""
    cells = by_cell(rows)
    found = verdicts(cells, us, ours)
    return {
        "us": us,
        "cells": len(cells),
        "counts": {
            quantile: {
                word: sum(v.quantile == quantile and v.verdict == word for v in found)
                for word in ("held", "open", "lost")
            }
            for quantile in LIMITS
        },
        "verdicts": [
            {
                "cell": _words(v.cell),
                "quantile": v.quantile,
                "peer": v.peer,
                "ratio": v.ratio.mean,
                "low": finite(v.ratio.low),
                "high": finite(v.ratio.high),
                "seeds": v.ratio.count,
                "verdict": v.verdict,
            }
            for v in found
        ],
        "overload": overload(cells),
        "saturation": [
            {"cell": _words(cell), "load_of_best_peer": share, "peer": peer}
            for cell, (share, peer) in relative_loads(cells, ours).items()
        ],
        "faults": fault_costs(cells),
    }


def overload(cells: dict[CellKey, dict[str, dict[int, Row]]]) -> list[dict[str, Any]]:
    """Goodput at the highest load over its peak, per family of cells and policy."""
    goodput: dict[Family, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for cell, policies in cells.items():
        for policy, rows in policies.items():
            mean = float(np.mean([row["goodput_rps"] for row in rows.values()]))
            goodput[family_of(cell)][policy][cell[2]] = mean
    return [
        {
            "family": _family(family),
            "policy": policy,
            "load": max(loads),
            "goodput_rps": loads[max(loads)],
            "peak_rps": max(loads.values()),
            "share": loads[max(loads)] / max(loads.values()) if max(loads.values()) else None,
        }
        for family, policies in goodput.items()
        for policy, loads in policies.items()
        if len(loads) > 1
    ]


def relative_loads(
    cells: dict[CellKey, dict[str, dict[int, Row]]], ours: Sequence[str]
) -> dict[CellKey, tuple[float, str]]:
    """A cell's rate over the highest throughput that a peer reached at any load of its family."""
    best: dict[Family, tuple[float, str]] = {}
    for cell, policies in cells.items():
        family = family_of(cell)
        for policy, rows in policies.items():
            if policy in ours:
                continue
            mean = float(np.mean([row["throughput_rps"] for row in rows.values()]))
            best[family] = max(best.get(family, (0.0, "")), (mean, policy))
    relative = {}
    for cell, policies in cells.items():
        family = family_of(cell)
        rate_rps = next(iter(next(iter(policies.values())).values()))["rate_rps"]
        if family in best and best[family][0] > 0:
            relative[cell] = (rate_rps / best[family][0], best[family][1])
    return relative


def fault_costs(cells: dict[CellKey, dict[str, dict[int, Row]]]) -> list[dict[str, Any]]:
    """Each policy's p99 with faults over its own without, in the same cell."""
    costs = []
    for cell, policies in cells.items():
        cluster, trace, load, warm, faults, admission = cell
        plain = cells.get((cluster, trace, load, warm, "none", admission))
        if faults == "none" or plain is None:
            continue
        for policy, rows in policies.items():
            seeds = sorted(set(rows) & set(plain.get(policy, {})))
            values = [
                [_quantile(table[seed], "p99") for seed in seeds]
                for table in (rows, plain.get(policy, {}))
            ]
            if not seeds or not np.isfinite(values).all():
                continue
            ratio = paired(*values)
            costs.append(
                {
                    "cell": _words(cell), "policy": policy, "p99_ratio": ratio.mean,
                    "low": finite(ratio.low), "high": finite(ratio.high),
                }
            )  # fmt: skip
    return costs


def markdown(rows: Sequence[Row], us: str, ours: Sequence[str]) -> str:
    """Tables for the documentation."""
    cells = by_cell(rows)
    facts = summary(rows, us, ours)
    parts = [_verdict_table(facts)]
    parts += [_cell_table(cell, policies) for cell, policies in cells.items()]
    if facts["overload"]:
        parts.append(_overload_table(facts["overload"]))
    if facts["faults"]:
        parts.append(_fault_table(facts["faults"]))
    return "\n\n".join(parts) + "\n"


def _verdict_table(facts: dict[str, Any]) -> str:
    us = facts["us"]
    lines = [
        f"TTFT of `{us}` over the best peer's, geometric mean of paired seeds with 95% interval. "
        + " ".join(
            f"{quantile} (limit {LIMITS[quantile]:g}): {counts['held']} held, "
            f"{counts['open']} open, {counts['lost']} lost."
            for quantile, counts in facts["counts"].items()
        ),
        "",
        "| cell | rate / best peer's saturation | p99 | best peer | p50 | best peer |",
        "|---|--:|--:|---|--:|---|",
    ]
    relative = {row["cell"]: row["load_of_best_peer"] for row in facts["saturation"]}
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in facts["verdicts"]:
        table[row["cell"]][row["quantile"]] = row
    for cell, quantiles in table.items():
        columns = [cell, f"{relative[cell]:.2f}" if cell in relative else "-"]
        for quantile in LIMITS:
            row = quantiles.get(quantile)
            columns += ["-", "-"] if row is None else [_interval(row), row["peer"]]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _interval(row: dict[str, Any]) -> str:
    mark = {"lost": " **lost**", "open": "", "held": ""}[row["verdict"]]
    if row["low"] is None:
        return f"{row['ratio']:.3f}{mark}"
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]{mark}"


def _cell_table(cell: CellKey, policies: dict[str, dict[int, Row]]) -> str:
    lines = [
        f"{_words(cell)}: mean over seeds, least to greatest in brackets",
        "",
        "| policy | TTFT p50 s | TTFT p99 s | SLO met | goodput req/s | rejected |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    order = sorted(policies, key=lambda p: _mean(policies[p], lambda r: _quantile(r, "p99")))
    for policy in order:
        rows = policies[policy]
        lines.append(
            f"| {policy} | {_spread(rows, 'p50')} | {_spread(rows, 'p99')} "
            f"| {100 * _mean(rows, lambda r: r['slo']['met']):.1f}% "
            f"| {_mean(rows, lambda r: r['goodput_rps']):.2f} "
            f"| {100 * _mean(rows, lambda r: r['rejected'] / max(r['requests'], 1)):.1f}% |"
        )
    specs = {row["spec"] for row in policies.get("dynamo_tuned", {}).values() if "spec" in row}
    if specs:
        lines += ["", f"dynamo_tuned is {', '.join(sorted(specs))}."]
    return "\n".join(lines)


def _overload_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "Goodput at the highest load over the peak of the loads tried:",
        "",
        "| cells | policy | load | goodput req/s | peak req/s | share |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        share = "-" if row["share"] is None else f"{100 * row['share']:.0f}%"
        lines.append(
            f"| {row['family']} | {row['policy']} | {row['load']:g} | {row['goodput_rps']:.2f} "
            f"| {row['peak_rps']:.2f} | {share} |"
        )
    return "\n".join(lines)


def _fault_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "p99 TTFT with faults over the same policy's without:",
        "",
        "| cell | policy | p99 ratio |",
        "|---|---|--:|",
    ]
    for row in rows:
        shown = {"ratio": row["p99_ratio"], "verdict": "open", **row}
        lines.append(f"| {row['cell']} | {row['policy']} | {_interval(shown)} |")
    return "\n".join(lines)


def _mean(rows: dict[int, Row], of: Callable[[Row], float]) -> float:
    return float(np.mean([of(row) for row in rows.values()]))


def _spread(rows: dict[int, Row], quantile: str) -> str:
    values = [_quantile(row, quantile) for row in rows.values()]
    return f"{np.mean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def _words(cell: CellKey) -> str:
    return _family(family_of(cell), f" {cell[2]:g}")


def _family(family: Family, load: str = "") -> str:
    cluster, trace, warm, faults, admission = family
    text = f"{Path(cluster).name} {Path(trace).name}{load} {'warm' if warm else 'cold'}"
    text += f" {faults}" if faults != "none" else ""
    return text + (" admission" if admission else "")
