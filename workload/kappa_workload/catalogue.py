"""Workloads by name or by path: the six that ship with the package, and files of their formats.

The simulator, the load test and the benchmarks all ask here. A file's format is found out from its
ending and its first fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kappa_workload import chats, finqa, miniswe, narrativeqa, sharegpt
from kappa_workload.arrivals import ArrivalProcess, poisson, servegen
from kappa_workload.azure import read_azure
from kappa_workload.mooncake import read_mooncake
from kappa_workload.reading import (
    DEFAULT,
    ReadAs,
    WorkloadError,
    json_items,
    json_lines,
    open_table,
)
from kappa_workload.shapes import Workload

_DATA = Path(__file__).parent / "data"
_FINQA_QUESTIONS = "finqa_questions.parquet"


def workload_named(name_or_path: str, how: ReadAs = DEFAULT) -> Workload:
    """A built-in workload by name, or one in a file by path; names come before files.

    Raises:
        WorkloadError: if there is no such workload or file, or the file cannot be used.
    """
    if name_or_path in _BUILT_IN:
        return replace(_BUILT_IN[name_or_path](how), built_in=True)
    path = Path(name_or_path)
    if not path.exists():
        raise WorkloadError(
            f"no workload and no file {name_or_path!r}: give a path, or one of "
            f"{', '.join(_BUILT_IN)}"
        )
    if path.is_dir():
        raise WorkloadError(f"{path}: is a folder: name the file in it")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix not in _BY_ENDING:
        raise WorkloadError(
            f"{path}: unknown ending; expected .jsonl, .json or .csv (perhaps with .gz), or "
            ".parquet"
        )
    return _BY_ENDING[suffix](path, how)


def arrivals_for(workload_name: str) -> ArrivalProcess:
    """The arrival process of a workload: sessions at random; independent requests (Azure) in
    bursts, by windows of a recorded day."""
    return partial(servegen, window_s=1_000.0, steady=True) if workload_name == "azure" else poisson


def _narrativeqa(
    questions: Path, how: ReadAs, readers: int, documents: Path | None = None
) -> Workload:
    summaries = _beside(questions, ("summaries.jsonl.gz", "summaries.jsonl"))
    return narrativeqa.read_narrativeqa(
        questions, documents, summaries=summaries, how=_of_documents(how, readers)
    )


def _of_documents(how: ReadAs, readers: int) -> ReadAs:
    """Reading options of documents: `readers` each, unless chosen, and their own blocks."""
    return replace(how, readers=how.readers or readers, block_tokens=None)


def _json_workload(path: Path, how: ReadAs) -> Workload:
    _, first = next(json_items(path, dict[str, Any]), ("", {}))
    if "dialogue_break" in (first.get("annotation") or ()):
        return finqa.read_convfinqa(path, how)
    return sharegpt.read_sharegpt_texts(path, how)


_LINES: tuple[tuple[str, str, Callable[[Path, ReadAs], Workload]], ...] = (
    ("question_tokens", "NarrativeQA", lambda path, how: _narrativeqa(path, how, readers=1)),
    ("annotation", "ConvFinQA", finqa.read_convfinqa),
    ("t_s", "recorded sessions", miniswe.read_miniswe_texts),
    *((name, what, chats.read_chats) for name, what in chats.FORMATS.items()),
    ("input_length", "Mooncake, aiperf mooncake_trace", lambda path, _: read_mooncake(path)),
)
"""JSON lines: the field of the first line that shows the format, what that is, its reader."""


def _json_lines_workload(path: Path, how: ReadAs) -> Workload:
    where, fields = next(json_lines(path, dict[str, Any]))
    for name, what, read in _LINES:
        if fields.get(name) is not None:
            return replace(read(path, how), source=what)
    known = ", ".join(f"{name!r} ({what})" for name, what, _ in _LINES)
    raise WorkloadError(
        f"{where}: no format has just the fields {sorted(fields)}: expected one of {known}"
    )


def _table_workload(path: Path, how: ReadAs) -> Workload:
    columns = open_table(path).columns
    if "conv_id" in columns:
        return sharegpt.read_sharegpt_table(path, how)
    if "session" in columns:
        return miniswe.read_miniswe(path, how)
    if "document_id" in columns:
        questions = _needed_beside(path, ("qaps.jsonl.gz", "qaps.jsonl"))
        return _narrativeqa(questions, how, readers=1, documents=path)
    if "doc_name" in columns:
        questions = _needed_beside(path, ("finqa_question_lengths.parquet", _FINQA_QUESTIONS))
        return finqa.read_finqa(path, questions, _of_documents(how, readers=1))
    if "rate_rps" in columns:
        raise WorkloadError(f"{path}: holds rates of arrivals, no requests: choose another file")
    if columns == ["question_tokens"]:
        raise WorkloadError(f"{path}: holds questions only: name the table of filings beside it")
    raise WorkloadError(
        f"{path}: no format has just the columns {columns}: expected 'conv_id' (ShareGPT), "
        "'session' (mini-SWE), 'document_id' (NarrativeQA) or 'doc_name' (FinQA) among them"
    )


def _beside(path: Path, names: tuple[str, ...]) -> Path | None:
    return next((path.with_name(n) for n in names if path.with_name(n).exists()), None)


def _needed_beside(path: Path, names: tuple[str, ...]) -> Path:
    found = _beside(path, names)
    if found is None:
        raise WorkloadError(f"{path}: the questions, {names[0]}, are not beside it")
    return found


_BUILT_IN: dict[str, Callable[[ReadAs], Workload]] = {
    "narrativeqa": lambda how: _narrativeqa(
        _DATA / "narrativeqa_lengths.jsonl.gz", how, narrativeqa.READERS
    ),
    "mooncake": lambda _: read_mooncake(_DATA / "mooncake_conversation.jsonl.gz"),
    "sharegpt": lambda how: sharegpt.read_sharegpt_table(_DATA / "sharegpt_turns.parquet", how),
    "miniswe": lambda how: miniswe.read_miniswe(_DATA / "miniswe_lengths.parquet", how),
    "azure": lambda _: read_azure(_DATA / "azure2023_conv.csv.gz"),
    "finqa": lambda how: finqa.read_finqa(
        _DATA / "finqa_filings.parquet", _DATA / _FINQA_QUESTIONS, _of_documents(how, finqa.READERS)
    ),
}

BUILT_IN = tuple(_BUILT_IN)
"""Names of the built-in workloads."""

_BY_ENDING: dict[str, Callable[[Path, ReadAs], Workload]] = {
    ".jsonl": _json_lines_workload,
    ".parquet": _table_workload,
    ".csv": lambda path, _: read_azure(path),
    ".json": _json_workload,
}
