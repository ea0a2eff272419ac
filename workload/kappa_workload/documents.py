"""Readers who put many questions to one long document: sessions made of lengths.

Every prompt is the whole document and one question: prompts share the document, not the talk.
NarrativeQA and FinQA are read into this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kappa_workload.reading import ReadAs, WorkloadError
from kappa_workload.shapes import SessionShape, TurnShape, extended, key_of, stream_ids, turn_of

# An assumption, since the sources have no times: mean pause of a reader between an answer and the
# next question.
MEAN_THINK_S = 20.0

BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Question:
    """A question on a document, in tokens; `text` is empty where the source has only lengths."""

    document: str
    document_tokens: int
    tokens: int
    output_tokens: int
    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReadDocuments:
    """Sessions, the questions of each in order, and notes on documents that were cut."""

    sessions: tuple[SessionShape, ...]
    questions: tuple[tuple[Question, ...], ...]
    notes: list[str]


def document_sessions(
    name: str, path: Path, groups: Mapping[str, Sequence[Question]], how: ReadAs
) -> ReadDocuments:
    """Sessions of the readers of each document.

    Each reader asks all questions of its document, beginning with a different one; `groups` has the
    questions of each, in order. Pauses are exponential with mean `MEAN_THINK_S`. Documents of
    workloads with different names share nothing.

    Raises:
        WorkloadError: a question of `path` does not fit beside any document.
    """
    rng, readers = np.random.default_rng(how.seed), how.readers or 1
    sessions: list[SessionShape] = []
    asked: list[tuple[Question, ...]] = []
    cut = 0
    for document, questions in groups.items():
        tokens = _fitting_tokens(path, questions, how.max_context_tokens)
        cut += tokens < questions[0].document_tokens
        for reader in range(readers):
            first = reader * len(questions) // readers
            own = (*questions[first:], *questions[:first])
            think_s = rng.exponential(MEAN_THINK_S, len(own))
            think_s[0] = 0.0
            session = f"{document}/{reader}"
            turns = _turns((name, session), tokens, own, think_s.tolist(), how.blocks(BLOCK_TOKENS))
            sessions.append(SessionShape(session, turns, document_tokens=tokens))
            asked.append(own)
    notes = [f"{cut} of {len(groups)} documents cut to {how.max_context_tokens} tokens"]
    return ReadDocuments(tuple(sessions), tuple(asked), notes if cut else [])


def _fitting_tokens(
    path: Path, questions: Sequence[Question], max_context_tokens: int | None
) -> int:
    """A document's length, cut so that its longest question and answer still fit."""
    if max_context_tokens is None:
        return questions[0].document_tokens
    longest = max(question.tokens + question.output_tokens for question in questions)
    if longest >= max_context_tokens:
        raise WorkloadError(
            f"{path}: a question on document {questions[0].document} takes {longest} tokens with "
            f"its answer, and max_context_tokens is {max_context_tokens}: raise it"
        )
    return min(questions[0].document_tokens, max_context_tokens - longest)


def _turns(
    names: tuple[str, str],
    document_tokens: int,
    questions: Sequence[Question],
    think_s: list[float],
    block_tokens: int,
) -> tuple[TurnShape, ...]:
    workload, session = names
    shared = stream_ids(key_of(workload, questions[0].document), 0, document_tokens // block_tokens)
    turns: list[TurnShape] = []
    for number, (question, after_s) in enumerate(zip(questions, think_s, strict=True)):
        prompt = document_tokens + question.tokens
        stop = (prompt + question.output_tokens) // block_tokens
        ids = extended(shared, key_of(workload, session, number), stop)
        turns.append(
            turn_of(after_s, prompt, question.output_tokens, ids, block_tokens, question.tokens)
        )
    return tuple(turns)
