"""Workloads by name or by path: the five that ship with the package, and files of their formats.

The simulator, the load test and the benchmarks all ask here. A file's format is told from its
ending and its first fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from workload import arrivals
from workload.azure import read_azure
from workload.errors import WorkloadError
from workload.lines import json_object, numbered_lines
from workload.miniswe import read_miniswe, read_miniswe_texts
from workload.mooncake import read_mooncake
from workload.narrativeqa import READERS, read_narrativeqa
from workload.shapes import Workload
from workload.sharegpt import read_sharegpt_table, read_sharegpt_texts
from workload.tables import open_table

TokenCounter = Callable[[str], int]

# Characters in a Llama-2 token of the mini-SWE prompts, on average; 2.5 to 3.7 in single prompts.
CHARACTERS_PER_TOKEN = 3.07

_DATA = Path(__file__).parent / "data"

_BUILT_IN: dict[str, Callable[[], Workload]] = {
    "narrativeqa": lambda: read_narrativeqa(
        _DATA / "narrativeqa_lengths.jsonl.gz", readers=READERS
    ),
    "mooncake": lambda: read_mooncake(_DATA / "mooncake_conversation.jsonl.gz"),
    "sharegpt": lambda: read_sharegpt_table(_DATA / "sharegpt_turns.parquet"),
    "miniswe": lambda: read_miniswe(_DATA / "miniswe_lengths.parquet"),
    "azure": lambda: read_azure(_DATA / "azure2023_conv.csv.gz"),
}


def workload_names() -> list[str]:
    """Names of the built-in workloads."""
    return list(_BUILT_IN)


def estimated_tokens(text: str) -> int:
    """Length of a text in tokens, guessed from its characters."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def workload_named(name_or_path: str, count_tokens: TokenCounter = estimated_tokens) -> Workload:
    """A built-in workload by its name, or the one in a file.

    Args:
        name_or_path: a name comes before a file of that name.
        count_tokens: measures the texts of formats that hold texts and no lengths.

    Raises:
        WorkloadError: if there is no such workload or file, or the file cannot be used.
    """
    built_in = _BUILT_IN.get(name_or_path)
    if built_in is not None:
        return built_in()
    path = Path(name_or_path)
    if not path.exists():
        raise WorkloadError(
            f"no workload and no file {name_or_path!r}: give a path, or one of "
            f"{', '.join(_BUILT_IN)}"
        )
    return _workload_in(path, count_tokens)


def arrivals_for(workload_name: str) -> arrivals.ArrivalProcess:
    """How sessions of a workload arrive: independent requests in bursts, sessions at random."""
    return arrivals.servegen if workload_name == "azure" else arrivals.poisson


def _workload_in(path: Path, count_tokens: TokenCounter) -> Workload:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".jsonl":
        return _json_lines_workload(path, count_tokens)
    if suffix == ".parquet":
        return _table_workload(path)
    if suffix == ".csv":
        return read_azure(path)
    if suffix == ".json":
        return read_sharegpt_texts(path, count_tokens)
    raise WorkloadError(
        f"{path}: unknown ending; expected .jsonl, .json or .csv (perhaps with .gz), or .parquet"
    )


def _json_lines_workload(path: Path, count_tokens: TokenCounter) -> Workload:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            fields = json_object(line)
        except ValueError as error:
            raise WorkloadError(f"{path}:{number}: {error}") from error
        if "hash_ids" in fields:
            return read_mooncake(path)
        if "question_tokens" in fields:
            return read_narrativeqa(path)
        if "session" in fields:
            return read_miniswe_texts(path, count_tokens)
        raise WorkloadError(
            f"{path}:{number}: no format has just the fields {sorted(fields)}: expected "
            "'hash_ids' (Mooncake), 'question_tokens' (NarrativeQA) or 'session' (recorded "
            "sessions) among them"
        )
    raise WorkloadError(f"{path}: is empty")


def _table_workload(path: Path) -> Workload:
    columns = open_table(path).columns
    if "conv_id" in columns:
        return read_sharegpt_table(path)
    if "session" in columns:
        return read_miniswe(path)
    if "document_id" in columns:
        return read_narrativeqa(_questions_beside(path), path)
    if "rate_rps" in columns:
        raise WorkloadError(f"{path}: holds rates of arrivals, no requests: choose another file")
    raise WorkloadError(
        f"{path}: no format has just the columns {columns}: expected 'conv_id' (ShareGPT), "
        "'session' (mini-SWE) or 'document_id' (NarrativeQA) among them"
    )


def _questions_beside(documents: Path) -> Path:
    for name in ("qaps.jsonl.gz", "qaps.jsonl"):
        if documents.with_name(name).exists():
            return documents.with_name(name)
    raise WorkloadError(f"{documents}: the questions, qaps.jsonl.gz, are not beside it")
