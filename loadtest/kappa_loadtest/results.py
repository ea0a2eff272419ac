"""A load test's records as one table, each request held against its objective.

The objective is one of three, tried in this order: limits that the user gave in seconds; the
objective of `kappa.slo` on the endpoint's own nodes (`GET /v1/nodes` reports their profiles); five
times the idle TTFT that the endpoint predicted for the request. An endpoint that reports nothing,
without limits given, has no objective, and then there is no goodput.

A request takes about 2 kB and 8 bytes a token. `loadtest.figures` makes the report's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from kappa import slo
from kappa.hardware import NodeProfile
from kappa.shapes import model_shape
from kappa_loadtest.run_folder import RequestRecord

Floats = NDArray[np.float64]

SHARE = 0.9
"""Share of the requests that must meet the objective, unless another is given: as in DistServe
(Zhong et al., OSDI 2024)."""

BASES: Mapping[str, str] = {
    "given": "limits given",
    "idle": "TTFT within 0.5 s (times the dilation) or 5 x idle, TPOT within 3 x idle, on the "
    "endpoint's median node",
    "predicted": "TTFT within 0.5 s (times the dilation) or 5 x the load and compute seconds that "
    "the endpoint predicted; no limit on TPOT",
    "none": "no objective: the endpoint reports nothing of its nodes, and no limit was given",
}

PARTS = ("queue_s", "load_s", "compute_s")
TOKENS = ("device_tokens", "cached_tokens", "new_tokens")
_BATCH = 8192

_TYPES: dict[Any, Any] = {
    str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean,
    int | None: pl.Int64, float | None: pl.Float64,
    list[float]: pl.List(pl.Float64), list[str]: pl.List(pl.String),
}  # fmt: skip
# Columns of the record, and of the endpoint's reports.
_RECORDED: dict[str, Any] = {
    field.name: _TYPES[field.type]
    for field in msgspec.structs.fields(RequestRecord)
    if field.name not in ("predicted", "actual")
}
_REPORTED: dict[str, Any] = {
    **{f"predicted_{name}": pl.Float64 for name in PARTS},
    **{f"predicted_{name}": pl.Int64 for name in TOKENS},
    **{f"actual_{name}": pl.Float64 for name in (*PARTS, "ttft_s")},
    **{f"actual_{name}": pl.Int64 for name in TOKENS},
}
SCHEMA: dict[str, Any] = {
    **_RECORDED, **_REPORTED,
    "ttft_s": pl.Float64, "tpot_s": pl.Float64, "e2e_s": pl.Float64, "late_s": pl.Float64,
    "way_s": pl.Float64, "unknown_s": pl.Float64, "split": pl.String, "bound": pl.String,
    "ttft_limit_s": pl.Float64, "tpot_limit_s": pl.Float64, "idle_ttft_s": pl.Float64,
    "basis": pl.String, "ttft_met": pl.Boolean, "tpot_met": pl.Boolean, "met": pl.Boolean,
}  # fmt: skip
"""Columns of the table: a record's own, its seconds as one reads them, and its objective.

