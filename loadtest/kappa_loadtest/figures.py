"""Every figure of a load test's report, from the table of its requests.

The keys are those of the simulator's output (`simulator/kappa_simulator/outcome.py`): `ttft_s`,
`tpot_s`, `e2e_s`, `goodput_rps`, `slo`, `jain`, `nodes`. Latencies count from when a request was
due, so a client that falls behind cannot hide it (coordinated omission); `ttft_sent_s` counts from
sending. Nothing is left out: a run has no warm-up that is not measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from kappa_loadtest.explain import why_slow, why_slow_tokens
from kappa_loadtest.results import BASES, PARTS, TOKENS, Floats, Objective
from kappa_loadtest.run_folder import ERROR_KINDS

_EXAMPLES = 3
_BINS, _FIRST_BIN_S = 240, 0.25
_MOST_OWNERS = 512
_OTHERS = "(all others)"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SLOWEST, _SLOWEST_TOKENS = 25, 10


def figures(table: pl.DataFrame, objective: Objective, is_closed: bool = False) -> dict[str, Any]:
    """The figures of a run, ready for JSON; None where there is nothing to measure.

    is_closed: sessions came when others had ended; rates are then over the whole run.
    """
    c = pl.col
    done, sent = table.filter(c.error == ""), table.filter(c.error != "prompt")
    duration_s = _span_s(sent["sent_s"], sent["ended_s"])
    due_s = 0.0 if is_closed else _span_s(table["scheduled_s"], table["scheduled_s"])
    window_s = due_s or duration_s
    output_tokens = int(done["generated_tokens"].sum())
    prompt = pl.when(c.prompt_tokens > 0).then("prompt_tokens").otherwise("input_tokens")
    slo = _slo(table, objective)
    by_class = table.with_columns(c.bound.fill_null(""))
    return {
        "requests": table.height,
        "sent": sent.height,
        "completed": done.height,
        "failed": table.height - done.height,
        "retried": int((table["attempt"] > 0).sum()),
        "window_s": window_s,
        "duration_s": duration_s,
        "rate_rps": _per(table.height, window_s),
        "throughput_rps": _per(done.height, duration_s),
        "prompt_tokens": int(done.select(prompt).to_series().sum()),
        "output_tokens": output_tokens,
        "output_tokens_per_s": _per(output_tokens, duration_s),
        "ttft_s": spread(table["ttft_s"]),
        "ttft_sent_s": spread(done["first_token_s"] - done["sent_s"]),
        "itl_s": spread(itl_s(table)),
        "tpot_s": spread(table["tpot_s"]),
        "e2e_s": spread(table["e2e_s"]),
        # Of retried requests only the last attempt's time is known, which the endpoint put off.
        "late_s": spread(sent.filter(c.attempt == 0)["late_s"]),
        "goodput_rps": None if slo["met"] is None else _per(int(table["met"].sum()), window_s),
        "slo": slo,
        "errors": _errors(table.filter(c.error != "")),
        "cached_tokens": _cached(table),
        "prediction": _prediction(done),
        **_fairness(table),
        "reasons": _counts(table.filter(c.reason != "")["reason"]),
        "nodes": _owners(table, "node", "(not reported)"),
        "tenants": _owners(table, "tenant", "(none)"),
        "priorities": _owners(
            table.with_columns(c.priority.cast(pl.String).fill_null("")), "priority", "(none)"
        ),
        "classes": _owners(by_class, "bound", "(not reported)"),
        "slowest": [_slow_row(row) for row in _largest(table, "ttft_s", _SLOWEST)],
        "slowest_tokens": [
            _slow_tokens_row(row) for row in _largest(table, "tpot_s", _SLOWEST_TOKENS)
        ],
        "paced_requests": int(table["paced"].sum()),
        "timeline": timeline(table),
    }


def spread(values: pl.Series) -> dict[str, float | None]:
    """Mean, quantiles and largest of the values that are not null; None if there are none."""
    found = values.drop_nulls().to_numpy()
    if not len(found):
        return dict.fromkeys(("mean", *_QUANTILES, "max"))
    quantiles = np.quantile(found, list(_QUANTILES.values()), method="lower")
    return {
        "mean": float(found.mean(dtype=np.float64)),
        **dict(zip(_QUANTILES, map(float, quantiles), strict=True)),
        "max": float(found.max()),
    }


def itl_s(table: pl.DataFrame) -> pl.Series:
    """Seconds between neighbouring chunks with output, of requests that did not fail."""
    return table.filter(pl.col("error") == "")["gaps_s"].explode()


def _span_s(first: pl.Series, last: pl.Series) -> float:
    """Seconds from the least to the largest time; 0 if there are none."""
    if not len(first):
        return 0.0
    return max(float(last.max()) - float(first.min()), 0.0)  # type: ignore[arg-type]


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _counts(values: pl.Series) -> dict[str, int]:
    """Counts by value, the most frequent first; of equals the one that came first."""
    counts = values.alias("value").to_frame().group_by("value", maintain_order=True).len()
    return dict(counts.sort("len", descending=True, maintain_order=True).iter_rows())


def _slo(table: pl.DataFrame, objective: Objective) -> dict[str, Any]:
    basis = set(table["basis"])
    no_limit = int(table["met"].null_count())
    limited = max(table.height - no_limit, 1)
    shares = {
        name: int(table[name].sum()) / limited if basis - {"none"} else None
        for name in ("met", "ttft_met", "tpot_met")
    }
    named = ", ".join(name for name in BASES if name in basis and name != "none")
    named = named or ("given" if objective.has_limits else "none")
    meaning = objective.limits_text() if objective.has_limits else BASES[named.split(", ")[0]]
    met, is_required = shares["met"], objective.is_required
    return {
        **shares,
        "ttft_limit_s_p50": spread(table["ttft_limit_s"])["p50"],
        "tpot_limit_s_p50": spread(table["tpot_limit_s"])["p50"],
        "basis": named,
        "meaning": meaning,
        "not_judged": no_limit,
        "asked": is_required,
        "share": objective.share,
        # An objective that was not required has no pass or fail.
        "passed": met >= objective.share if met is not None and is_required else None,
    }


def _errors(failed: pl.DataFrame) -> dict[str, Any]:
    rows = {}
    for kind, count in _counts(failed["error"]).items():
        details = failed.filter(pl.col("error") == kind)["error_detail"]
        examples = details.filter(details != "").unique(maintain_order=True).head(_EXAMPLES)
        meaning = ERROR_KINDS.get("http_NNN" if kind.startswith("http_") else kind, "")
        rows[kind] = {"count": count, "meaning": meaning, "examples": examples.to_list()}
    return rows


def _cached(table: pl.DataFrame) -> dict[str, Any]:
    """Cached tokens as expected with an unlimited cache, and as engines reported them."""
    reported = table.drop_nulls([f"actual_{name}" for name in TOKENS])
    device, host, computed = (int(reported[f"actual_{name}"].sum()) for name in TOKENS)
    found = {"actual": device + host, "device": device, "host": host, "computed": computed}
    return {
        "expected": int(table["cached_tokens"].sum()),
        "told_requests": reported.height,
        "expected_where_told": int(reported["cached_tokens"].sum()),
        **(found if reported.height else dict.fromkeys(found)),
    }


def _prediction(done: pl.DataFrame) -> dict[str, Any]:
    """|predicted - actual| / actual of TTFT, the actual one as client and as router saw it."""
    c = pl.col
    known = done.drop_nulls(["predicted_ttft_s", "first_token_s"])
    known = known.with_columns(client_s=c.first_token_s - c.sent_s)
    client = known.filter(c.client_s > 0).select(c.predicted_ttft_s / c.client_s - 1).to_series()
    router = known.filter(c.actual_ttft_s > 0)
    off = router.select(c.predicted_ttft_s / c.actual_ttft_s - 1).to_series()
    return {
        "requests": len(client),
        "client_error": spread(client.abs()),
        "client_bias_p50": spread(client)["p50"],
        "router_requests": len(off),
        "router_error": spread(off.abs()),
    }


def _fairness(table: pl.DataFrame) -> dict[str, Any]:
    """Jain's index over tenants: of how near to idle they ran, else of their token rates."""
    c = pl.col
    done = _few_owners(table, "tenant").filter(c.error == "")
    for what, figure in (
        ("idle TTFT over TTFT, mean by tenant", c.idle_ttft_s / c.ttft_s.clip(1e-9)),
        (
            "output tokens per second of a request, mean by tenant",
            pl.when(c.e2e_s > 0).then(c.generated_tokens / c.e2e_s),
        ),
    ):
        means = done.group_by("tenant", maintain_order=True).agg(figure.mean().alias("mean"))
        index = jain(means["mean"].drop_nulls().to_numpy())
        if index is not None:
            return {"jain": index, "jain_of": what}
    return {"jain": None, "jain_of": None}


