"""Every figure of a load test's report, from the table of its requests.

The keys are those of the simulator's output (`simulator/outcome.py`): `ttft_s`, `tpot_s`, `e2e_s`,
`goodput_rps`, `slo`, `jain`, `nodes`. Latencies count from when a request was due, so a client
that falls behind cannot hide it (coordinated omission); `ttft_sent_s` counts from sending. Nothing
is left out: a run has no warm-up that is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from loadtest.explain import split, why_slow, why_slow_tokens
from loadtest.journal import ERROR_KINDS, RequestRecord
from loadtest.results import BASES, PARTS, TOKENS, Floats, Results

_EXAMPLES = 3
_BINS, _FIRST_BIN_S = 240, 0.25
_MOST_OWNERS = 512
_OTHERS = "(all others)"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def figures(found: Results) -> dict[str, Any]:
    """The figures of a run, ready for JSON; None where there is nothing to measure."""
    table = found.table
    done, sent = table.filter(pl.col("error") == ""), table.filter(pl.col("error") != "prompt")
    duration_s = _span_s(sent["sent_s"], sent["ended_s"])
    due_s = 0.0 if found.is_closed else _span_s(table["scheduled_s"], table["scheduled_s"])
    window_s = due_s or duration_s
    output_tokens = int(done["generated_tokens"].sum())
    prompt = pl.when(pl.col("prompt_tokens") > 0).then("prompt_tokens").otherwise("input_tokens")
    slo = _slo(found)
    met = int(table["met"].sum())
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
        "late_s": spread(sent.filter(pl.col("attempt") == 0)["late_s"]),
        "goodput_rps": None if slo["met"] is None else _per(met, window_s),
        "slo": slo,
        "errors": _errors(table.filter(pl.col("error") != "")),
        "cached_tokens": _cached(table),
        "prediction": _prediction(done),
        **_fairness(table),
        "reasons": _counts(table.filter(pl.col("reason") != "")["reason"]),
        "nodes": _owners(table, "node", "(not reported)"),
        "tenants": _owners(table, "tenant", "(none)"),
        "classes": _owners(table.with_columns(pl.col("bound").fill_null("")), "bound",
                           "(not reported)"),
        "slowest": [_slow_row(record) for record in found.slowest],
        "slowest_tokens": [_slow_tokens_row(record) for record in found.slowest_tokens],
        "paced_requests": int(table["paced"].sum()),
        "timeline": timeline(table).to_dict(),
    }  # fmt: skip


def spread(values: pl.Series) -> dict[str, float | None]:
    """Mean, quantiles and largest of what is not null; None where there is nothing."""
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
    """From the least to the largest; 0 where that is no time."""
    if not len(first):
        return 0.0
    return max(float(last.max()) - float(first.min()), 0.0)  # type: ignore[arg-type]


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _counts(values: pl.Series) -> dict[str, int]:
    """How often each occurs, the most frequent first; of equals the one that came first."""
    names, counts = np.unique(values.to_numpy().astype(str), return_counts=True)
    first = {name: place for place, name in reversed(list(enumerate(values.to_list())))}
    pairs = zip(names.tolist(), counts.tolist(), strict=True)
    return dict(sorted(pairs, key=lambda pair: (-pair[1], first[pair[0]])))


def _slo(found: Results) -> dict[str, Any]:
    table, objective = found.table, found.objective
    basis = _counts(table["basis"])
    has_any = set(basis) - {"none"} != set()
    not_judged = int(table["met"].null_count())
    judged = max(table.height - not_judged, 1)
    shares = {
        name: int(table[name].sum()) / judged if has_any else None
        for name in ("met", "ttft_met", "tpot_met")
    }
    given = objective.has_limits
    named = ", ".join(name for name in BASES if name in basis and name != "none")
    named = named or ("given" if given else "none")
    met = shares["met"]
    return {
        **shares,
        "ttft_limit_s_p50": spread(table["ttft_limit_s"])["p50"],
        "tpot_limit_s_p50": spread(table["tpot_limit_s"])["p50"],
        "basis": named,
        "meaning": objective.limits_text() if given else BASES[named.split(", ")[0]],
        "not_judged": not_judged,
        "asked": objective.is_required,
        "share": objective.share,
        # What nobody required can be met in part, but neither passed nor missed.
        "passed": met >= objective.share if met is not None and objective.is_required else None,
    }


def _errors(failed: pl.DataFrame) -> dict[str, Any]:
    rows = {}
    for kind, count in _counts(failed["error"]).items():
        details = failed.filter(pl.col("error") == kind)["error_detail"]
        examples = details.filter(details != "").unique(maintain_order=True).head(_EXAMPLES)
        name = "http_NNN" if kind.startswith("http_") else kind
        meaning = ERROR_KINDS.get(name, "")
        rows[kind] = {"count": count, "meaning": meaning, "examples": examples.to_list()}
    return rows


def _cached(table: pl.DataFrame) -> dict[str, Any]:
    """Expected with an unlimited cache, against what engines found, where they reported it."""
    reported = table.drop_nulls([f"actual_{name}" for name in TOKENS])
    device, host, computed = (int(reported[f"actual_{name}"].sum()) for name in TOKENS)
    return {
        "expected": int(table["cached_tokens"].sum()),
        "told_requests": reported.height,
        "expected_where_told": int(reported["cached_tokens"].sum()),
        "actual": device + host if reported.height else None,
        "device": device if reported.height else None,
        "host": host if reported.height else None,
        "computed": computed if reported.height else None,
    }


def _prediction(done: pl.DataFrame) -> dict[str, Any]:
    """|predicted - actual| / actual of TTFT, the actual one as client and as router saw it."""
    known = done.drop_nulls(["predicted_ttft_s", "first_token_s"])
    known = known.with_columns(client_s=pl.col("first_token_s") - pl.col("sent_s"))
    client = known.filter(pl.col("client_s") > 0)
    router = known.filter(pl.col("actual_ttft_s") > 0)
    bias = (client["predicted_ttft_s"] - client["client_s"]) / client["client_s"]
    off = (router["predicted_ttft_s"] - router["actual_ttft_s"]) / router["actual_ttft_s"]
    return {
        "requests": client.height,
        "client_error": spread(bias.abs()),
        "client_bias_p50": spread(bias)["p50"],
        "router_requests": router.height,
        "router_error": spread(off.abs()),
    }


def _fairness(table: pl.DataFrame) -> dict[str, Any]:
    """Jain's index over tenants: of how near to idle they ran, else of their token rates."""
    done = _few_owners(table, "tenant").filter(pl.col("error") == "")
    by_speed = jain(_means(done, pl.col("idle_ttft_s") / pl.col("ttft_s").clip(lower_bound=1e-9)))
    if by_speed is not None:
        return {"jain": by_speed, "jain_of": "idle TTFT over TTFT, mean by tenant"}
    quick = done.filter(pl.col("e2e_s") > 0)
    by_rate = jain(_means(quick, pl.col("generated_tokens") / pl.col("e2e_s")))
    what = "output tokens per second of a request, mean by tenant"
    return {"jain": by_rate, "jain_of": None if by_rate is None else what}


