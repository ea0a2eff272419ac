"""A load test's records as one table, each held against its objective, and the slowest in full.

What a request may take is found in one of three ways, tried in this order: limits that the user
gave in seconds; the objective of `kappa.slo` on the endpoint's own nodes (`GET /v1/nodes` reports
their profiles); five times the idle TTFT that the endpoint predicted for the request. An endpoint
that reports nothing, without limits given, has no objective, and then there is no goodput.

A request takes about 2 kB and 4 bytes a token (200,000 requests: a process of 520 MB).
`loadtest.figures` makes the report's figures of the table.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kappa.cost import step_model
from kappa.hardware import NodeProfile
from kappa.model import kv_bytes_per_token
from kappa.shapes import model_shape
from kappa.slo import (
    TTFT_FLOOR_S,
    TTFT_IDLE_FACTOR,
    IdleSpeed,
    Limits,
    idle_tpot_s,
    idle_ttft_s,
    limits,
    median_node,
)
from loadtest.explain import split
from loadtest.journal import RequestRecord

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

SCHEMA: dict[str, Any] = {
    "session": pl.String, "turn": pl.Int64, "tenant": pl.String, "attempt": pl.Int64,
    "scheduled_s": pl.Float64, "sent_s": pl.Float64, "first_token_s": pl.Float64,
    "last_token_s": pl.Float64, "ended_s": pl.Float64,
    "ttft_s": pl.Float64, "tpot_s": pl.Float64, "e2e_s": pl.Float64, "late_s": pl.Float64,
    "input_tokens": pl.Int64, "output_tokens": pl.Int64, "generated_tokens": pl.Int64,
    "prompt_tokens": pl.Int64, "cached_tokens": pl.Int64, "new_tokens": pl.Int64,
    "gaps_s": pl.List(pl.Float32),
    "status": pl.Int64, "error": pl.String, "error_detail": pl.String,
    "retried": pl.List(pl.String),
    "request_id": pl.String, "node": pl.String, "paced": pl.Boolean, "reason": pl.String,
    "ratio": pl.Float64, "crit": pl.Float64, "predicted_ttft_s": pl.Float64,
    **{f"predicted_{name}": pl.Float64 for name in PARTS},
    **{f"predicted_{name}": pl.Int64 for name in TOKENS},
    **{f"actual_{name}": pl.Float64 for name in (*PARTS, "ttft_s")},
    **{f"actual_{name}": pl.Int64 for name in TOKENS},
    "split": pl.String, "bound": pl.String,
    "ttft_limit_s": pl.Float64, "tpot_limit_s": pl.Float64, "idle_ttft_s": pl.Float64,
    "basis": pl.String, "ttft_met": pl.Boolean, "tpot_met": pl.Boolean, "met": pl.Boolean,
}  # fmt: skip
"""Columns of the table: a record's own, its seconds as one reads them, and its objective.

