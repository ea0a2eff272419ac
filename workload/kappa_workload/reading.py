"""Files of workloads, read record by record: every damage is reported as file, place, reason.

Lines and lists of JSON, CSV and Parquet files become records (msgspec structs with checked types).
Text files may be gzipped (`.gz`).
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec

# More than any context: a larger number is a wrong unit or a damaged file.
MOST_TOKENS = 1 << 24

# Of requests that do not say how long their answer is to be.
DEFAULT_OUTPUT_TOKENS = 128

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
SomeTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e300)]

MAX_CONTEXT_TOKENS = 128 * 1024

# Characters in a Llama-2 token of the mini-SWE prompts, on average; 2.5 to 3.7 in single prompts.
CHARACTERS_PER_TOKEN = 3.07

_ROWS = 64  # of a Parquet file made into records at a time: each may repeat a whole story

TokenCounter = Callable[[str], int]

T = TypeVar("T")


def estimated_tokens(text: str) -> int:
    """Length of a text in tokens, guessed from its characters."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Reading options, where a format leaves a choice; the defaults suit a simulator."""

    # Measures texts, in formats that hold texts and no lengths.
    count_tokens: TokenCounter = estimated_tokens
    # Block size of talks and agents; None: the reader's own. Documents and traces keep theirs.
    block_tokens: int | None = None
    # Longer documents are cut; None: none is.
    max_context_tokens: int | None = MAX_CONTEXT_TOKENS
    # Include the estimated part of the talk that the source of ShareGPT lengths cut off.
    whole_history: bool = False
    # The most conversations to read, of texts; None: all.
    limit: int | None = None
    # Readers of each document; None: 1 of given documents, several of built-in ones.
    readers: int | None = None
    seed: int = 0  # of drawn pauses

    def __post_init__(self) -> None:
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"block_tokens is {self.block_tokens}: give at least 1")
        if self.readers is not None and self.readers < 1:
            raise ValueError(f"readers is {self.readers}: give at least 1")

    def blocks(self, own: int) -> int:
        """The block size to read with, where the reader's own is `own`."""
        return own if self.block_tokens is None else self.block_tokens


DEFAULT = ReadAs()


class WorkloadError(ValueError):
    """A workload file is absent, damaged, or breaks its format; the message names the file, the
    place and the reason."""


@contextmanager
def at(where: str) -> Iterator[None]:
    """Turn errors of a record into WorkloadErrors that begin with `FILE:LINE` or `FILE: row N`."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{where}: {error}") from error
    except msgspec.DecodeError as error:
        raise WorkloadError(f"{where}: not JSON ({error}){_remedy(error)}") from error
    except RecursionError:
        raise WorkloadError(f"{where}: not JSON of any known format (nested too deep)") from None
    except ValueError as error:
        raise WorkloadError(f"{where}: {error}") from error


def _remedy(error: Exception) -> str:
    return ": the file is cut short, fetch it again" if "truncated" in str(error) else ""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1.

    Raises:
        WorkloadError: the file is absent, cut short or not text.
    """
    number = 0
    try:
        opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                yield number, line
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}:{number + 1}: not UTF-8 ({error.reason})") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        where = f"{path}:{number + 1}" if number else str(path)
        raise WorkloadError(f"{where}: {reason}") from error


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The records of a file of JSON lines, each with its place; blank lines do not count.

    Raises:
        WorkloadError: a line is no such record, or there is none.
    """
    decoder = msgspec.json.Decoder(kind)
    empty = True
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        empty = False
        with at(f"{path}:{number}"):
            record = decoder.decode(line)
        yield f"{path}:{number}", record
    if empty:
        raise WorkloadError(f"{path}: holds no records")


def json_items(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The records of the JSON list that a file holds, each with its place.

    Raises:
        WorkloadError: the file is absent or damaged, holds no list, or an item is no such record.
    """
    text = "".join(line for _, line in numbered_lines(path)).encode()
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{path}: expected a list: {error}") from error
    except msgspec.DecodeError as error:
        place = re.search(r"byte (\d+)", str(error))
        line = 1 + text.count(b"\n", 0, int(place[1]) if place else len(text))
        raise WorkloadError(
            f"{path}:{line}: not JSON ({error}) in {len(text):,} bytes{_remedy(error)}"
        ) from error
    except RecursionError:
        raise WorkloadError(f"{path}: not JSON of any known format (nested too deep)") from None
    decode = msgspec.json.Decoder(kind).decode
    for number, item in enumerate(items, start=1):
        where = f"{path}: item {number}"
        with at(where):
            record = decode(item)
        yield where, record