def _means(done: pl.DataFrame, figure: pl.Expr) -> list[float]:
    means = done.group_by("tenant", maintain_order=True).agg(figure.mean().alias("mean"))
    return means["mean"].drop_nulls().to_list()


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
    """The table with owners beyond the first so many as one: a workload may name one a request."""
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
        "ttft_s": spread(group["ttft_s"]),
        "tpot_s": spread(group["tpot_s"]),
        "e2e_s": spread(group["e2e_s"]),
        "met": group["met"].mean(),
        "kappa_p50": spread(group["ratio"])["p50"],
        "expected_cached_tokens": int(group["cached_tokens"].sum()),
        **{n: int(reported[f"actual_{n}"].sum()) if reported.height else None for n in TOKENS},
    }


# -- the slowest ----------------------------------------------------------------------------------


def _slow_row(record: RequestRecord) -> dict[str, Any]:
    """One with a late first token: predicted and actual, split alike, and why."""
    found = split(record)
    predicted, actual = record.predicted or {}, record.actual or {}
    return {
        **_named(record),
        "ttft_s": record.ttft_s,
        "predicted": {
            "ttft_s": record.predicted_ttft_s,
            **{name: predicted.get(name) for name in PARTS},
        },
        "actual": asdict(found) if found else None,
        "expected_cached_tokens": record.cached_tokens,
        "actual_tokens": {name: actual.get(name) for name in TOKENS},
        "why": why_slow(record),
    }


