"""A run's records as a table: one row each, written as parquet.

Beside what the record says stand its seconds as one reads them (TTFT, end to end, late), and its
TTFT split into queue, load and compute, predicted and actual. Written piece by piece, so that a
run of any length fits. Called by `loadtest.replay.report`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from loadtest.replay.record import Record
from loadtest.replay.slow import split
from loadtest.replay.summary import batches

_ROWS = 8192
_PARTS = ("queue_s", "load_s", "compute_s", "ttft_s")
_TOKENS = ("device_tokens", "cached_tokens", "new_tokens")

_SCHEMA: dict[str, Any] = {
    "session": pl.String, "turn": pl.Int64, "tenant": pl.String, "attempt": pl.Int64,
    "scheduled_s": pl.Float64, "sent_s": pl.Float64, "first_token_s": pl.Float64,
    "last_token_s": pl.Float64, "ended_s": pl.Float64,
    "ttft_s": pl.Float64, "e2e_s": pl.Float64, "late_s": pl.Float64,
    "input_tokens": pl.Int64, "output_tokens": pl.Int64, "generated_tokens": pl.Int64,
    "prompt_tokens": pl.Int64, "cached_tokens": pl.Int64, "new_tokens": pl.Int64,
    "gaps_s": pl.List(pl.Float32),
    "status": pl.Int64, "error": pl.String, "error_detail": pl.String,
    "retried": pl.List(pl.String),
    "request_id": pl.String, "node": pl.String, "paced": pl.Boolean, "reason": pl.String,
    "ratio": pl.Float64, "crit": pl.Float64, "predicted_ttft_s": pl.Float64,
    **{f"predicted_{name}": pl.Float64 for name in _PARTS[:3]},
    **{f"predicted_{name}": pl.Int64 for name in _TOKENS},
    **{f"actual_{name}": pl.Float64 for name in _PARTS},
    **{f"actual_{name}": pl.Int64 for name in _TOKENS},
    "split": pl.String,
}  # fmt: skip


def write_parquet(records: Iterable[Record], path: Path) -> int:
    """One row per record, with the split of its seconds; returns how many.

    Written piece by piece, so that memory does not grow with the run; appears when it is complete.
    """
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".parquet-") as scratch:
        pieces: list[Path] = []
        for batch in batches(records, _ROWS):
            rows = [_row(record) for record in batch]
            count += len(rows)
            piece = Path(scratch) / f"{len(pieces):06}.parquet"
            pl.DataFrame(rows, schema=_SCHEMA, orient="row").write_parquet(piece)
            pieces.append(piece)
        whole = Path(scratch) / "whole.parquet"
        if pieces:
            pl.scan_parquet(pieces).sink_parquet(whole)
        else:
            pl.DataFrame(schema=_SCHEMA).write_parquet(whole)
        whole.replace(path)
    return count


def _row(record: Record) -> tuple[Any, ...]:
    found = split(record)
    predicted, actual = record.predicted or {}, record.actual or {}
    values: dict[str, Any] = {
        name: getattr(record, name) for name in _SCHEMA if hasattr(record, name)
    }
    values["ttft_s"] = record.ttft_s
    values["e2e_s"] = None if record.error else record.ended_s - record.scheduled_s
    values["late_s"] = max(record.sent_s - record.scheduled_s, 0.0)
    values |= {f"predicted_{name}": predicted.get(name) for name in (*_PARTS[:3], *_TOKENS)}
    values |= {f"actual_{name}": actual.get(name) for name in _TOKENS}
    values |= {f"actual_{name}": getattr(found, name, None) for name in _PARTS[:3]}
    values["actual_ttft_s"] = actual.get("ttft_s")
    values["split"] = found.source if found else None
    return tuple(_typed(values[name], kind) for name, kind in _SCHEMA.items())


def _typed(value: Any, kind: Any) -> Any:
    """A journal is JSON, where 2.0 may be written as 2 and the other way round."""
    if value is None:
        return None
    if kind == pl.Float64:
        return float(value)
    return int(value) if kind == pl.Int64 else value
