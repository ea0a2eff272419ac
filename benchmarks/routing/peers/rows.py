"""What a router did, from what its clients saw: one row, with the spread over the repeats."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import quantile, spread
from benchmarks.routing.peers.play import Outcome


def measured(outcomes: Sequence[Outcome], from_s: float) -> list[Outcome]:
    """Requests sent at `from_s` or later: what came before only warmed the caches."""
    return [outcome for outcome in outcomes if outcome.start_s >= from_s]


def repeat_row(
    outcomes: Sequence[Outcome], totals: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """One repeat, of measured requests; seconds are emulated ones.

    totals: what each node did in the whole run, warm-up included: tokens of the prompts and where
    they were found.

    A request that was still under way at the end has waited at least until then, but its figure is
    not known: it is counted as unfinished and makes the quantiles too kind.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    shares = Counter(outcome.node for outcome in good)
    row: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(good),
        "failed": dict(Counter(_kind(o.error) for o in outcomes if o.error)),
        "node_share": {node: shares[node] / max(len(good), 1) for node in totals},
        "in_flight": _in_flight(outcomes),
        "found": {
            tier: sum(node[f"{tier}_tokens"] for node in totals.values())
            / max(sum(node["prompt_tokens"] for node in totals.values()), 1)
            for tier in ("device", "host")
        },
    }
    if good:
        ttft_s, e2e_s = [o.ttft_s for o in good], [o.e2e_s for o in good]
        row["ttft_s"] = {
            "mean": statistics.fmean(ttft_s), "p50": quantile(ttft_s, 0.5),
            "p99": quantile(ttft_s, 0.99),
        }  # fmt: skip
        row["e2e_s"] = {"mean": statistics.fmean(e2e_s), "p50": quantile(e2e_s, 0.5)}
        route_s = [o.route_s for o in good if o.route_s == o.route_s]
        row["route_ms"] = 1e3 * statistics.median(route_s) if route_s else None
    return row


def router_row(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median over repeats of each figure, and its least and most."""
    whole = [row for row in repeats if "ttft_s" in row]
    row: dict[str, Any] = {
        "requests": sum(row["requests"] for row in repeats),
        "completed": sum(row["completed"] for row in repeats),
        "failed": dict(sum((Counter(row["failed"]) for row in repeats), Counter())),
        "repeats": list(repeats),
    }
    if whole:
        row["ttft_s"] = {
            key: spread([r["ttft_s"][key] for r in whole]) for key in ("mean", "p50", "p99")
        }
        row["e2e_s"] = {key: spread([r["e2e_s"][key] for r in whole]) for key in ("mean", "p50")}
        row["found"] = {
            tier: statistics.median(r["found"][tier] for r in whole) for tier in ("device", "host")
        }
        row["in_flight"] = spread([r["in_flight"] for r in whole])
        row["node_share"] = {
            node: statistics.median(r["node_share"][node] for r in whole)
            for node in whole[0]["node_share"]
        }
        route_ms = [r["route_ms"] for r in whole if r["route_ms"] is not None]
        row["route_ms"] = statistics.median(route_ms) if route_ms else None
    return row


def against(rows: Sequence[dict[str, Any]], ours: str) -> list[dict[str, Any]]:
    """Each router's TTFT over ours, repeat by repeat on the same requests."""
    mine = next((row for row in rows if row["router"] == ours), None)
    if mine is None:
        return []
    found = []
    for row in rows:
        pairs = [
            (a["ttft_s"], b["ttft_s"])
            for a, b in zip(row["repeats"], mine["repeats"], strict=True)
            if "ttft_s" in a and "ttft_s" in b
        ]
        if row is not mine and pairs:
            ratios = {
                key: spread([theirs[key] / own[key] for theirs, own in pairs])
                for key in ("mean", "p50", "p99")
            }
            found.append({"router": row["router"], **ratios})
    return found


def _in_flight(outcomes: Sequence[Outcome]) -> float:
    """Mean number of requests in flight while requests were being sent (Little's law)."""
    ends = [o.start_s + o.e2e_s for o in outcomes if not o.error]
    if not ends:
        return 0.0
    seconds = max(o.start_s for o in outcomes) - min(o.start_s for o in outcomes)
    return sum(o.e2e_s for o in outcomes if not o.error) / seconds if seconds > 0 else 0.0


def _kind(error: str) -> str:
    return error.split(":")[0]