def jain(values: ArrayLike) -> float | None:
    """Jain's index of shares: 1 if all are alike, 1/n if one of n has everything.

    Source: Jain, Chiu, Hawe, "A quantitative measure of fairness" (1984). None for fewer than two.
    """
    found: Floats = np.asarray(values, dtype=np.float64)
    squares = float((found**2).sum())
    if len(found) < 2 or not squares:
        return None
    return float(found.sum()) ** 2 / (len(found) * squares)


# -- by node, tenant, class -----------------------------------------------------------------------


def _few_owners(table: pl.DataFrame, column: str) -> pl.DataFrame:
    """The table with owners beyond the first `_MOST_OWNERS` merged: each request may name one."""
    names = table[column].unique(maintain_order=True)
    if len(names) <= _MOST_OWNERS:
        return table
    kept = pl.col(column).is_in(names.head(_MOST_OWNERS).to_list())
    return table.with_columns(pl.when(kept).then(column).otherwise(pl.lit(_OTHERS)).alias(column))


def _owners(table: pl.DataFrame, column: str, nameless: str) -> list[dict[str, Any]]:
    """A row per owner, the one with most requests first; none if there is only the nameless."""
    table = _few_owners(table, column)
    if not (table[column] != "").any():
        return []
    groups = table.partition_by(column, as_dict=True)
    ordered = sorted(groups.items(), key=lambda pair: (-pair[1].height, str(pair[0][0])))
    return [{"name": str(name[0]) or nameless, **_owner(group)} for name, group in ordered]


