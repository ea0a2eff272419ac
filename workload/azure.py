"""Azure LLM inference traces: lengths of independent requests, with nothing known to be shared.

CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`. Every row is a session of one turn with a prompt
of its own, and arrives when its row says.
Source: Azure/AzurePublicDataset (Splitwise, ISCA 2024).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from workload.block_ids import key_of, stream_ids
from workload.errors import WorkloadError
from workload.lines import numbered_lines
from workload.shapes import SessionShape, Workload, require_block_tokens, require_tokens, turn_of

BLOCK_TOKENS = 512
COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
SOURCE = "Azure LLM inference trace 2023 (conversation), Microsoft Azure (Splitwise), CC-BY-4.0"


def read_azure(path: str | Path, *, block_tokens: int = BLOCK_TOKENS) -> Workload:
    """Read an Azure trace; `.gz` is read as is.

    Raises:
        WorkloadError: if the file is absent, damaged, or breaks the format.
    """
    require_block_tokens(block_tokens)
    path = Path(path)
    rows = list(_rows(path))
    start = min(time for time, _, _ in rows)
    blocks = [(prompt + max(output, 1)) // block_tokens for _, prompt, output in rows]
    ids = stream_ids(key_of("azure"), 0, sum(blocks))
    sessions: list[SessionShape] = []
    first = 0
    for number, ((time, prompt, output), count) in enumerate(zip(rows, blocks, strict=True)):
        turn = turn_of(0.0, prompt, output, ids[first : first + count], block_tokens, prompt)
        arrival_s = (time - start).total_seconds()
        sessions.append(SessionShape(id=f"azure-{number}", turns=(turn,), arrival_s=arrival_s))
        first += count
    return Workload("azure", block_tokens, tuple(sessions), SOURCE)


def _rows(path: Path) -> Iterator[tuple[datetime, int, int]]:
    """(time, prompt tokens, output tokens) of each row."""
    rows = _numbered_rows(path)
    header = next(rows, None)
    if header is None:
        raise WorkloadError(f"{path}: is empty")
    _require_columns(path, header[1])
    empty = True
    for number, row in rows:
        if not row:
            continue
        try:
            yield _parse(row)
        except ValueError as error:
            raise WorkloadError(f"{path}:{number}: {error}") from error
        empty = False
    if empty:
        raise WorkloadError(f"{path}: holds no requests")


def _numbered_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    rows = csv.reader(line for _, line in numbered_lines(path))
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise WorkloadError(f"{path}:{rows.line_num}: not CSV ({error})") from error


def _require_columns(path: Path, header: list[str]) -> None:
    if header != COLUMNS:
        missing = [name for name in COLUMNS if name not in header]
        unknown = [name for name in header if name not in COLUMNS]
        raise WorkloadError(
            f"{path}:1: missing columns {missing}, unknown columns {unknown}; expected {COLUMNS} "
            "in this order"
        )


def _parse(row: list[str]) -> tuple[datetime, int, int]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} values, found {len(row)}")
    try:
        time = datetime.fromisoformat(row[0])
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and time, found {row[0]!r}") from None
    if time.tzinfo is not None:  # so that all rows can be compared
        time = time.astimezone(UTC).replace(tzinfo=None)
    return time, _tokens(row[1], COLUMNS[1], 1), _tokens(row[2], COLUMNS[2], 0)


def _tokens(text: str, column: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{column} must be an integer, found {text!r}") from None
    return require_tokens(column, value, least)
