"""What a grid of routing runs shows: quantiles with spread, and us against the best other system.

Ratios are paired by seed: the same traffic under two policies. An interval is Student's t on the
logarithms of the ratios, 95%; with one seed there is none. The best peer (other system) of a cell
has the least geometric mean over the seeds of the quantile in question. A cell is *lost* if the
whole interval lies above the limit, and *held* if all of it lies at or below; else it is open.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Interval, finite, paired

Row = dict[str, Any]
CellKey = tuple[str, str, float, bool, str, bool]
Seeds = dict[int, Row]
Cells = dict[CellKey, dict[str, Seeds]]

LIMITS = {"p99": 1.02, "p50": 1.05}
"""Most that our quantile may be of the best peer's."""
_WORDS = ("held", "open", "lost")


def by_cell(rows: Iterable[Row]) -> Cells:
    """Rows by cell, policy and seed; cells in order."""
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = tuple(
            row[name] for name in ("cluster", "trace", "load", "warm", "faults", "admission")
        )
        cells[key][row["policy"]][row["seed"]] = row
    return {cell: dict(cells[cell]) for cell in sorted(cells)}


def summary(rows: Sequence[Row], us: str, ours: Sequence[str]) -> dict[str, Any]:
    """All comparisons, their counts, and what overload and faults do, ready for JSON."""
    cells = by_cell(rows)
    found = [
        compared
        for cell, policies in cells.items()
        for quantile in LIMITS
        if (compared := _compared(cell, policies, quantile, us, ours)) is not None
    ]
    return {
        "us": us,
        "cells": len(cells),
        "counts": {
            quantile: {
                word: sum(one["quantile"] == quantile and one["verdict"] == word for one in found)
                for word in _WORDS
            }
            for quantile in LIMITS
        },
        "verdicts": found,
        "overload": overload(cells),
        "saturation": saturation(cells, ours),
        "faults": fault_costs(cells),
    }


def _compared(
    cell: CellKey, policies: dict[str, Seeds], quantile: str, us: str, ours: Sequence[str]
) -> Row | None:
    """How `us` did against the best peer; None without a peer, or seeds in common with it."""
    mine = {seed: _quantile(row, quantile) for seed, row in policies.get(us, {}).items()}
    best: tuple[float, str] | None = None
    for name, rows in policies.items():
        # A peer that skipped some of the seeds has not run the same race.
        if name in ours or not mine or not rows.keys() >= mine.keys():
            continue
        mean = float(np.mean(np.log([_quantile(rows[seed], quantile) for seed in mine])))
        if best is None or mean < best[0]:
            best = (mean, name)
    if best is None or not all(math.isfinite(value) for value in mine.values()):
        return None
    theirs, seeds = policies[best[1]], sorted(mine)
    ratio = paired([mine[s] for s in seeds], [_quantile(theirs[s], quantile) for s in seeds])
    return {
        "cell": _name(cell), "quantile": quantile, "peer": best[1], "ratio": ratio.mean,
        "low": finite(ratio.low), "high": finite(ratio.high), "seeds": ratio.count,
        "verdict": _verdict(ratio, LIMITS[quantile]),
    }  # fmt: skip


def _verdict(ratio: Interval, limit: float) -> str:
    if ratio.low > limit:
        return "lost"
    return "held" if ratio.high <= limit else "open"


def _quantile(row: Row, quantile: str) -> float:
    """A TTFT quantile; infinite where nothing was served."""
    value = row["ttft_s"][quantile]
    return math.inf if value is None else max(float(value), 1e-9)


def overload(cells: Cells) -> list[Row]:
    """Goodput at the highest load over its peak, per family of cells and policy."""
    goodput: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    for cell, policies in cells.items():
        for policy, rows in policies.items():
            goodput[_name(cell, load=False), policy][cell[2]] = _mean(rows, "goodput_rps")
    return [
        {
            "family": family, "policy": policy, "load": max(loads),
            "goodput_rps": loads[max(loads)], "peak_rps": max(loads.values()),
            "share": loads[max(loads)] / max(loads.values()) if max(loads.values()) else None,
        }
        for (family, policy), loads in goodput.items()
        if len(loads) > 1
    ]  # fmt: skip


def saturation(cells: Cells, ours: Sequence[str]) -> list[Row]:
    """A cell's rate over the highest throughput that a peer reached at any load of its family."""
    best: dict[str, tuple[float, str]] = {}
    for cell, policies in cells.items():
        family = _name(cell, load=False)
        for policy, rows in policies.items():
            if policy not in ours:
                reached = (_mean(rows, "throughput_rps"), policy)
                best[family] = max(best.get(family, (0.0, "")), reached)
    found = []
    for cell, policies in cells.items():
        most_rps, peer = best.get(_name(cell, load=False), (0.0, ""))
        rate_rps = next(iter(next(iter(policies.values())).values()))["rate_rps"]
        if most_rps > 0:
            share = rate_rps / most_rps
            found.append({"cell": _name(cell), "load_of_best_peer": share, "peer": peer})
    return found


