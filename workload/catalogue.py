"""Workloads by name or by path: the six that ship with the package, and files of their formats.

The simulator, the load test and the benchmarks all ask here. A file's format is told from its
ending and its first fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workload import arrivals, finqa, miniswe, narrativeqa, sharegpt
from workload.azure import read_azure
from workload.documents import MAX_CONTEXT_TOKENS
from workload.errors import WorkloadError
from workload.finqa import read_convfinqa, read_finqa
from workload.lines import json_items, json_object, numbered_lines
from workload.miniswe import read_miniswe, read_miniswe_texts
from workload.mooncake import read_mooncake
from workload.narrativeqa import read_narrativeqa
from workload.shapes import Workload
from workload.sharegpt import read_sharegpt_table, read_sharegpt_texts
from workload.tables import open_table

TokenCounter = Callable[[str], int]

# Characters in a Llama-2 token of the mini-SWE prompts, on average; 2.5 to 3.7 in single prompts.
CHARACTERS_PER_TOKEN = 3.07

_DATA = Path(__file__).parent / "data"
_FINQA_QUESTIONS = "finqa_questions.parquet"

BUILT_IN = ("narrativeqa", "mooncake", "sharegpt", "miniswe", "azure", "finqa")
"""Names of the built-in workloads."""


@dataclass(frozen=True, slots=True)
class ReadAs:
    """How a workload is read, where its format leaves a choice; the defaults suit a simulator.

    count_tokens: measures the texts of formats that hold texts and no lengths. block_tokens: of
    talks and agents; the reader's own if None. Documents and traces keep their blocks.
    max_context_tokens: longer documents are cut, none if None. whole_history: of ShareGPT lengths,
    with the estimated part of the talk that the source cut off. limit: of ShareGPT texts, read no
    more conversations. readers: of each document; 1 of given ones and several of built-in ones if
    None.
    """

    count_tokens: TokenCounter
    block_tokens: int | None = None
    max_context_tokens: int | None = MAX_CONTEXT_TOKENS
    whole_history: bool = False
    limit: int | None = None
    readers: int | None = None

    def blocks(self, own: int) -> int:
        """The block size to read with, where the reader's own is `own`."""
        return own if self.block_tokens is None else self.block_tokens


def workload_names() -> list[str]:
    """Names of the built-in workloads."""
    return list(BUILT_IN)


