"""Workloads by name or by path: the six that ship with the package, files of their formats, and
data sets as published.

The simulator, the load test and the benchmarks all ask here. A file's format is found out from its
ending and its first fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kappa_workload import chats, finqa, miniswe, narrativeqa, published, sharegpt
from kappa_workload.arrivals import ArrivalProcess, poisson, servegen
from kappa_workload.azure import COLUMNS, read_azure
from kappa_workload.mooncake import read_mooncake
from kappa_workload.reading import (
    DEFAULT,
    ReadAs,
    WorkloadError,
    columns_of,
    csv_rows,
    json_items,
    json_lines,
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
        return _folder_workload(path, how)
    if _ending(path) not in _BY_ENDING:
        raise WorkloadError(
            f"{path}: unknown ending; expected .jsonl, .json or .csv (perhaps with .gz), or "
            ".parquet"
        )
    return _BY_ENDING[_ending(path)](path, how)


def _ending(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _folder_workload(folder: Path, how: ReadAs) -> Workload:
    """NarrativeQA's repository, or all files of a published data set, below a folder."""
    if (folder / published.QUESTIONS_CSV).exists():
        return published.read_narrativeqa_csv(folder / published.QUESTIONS_CSV, _of_documents(how))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # What lies beside the Parquet files of a data set describes it.
    kinds = ([path for path in files if _ending(path) == ending] for ending in _FIELDS)
    paths = next(filter(None, kinds), [])
    forms = {path: published.format_of(_FIELDS[_ending(path)](path)) for path in paths}
    form = next(iter(forms.values()), None)
    if form is None or set(forms.values()) != {form}:
        found = ", ".join(f"{path.name} ({form.what})" for path, form in forms.items() if form)
        raise WorkloadError(
            f"{folder}: is a folder: name the file in it"
            + (
                f"; only folders of one published data set are read whole, here {found}"
                * bool(found)
            )
        )
    _refuse_missing_shards(folder, paths)
    return published.read_published(paths, form, _of_documents(how))


def _refuse_missing_shards(folder: Path, paths: Sequence[Path]) -> None:
    """Refuse a folder without some of the files `NAME-00000-of-00008.parquet` of a split."""
    found: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if shard := re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\..+", path.name):
            found.setdefault((shard[1], int(shard[3])), set()).add(int(shard[2]))
    for (split, count), numbers in found.items():
        missing = [str(number) for number in range(count) if number not in numbers]
        if missing:
            raise WorkloadError(
                f"{folder}: has {len(numbers)} of the {count} files of {split!r}, numbers "
                f"{', '.join(missing)} are not there: fetch them, or name one file"
            )


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


def _of_documents(how: ReadAs, readers: int = 1) -> ReadAs:
    """Reading options of documents: `readers` each, unless chosen, and their own blocks."""
    return replace(how, readers=how.readers or readers, block_tokens=None)


def _first_item(path: Path) -> dict[str, Any]:
    return next(json_items(path, dict[str, Any]), ("", {}))[1]


def _first_line(path: Path) -> dict[str, Any]:
    return next(json_lines(path, dict[str, Any]))[1]


_FIELDS: dict[str, Callable[[Path], Collection[str]]] = {
    ".parquet": columns_of, ".jsonl": _first_line, ".json": _first_item,
}  # fmt: skip
"""The fields of a file's records, by its ending, where published data sets have it."""


def _published(
    path: Path, where: str, fields: Collection[str], how: ReadAs
) -> Callable[[], Workload] | None:
    """What reads a published data set with these fields, or refuses one that lacks some; None if it
    is none at all."""
    form = published.format_of(fields)
    if form is not None:
        return lambda: published.read_published([path], form, _of_documents(how))
    formats = {form.what: form.fields for form in published.FORMATS}
    formats["recorded sessions"] = ["session", "t_s", "input", "output"]
    near = published.nearest(fields, formats)
    return (lambda: _refuse(f"{where}: {near}")) if near else None


def _json_workload(path: Path, how: ReadAs) -> Workload:
    first = _first_item(path)
    if "dialogue_break" in (first.get("annotation") or ()):
        return finqa.read_convfinqa(path, how)
    if "conversations" not in first and (read := _published(path, f"{path}: item 1", first, how)):
        return read()
    return sharegpt.read_sharegpt_texts(path, how)


def _refuse(reason: str) -> NoReturn:
    raise WorkloadError(reason)


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
    if known := _published(path, where, fields, how):
        return known()
    fitting = ", ".join(f"{name!r} ({what})" for name, what, _ in _LINES)
    raise WorkloadError(
        f"{where}: no format has just the fields {sorted(fields)}: expected one of {fitting}"
    )


def _lengths_narrativeqa(path: Path, how: ReadAs) -> Workload:
    questions = _needed_beside(path, ("qaps.jsonl.gz", "qaps.jsonl"))
    return _narrativeqa(questions, how, readers=1, documents=path)


def _lengths_finqa(path: Path, how: ReadAs) -> Workload:
    questions = _needed_beside(path, ("finqa_question_lengths.parquet", _FINQA_QUESTIONS))
    return finqa.read_finqa(path, questions, _of_documents(how))


_TABLES: tuple[tuple[str, str, Callable[[Path, ReadAs], Workload]], ...] = (
    ("conv_id", "ShareGPT", sharegpt.read_sharegpt_table),
    ("session", "mini-SWE", miniswe.read_miniswe),
    ("document_id", "NarrativeQA", _lengths_narrativeqa),
    ("doc_name", "FinQA", _lengths_finqa),
)
"""Tables of lengths: the column that shows the format, what that is, its reader."""


def _table_workload(path: Path, how: ReadAs) -> Workload:
    columns = columns_of(path)
    for name, what, read in _TABLES:
        if name in columns:
            return replace(read(path, how), source=f"lengths in the layout of {what}, {path.name}")
    if read_known := _published(path, str(path), columns, how):
        return read_known()
    if "rate_rps" in columns:
        raise WorkloadError(f"{path}: holds rates of arrivals, no requests: choose another file")
    if columns == ["question_tokens"]:
        raise WorkloadError(f"{path}: holds questions only: name the table of filings beside it")
    known = ", ".join(f"{name!r} ({what})" for name, what, _ in _TABLES)
    sets = "; ".join(f"{form.what}: {form.fields}" for form in published.FORMATS)
    raise WorkloadError(
        f"{path}: no format has just the columns {columns}: expected one of {known}, or all of "
        f"a published data set ({sets})"
    )


def _csv_workload(path: Path, how: ReadAs) -> Workload:
    _, header = next(csv_rows(path), (0, []))
    if any(set(needed) <= set(header) for needed in published.CSV_FORMATS.values()):
        return published.read_narrativeqa_csv(path, _of_documents(how))
    if header and not set(COLUMNS) & set(header):
        formats = {"an Azure trace": COLUMNS, **published.CSV_FORMATS}
        near = published.nearest(header, formats)
        _refuse(f"{path}:1: {near or f'no format has just the columns {header}: {formats}'}")
    return replace(read_azure(path), source=f"an Azure LLM inference trace, {path.name}")


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
    ".csv": _csv_workload,
    ".json": _json_workload,
}
