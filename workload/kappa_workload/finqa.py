"""FinQA: analysts who put many questions to a financial report.

Either two tables of lengths, of whole filings (`doc_name`, `pdf_bytes`, `pages`, `words`,
`llama2_tokens`) and of questions (`question_tokens`), which we pair; or ConvFinQA's own items with
texts (`id`, `pre_text`, `table`, `post_text`, `annotation.dialogue_break`), one report page each,
as JSON lines or a JSON list. Sources: patronus-ai/financebench, czyssrs/ConvFinQA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from kappa_workload.documents import BLOCK_TOKENS, MEAN_THINK_S, Question, document_sessions
from kappa_workload.reading import (
    DEFAULT,
    ReadAs,
    SomeTokens,
    TokenCounter,
    WorkloadError,
    by_name,
    json_records,
    table_records,
)
from kappa_workload.shapes import (
    SessionShape,
    Texts,
    TurnShape,
    Workload,
    extended,
    key_of,
    of_user,
    stream_ids,
    turn_of,
)

PAGE_BLOCK_TOKENS = 64
SOURCE = (
    "FinQA lengths: filings of patronus-ai/financebench, questions of ConvFinQA; derived lengths"
)
PAGE_SOURCE = "ConvFinQA, czyssrs/ConvFinQA, MIT"

# Assumptions. The paper's data set has 7.4 thousand questions on 801 documents, which is 9 each;
# here no question belongs to a filing, so they are dealt. An answer is a number with its unit.
QUESTIONS_PER_FILING = 9
READERS = 2
OUTPUT_TOKENS = 8


class _Filing(msgspec.Struct):
    doc_name: str
    llama2_tokens: SomeTokens


class _AskedLength(msgspec.Struct):
    question_tokens: SomeTokens


def read_finqa(filings: Path, questions: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read the two tables of lengths; each filing is dealt questions at random, by `how.seed`;
    `notes` counts filings that are cut."""
    table = by_name(table_records(filings, _Filing), "doc_name")
    asked = [row.question_tokens for _, row in table_records(questions, _AskedLength)]
    places = np.random.default_rng((how.seed, 1)).permutation(len(asked))
    dealt = np.resize(places, (len(table), QUESTIONS_PER_FILING)).tolist()
    groups = {
        name: [Question(name, row.llama2_tokens, asked[place], OUTPUT_TOKENS) for place in own]
        for (name, row), own in zip(table.items(), dealt, strict=True)
    }
    read = document_sessions("finqa", filings, groups, how)
    notes = [*read.notes, "which question goes with which filing is drawn, not recorded"]
    return Workload("finqa", how.blocks(BLOCK_TOKENS), read.sessions, SOURCE, tuple(notes))


class _Annotation(msgspec.Struct):
    dialogue_break: Annotated[list[str], msgspec.Meta(min_length=1)]


class ReportPage(msgspec.Struct):
    """A page of a report as FinQA and ConvFinQA write it."""

    pre_text: list[str]
    post_text: list[str]
    table: list[list[Any]]

    @property
    def text(self) -> str:
        """What stands before its table, the table, what stands behind."""
        table = [" | ".join(map(str, row)) for row in self.table]
        return "\n".join([*self.pre_text, *table, *self.post_text])


class _Item(ReportPage):
    """A report page and the dialogue on it, as ConvFinQA writes them."""

    id: str
    annotation: _Annotation

    def prompt(self, turn: int) -> str:
        """The page, and the questions up to the turn's."""
        return "\n\n".join([self.text, *self.annotation.dialogue_break[: turn + 1]])


def read_convfinqa(path: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read ConvFinQA's items: JSON lines, or a JSON list if the name does not end in `.jsonl` or
    `.jsonl.gz`.

    A session is one page and the dialogue on it. Each prompt is the page and the questions so far,
    and so extends the one before. Prompts hold no answers, since the test set has none.
    """
    pages = [page for _, page in json_records(path, _Item)]
    if not pages:
        raise WorkloadError(f"{path}: holds no questions")
    block_tokens, rng = how.blocks(PAGE_BLOCK_TOKENS), np.random.default_rng(how.seed)
    sessions = tuple(
        SessionShape(f"{page.id}/{place}", _turns(page, place, how.count_tokens, block_tokens, rng))
        for place, page in enumerate(pages)
    )
    texts = Texts(lambda session, turn: of_user(pages[session].prompt(turn)))
    return Workload("convfinqa", block_tokens, sessions, PAGE_SOURCE, texts=texts)


def _turns(
    page: _Item, place: int, count_tokens: TokenCounter, block_tokens: int, rng: np.random.Generator
) -> tuple[TurnShape, ...]:
    prompts = [count_tokens(page.prompt(i)) for i in range(len(page.annotation.dialogue_break))]
    page_tokens = min(count_tokens(page.text), prompts[0] - 1)
    before = [page_tokens, *prompts]
    stream = stream_ids(key_of("convfinqa", page.id, place), 0, prompts[-1] // block_tokens)
    turns: list[TurnShape] = []
    for turn, tokens in enumerate(prompts):
        prompt, stop = stream[: tokens // block_tokens], (tokens + OUTPUT_TOKENS) // block_tokens
        ids = extended(prompt, key_of("convfinqa answer", page.id, place, turn), stop)
        after_s = float(rng.exponential(MEAN_THINK_S)) if turn else 0.0
        new = max(tokens - before[turn], 1)
        turns.append(turn_of(after_s, tokens, OUTPUT_TOKENS, ids, block_tokens, new))
    return tuple(turns)
