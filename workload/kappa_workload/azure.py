"""Azure LLM inference traces: lengths of independent requests, with nothing known to be shared.

CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`. Every row is a session of one turn with a prompt
of its own, and arrives when its row says.
Source: Azure/AzurePublicDataset (Splitwise, ISCA 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from kappa_workload.reading import SomeTokens, Tokens, WorkloadError, at, csv_rows
from kappa_workload.shapes import SessionShape, Workload, key_of, stream_ids, turn_of

BLOCK_TOKENS = 512
COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
SOURCE = "Azure LLM inference trace 2023 (conversation), Microsoft Azure (Splitwise), CC-BY-4.0"


class _AzureRow(NamedTuple):
    time: str
    prompt_tokens: SomeTokens
    output_tokens: Tokens


def read_azure(path: Path) -> Workload:
    """Read an Azure trace; `.gz` is read as is."""
    rows = list(_rows(path))
    start = min(time for time, _, _ in rows)
    blocks = [(prompt + max(output, 1)) // BLOCK_TOKENS for _, prompt, output in rows]
    ids = stream_ids(key_of("azure"), 0, sum(blocks))
    sessions: list[SessionShape] = []
    first = 0
    for number, ((time, prompt, output), count) in enumerate(zip(rows, blocks, strict=True)):
        turn = turn_of(0.0, prompt, output, ids[first : first + count], BLOCK_TOKENS, prompt)
        arrival_s = (time - start).total_seconds()
        sessions.append(SessionShape(id=f"azure-{number}", turns=(turn,), arrival_s=arrival_s))
        first += count
    return Workload("azure", BLOCK_TOKENS, tuple(sessions), SOURCE)


def _rows(path: Path) -> Iterator[tuple[datetime, int, int]]:
    """(time, prompt tokens, output tokens) of each row; times have no zone, so they compare."""
    rows = csv_rows(path)
    header = next(rows, None)
    if header is None:
        raise WorkloadError(f"{path}: is empty")
    if header[1] != COLUMNS:
        missing = [name for name in COLUMNS if name not in header[1]]
        unknown = [name for name in header[1] if name not in COLUMNS]
        raise WorkloadError(
            f"{path}:1: missing columns {missing}, unknown columns {unknown}; expected {COLUMNS} "
            "in this order"
        )
    empty = True
    for number, values in rows:
        if values:
            with at(f"{path}:{number}"):
                row = msgspec.convert(values, _AzureRow, strict=False)
                time = datetime.fromisoformat(row.time)
            if time.tzinfo is not None:
                time = time.astimezone(UTC).replace(tzinfo=None)
            yield time, row.prompt_tokens, row.output_tokens
            empty = False
    if empty:
        raise WorkloadError(f"{path}: holds no requests")
