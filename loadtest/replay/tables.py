"""A run's records as a table: read one by one, checked, and written as parquet.

The journal may belong to a run that was killed: its last line may be cut, and the decisions that
the cluster told may still lie in a file of their own. Anything that is no record is an error that
names file and line. Called by `loadtest.replay.report`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from loadtest.replay.journal import DECISIONS, RECORDS, JournalError, read_records
from loadtest.replay.record import Record
from loadtest.replay.slow import split

SUMMARY, PARQUET, REPORT = "summary.json", "records.parquet", "report.html"

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
    "request_id": pl.String, "node": pl.String, "paced": pl.Boolean, "reason": pl.String,
    "ratio": pl.Float64, "crit": pl.Float64, "predicted_ttft_s": pl.Float64,
    **{f"predicted_{name}": pl.Float64 for name in _PARTS[:3]},
    **{f"predicted_{name}": pl.Int64 for name in _TOKENS},
    **{f"actual_{name}": pl.Float64 for name in _PARTS},
    **{f"actual_{name}": pl.Int64 for name in _TOKENS},
    "split": pl.String,
}  # fmt: skip


class Records:
    """A run's records with the decisions told of them, read anew whenever they are iterated over.

    was_cut: whether the last line had no end, as when its writer was killed; it is left out.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORDS
        self._decisions = folder / DECISIONS
        self.was_cut = _is_cut(self.path)

    def __iter__(self) -> Iterator[Record]:
        """Every record, in the file's order.

        Raises:
            JournalError: a line that is no record; names file and line.
        """
        with _Told(self._decisions) as told:
            for number, record in enumerate(read_records(self.path), start=1):
                if fault := _fault(record):
                    raise JournalError(f"{self.path}:{number}: {fault}")
                told.put_into(record)
                yield record


class _Told:
    """Decisions that a killed run has not put into its records yet, looked up where they lie."""

    def __init__(self, path: Path) -> None:
        self._places: dict[str, int] = {}
        self._file = path.open("rb") if path.exists() else None

    def __enter__(self) -> _Told:
        place = 0
        for line in self._file or ():
            # The last of a request counts; an unfinished line is the last one of all.
            if line.endswith(b"\n"):
                self._places[msgspec.json.decode(line)["request_id"]] = place
            place += len(line)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def put_into(self, record: Record) -> None:
        place = self._places.get(record.request_id) if record.request_id else None
        if place is None or self._file is None:
            return
        self._file.seek(place)
        decision = msgspec.json.decode(self._file.readline())
        record.predicted, record.actual = decision["predicted"], decision["actual"]


def _is_cut(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None


def _fault(record: Record) -> str:
    """What of a record is not of its kind; nothing if all is."""
    for names, kinds, expected in _KINDS:
        for name in names:
            value = getattr(record, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                return f"{name} is {value!r}; expected {expected}"
    if any(isinstance(gap, bool) or not isinstance(gap, int | float) for gap in record.gaps_s):
        return "gaps_s holds something else than seconds"
    return ""


_NONE = type(None)
_KINDS: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("scheduled_s", "sent_s", "ended_s"), (int, float), "seconds"),
    (("first_token_s", "last_token_s", "predicted_ttft_s"), (int, float, _NONE), "seconds or null"),
    (("ratio", "crit"), (int, float, _NONE), "a number or null"),
    (("turn", "attempt", "status", "input_tokens", "output_tokens", "generated_tokens",
      "cached_tokens", "new_tokens"), (int,), "an integer"),
    (("prompt_tokens",), (int, _NONE), "an integer or null"),
    (("session", "tenant", "error", "error_detail", "request_id", "node", "reason"), (str,),
     "a string"),
    (("paced",), (bool,), "true or false"),
    (("predicted", "actual"), (dict, _NONE), "an object or null"),
    (("gaps_s",), (list,), "a list of seconds"),
)  # fmt: skip


def write_parquet(records: Iterable[Record], path: Path) -> int:
    """One row per record, with the split of its seconds; returns how many.

    Written piece by piece, so that memory does not grow with the run; appears when it is complete.
    """
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".parquet-") as scratch:
        pieces: list[Path] = []
        for rows in _pieces(records):
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


def _pieces(records: Iterable[Record]) -> Iterator[list[tuple[Any, ...]]]:
    rows: list[tuple[Any, ...]] = []
    for record in records:
        rows.append(_row(record))
        if len(rows) >= _ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


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
