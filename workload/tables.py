"""Tables in Parquet files, with every column checked.

The readers of tables share this, so that a wrong file is reported alike: file, row, column,
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from workload.errors import WorkloadError

_KINDS = {str: "text", int: "integers", float: "numbers"}


def read_table(path: Path, columns: Mapping[str, type]) -> pl.DataFrame:
    """Read a Parquet file that must have exactly these columns of `str`, `int` or `float`.

    Numbers must be finite and zero or more; nothing may be missing.

    Raises:
        WorkloadError: if the file is absent, damaged, empty or not this table.
    """
    table = open_table(path)
    _require_columns(path, table, columns)
    if not table.height:
        raise WorkloadError(f"{path}: holds no rows")
    for name, kind in columns.items():
        _require_kind(path, table[name], kind)
    return table.select(list(columns))


def open_table(path: Path) -> pl.DataFrame:
    """Read a Parquet file with whatever columns it has."""
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise WorkloadError(f"{path}: not a readable Parquet file ({reason})") from error


def _require_columns(path: Path, table: pl.DataFrame, columns: Mapping[str, type]) -> None:
    missing = [name for name in columns if name not in table.columns]
    unknown = [name for name in table.columns if name not in columns]
    if missing or unknown:
        wrong = [f"missing columns {missing}"] if missing else []
        wrong += [f"unknown columns {unknown}"] if unknown else []
        raise WorkloadError(f"{path}: {', '.join(wrong)}; expected {list(columns)}")


def _require_kind(path: Path, column: pl.Series, kind: type) -> None:
    dtype = column.dtype
    right = {
        str: dtype == pl.String,
        int: dtype.is_integer(),
        float: dtype.is_integer() or dtype.is_float(),
    }[kind]
    if not right:
        raise WorkloadError(
            f"{path}: column {column.name!r} must hold {_KINDS[kind]}, found {dtype}"
        )
    _refuse_rows(path, column, column.is_null(), "holds nothing")
    if kind is str:
        return
    _refuse_rows(path, column, column.cast(pl.Float64).is_finite().not_(), "must be finite")
    _refuse_rows(path, column, column < 0, "must not be negative")


def _refuse_rows(path: Path, column: pl.Series, wrong: pl.Series, reason: str) -> None:
    if wrong.any():
        row = int(wrong.arg_true()[0])
        value = "" if column[row] is None else f", found {column[row]}"
        raise WorkloadError(f"{path}: row {row + 1}: column {column.name!r} {reason}{value}")
