"""NarrativeQA: readers who put many questions to one long document.

Questions are JSON lines of `document_id`, `doc_est_tokens`, `question_tokens` and either `answers`
(texts, of which only the length counts) or `output_tokens`, and perhaps `question`; a Parquet table
of documents may give the lengths instead, and JSON lines of summaries what documents begin with.
The source has no times; the pauses are drawn. Source: google-deepmind/narrativeqa.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kappa_workload.documents import BLOCK_TOKENS, Question, document_sessions
from kappa_workload.prompts import filler
from kappa_workload.reading import (
    DEFAULT,
    ReadAs,
    SomeTokens,
    Tokens,
    at,
    by_name,
    json_lines,
    table_records,
)
from kappa_workload.shapes import Message, Texts, Workload, of_user

SOURCE = "NarrativeQA lengths, google-deepmind/narrativeqa, Apache-2.0"
SUMMARY_SOURCE = f"{SOURCE}; summaries from Wikipedia, CC-BY-SA-3.0 (documents.wiki_url)"

# Assumptions, since the source has only texts: how many read one document, Llama-2 tokens in a word
# of an answer, and the shortest answer a model gives.
READERS = 4
TOKENS_PER_WORD = 1.3
LEAST_OUTPUT_TOKENS = 4


def read_narrativeqa(
    path: Path,
    documents: Path | None = None,
    *,
    summaries: Path | None = None,
    how: ReadAs = DEFAULT,
) -> Workload:
    """Read questions with the lengths of their documents; `notes` counts documents that are cut.

    documents: a table with `est_tokens`, which replace the questions' `doc_est_tokens`; documents
    without a question are left out, and `notes` counts them. summaries: beginnings of documents;
    with them, and the questions' texts, the workload has texts.
    """
    lengths = None if documents is None else _document_tokens(documents)
    described = None if summaries is None else _summaries(summaries)
    groups = _read(path, lengths)
    read = document_sessions("narrativeqa", path, groups, how)
    notes = list(read.notes)
    if lengths and len(lengths) > len(groups):
        notes.append(f"{len(lengths) - len(groups)} of {len(lengths)} documents have no question")
    texts: Texts | None = None
    asked = [question for questions in read.questions for question in questions]
    if described is not None and all(question.text for question in asked):
        tokens = [session.document_tokens for session in read.sessions]
        texts = document_texts(read.questions, tokens, described)
        notes.append("story bodies are not in the source: a summary, then plain words")
    source = SOURCE if texts is None else SUMMARY_SOURCE
    return Workload(
        "narrativeqa", how.blocks(BLOCK_TOKENS), read.sessions, source, tuple(notes), texts
    )


def document_texts(
    asked: Sequence[tuple[Question, ...]],
    tokens: Sequence[int],
    summaries: Mapping[str, tuple[str, int]],
) -> Texts:
    """Texts of documents without their bodies: a summary, then plain words up to their length.

    asked: the questions of each session, in order. tokens: the length of each session's document.
    summaries: text and tokens of each document's summary; a document without one is plain words.
    """

    def chat(session: int, turn: int) -> tuple[Message, ...]:
        question = asked[session][turn]
        summary, summary_tokens = summaries.get(question.document, ("", 0))
        words = filler(question.document, tokens[session] - summary_tokens)
        return of_user("\n\n".join(filter(None, (summary, words, question.text))))

    return Texts(chat)


class _DocumentLength(msgspec.Struct):
    document_id: str
    est_tokens: SomeTokens


class _Summary(msgspec.Struct):
    document_id: str
    summary_tokenized: str
    summary_tokens: Tokens


class _QuestionRecord(msgspec.Struct):
    document_id: str
    question_tokens: SomeTokens
    doc_est_tokens: SomeTokens | None = None
    question: str = ""
    output_tokens: SomeTokens | None = None
    answers: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None

    def as_question(self, lengths: dict[str, int] | None) -> Question:
        if lengths is not None and self.document_id not in lengths:
            raise ValueError(f"document {self.document_id} is not in the table of documents")
        tokens = self.doc_est_tokens if lengths is None else lengths[self.document_id]
        if tokens is None:
            raise ValueError("field 'doc_est_tokens' is missing: it is the document's length")
        output_tokens = self._output_tokens()
        return Question(
            self.document_id, tokens, self.question_tokens, output_tokens, self.question
        )

    def _output_tokens(self) -> int:
        if self.output_tokens is not None:
            return self.output_tokens
        if self.answers is None:
            raise ValueError("fields 'output_tokens' and 'answers' are missing: give one of them")
        return answer_tokens(self.answers)


def answer_tokens(answers: Sequence[str]) -> int:
    """Tokens of an answer: those of the given ones on average, at least `LEAST_OUTPUT_TOKENS`."""
    words = sum(len(answer.split()) for answer in answers) / len(answers)
    return max(math.ceil(words * TOKENS_PER_WORD), LEAST_OUTPUT_TOKENS)


def _summaries(path: Path) -> dict[str, tuple[str, int]]:
    """Text and tokens of each document's summary."""
    return {
        record.document_id: (record.summary_tokenized.strip(), record.summary_tokens)
        for _, record in json_lines(path, _Summary)
    }


def _document_tokens(path: Path) -> dict[str, int]:
    rows = by_name(table_records(path, _DocumentLength), "document_id")
    return {name: row.est_tokens for name, row in rows.items()}


def _read(path: Path, lengths: dict[str, int] | None) -> dict[str, list[Question]]:
    """The questions of each document, in order."""
    documents: dict[str, list[Question]] = {}
    for where, record in json_lines(path, _QuestionRecord):
        with at(where):
            question = record.as_question(lengths)
            group = documents.setdefault(question.document, [])
            if group and group[0].document_tokens != question.document_tokens:
                raise ValueError(
                    f"document {question.document} has {question.document_tokens} tokens here "
                    f"and {group[0].document_tokens} in an earlier line"
                )
        group.append(question)
    return documents
