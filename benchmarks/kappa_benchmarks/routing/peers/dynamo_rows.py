"""Figures of a run before Dynamo's mockers, the choice of the tuned arm, and a summary."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kappa_benchmarks.harness import paired, quantile
from kappa_benchmarks.routing.peers.routers import PeerError

Row = dict[str, Any]
FIGURES = ("p50", "p99", "mean")
TUNED = "kv-tuned"
"""`kv` with the options that have the least mean TTFT on a seed of their own."""
TUNING_SEED = 1000
TUNING = (
    "kv", "kv:host-cache-hit-weight=0.5", "kv:host-cache-hit-weight=1", "kv:prefill-load-scale=4",
    "kv:host-cache-hit-weight=1,prefill-load-scale=4",
)  # fmt: skip
_EARLY_SHARE = 0.2  # of the requests, those sent first, that are not measured


@dataclass(slots=True)
class Sent:
    """One request as its client saw it; wall seconds since the run began."""

    request: str
    tokens: int
    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    instance: int = 0
    cached: int = 0
    error: str = "unfinished"


def figures(sent: Sequence[Sent], nodes: Mapping[int, str], decisions: Mapping[str, Row]) -> Row:
    """A run's row: TTFT in wall seconds of the later four fifths of the requests, the share of
    tokens found in caches, the share of requests by node; of our router, the errors of its
    predictions, before and after its 200th and by class."""
    ordered = sorted(sent, key=lambda one: one.sent_s)
    measured = ordered[int(_EARLY_SHARE * len(ordered)) :]
    good = [one for one in measured if not one.error and one.first_s is not None]
    ttft_s = [one.first_s - one.due_s for one in good if one.first_s is not None]
    shares = Counter(nodes.get(one.instance, "?") for one in good)
    row: Row = {
        "requests": len(sent), "measured": len(measured),
        "failed": dict(Counter(one.error[:40] for one in sent if one.error)),
        "ttft_s": {
            "p50": quantile(ttft_s, 0.5), "p90": quantile(ttft_s, 0.9),
            "p99": quantile(ttft_s, 0.99), "mean": statistics.fmean(ttft_s) if ttft_s else None,
        },
        "cached": sum(o.cached for o in good) / max(sum(o.tokens for o in good), 1),
        "share": {name: shares[name] / max(len(good), 1) for name in nodes.values()},
        "lasted_s": max((one.ended_s for one in sent), default=0.0),
        "late_ms": 1e3 * max((one.sent_s - one.due_s for one in sent), default=0.0),
        "raw": [
            [round(o.due_s, 4), None if o.first_s is None else round(o.first_s - o.due_s, 4),
             nodes.get(o.instance, "?")[:1], o.tokens, o.cached]
            for o in ordered
        ],
    }  # fmt: skip
    known = [
        {**decisions[one.request], "cached": one.cached, "node": nodes.get(one.instance, "?")}
        for one in ordered
        if "ttft_s" in decisions.get(one.request, {})
    ]
    if known:
        row["prediction"] = {
            "first_200": _errors(known[:200]), "later": _errors(known[200:]),
            **{f"later_{kind}": _errors([d for d in known[200:] if d["kind"] == kind])
               for kind in sorted({d["kind"] for d in known})},
        }  # fmt: skip
        row["route_ms"] = statistics.median(d["route_ms"] for d in known)
        row["held_error"] = sum(abs(d["held"] - d["cached"]) for d in known) / sum(
            one.tokens for one in ordered
        )
        row["decisions"] = [
            [round(d[k], 5) if isinstance(d[k], float) else d[k] for k in _KEPT] for d in known
        ]
    return row


_KEPT = (
    "predicted_s", "ttft_s", "kind", "node", "host", "held", "cached", "new", "queue_s", "load_s",
    "compute_s", "in_flight",
)  # fmt: skip


def _errors(decided: Sequence[Row]) -> Row:
    """Absolute errors of predicted TTFTs over those that came, and the median ratio."""
    off = [abs(d["predicted_s"] / d["ttft_s"] - 1) for d in decided]
    ratio = [d["predicted_s"] / d["ttft_s"] for d in decided]
    return {
        "count": len(off), "median": quantile(off, 0.5), "p90": quantile(off, 0.9),
        "ratio": quantile(ratio, 0.5),
    }  # fmt: skip


def tuned(rows: Sequence[Row], trace: str, cluster: str) -> str:
    """The arm of `kv` to take as tuned: of its tuning runs without a failure the least mean TTFT.

    Raises:
        PeerError: none is left.
    """
    of = [
        row for row in rows
        if (row["trace"], row["cluster"], row["seed"]) == (trace, cluster, TUNING_SEED)
        and row["arm"] in TUNING and not row["failed"]
    ]  # fmt: skip
    if not of:
        raise PeerError(f"{TUNED}: no run of seed {TUNING_SEED} ended well to choose options by")
    return str(min(of, key=lambda row: row["ttft_s"]["mean"])["arm"])


def summary(rows: Sequence[Row]) -> list[Row]:
    """By trace and arm: geometric means over seeds of each figure, and ours over the arm's, paired
    by seed, with 95 % intervals."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["trace"], row["arm"]), {})[row["seed"]] = row
    out = []
    for (trace, arm), runs in found.items():
        ours = found.get((trace, "ours"), {})
        seeds = [seed for seed in runs if seed in ours and arm != "ours"]
        line: Row = {
            "trace": trace, "arm": arm, "seeds": sorted(runs),
            "requests": sum(r["requests"] for r in runs.values()),
            "failed": sum(sum(r["failed"].values()) for r in runs.values()),
            "cached": statistics.fmean(r["cached"] for r in runs.values()),
            "share": {n: statistics.fmean(r["share"][n] for r in runs.values())
                      for n in next(iter(runs.values()))["share"]},
            "ttft_s": {k: statistics.geometric_mean([r["ttft_s"][k] for r in runs.values()])
                       for k in FIGURES},
        }  # fmt: skip
        if seeds:
            line["ours_over_it"] = {
                k: asdict(
                    paired(
                        [ours[s]["ttft_s"][k] for s in seeds], [runs[s]["ttft_s"][k] for s in seeds]
                    )
                )
                for k in FIGURES
            }
        out.append(line)
    return out