def fault_costs(cells: Cells) -> list[Row]:
    """Each policy's p99 with faults over its own without, in the same cell."""
    costs = []
    for cell, policies in cells.items():
        plain = cells.get((*cell[:4], "none", cell[5]))
        if cell[4] == "none" or plain is None:
            continue
        for policy, rows in policies.items():
            seeds = sorted(set(rows) & set(plain.get(policy, {})))
            faulty = [_quantile(rows[seed], "p99") for seed in seeds]
            sound = [_quantile(plain[policy][seed], "p99") for seed in seeds]
            if not seeds or not np.isfinite([*faulty, *sound]).all():
                continue
            ratio = paired(faulty, sound)
            costs.append({
                "cell": _name(cell), "policy": policy, "p99_ratio": ratio.mean,
                "low": finite(ratio.low), "high": finite(ratio.high),
            })  # fmt: skip
    return costs


def markdown(rows: Sequence[Row], us: str, ours: Sequence[str]) -> str:
    """Tables for the documentation."""
    facts = summary(rows, us, ours)
    parts = [_comparison_table(facts)]
    parts += [_cell_table(cell, policies) for cell, policies in by_cell(rows).items()]
    if facts["overload"]:
        columns = ("cells", "policy", "load", "goodput req/s", "peak req/s", "share")
        lines = [
            (row["family"], row["policy"], f"{row['load']:g}", f"{row['goodput_rps']:.2f}",
             f"{row['peak_rps']:.2f}",
             "-" if row["share"] is None else f"{100 * row['share']:.0f}%")
            for row in facts["overload"]
        ]  # fmt: skip
        title = "Goodput at the highest load over the peak of the loads tried:"
        parts.append(_markdown_table(title, columns, lines))
    if facts["faults"]:
        ratios = [
            (row["cell"], row["policy"], _interval(row["p99_ratio"], row))
            for row in facts["faults"]
        ]
        title = "p99 TTFT with faults over the same policy's without:"
        parts.append(_markdown_table(title, ("cell", "policy", "p99 ratio"), ratios))
    return "\n\n".join(parts) + "\n"


def _markdown_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rules = [
        "---" if name in ("cell", "cells", "policy", "best peer") else "--:" for name in columns
    ]
    table = [columns, rules, *lines]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in table)])


def _comparison_table(facts: dict[str, Any]) -> str:
    title = (
        f"TTFT of `{facts['us']}` over the best peer's, geometric mean of paired seeds with 95% "
        "interval. "
        + " ".join(
            f"{quantile} (limit {LIMITS[quantile]:g}): {counts['held']} held, "
            f"{counts['open']} open, {counts['lost']} lost."
            for quantile, counts in facts["counts"].items()
        )
    )
    relative = {row["cell"]: row["load_of_best_peer"] for row in facts["saturation"]}
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in facts["verdicts"]:
        found[row["cell"]][row["quantile"]] = row
    lines = []
    for cell, quantiles in found.items():
        line = [cell, f"{relative[cell]:.2f}" if cell in relative else "-"]
        for quantile in LIMITS:
            row = quantiles.get(quantile)
            line += ["-", "-"] if row is None else [_interval(row["ratio"], row), row["peer"]]
        lines.append(line)
    columns = ("cell", "rate / best peer's saturation", "p99", "best peer", "p50", "best peer")
    return _markdown_table(title, columns, lines)


def _interval(ratio: float, row: Row) -> str:
    lost = " **lost**" if row.get("verdict") == "lost" else ""
    if row["low"] is None:
        return f"{ratio:.3f}{lost}"
    return f"{ratio:.3f} [{row['low']:.3f}, {row['high']:.3f}]{lost}"


def _cell_table(cell: CellKey, policies: dict[str, Seeds]) -> str:
    order = sorted(
        policies, key=lambda p: np.mean([_quantile(r, "p99") for r in policies[p].values()])
    )
    lines = [
        (
            policy, _spread(policies[policy], "p50"), _spread(policies[policy], "p99"),
            f"{100 * _mean(policies[policy], lambda row: row['slo']['met']):.1f}%",
            f"{_mean(policies[policy], 'goodput_rps'):.2f}",
            f"{100 * _mean(policies[policy], _rejected):.1f}%",
        )
        for policy in order
    ]  # fmt: skip
    columns = ("policy", "TTFT p50 s", "TTFT p99 s", "SLO met", "goodput req/s", "rejected")
    title = f"{_name(cell)}: mean over seeds, least to greatest in brackets"
    text = _markdown_table(title, columns, lines)
    specs = {row["spec"] for row in policies.get("dynamo_tuned", {}).values()}
    return f"{text}\n\ndynamo_tuned is {', '.join(sorted(specs))}." if specs else text


def _rejected(row: Row) -> float:
    return float(row["rejected"] / max(row["requests"], 1))


def _mean(rows: Seeds, of: str | Callable[[Row], float]) -> float:
    values = [row[of] if isinstance(of, str) else of(row) for row in rows.values()]
    return float(np.mean(values))


def _spread(rows: Seeds, quantile: str) -> str:
    values = [_quantile(row, quantile) for row in rows.values()]
    return f"{np.mean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def _name(cell: CellKey, *, load: bool = True) -> str:
    """A cell in words, or its family: the cell without its load."""
    cluster, trace, share, warm, faults, admission = cell
    text = f"{Path(cluster).name} {Path(trace).name}{f' {share:g}' if load else ''}"
    text += " warm" if warm else " cold"
    text += f" {faults}" if faults != "none" else ""
    return text + (" admission" if admission else "")
