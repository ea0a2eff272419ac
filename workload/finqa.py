"""FinQA: analysts who put many questions to a financial report.

Either two tables of lengths, of whole filings (`doc_name`, `pdf_bytes`, `pages`, `words`,
`llama2_tokens`) and of questions (`question_tokens`), whose pairing is ours; or ConvFinQA's own
items with texts (`id`, `pre_text`, `table`, `post_text`, `annotation.dialogue_break`), one report
page each, as JSON lines or a JSON list. Sources: patronus-ai/financebench, czyssrs/ConvFinQA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workload.block_ids import key_of, stream_ids
from workload.documents import (
    MAX_CONTEXT_TOKENS,
    MEAN_THINK_S,
    Question,
    Reading,
    document_sessions,
)
from workload.errors import WorkloadError
from workload.lines import Record, found, json_items, json_object, numbered_lines, text_field
from workload.shapes import (
    BlockIds,
    SessionShape,
    TurnShape,
    Workload,
    require_block_tokens,
    require_tokens,
    turn_of,
)
from workload.tables import read_table
from workload.texts import Prompts

BLOCK_TOKENS = 256
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

_FILING_COLUMNS: dict[str, type] = {
    "doc_name": str,
    "pdf_bytes": int,
    "pages": int,
    "words": int,
    "llama2_tokens": int,
}
_QUESTION_COLUMNS: dict[str, type] = {"question_tokens": int}


def read_finqa(
    filings: str | Path,
    questions: str | Path,
    *,
    block_tokens: int = BLOCK_TOKENS,
    max_context_tokens: int | None = MAX_CONTEXT_TOKENS,
    readers: int = 1,
    seed: int = 0,
) -> Workload:
    """Read the two tables of lengths; each filing is dealt questions at random.

    Args:
        filings: the table of filings.
        questions: the table of questions.
        block_tokens: tokens a block.
        max_context_tokens: longest prompt and answer together; longer filings lose their end, and
            `notes` counts them. None for no limit.
        readers: sessions a filing; each asks all its questions, beginning with another one.
        seed: of the dealing and of the pauses.

    Raises:
        WorkloadError: if a file is absent, damaged, or breaks the format.
    """
    reading = Reading(block_tokens, max_context_tokens, readers, seed)
    filings, questions = Path(filings), Path(questions)
    lengths = _lengths(filings, _FILING_COLUMNS, "llama2_tokens")
    names = read_table(filings, _FILING_COLUMNS)["doc_name"].to_list()
    asked = _lengths(questions, _QUESTION_COLUMNS, "question_tokens")
    places = np.random.default_rng((seed, 1)).permutation(len(asked))
    dealt = np.resize(places, (len(names), QUESTIONS_PER_FILING)).tolist()
    groups: dict[str, list[Question]] = {}
    for number, (name, tokens) in enumerate(zip(names, lengths, strict=True)):
        if name in groups:
            raise WorkloadError(f"{filings}: row {number + 1}: column 'doc_name' repeats {name}")
        groups[name] = [
            Question(name, tokens, asked[place], OUTPUT_TOKENS) for place in dealt[number]
        ]
    read = document_sessions("finqa", filings, groups, reading)
    notes = [*read.notes, "which question goes with which filing is drawn, not recorded"]
    return Workload("finqa", block_tokens, read.sessions, SOURCE, tuple(notes))


def _lengths(path: Path, columns: dict[str, type], column: str) -> list[int]:
    lengths: list[int] = read_table(path, columns)[column].to_list()
    for number, tokens in enumerate(lengths, start=1):
        try:
            require_tokens(f"column {column!r}", tokens, least=1)
        except ValueError as error:
            raise WorkloadError(f"{path}: row {number}: {error}") from error
    return lengths


@dataclass(frozen=True, slots=True)
class _Page:
    """A report page and the questions on it, in the order in which they were asked."""

    id: str
    text: str
    questions: tuple[str, ...]

    def prompt(self, turn: int) -> str:
        """The page, and the questions up to the turn's."""
        return "\n\n".join([self.text, *self.questions[: turn + 1]])