def _slow_tokens_row(record: RequestRecord) -> dict[str, Any]:
    return {
        **_named(record),
        "tpot_s": record.tpot_s,
        "longest_gap_s": max(record.gaps_s, default=None),
        "why": why_slow_tokens(record),
    }


def _named(record: RequestRecord) -> dict[str, Any]:
    return {
        "session": record.session,
        "turn": record.turn,
        "tenant": record.tenant,
        "request_id": record.request_id,
        "scheduled_s": record.scheduled_s,
        "node": record.node,
        "paced": record.paced,
        "reason": record.reason,
        "ratio": record.ratio,
        "kappa_crit": record.crit,
        "input_tokens": record.input_tokens,
        "generated_tokens": record.generated_tokens,
    }


# -- for pictures ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RateTimeline:
    """What happened in each of at most `_BINS` bins of `bin_s` seconds; `counts` by series.

    in_flight: requests sent and not yet ended, waiting: due and not yet sent; at the end of a bin.
    """

    bin_s: float
    counts: Mapping[str, Floats]

    def times_s(self) -> Floats:
        """The middle of each bin."""
        return (np.arange(len(self.counts["due"]), dtype=np.float64) + 0.5) * self.bin_s

    def per_second(self, series: str) -> Floats:
        return self.counts[series] / self.bin_s

    def in_flight(self) -> Floats:
        return np.cumsum(self.counts["sent"] - self.counts["ended"])

    def waiting(self) -> Floats:
        return np.maximum(np.cumsum(self.counts["due"] - self.counts["sent"]), 0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "bin_s": self.bin_s,
            **{name: counts.astype(int).tolist() for name, counts in self.counts.items()},
            "in_flight": self.in_flight().astype(int).tolist(),
        }


def timeline(table: pl.DataFrame) -> RateTimeline:
    """Requests and output tokens over time; one that was never sent was neither due nor ended."""
    sent, done = table.filter(pl.col("error") != "prompt"), table.filter(pl.col("error") == "")
    last_s = max([0.0, *table["scheduled_s"], *sent["sent_s"], *table["ended_s"]])
    bin_s = _FIRST_BIN_S
    while last_s >= bin_s * _BINS:
        bin_s *= 2
    bins = int(last_s / bin_s) + 1

    def counted(times_s: pl.Series, weights: pl.Series | None = None) -> Floats:
        places = (times_s.to_numpy().clip(min=0.0) / bin_s).astype(np.int64)
        by = None if weights is None else weights.to_numpy()
        return np.bincount(places, weights=by, minlength=bins).astype(np.float64)

    return RateTimeline(bin_s, {
        "due": counted(sent["scheduled_s"]),
        "sent": counted(sent["sent_s"]),
        "ended": counted(sent["ended_s"]),
        "completed": counted(done["ended_s"]),
        "failed": counted(table.filter(pl.col("error") != "")["ended_s"]),
        "met": counted(table.filter(pl.col("met"))["ended_s"]),
        "output_tokens": counted(done["ended_s"], done["generated_tokens"]),
    })  # fmt: skip
