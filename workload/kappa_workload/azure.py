"""Azure LLM inference traces: lengths of independent requests, with nothing known to be shared.

CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`. Every row is a session of one turn with a prompt
of its own, and arrives when its row says.
Source: Azure/AzurePublicDataset (Splitwise, ISCA 2024).
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kappa_workload.reading import SomeTokens, Tokens, at, csv_records, required_fields
from kappa_workload.shapes import SessionShape, Workload, key_of, stream_ids, turn_of

BLOCK_TOKENS = 512
SOURCE = "Azure LLM inference trace 2023 (conversation), Microsoft Azure (Splitwise), CC-BY-4.0"


class _AzureRow(msgspec.Struct):
    time: str = msgspec.field(name="TIMESTAMP")
    prompt_tokens: SomeTokens = msgspec.field(name="ContextTokens")
    output_tokens: Tokens = msgspec.field(name="GeneratedTokens")


COLUMNS = required_fields(_AzureRow)


def read_azure(path: Path) -> Workload:
    """Read an Azure trace; `.gz` is read as is."""
    rows = list(csv_records(path, _AzureRow))
    times = [_time(where, row.time) for where, row in rows]
    start = min(times)
    blocks = [(row.prompt_tokens + max(row.output_tokens, 1)) // BLOCK_TOKENS for _, row in rows]
    ids = stream_ids(key_of("azure"), 0, sum(blocks))
    sessions: list[SessionShape] = []
    first = 0
    for number, (time, (_, row), count) in enumerate(zip(times, rows, blocks, strict=True)):
        prompt, own = row.prompt_tokens, ids[first : first + count]
        turn = turn_of(0.0, prompt, row.output_tokens, own, BLOCK_TOKENS, prompt)
        arrival_s = (time - start).total_seconds()
        sessions.append(SessionShape(id=f"azure-{number}", turns=(turn,), arrival_s=arrival_s))
        first += count
    return Workload("azure", BLOCK_TOKENS, tuple(sessions), SOURCE)


def _time(where: str, text: str) -> datetime:
    """A row's time, without a zone, so that all compare."""
    with at(where):
        time = datetime.fromisoformat(text)
    return time if time.tzinfo is None else time.astimezone(UTC).replace(tzinfo=None)
