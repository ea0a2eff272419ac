"""Several clients' rounds beside each other: medians, their spread, and ours over theirs.

A round's figure is the median over its requests; a client's the median over its rounds, with the
least and the largest of them. Ratios are taken within a round, in which the machine was nearly the
same for all, and their median is what is told. Differences over 5 % are marked. Clients differ in
when they say that a request was sent: ours when its bytes have gone out, others before they ask
their pool for a connection. `ttft_due_s`, ours from when a request was due over theirs, is the
other end of that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.serving.clients.common import Played

FIGURES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "late_s")
TOLERATED = 0.05


def figures(played: Played) -> dict[str, float | None]:
    """A round's medians in seconds; None for what the client does not tell."""
    values = {
        "ttft_s": [a.ttft_s for a in played.answers],
        "tpot_s": [a.tpot_s for a in played.answers],
        "itl_s": list(played.gaps_s),
        "e2e_s": [a.e2e_s for a in played.answers],
        "late_s": [a.late_s for a in played.answers],
        "ttft_due_s": [a.late_s + a.ttft_s for a in played.answers],
    }
    return {name: _median(found) for name, found in values.items()}


def compared(
    rounds: Sequence[Mapping[str, Played]], ours: str, least_s: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Rows of all clients and the ratios of ours to each other one.

    Args:
        rounds: what each client told, by its name; the same names in every round.
        ours: whose figures are divided by the others'.
        least_s: what the endpoint itself takes, where that is known (a stub's latencies).
    """
    told = [{name: figures(played) for name, played in one.items()} for one in rounds]
    names = list(rounds[0]) if rounds else []
    rows = [
        _row(name, [one[name] for one in rounds], [one[name] for one in told], least_s or {})
        for name in names
    ]
    ratios = [
        {"ours": ours, "against": name, "figures": _ratios(told, ours, name)}
        for name in names
        if name != ours
    ]
    return {"clients": rows, "ratios": ratios}


def _row(
    name: str,
    played: Sequence[Played],
    told: Sequence[Mapping[str, float | None]],
    least_s: Mapping[str, float],
) -> dict[str, Any]:
    spreads: dict[str, Any] = {figure: _spread([t[figure] for t in told]) for figure in FIGURES}
    excess = {
        figure: spreads[figure]["median"] - least
        for figure, least in least_s.items()
        if spreads[figure] is not None
    }
    return {
        "client": name,
        "rounds": len(played),
        "requests": sum(len(p.answers) for p in played),
        "failed": sum(p.failed for p in played),
        **spreads,
        "above_the_endpoint_s": excess,
        "rps": _spread([len(p.answers) / p.seconds for p in played if p.seconds > 0]),
        "cpu_s": _spread([p.cpu_s for p in played]),
    }


def _ratios(
    told: Sequence[Mapping[str, Mapping[str, float | None]]], ours: str, other: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    alike = [(figure, figure) for figure in FIGURES if figure != "late_s"]
    for figure, theirs_s in [*alike, ("ttft_due_s", "ttft_s")]:
        pairs = [(one[ours][figure], one[other][theirs_s]) for one in told]
        spread = _spread([mine / theirs for mine, theirs in pairs if mine and theirs])
        if spread is not None:
            spread["within_5_percent"] = abs(spread["median"] - 1) <= TOLERATED
        found[figure] = spread
    return found


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median, least and largest of a few rounds; None without any."""
    found = [value for value in values if value is not None and not math.isnan(value)]
    if not found:
        return None
    return {"median": statistics.median(found), "least": min(found), "largest": max(found)}


def _median(values: Sequence[float]) -> float | None:
    found = np.asarray(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    return float(np.median(found)) if len(found) else None