ttft_s, tpot_s, e2e_s: from when it was due; null for a request that failed. late_s, actual_queue_s,
actual_load_s, actual_compute_s, way_s, unknown_s: the parts of its TTFT (`_split`). bound:
`memory-bound` if its ratio is at or above its critical ratio there, else `compute-bound`. met:
null where there was no objective for it.
"""


def table_of(records: Iterable[RequestRecord], objective: Objective) -> pl.DataFrame:
    """The requests of a run, read once."""
    rest = iter(records)
    pieces = [pl.DataFrame(schema=SCHEMA)]
    while batch := list(islice(rest, _BATCH)):
        # A record is JSON, where 2.0 may be written as 2 and the other way round.
        rows = pl.DataFrame(map(_row, batch), schema={**_RECORDED, **_REPORTED}, strict=False)
        pieces.append(objective.evaluated(_split(_timed(rows))).select(list(SCHEMA)))
    return pl.concat(pieces)


def _row(record: RequestRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in _RECORDED}
    for name in _REPORTED:
        source, _, figure = name.partition("_")
        row[name] = (getattr(record, source) or {}).get(figure)
    return row


def _timed(table: pl.DataFrame) -> pl.DataFrame:
    """Add latencies, counted from when a request was due; null for requests that failed."""
    c = pl.col
    is_done, later_tokens = c.error == "", c.generated_tokens - 1
    is_timed = is_done & c.first_token_s.is_not_null()
    memory, compute = pl.lit("memory-bound"), pl.lit("compute-bound")
    return table.with_columns(
        ttft_s=pl.when(is_done).then(c.first_token_s - c.scheduled_s),
        # By tokens and not by chunks; null for one token or none.
        tpot_s=pl.when(is_timed & (later_tokens > 0)).then(
            (c.last_token_s - c.first_token_s) / later_tokens
        ),
        e2e_s=pl.when(is_done).then(c.ended_s - c.scheduled_s),
        late_s=(c.sent_s - c.scheduled_s).clip(0.0),
        bound=pl.when(c.ratio >= c.crit).then(memory).when(c.ratio < c.crit).then(compute),
    )


def _split(table: pl.DataFrame) -> pl.DataFrame:
    """Add the parts of the TTFT: late, queue, load, compute, way (client to router), unknown.

    The router's part is split as the endpoint reported it (`told`). If it reported only token
    counts, load and compute are its predictions, scaled to the tokens that were really loaded and
    computed, and the queue is the rest (`derived`). Else the whole part is unknown (`none`).
    """
    c = pl.col
    since_sent_s = (c.first_token_s - c.sent_s).clip(0.0)
    seen_s = pl.min_horizontal(c.actual_ttft_s, since_sent_s)
    has_token, is_seen = c.first_token_s.is_not_null(), c.actual_ttft_s.is_not_null()
    actual = [c(f"actual_{part}") for part in PARTS]
    is_told = has_token & is_seen & pl.all_horizontal(part.is_not_null() for part in actual)
    load_s, compute_s = _scaled("load_s", "cached_tokens"), _scaled("compute_s", "new_tokens")
    is_derived = has_token & is_seen & (load_s + compute_s).is_not_null()
    # The predictions for these tokens cannot have taken longer than all parts together.
    excess = pl.when(seen_s > 0).then(((load_s + compute_s) / seen_s).clip(1.0)).otherwise(1.0)
    load_s, compute_s = load_s / excess, compute_s / excess
    queue_s = (seen_s - load_s - compute_s).clip(0.0)
    derived = [pl.when(is_derived).then(part) for part in (queue_s, load_s, compute_s)]
    parts = [pl.when(is_told).then(a).otherwise(d) for a, d in zip(actual, derived, strict=True)]
    told_rest_s = (seen_s - actual[0] - actual[1] - actual[2]).clip(0.0)
    return table.with_columns(
        *(part.alias(f"actual_{name}") for part, name in zip(parts, PARTS, strict=True)),
        way_s=pl.when(has_token & is_seen).then(since_sent_s - seen_s),
        unknown_s=pl.when(is_told).then(told_rest_s).when(is_derived).then(0.0)
        .when(is_seen).then(seen_s).otherwise(since_sent_s),
        split=pl.when(is_told).then(pl.lit("told")).when(is_derived).then(pl.lit("derived"))
        .when(has_token).then(pl.lit("none")),
    )  # fmt: skip


def _scaled(part: str, tokens: str) -> pl.Expr:
    """The predicted seconds of a part for the tokens really taken; null where that is unknown."""
    seconds, expected = pl.col(f"predicted_{part}"), pl.col(f"predicted_{tokens}")
    real = pl.col(f"actual_{tokens}")
    nothing = pl.when((expected == 0) & (real == 0) & seconds.is_not_null()).then(0.0)
    return pl.when(expected > 0).then(seconds * real / expected).otherwise(nothing)


# -- the objective --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective that requests are held against."""

    # Limits given by the user, in seconds; None: no limit, or the endpoint's own objective if both
    # are None.
    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = SHARE  # of requests that must meet it for the run to pass
    # One per worker of the endpoint; empty if not reported.
    speeds: tuple[slo.IdleSpeed, ...] = ()
    dilation: float = 1.0  # of the endpoint's nodes
    has_share: bool = False  # `share` was given: the endpoint's own objective must be met, too

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ValueError(f"the objective's {name} is {value}: give seconds above zero")
        if not 0 < self.share <= 1:
            raise ValueError(f"the objective's share is {self.share}: give one above 0, at most 1")

    @property
    def has_limits(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    @property
    def is_required(self) -> bool:
        """Whether the user gave limits or a share: only then can a run fail."""
        return self.has_share or self.has_limits

    def limits_text(self) -> str:
        """The limits that were given, in words."""
        first = "" if self.ttft_s is None else f"first token within {self.ttft_s:g} s"
        later = "" if self.tpot_s is None else f"later tokens within {self.tpot_s:g} s each"
        return ", ".join(filter(None, (first, later)))

    def evaluated(self, table: pl.DataFrame) -> pl.DataFrame:
        """The table with each request's limits and whether it met them."""
        found, idle_s, basis = self._limits(table)
        ttft, tpot = table["ttft_s"].to_numpy(), table["tpot_s"].to_numpy()
        answered, has_limit = ~np.isnan(ttft), ~np.isnan(found.ttft_s)
        columns = {
            "ttft_limit_s": _finite(found.ttft_s),
            "tpot_limit_s": _finite(found.tpot_s),
            "idle_ttft_s": _finite(idle_s),
            "basis": np.where(has_limit, basis, "none").tolist(),
            "ttft_met": ttft <= found.ttft_s,
            "tpot_met": answered & has_limit & ~(tpot > found.tpot_s),
            # An answered request met or missed a limit only if it had one; a failed one missed it.
            "met": [
                bool(met) if known else None
                for met, known in zip(found.met(ttft, tpot), has_limit | ~answered, strict=True)
            ],
        }
        return table.with_columns(
            pl.Series(name, values, dtype=SCHEMA[name]) for name, values in columns.items()
        )

    def _limits(self, table: pl.DataFrame) -> tuple[slo.Limits, Floats, str]:
        """(limits of each request, NaN or inf for none; its idle TTFT, NaN if unknown; basis)."""
        idle_ttft, idle_tpot = self._idle(table)
        if self.has_limits:
            ttft, tpot = (np.full(table.height, s or np.inf) for s in (self.ttft_s, self.tpot_s))
            return slo.Limits(ttft, tpot), idle_ttft, "given"
        if self.speeds:
            return slo.limits(idle_ttft, idle_tpot, self.dilation), idle_ttft, "idle"
        predicted = table["predicted_load_s"] + table["predicted_compute_s"]
        idle = predicted.to_numpy().astype(np.float64)
        return slo.limits(idle, np.full(table.height, np.inf), self.dilation), idle, "predicted"

    def _idle(self, table: pl.DataFrame) -> tuple[Floats, Floats]:
        """Idle TTFT and TPOT on the median node, with the reusable prefix in its host tier."""
        if not self.speeds:
            unknown = np.full(table.height, np.nan)
            return unknown, unknown
        lengths = table.select(
            _positive_or("prompt_tokens", "input_tokens"),
            _positive_or("generated_tokens", "output_tokens"),
        )
        prompt, output = (column.to_numpy().astype(np.float64) for column in lengths)
        cached = np.minimum(table["cached_tokens"].to_numpy(), np.maximum(prompt - 1, 0))
        return slo.median_idle(self.speeds, cached, prompt - cached, output)


def _positive_or(column: str, other: str) -> pl.Expr:
    return pl.when(pl.col(column) > 0).then(column).otherwise(other).alias(column)


def _finite(values: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def objective_of(run: Mapping[str, Any]) -> Objective:
    """The objective of a run, from its `run.json`: `objective` as given, `nodes` as reported.

    Raises:
        ValueError: a malformed objective.
    """
    given = run.get("objective") or {}
    unknown = sorted(set(given) - {"ttft_s", "tpot_s", "share"})
    if unknown:
        raise ValueError(f"objective: unknown key {unknown[0]!r}; known: ttft_s, tpot_s, share")
    rows, share = run.get("nodes") or [], given.get("share")
    profiles = (row.get("profile") for row in rows)
    dilations = (profile.get("dilation") for profile in profiles if isinstance(profile, Mapping))
    return Objective(
        ttft_s=given.get("ttft_s"),
        tpot_s=given.get("tpot_s"),
        share=SHARE if share is None else float(share),
        speeds=_node_speeds(rows, str(run.get("model") or "")),
        # That of the slowest paced node.
        dilation=max((float(d) for d in dilations if isinstance(d, int | float)), default=1.0),
        has_share=share is not None,
    )


def _node_speeds(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[slo.IdleSpeed, ...]:
    """The idle speed of each node of `GET /v1/nodes`; empty if one of them cannot be priced.

    A paced node is priced as the model that it emulates, any other as the served model, if its
    shape is known by name.
    """
    speeds = []
    for row in rows:
        try:
            shape = model_shape(row.get("emulated_model") or model)
            profile = NodeProfile.from_dict(row["profile"])
        except (KeyError, TypeError, ValueError):
            return ()
        speeds.append(slo.idle_speed(shape, profile))
    return tuple(speeds)
