"""NarrativeQA: readers who put many questions to one long document.

Questions are JSON lines of `document_id`, `doc_est_tokens`, `question_tokens` and either `answers`
(texts, of which only the length counts) or `output_tokens`, and perhaps `question`; a Parquet table
of documents may give the lengths instead, and JSON lines of summaries what documents begin with.
The source has no times; the pauses are drawn. Source: google-deepmind/narrativeqa.
"""

from __future__ import annotations

import math
from pathlib import Path

from workload.documents import MAX_CONTEXT_TOKENS, Question, Reading, document_sessions
from workload.errors import WorkloadError
from workload.lines import Record, found, json_object, numbered_lines, text_field, tokens_field
from workload.shapes import Texts, Workload
from workload.tables import read_table
from workload.texts import Documents

BLOCK_TOKENS = 256
SOURCE = "NarrativeQA lengths, google-deepmind/narrativeqa, Apache-2.0"
SUMMARY_SOURCE = f"{SOURCE}; summaries from Wikipedia, CC-BY-SA-3.0 (documents.wiki_url)"

# Assumptions, since the source has only texts: how many read one document, Llama-2 tokens in a word
# of an answer, and the shortest answer a model gives.
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


def read_narrativeqa(
    path: str | Path,
    documents: str | Path | None = None,
    *,
    summaries: str | Path | None = None,
    block_tokens: int = BLOCK_TOKENS,
    max_context_tokens: int | None = MAX_CONTEXT_TOKENS,
    readers: int = 1,
    seed: int = 0,
) -> Workload:
    """Read questions with the lengths of their documents; `.gz` is read as is.

    Args:
        path: the questions.
        documents: the table of documents, whose `est_tokens` then count and not the questions'
            `doc_est_tokens`. Documents without a question are left out, and `notes` counts them.
        summaries: what documents begin with. With it and the questions' texts the workload has
            texts: the summary, plain words up to the document's length, and the question.
        block_tokens: tokens a block.
        max_context_tokens: longest prompt and answer together; longer documents lose their end,
            and `notes` counts them. None for no limit.
        readers: sessions a document; each asks all its questions, beginning with another one.
        seed: of the pauses, exponential with mean `workload.documents.MEAN_THINK_S`.

    Raises:
        WorkloadError: if a file is absent, damaged, or breaks the format.
    """
    reading = Reading(block_tokens, max_context_tokens, readers, seed)
    path = Path(path)
    lengths = None if documents is None else _document_tokens(Path(documents))
    told = None if summaries is None else _summaries(Path(summaries))
    groups = _read(path, lengths)
    read = document_sessions("narrativeqa", path, groups, reading)
    notes = list(read.notes)
    if lengths and len(lengths) > len(groups):
        notes.append(f"{len(lengths) - len(groups)} of {len(lengths)} documents have no question")
    texts: Texts | None = None
    if told is not None and all(question.text for asked in read.questions for question in asked):
        tokens = [session.document_tokens for session in read.sessions]
        texts = Documents(read.questions, tokens, told)
        notes.append("story bodies are not in the source: a summary, then plain words")
    source = SOURCE if texts is None else SUMMARY_SOURCE
    return Workload("narrativeqa", block_tokens, read.sessions, source, tuple(notes), texts)


def _summaries(path: Path) -> dict[str, tuple[str, int]]:
    """Text and tokens of each document's summary."""
    summaries: dict[str, tuple[str, int]] = {}
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            record = json_object(line)
            name = text_field(record, "document_id")
            text = text_field(record, "summary_tokenized").strip()
            summaries[name] = (text, tokens_field(record, "summary_tokens"))
        except ValueError as error:
            raise WorkloadError(f"{path}:{number}: {error}") from error
    if not summaries:
        raise WorkloadError(f"{path}: holds no summaries")
    return summaries


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


def _read(path: Path, lengths: dict[str, int] | None) -> dict[str, list[Question]]:
    """The questions of each document, in order."""
    documents: dict[str, list[Question]] = {}
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


def _parse(record: Record, lengths: dict[str, int] | None) -> Question:
    document = text_field(record, "document_id")
    if lengths is None:
        document_tokens = tokens_field(record, "doc_est_tokens", least=1)
    elif document in lengths:
        document_tokens = lengths[document]
    else:
        raise ValueError(f"document {document} is not in the table of documents")
    return Question(
        document=document,
        document_tokens=document_tokens,
        tokens=tokens_field(record, "question_tokens", least=1),
        output_tokens=_output_tokens(record),
        text=text_field(record, "question") if "question" in record else "",
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