ttft_s, tpot_s, e2e_s: null for a request that failed. predicted_*, actual_*: its TTFT split into
queue, load and compute; split: where the actual one is from (`loadtest.explain`). bound:
`memory-bound` if its ratio is at or above the node's critical ratio, else `compute-bound`. met:
null where there was no objective for it.
"""

_BATCH = 8192
_SLOWEST, _SLOWEST_TOKENS = 25, 10


# -- the objective --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Per request: limits (NaN or inf: none), seconds idle (NaN: unknown), one of `BASES`."""

    limits: Limits
    idle_ttft_s: Floats
    basis: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Objective:
    """By what requests are judged.

    ttft_s, tpot_s: limits given, in seconds; None leaves that one unlimited, or to the endpoint's
    own objective if both are None. share: of the requests that must meet it for the run to pass;
    has_share: whether that was given, so that the endpoint's own objective must be met, too.
    speeds, dilation: of the endpoint's nodes, one entry per worker; none if not reported.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = SHARE
    speeds: tuple[IdleSpeed, ...] = ()
    dilation: float = 1.0
    has_share: bool = False

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
        """Whether the user gave any of it: a run can only miss what was required."""
        return self.has_share or self.has_limits

    def limits_text(self) -> str:
        """The limits that were given, in words."""
        first = "" if self.ttft_s is None else f"first token within {self.ttft_s:g} s"
        later = "" if self.tpot_s is None else f"later tokens within {self.tpot_s:g} s each"
        return ", ".join(filter(None, (first, later)))

    def judge(self, batch: Sequence[RequestRecord]) -> Judged:
        count = len(batch)
        idle_ttft, idle_tpot = self._idle(batch)
        if self.has_limits:
            given = (np.inf if limit is None else limit for limit in (self.ttft_s, self.tpot_s))
            ttft, tpot = (np.full(count, limit) for limit in given)
            return Judged(Limits(ttft, tpot), idle_ttft, ("given",) * count)
        if self.speeds:
            own = limits(idle_ttft, idle_tpot, self.dilation)
            return Judged(own, idle_ttft, ("idle",) * count)
        predicted = np.array([_predicted_idle_s(record) for record in batch], dtype=np.float64)
        ttft = np.maximum(TTFT_FLOOR_S * self.dilation, TTFT_IDLE_FACTOR * predicted)
        bases = tuple("none" if unknown else "predicted" for unknown in np.isnan(predicted))
        return Judged(Limits(ttft, np.full(count, np.inf)), predicted, bases)

    def _idle(self, batch: Sequence[RequestRecord]) -> tuple[Floats, Floats]:
        """Idle TTFT and TPOT on the median node, its reusable prefix in the host tier."""
        if not self.speeds or not batch:
            unknown = np.full(len(batch), np.nan)
            return unknown, unknown
        prompt = np.array([r.prompt_tokens or r.input_tokens for r in batch], dtype=np.float64)
        cached = np.minimum([r.cached_tokens for r in batch], np.maximum(prompt - 1, 0))
        output = np.array([r.generated_tokens or r.output_tokens for r in batch], dtype=np.float64)
        kinds = list(dict.fromkeys(self.speeds))
        counts = [self.speeds.count(kind) for kind in kinds]
        ttft = [idle_ttft_s(kind, cached, prompt - cached) for kind in kinds]
        tpot = [idle_tpot_s(kind, prompt, output) for kind in kinds]
        return median_node(ttft, counts), median_node(tpot, counts)


def _predicted_idle_s(record: RequestRecord) -> float:
    predicted = record.predicted or {}
    load_s, compute_s = predicted.get("load_s"), predicted.get("compute_s")
    return float("nan") if load_s is None or compute_s is None else float(load_s) + float(compute_s)


def objective_of(run: Mapping[str, Any]) -> Objective:
    """The objective of a run, from its `run.json`: `objective` as given, `nodes` as reported.

    Raises:
        ValueError: an objective that is none.
    """
    given = run.get("objective") or {}
    unknown = sorted(set(given) - {"ttft_s", "tpot_s", "share"})
    if unknown:
        raise ValueError(f"objective: unknown key {unknown[0]!r}; known: ttft_s, tpot_s, share")
    rows, share = run.get("nodes") or [], given.get("share")
    return Objective(
        ttft_s=given.get("ttft_s"),
        tpot_s=given.get("tpot_s"),
        share=SHARE if share is None else float(share),
        speeds=_node_speeds(rows, str(run.get("model") or "")),
        dilation=_dilation(rows),
        has_share=share is not None,
    )


def _dilation(rows: Sequence[Mapping[str, Any]]) -> float:
    """Real seconds per emulated one, on the node that is slowed down most; 1 without nodes."""
    profiles = (row.get("profile") for row in rows)
    known = (profile.get("dilation") for profile in profiles if isinstance(profile, Mapping))
    return max((float(value) for value in known if isinstance(value, int | float)), default=1.0)


def _node_speeds(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[IdleSpeed, ...]:
    """How fast each node of `GET /v1/nodes` is when idle; empty if one of them cannot be priced.

    A paced node is priced as the model that it emulates, any other as the model served: that one's
    shape must be known by name, or nothing is known.
    """
    speeds = []
    for row in rows:
        try:
            shape = model_shape(row.get("emulated_model") or model)
            profile = NodeProfile.from_dict(row["profile"])
        except (KeyError, TypeError, ValueError):
            return ()
        load_token_s = kv_bytes_per_token(shape) / profile.h2d_bytes_per_s
        speeds.append(IdleSpeed(step_model(shape, profile), load_token_s, profile.load_fixed_s))
    return tuple(speeds)


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """A run's requests as a table, and the slowest of them in full.

    slowest: by first token; slowest_tokens: by later tokens; the worst first, of equals the first.
    is_closed: whether sessions came when others had ended; rates are then over the whole run.
    """

    table: pl.DataFrame
    objective: Objective
    slowest: Sequence[RequestRecord]
    slowest_tokens: Sequence[RequestRecord]
    is_closed: bool = False


def results_of(
    records: Iterable[RequestRecord], objective: Objective, *, is_closed: bool = False
) -> Results:
    """Read records, once, into a table."""
    rest = iter(records)
    pieces = [pl.DataFrame(schema=SCHEMA)]
    slowest: list[RequestRecord] = []
    slowest_tokens: list[RequestRecord] = []
    while batch := list(islice(rest, _BATCH)):
        pieces.append(_piece(batch, objective))
        done = [record for record in batch if not record.error and record.ttft_s is not None]
        slowest = heapq.nlargest(_SLOWEST, chain(slowest, done), key=lambda r: r.ttft_s or 0.0)
        later = (record for record in done if record.tpot_s is not None)
        slowest_tokens = heapq.nlargest(
            _SLOWEST_TOKENS, chain(slowest_tokens, later), key=lambda r: r.tpot_s or 0.0
        )
    return Results(pl.concat(pieces), objective, slowest, slowest_tokens, is_closed)


def _piece(batch: list[RequestRecord], objective: Objective) -> pl.DataFrame:
    rows = [_row(record) for record in batch]
    found = objective.judge(batch)
    ttft, tpot = (np.array([row[name] for row in rows], dtype=np.float64) for name in
                  ("ttft_s", "tpot_s"))  # fmt: skip
    answered, known = ~np.isnan(ttft), np.array([basis != "none" for basis in found.basis])
    met = found.limits.met(ttft, tpot)
    judged = {
        "ttft_limit_s": _finite(found.limits.ttft_s),
        "tpot_limit_s": _finite(found.limits.tpot_s),
        "idle_ttft_s": _finite(found.idle_ttft_s),
        "basis": list(found.basis),
        "ttft_met": ttft <= found.limits.ttft_s,
        "tpot_met": answered & known & ~(tpot > found.limits.tpot_s),
        # What was answered has met or missed a limit only if there was one; what failed missed.
        "met": [bool(is_met) if judge else None
                for is_met, judge in zip(met, known | ~answered, strict=True)],
    }  # fmt: skip
    columns = [name for name in SCHEMA if name not in judged]
    # A journal is JSON, where 2.0 may be written as 2 and the other way round.
    piece = pl.DataFrame(rows, schema={name: SCHEMA[name] for name in columns}, strict=False)
    return piece.with_columns(
        pl.Series(name, values, dtype=SCHEMA[name], strict=False) for name, values in judged.items()
    ).select(list(SCHEMA))


def _row(record: RequestRecord) -> dict[str, Any]:
    found = split(record)
    predicted, actual = record.predicted or {}, record.actual or {}
    row: dict[str, Any] = {n: getattr(record, n) for n in SCHEMA if hasattr(record, n)}
    is_done = not record.error
    row["ttft_s"] = record.ttft_s if is_done else None
    row["tpot_s"] = record.tpot_s if is_done and record.ttft_s is not None else None
    row["e2e_s"] = record.ended_s - record.scheduled_s if is_done else None
    row["late_s"] = max(record.sent_s - record.scheduled_s, 0.0)
    row |= {f"predicted_{name}": predicted.get(name) for name in (*PARTS, *TOKENS)}
    row |= {f"actual_{name}": actual.get(name) for name in (*TOKENS, "ttft_s")}
    row |= {f"actual_{name}": getattr(found, name, None) for name in PARTS}
    row["split"] = found.source if found else None
    if record.ratio is not None and record.crit is not None:
        row["bound"] = "memory-bound" if record.ratio >= record.crit else "compute-bound"
    return row


def _finite(values: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