def json_records(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The records of a file of JSON lines, or else of the JSON list that it holds, by its name."""
    lines = path.name.endswith((".jsonl", ".jsonl.gz"))
    return json_lines(path, kind) if lines else json_items(path, kind)


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, with the number of the line on which each ends; header included."""
    rows = csv.reader(line for _, line in numbered_lines(path))
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise WorkloadError(f"{path}:{rows.line_num}: not CSV ({error})") from error


def csv_records(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The rows of a CSV file with a header, each with its place; columns beyond the struct's are
    left out.

    Raises:
        WorkloadError: a row has more or fewer columns than the header, as the last one of a file
            that is cut short, or is no such record; or there is none.
    """
    rows = csv_rows(path)
    _, header = next(rows, (0, []))
    empty = True
    for number, values in filter(lambda row: row[1], rows):
        with at(f"{path}:{number}"):
            if len(values) != len(header):
                raise ValueError(
                    f"has {len(values)} of {len(header)} columns: if the file is cut short (it has "
                    f"{path.stat().st_size:,} bytes), fetch it again"
                )
            record = msgspec.convert(dict(zip(header, values, strict=True)), kind, strict=False)
        empty = False
        yield f"{path}:{number}", record
    if empty:
        raise WorkloadError(f"{path}: holds no records")


def required_fields(kind: Any) -> list[str]:
    """The fields that a record of a struct has at least, as its file names them."""
    return [field.encode_name for field in msgspec.structs.fields(kind) if field.required]


def columns_of(path: Path) -> list[str]:
    """Names of a Parquet file's columns."""
    import polars as pl

    with _parquet(path):
        return list(pl.read_parquet_schema(path))


def table_records(path: Path, kind: Any) -> Iterator[tuple[str, Any]]:
    """The rows of a Parquet file as structs, each with its place; some row groups are held, and
    columns beyond the struct's are left out.

    Raises:
        WorkloadError: the file is absent or damaged or lacks a column, or a row is no such record;
            or there is none.
    """
    # Half a second to import, 170 MB to install, and only tables need it.
    import polars as pl

    needed, columns, number = required_fields(kind), columns_of(path), 0
    if missing := [name for name in needed if name not in columns]:
        raise WorkloadError(f"{path}: missing columns {missing}")
    with _parquet(path):
        table = pl.scan_parquet(path).select(needed)
        for batch in table.collect_batches(chunk_size=_ROWS, maintain_order=True):
            for row in batch.iter_rows(named=True):
                number += 1
                with at(f"{path}: row {number}"):
                    record = msgspec.convert(row, kind)
                yield f"{path}: row {number}", record
    if not number:
        raise WorkloadError(f"{path}: holds no records")


def by_name(records: Iterable[tuple[str, T]], field: str) -> dict[str, T]:
    """Records by a field that none shares with another; WorkloadError where one does."""
    found: dict[str, T] = {}
    for where, record in records:
        name = getattr(record, field)
        if name in found:
            raise WorkloadError(f"{where}: {name} stands in an earlier row, too")
        found[name] = record
    return found


@contextmanager
def _parquet(path: Path) -> Iterator[None]:
    """Report what polars cannot read as no Parquet file."""
    import polars as pl

    try:
        yield
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        size = f" of {path.stat().st_size:,} bytes" if path.is_file() else ""
        raise WorkloadError(
            f"{path}: not a readable Parquet file ({reason}){size}: if it is cut short, fetch it "
            "again"
        ) from error