def estimated_tokens(text: str) -> int:
    """Length of a text in tokens, guessed from its characters."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def workload_named(
    name_or_path: str,
    count_tokens: TokenCounter = estimated_tokens,
    *,
    block_tokens: int | None = None,
    max_context_tokens: int | None = MAX_CONTEXT_TOKENS,
    whole_history: bool = False,
    limit: int | None = None,
    readers: int | None = None,
) -> Workload:
    """A built-in workload by its name, or the one in a file.

    Args:
        name_or_path: a name comes before a file of that name.
        count_tokens: measures the texts of formats that hold texts and no lengths.
        block_tokens: see `ReadAs`, as for the others.
        max_context_tokens: longest prompt and answer together of documents.
        whole_history: put the history that ShareGPT's lengths lack in front, as estimated.
        limit: read no more conversations of ShareGPT texts.
        readers: sessions of each document.

    Raises:
        WorkloadError: if there is no such workload or file, or the file cannot be used.
    """
    how = ReadAs(count_tokens, block_tokens, max_context_tokens, whole_history, limit, readers)
    if name_or_path in BUILT_IN:
        return _built_in(name_or_path, how)
    path = Path(name_or_path)
    if not path.exists():
        raise WorkloadError(
            f"no workload and no file {name_or_path!r}: give a path, or one of "
            f"{', '.join(BUILT_IN)}"
        )
    if path.is_dir():
        raise WorkloadError(f"{path}: is a folder: name the file in it")
    return _workload_in(path, how)


def arrivals_for(workload_name: str) -> arrivals.ArrivalProcess:
    """How sessions of a workload arrive: independent requests in bursts, sessions at random."""
    return arrivals.servegen if workload_name == "azure" else arrivals.poisson


def _built_in(name: str, how: ReadAs) -> Workload:
    if name == "narrativeqa":
        return read_narrativeqa(
            _DATA / "narrativeqa_lengths.jsonl.gz",
            max_context_tokens=how.max_context_tokens,
            readers=how.readers or narrativeqa.READERS,
        )
    if name == "finqa":
        return read_finqa(
            _DATA / "finqa_filings.parquet",
            _DATA / _FINQA_QUESTIONS,
            max_context_tokens=how.max_context_tokens,
            readers=how.readers or finqa.READERS,
        )
    if name == "mooncake":
        return read_mooncake(_DATA / "mooncake_conversation.jsonl.gz")
    if name == "azure":
        return read_azure(_DATA / "azure2023_conv.csv.gz")
    if name == "sharegpt":
        return _sharegpt_table(_DATA / "sharegpt_turns.parquet", how)
    return _miniswe_table(_DATA / "miniswe_lengths.parquet", how)


def _sharegpt_table(path: Path, how: ReadAs) -> Workload:
    return read_sharegpt_table(
        path,
        block_tokens=how.blocks(sharegpt.BLOCK_TOKENS),
        whole_history=how.whole_history,
    )


def _miniswe_table(path: Path, how: ReadAs) -> Workload:
    return read_miniswe(path, block_tokens=how.blocks(miniswe.BLOCK_TOKENS))


def _workload_in(path: Path, how: ReadAs) -> Workload:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".jsonl":
        return _json_lines_workload(path, how)
    if suffix == ".parquet":
        return _table_workload(path, how)
    if suffix == ".csv":
        return read_azure(path)
    if suffix == ".json":
        return _json_workload(path, how)
    raise WorkloadError(
        f"{path}: unknown ending; expected .jsonl, .json or .csv (perhaps with .gz), or .parquet"
    )


def _json_workload(path: Path, how: ReadAs) -> Workload:
    for item in json_items(path):
        if isinstance(item, dict) and "dialogue_break" in (item.get("annotation") or ()):
            return _convfinqa(path, how)
        break
    return read_sharegpt_texts(
        path,
        how.count_tokens,
        block_tokens=how.blocks(sharegpt.BLOCK_TOKENS),
        limit=how.limit,
    )


def _convfinqa(path: Path, how: ReadAs) -> Workload:
    return read_convfinqa(path, how.count_tokens, block_tokens=how.blocks(finqa.PAGE_BLOCK_TOKENS))


def _json_lines_workload(path: Path, how: ReadAs) -> Workload:
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
            return _narrativeqa(path, how)
        if "annotation" in fields:
            return _convfinqa(path, how)
        if "session" in fields:
            return read_miniswe_texts(
                path, how.count_tokens, block_tokens=how.blocks(miniswe.BLOCK_TOKENS)
            )
        raise WorkloadError(
            f"{path}:{number}: no format has just the fields {sorted(fields)}: expected "
            "'hash_ids' (Mooncake), 'question_tokens' (NarrativeQA), 'annotation' (ConvFinQA) or "
            "'session' (recorded sessions) among them"
        )
    raise WorkloadError(f"{path}: is empty")


def _narrativeqa(questions: Path, how: ReadAs, documents: Path | None = None) -> Workload:
    return read_narrativeqa(
        questions,
        documents,
        summaries=_beside(questions, ("summaries.jsonl.gz", "summaries.jsonl")),
        max_context_tokens=how.max_context_tokens,
        readers=how.readers or 1,
    )


def _table_workload(path: Path, how: ReadAs) -> Workload:
    columns = open_table(path).columns
    if "conv_id" in columns:
        return _sharegpt_table(path, how)
    if "session" in columns:
        return _miniswe_table(path, how)
    if "document_id" in columns:
        questions = _needed_beside(path, ("qaps.jsonl.gz", "qaps.jsonl"))
        return _narrativeqa(questions, how, path)
    if "doc_name" in columns:
        questions = _needed_beside(path, ("finqa_question_lengths.parquet", _FINQA_QUESTIONS))
        return read_finqa(
            path,
            questions,
            max_context_tokens=how.max_context_tokens,
            readers=how.readers or 1,
        )
    if "rate_rps" in columns:
        raise WorkloadError(f"{path}: holds rates of arrivals, no requests: choose another file")
    if columns == ["question_tokens"]:
        raise WorkloadError(f"{path}: holds questions only: name the table of filings beside it")
    raise WorkloadError(
        f"{path}: no format has just the columns {columns}: expected 'conv_id' (ShareGPT), "
        "'session' (mini-SWE), 'document_id' (NarrativeQA) or 'doc_name' (FinQA) among them"
    )


def _beside(path: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        if path.with_name(name).exists():
            return path.with_name(name)
    return None


def _needed_beside(path: Path, names: tuple[str, ...]) -> Path:
    found = _beside(path, names)
    if found is None:
        raise WorkloadError(f"{path}: the questions, {names[0]}, are not beside it")
    return found
