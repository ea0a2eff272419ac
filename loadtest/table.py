"""A load test's records as one table, each held against its objective, and the slowest in full.

A request takes about 2 kB and 4 bytes a token (200,000 requests: a process of 520 MB).
`loadtest.figures` makes the report's figures of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from loadtest.journal import Record
from loadtest.slo import Objective
from loadtest.slow import split

Floats = NDArray[np.float64]

_BATCH = 8192
_SLOWEST, _SLOWEST_TOKENS = 25, 10
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
queue, load and compute; split: where the actual one is from (`loadtest.slow`). bound:
`memory-bound` if its ratio is at or above the node's critical ratio, else `compute-bound`. met:
null where there was no objective for it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """A run's requests as a table, and the slowest of them in full.

    slowest: by first token; slowest_tokens: by later tokens; the worst first, of equals the first.
    is_closed: whether sessions came when others had ended; rates are then over the whole run.
    """

    table: pl.DataFrame
    objective: Objective
    slowest: Sequence[Record]
    slowest_tokens: Sequence[Record]
    is_closed: bool = False


def results_of(
    records: Iterable[Record],
    objective: Objective,
    *,
    dilation: float | None = None,
    is_closed: bool = False,
) -> Results:
    """Read records into a table.

    Args:
        records: read once.
        objective: that each is held against.
        dilation: real seconds per emulated one, if the endpoint does not tell it.
        is_closed: whether sessions came when others had ended.
    """
    rest = iter(records)
    pieces = [pl.DataFrame(schema=SCHEMA)]
    slowest: list[Record] = []
    slowest_tokens: list[Record] = []
    while batch := list(islice(rest, _BATCH)):
        pieces.append(_piece(batch, objective, dilation))
        done = [record for record in batch if not record.error and record.ttft_s is not None]
        slowest = heapq.nlargest(_SLOWEST, chain(slowest, done), key=lambda r: r.ttft_s or 0.0)
        later = (record for record in done if record.tpot_s is not None)
        slowest_tokens = heapq.nlargest(
            _SLOWEST_TOKENS, chain(slowest_tokens, later), key=lambda r: r.tpot_s or 0.0
        )
    return Results(pl.concat(pieces), objective, slowest, slowest_tokens, is_closed)


def _piece(batch: list[Record], objective: Objective, dilation: float | None) -> pl.DataFrame:
    rows = [_row(record) for record in batch]
    limits = objective.judge(batch, dilation)
    ttft = np.array([np.nan if row["ttft_s"] is None else row["ttft_s"] for row in rows])
    tpot = np.array([np.nan if row["tpot_s"] is None else row["tpot_s"] for row in rows])
    # Answered, but by what measure? What failed has missed any.
    unknown = np.array([basis == "none" for basis in limits.basis]) & ~np.isnan(ttft)
    judged = {
        "ttft_limit_s": _known(limits.ttft_limit_s),
        "tpot_limit_s": _known(limits.tpot_limit_s),
        "idle_ttft_s": _known(limits.idle_ttft_s),
        "basis": list(limits.basis),
        "ttft_met": ~(np.isnan(ttft) | (ttft > limits.ttft_limit_s)) & ~unknown,
        "tpot_met": ~(np.isnan(ttft) | (tpot > limits.tpot_limit_s)) & ~unknown,
        "met": [
            None if is_unknown else bool(met)
            for met, is_unknown in zip(limits.met(ttft, tpot), unknown, strict=True)
        ],
    }
    columns = [name for name in SCHEMA if name not in judged]
    # A journal is JSON, where 2.0 may be written as 2 and the other way round.
    piece = pl.DataFrame(rows, schema={name: SCHEMA[name] for name in columns}, strict=False)
    return piece.with_columns(
        pl.Series(name, values, dtype=SCHEMA[name], strict=False) for name, values in judged.items()
    ).select(list(SCHEMA))


def _row(record: Record) -> dict[str, Any]:
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


def _known(values: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]