def _owner(group: pl.DataFrame) -> dict[str, Any]:
    completed = int((group["error"] == "").sum())
    reported = group.drop_nulls("actual_cached_tokens")
    return {
        "requests": group.height,
        "completed": completed,
        "failed": group.height - completed,
        **{name: spread(group[name]) for name in ("ttft_s", "tpot_s", "e2e_s")},
        "met": group["met"].mean(),
        "kappa_p50": spread(group["ratio"])["p50"],
        "expected_cached_tokens": int(group["cached_tokens"].sum()),
        **{n: int(reported[f"actual_{n}"].sum()) if reported.height else None for n in TOKENS},
    }


# -- the slowest ----------------------------------------------------------------------------------


def _largest(table: pl.DataFrame, column: str, most: int) -> list[dict[str, Any]]:
    """The rows with the largest values, the worst first, of equals the first."""
    known = table.drop_nulls(["ttft_s", column])
    return known.sort(column, descending=True, maintain_order=True).head(most).to_dicts()


def _slow_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row on a late first token: predicted and actual parts, and the cause."""
    parts = {name: row[f"actual_{name}"] for name in PARTS}
    rest = {name: row[name] for name in ("ttft_s", "late_s", "way_s", "unknown_s")}
    return {
        **_named(row),
        "ttft_s": row["ttft_s"],
        "predicted": {name: row[f"predicted_{name}"] for name in ("ttft_s", *PARTS)},
        "actual": {**rest, **parts, "source": row["split"]},
        "expected_cached_tokens": row["cached_tokens"],
        "actual_tokens": {name: row[f"actual_{name}"] for name in TOKENS},
        "why": why_slow(row),
    }


def _slow_tokens_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **_named(row),
        "tpot_s": row["tpot_s"],
        "longest_gap_s": max(row["gaps_s"], default=None),
        "why": why_slow_tokens(row),
    }


def _named(row: dict[str, Any]) -> dict[str, Any]:
    names = (
        "session", "turn", "tenant", "request_id", "scheduled_s", "node", "paced", "reason",
        "ratio", "input_tokens", "generated_tokens",
    )  # fmt: skip
    return {**{name: row[name] for name in names}, "kappa_crit": row["crit"]}


# -- over time ------------------------------------------------------------------------------------


def timeline(table: pl.DataFrame) -> dict[str, Any]:
    """Series of events in at most `_BINS` bins of `bin_s` seconds.

    A request that was never sent counts as neither due nor ended. in_flight: sent and not yet
    ended; waiting: due and not yet sent; at the end of a bin.
    """
    c = pl.col
    sent, done = table.filter(c.error != "prompt"), table.filter(c.error == "")
    last_s = max([0.0, *table["scheduled_s"], *sent["sent_s"], *table["ended_s"]])
    bin_s = _FIRST_BIN_S
    while last_s >= bin_s * _BINS:
        bin_s *= 2
    bins = int(last_s / bin_s) + 1

    def counted(times_s: pl.Series, weights: pl.Series | None = None) -> Any:
        places = (times_s.to_numpy().clip(min=0.0) / bin_s).astype(np.int64)
        by = None if weights is None else weights.to_numpy()
        return np.bincount(places, weights=by, minlength=bins).astype(np.int64)

    counts = {
        "due": counted(sent["scheduled_s"]),
        "sent": counted(sent["sent_s"]),
        "ended": counted(sent["ended_s"]),
        "completed": counted(done["ended_s"]),
        "failed": counted(table.filter(c.error != "")["ended_s"]),
        "met": counted(table.filter("met")["ended_s"]),
        "output_tokens": counted(done["ended_s"], done["generated_tokens"]),
    }
    counts["in_flight"] = np.cumsum(counts["sent"] - counts["ended"])
    counts["waiting"] = np.maximum(np.cumsum(counts["due"] - counts["sent"]), 0)
    return {"bin_s": bin_s, **{name: values.tolist() for name, values in counts.items()}}