def read_convfinqa(
    path: str | Path,
    count_tokens: Callable[[str], int],
    *,
    block_tokens: int = PAGE_BLOCK_TOKENS,
    seed: int = 0,
) -> Workload:
    """Read ConvFinQA's items, measured with `count_tokens`.

    A session is one page and the dialogue on it. Each prompt is the page and the questions so far,
    and so extends the one before; answers are no part of it, since the test set has none.

    Args:
        path: JSON lines, or a JSON list if the name does not end in `.jsonl` or `.jsonl.gz`.
        count_tokens: length of a text.
        block_tokens: tokens a block.
        seed: of the pauses, exponential with mean `workload.documents.MEAN_THINK_S`.

    Raises:
        WorkloadError: if the file is absent, damaged, or breaks the format.
    """
    require_block_tokens(block_tokens)
    path = Path(path)
    pages: list[_Page] = []
    for where, item in _items(path):
        try:
            pages.append(_page(item))
        except ValueError as error:
            raise WorkloadError(f"{path}{where}: {error}") from error
    if not pages:
        raise WorkloadError(f"{path}: holds no questions")
    rng = np.random.default_rng(seed)
    sessions = tuple(
        SessionShape(f"{page.id}/{place}", _turns(page, place, count_tokens, block_tokens, rng))
        for place, page in enumerate(pages)
    )
    texts = Prompts(lambda session, turn: pages[session].prompt(turn))
    return Workload("convfinqa", block_tokens, sessions, PAGE_SOURCE, texts=texts)


def _turns(
    page: _Page,
    place: int,
    count_tokens: Callable[[str], int],
    block_tokens: int,
    rng: np.random.Generator,
) -> tuple[TurnShape, ...]:
    prompts = [count_tokens(page.prompt(turn)) for turn in range(len(page.questions))]
    page_tokens = min(count_tokens(page.text), prompts[0] - 1)
    before = [page_tokens, *prompts]
    stream = stream_ids(key_of("convfinqa", page.id, place), 0, prompts[-1] // block_tokens)
    turns: list[TurnShape] = []
    for turn, tokens in enumerate(prompts):
        full = tokens // block_tokens
        stop = (tokens + OUTPUT_TOKENS) // block_tokens
        answer = stream_ids(key_of("convfinqa answer", page.id, place, turn), full, stop)
        ids: BlockIds = np.concatenate([stream[:full], answer])
        after_s = float(rng.exponential(MEAN_THINK_S)) if turn else 0.0
        new = max(tokens - before[turn], 1)
        turns.append(turn_of(after_s, tokens, OUTPUT_TOKENS, ids, block_tokens, new))
    return tuple(turns)


def _items(path: Path) -> Iterator[tuple[str, object]]:
    """Each item, and where it is, for messages."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        for number, line in numbered_lines(path):
            if not line.strip():
                continue
            try:
                yield f":{number}", json_object(line)
            except ValueError as error:
                raise WorkloadError(f"{path}:{number}: {error}") from error
    else:
        for number, item in enumerate(json_items(path), start=1):
            yield f": item {number}", item


def _page(item: object) -> _Page:
    if not isinstance(item, dict):
        raise ValueError(f"expected an object, found {type(item).__name__}")
    annotation = item.get("annotation")
    if not isinstance(annotation, dict):
        raise ValueError(f"field 'annotation' must be an object, found {found(item, 'annotation')}")
    questions = _texts(annotation, "dialogue_break")
    if not questions:
        raise ValueError("field 'dialogue_break' holds no question")
    rows = item.get("table")
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"field 'table' must be a list of lists, found {found(item, 'table')}")
    table = [" | ".join(map(str, row)) for row in rows]
    lines = [*_texts(item, "pre_text"), *table, *_texts(item, "post_text")]
    return _Page(text_field(item, "id"), "\n".join(lines), tuple(questions))


def _texts(record: Record, field: str) -> Sequence[str]:
    texts = record.get(field)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"field {field!r} must be a list of strings, found {found(record, field)}")
    return texts
