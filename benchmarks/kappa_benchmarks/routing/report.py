"""Tables of a grid of routing runs: quantiles with spread, and us against the best other system.

Ratios are paired by seed: the same traffic under two policies. An interval is Student's t on the
logarithms of the ratios, 95%; with one seed there is none. The best peer (other system) of a cell
has the least geometric mean over the seeds of the quantile in question. A cell is *lost* if the
whole interval lies above the limit, *held* if it lies at or below, and else *open*.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from rich.console import Console

from kappa_benchmarks.harness import Column, finite, paired, rows_table
from kappa_benchmarks.routing.grid import Cell, Row

Seeds = dict[int, Row]

LIMITS = {"p99": 1.02, "p50": 1.05}
"""Most that our quantile may be of the best peer's."""

Cells = dict[Cell, dict[str, Seeds]]


def by_cell(rows: Iterable[Row]) -> Cells:
    """Rows by cell, policy and seed; cells in order."""
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = Cell(*(row[one.name] for one in fields(Cell)))
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
    cell: Cell, policies: dict[str, Seeds], quantile: str, us: str, ours: Sequence[str]
) -> Row | None:
    """`us` against the best peer; None without a peer, or seeds in common with it."""
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
        "cell": cell.words, "quantile": quantile, "peer": best, "ratio": ratio.mean,
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
        plain = cells.get(replace(cell, faults="none"))
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
                "cell": cell.words, "policy": policy, "p99_ratio": ratio.mean,
                "low": finite(ratio.low), "high": finite(ratio.high),
            })  # fmt: skip
    return costs


# Tables -------------------------------------------------------------------------------------------

_COMPARED: dict[str, Column] = {
    "cell": "cell", "quantile": "quantile", "ratio": lambda row: _interval(row["ratio"], row),
    "best peer": "peer", "verdict": "verdict",
}  # fmt: skip
_POLICIES: dict[str, Column] = {
    "policy": "policy", "TTFT p50 s": lambda row: _spread(row["p50_s"]),
    "TTFT p99 s": lambda row: _spread(row["p99_s"]), "SLO met": "met:.1%",
    "goodput req/s": "goodput_rps:.2f", "rejected": "rejected:.1%",
}  # fmt: skip
_FAULTS: dict[str, Column] = {
    "cell": "cell", "policy": "policy", "p99 ratio": lambda row: _interval(row["p99_ratio"], row),
}  # fmt: skip


def show(facts: dict[str, Any], console: Console) -> None:
    """Print a `summary` with its rows: the comparisons, each cell's policies, what faults do."""
    counts = "; ".join(
        f"{quantile} (limit {LIMITS[quantile]:g}): "
        + ", ".join(f"{number} {word}" for word, number in found.items())
        for quantile, found in facts["counts"].items()
    )
    title = f"TTFT of {facts['us']} over the best peer's, paired seeds, 95% interval. {counts}"
    left = ("quantile", "best peer", "verdict")
    console.print(rows_table(title, _COMPARED, facts["verdicts"], left))
    for cell, policies in by_cell(facts["rows"]).items():
        means = sorted((_means(*each) for each in policies.items()), key=lambda m: m["p99_mean_s"])
        title = f"{cell.words}: mean over seeds [least, greatest]"
        console.print(rows_table(title, _POLICIES, means))
    if facts["faults"]:
        title = "p99 TTFT with faults over the same policy's without"
        console.print(rows_table(title, _FAULTS, facts["faults"], left=("policy",)))


def _means(policy: str, seeds: Seeds) -> Row:
    p50_s, p99_s = ([_ttft_s(row, q) for row in seeds.values()] for q in ("p50", "p99"))
    return {
        "policy": policy, "p50_s": p50_s, "p99_s": p99_s, "p99_mean_s": float(np.mean(p99_s)),
        "met": _mean(seeds, lambda row: row["slo"]["met"]),
        "goodput_rps": _mean(seeds, lambda row: row["goodput_rps"]),
        "rejected": _mean(seeds, lambda row: row["rejected"] / max(row["requests"], 1)),
    }  # fmt: skip


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def _interval(ratio: float, row: Mapping[str, Any]) -> str:
    around = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
    return f"{ratio:.3f}{around}"
