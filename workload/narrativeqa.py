"""NarrativeQA: readers who put many questions to one long document.

Questions are JSON lines of `document_id`, `doc_est_tokens`, `question_tokens` and either `answers`
(texts, of which only the length counts) or `output_tokens`; a Parquet table of documents may give
the lengths instead. A session is one reader of one document. Every prompt is the whole document
and one question: what is shared is the document, not the talk. The source has no times; the pauses
are drawn. Source: google-deepmind/narrativeqa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workload.block_ids import key_of, stream_ids
from workload.errors import WorkloadError
from workload.lines import Record, found, json_object, numbered_lines, text_field, tokens_field
from workload.shapes import (
    BlockIds,
    SessionShape,
    TurnShape,
    Workload,
    require_block_tokens,
    turn_of,
)
from workload.tables import read_table

BLOCK_TOKENS = 256
MAX_CONTEXT_TOKENS = 128 * 1024
SOURCE = "NarrativeQA lengths, google-deepmind/narrativeqa, Apache-2.0"

# Assumptions, since the source has only texts: mean pause of a reader between an answer and the
# next question, how many read one document, Llama-2 tokens in a word of an answer, and the shortest
# answer a model gives.
MEAN_THINK_S = 20.0
READERS = 4
TOKENS_PER_WORD = 1.3
LEAST_OUTPUT_TOKENS = 4

_DOCUMENT_COLUMNS: dict[str, type] = {
    "document_id": str,
    "set": str,
    "kind": str,
    "story_word_count": int,
    "story_file_size": int,
    "wiki_title": str,
    "wiki_url": str,
    "est_tokens": int,
}


@dataclass(frozen=True, slots=True)
class _Question:
    document: str
    document_tokens: int
    tokens: int
    output_tokens: int


def read_narrativeqa(
    path: str | Path,
    documents: str | Path | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    max_context_tokens: int = MAX_CONTEXT_TOKENS,
    readers: int = 1,
    seed: int = 0,
) -> Workload:
    """Read questions with the lengths of their documents; `.gz` is read as is.

    Args:
        path: the questions.
        documents: the table of documents, whose `est_tokens` then count and not the questions'
            `doc_est_tokens`. Documents without a question are left out, and `notes` counts them.
        block_tokens: tokens a block.
        max_context_tokens: longest prompt and answer together; longer documents lose their end,
            and `notes` counts them.
        readers: sessions a document; each asks all its questions, beginning with another one.
        seed: of the pauses, exponential with mean `MEAN_THINK_S`.

    Raises:
        WorkloadError: if a file is absent, damaged, or breaks the format.
    """
    require_block_tokens(block_tokens)
    if readers < 1:
        raise ValueError(f"readers is {readers}: give at least 1")
    lengths = None if documents is None else _document_tokens(Path(documents))
    groups = _read(Path(path), lengths)
    rng = np.random.default_rng(seed)
    sessions: list[SessionShape] = []
    cut = 0
    for name, questions in groups.items():
        tokens = _fitting_tokens(Path(path), questions, max_context_tokens)
        cut += tokens < questions[0].document_tokens
        for reader in range(readers):
            first = reader * len(questions) // readers
            own = questions[first:] + questions[:first]
            think_s = rng.exponential(MEAN_THINK_S, len(own))
            think_s[0] = 0.0
            turns = _turns(f"{name}/{reader}", tokens, own, think_s.tolist(), block_tokens)
            sessions.append(SessionShape(id=f"{name}/{reader}", turns=turns))
    notes = []
    if cut:
        notes.append(f"{cut} of {len(groups)} documents cut to {max_context_tokens} tokens")
    if lengths and len(lengths) > len(groups):
        notes.append(f"{len(lengths) - len(groups)} of {len(lengths)} documents have no question")
    return Workload("narrativeqa", block_tokens, tuple(sessions), SOURCE, tuple(notes))


def _fitting_tokens(path: Path, questions: list[_Question], max_context_tokens: int) -> int:
    """A document's length, such that its longest question and answer still fit."""
    longest = max(question.tokens + question.output_tokens for question in questions)
    if longest >= max_context_tokens:
        raise WorkloadError(
            f"{path}: a question on document {questions[0].document} takes {longest} tokens with "
            f"its answer, and max_context_tokens is {max_context_tokens}: raise it"
        )
    return min(questions[0].document_tokens, max_context_tokens - longest)


def _turns(
    session: str,
    document_tokens: int,
    questions: list[_Question],
    think_s: list[float],
    block_tokens: int,
) -> tuple[TurnShape, ...]:
    shared = stream_ids(
        key_of("narrativeqa", questions[0].document), 0, document_tokens // block_tokens
    )
    turns: list[TurnShape] = []
    for number, (question, after_s) in enumerate(zip(questions, think_s, strict=True)):
        prompt = document_tokens + question.tokens
        stop = (prompt + question.output_tokens) // block_tokens
        own = stream_ids(key_of("narrativeqa", session, number), len(shared), stop)
        ids: BlockIds = np.concatenate([shared, own])
        turns.append(turn_of(after_s, prompt, question.output_tokens, ids, block_tokens))
    return tuple(turns)


def _document_tokens(path: Path) -> dict[str, int]:
    table = read_table(path, _DOCUMENT_COLUMNS).select("document_id", "est_tokens")
    lengths: dict[str, int] = {}
    for number, (name, tokens) in enumerate(table.iter_rows(), start=1):
        if name in lengths:
            raise WorkloadError(f"{path}: row {number}: column 'document_id' repeats {name}")
        if tokens < 1:
            raise WorkloadError(f"{path}: row {number}: column 'est_tokens' must be at least 1")
        lengths[name] = tokens
    return lengths


def _read(path: Path, lengths: dict[str, int] | None) -> dict[str, list[_Question]]:
    """The questions of each document, in order."""
    documents: dict[str, list[_Question]] = {}
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            question = _parse(json_object(line), lengths)
            group = documents.setdefault(question.document, [])
            if group and group[0].document_tokens != question.document_tokens:
                raise ValueError(
                    f"document {question.document} has {question.document_tokens} tokens here "
                    f"and {group[0].document_tokens} in an earlier line"
                )
        except ValueError as error:
            raise WorkloadError(f"{path}:{number}: {error}") from error
        group.append(question)
    if not documents:
        raise WorkloadError(f"{path}: holds no questions")
    return documents


def _parse(record: Record, lengths: dict[str, int] | None) -> _Question:
    document = text_field(record, "document_id")
    if lengths is None:
        document_tokens = tokens_field(record, "doc_est_tokens", least=1)
    elif document in lengths:
        document_tokens = lengths[document]
    else:
        raise ValueError(f"document {document} is not in the table of documents")
    return _Question(
        document=document,
        document_tokens=document_tokens,
        tokens=tokens_field(record, "question_tokens", least=1),
        output_tokens=_output_tokens(record),
    )


def _output_tokens(record: Record) -> int:
    if "output_tokens" in record:
        return tokens_field(record, "output_tokens", least=1)
    answers = record.get("answers")
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) for answer in answers)
    ):
        raise ValueError(
            f"field 'answers' must be a list of strings, found {found(record, 'answers')}"
        )
    words = sum(len(answer.split()) for answer in answers) / len(answers)
    return max(math.ceil(words * TOKENS_PER_WORD), LEAST_OUTPUT_TOKENS)
