"""Questions on documents, in the files that their authors publish.

NarrativeQA's repository (`documents.csv`, `qaps.csv`, and the stories that its script fetches), and
files of the hub, as Parquet, JSON lines or a JSON list: NarrativeQA, DocFinQA, FinQA, LongBench and
LooGLE. A record's fields decide the format. Each document is read once, and each prompt is the
document and one question. Nothing of these data sets ships with this package. `catalogue` calls.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from kappa_workload.documents import BLOCK_TOKENS, Question, document_sessions
from kappa_workload.finqa import ReportPage
from kappa_workload.narrativeqa import answer_tokens
from kappa_workload.prompts import filler
from kappa_workload.reading import (
    CHARACTERS_PER_TOKEN,
    ReadAs,
    SomeTokens,
    WorkloadError,
    at,
    by_name,
    csv_records,
    estimated_tokens,
    json_records,
    required_fields,
    table_records,
)
from kappa_workload.shapes import Message, Texts, Workload, key_of, of_user

Asked = tuple[str, str, list[tuple[str, list[str]]]]
"""A document's key, its text, and questions on it with their answers."""


def _by_text(text: str) -> str:
    """The key of a document that has no name: equal texts are one document."""
    return f"{int(key_of('document', text)):016x}"


class _Text(msgspec.Struct):
    text: str


class _Story(msgspec.Struct):
    id: str
    text: str


class _NarrativeQa(msgspec.Struct):
    document: _Story
    question: _Text
    answers: list[_Text]

    def asked(self) -> Asked:
        answers = [answer.text for answer in self.answers]
        return self.document.id, self.document.text, [(self.question.text, answers)]


class _DocFinQa(msgspec.Struct, rename="pascal"):
    context: str
    question: str
    answer: Any

    def asked(self) -> Asked:
        return _by_text(self.context), self.context, [(self.question, [str(self.answer)])]


class _PageQuestion(msgspec.Struct):
    question: str
    answer: Any = ""


class _FinQa(ReportPage):
    filename: str
    qa: _PageQuestion

    def asked(self) -> Asked:
        return self.filename, self.text, [(self.qa.question, [str(self.qa.answer)])]


class _LongBench(msgspec.Struct):
    context: str
    input: str
    answers: list[str]

    def asked(self) -> Asked:
        # Tasks such as summaries have no question of their own.
        question = self.input or "What does the text say?"
        return _by_text(self.context), self.context, [(question, self.answers)]


class _Pair(msgspec.Struct, rename="upper"):
    q: str
    a: str


class _LooGle(msgspec.Struct):
    """A document and its questions, as the text of a Python list or `none`."""

    input: str
    qa_pairs: str | list[_Pair]

    def asked(self) -> Asked:
        pairs = self.qa_pairs
        if isinstance(pairs, str):
            try:
                found = [] if pairs == "none" else ast.literal_eval(pairs)
            except (SyntaxError, ValueError, MemoryError) as error:
                raise ValueError(f"field 'qa_pairs' is no list of pairs ({error})") from None
            pairs = msgspec.convert(found, list[_Pair])
        return _by_text(self.input), self.input, [(pair.q, [pair.a]) for pair in pairs]


class _LooGleQuestion(msgspec.Struct):
    context: str
    question: str
    answer: str

    def asked(self) -> Asked:
        return _by_text(self.context), self.context, [(self.question, [self.answer])]


@dataclass(frozen=True, slots=True)
class Format:
    """A published layout."""

    name: str  # of the workload; `narrativeqa` and `finqa` stand beside the paper's figures
    what: str
    record: Any  # a struct with `asked`

    @property
    def fields(self) -> list[str]:
        """The fields that a record has at least."""
        return required_fields(self.record)


FORMATS = (
    Format("narrativeqa", "NarrativeQA as on the hub", _NarrativeQa),
    Format("finqa", "DocFinQA", _DocFinQa),  # what paper 001 calls FinQA
    Format("finqa-pages", "FinQA's report pages", _FinQa),
    Format("longbench", "LongBench", _LongBench),
    Format("loogle", "LooGLE", _LooGle),
    Format("loogle", "LooGLE by questions", _LooGleQuestion),
)


def format_of(fields: Collection[str]) -> Format | None:
    """The format of records with these fields, which may have others besides."""
    return next((form for form in FORMATS if set(form.fields) <= set(fields)), None)


def nearest(fields: Collection[str], formats: Mapping[str, Sequence[str]]) -> str:
    """`looks like WHAT, but lacks …`, of the format with the most of these fields, of which at
    least half must be there; else empty."""
    shares = {
        what: len(set(needed) & set(fields)) / len(needed) for what, needed in formats.items()
    }
    what = max(shares, key=lambda name: shares[name])
    if shares[what] < 0.5:
        return ""
    lacking = [name for name in formats[what] if name not in fields]
    return f"looks like {what}, but lacks {lacking} of its columns {list(formats[what])}"


def read_published(paths: Sequence[Path], form: Format, how: ReadAs) -> Workload:
    """Read files of one format, as one workload; `how.limit` counts records.

    Raises:
        WorkloadError: a file is damaged or cut short, or a record is none of the format.
    """
    bodies: dict[str, str] = {}
    groups: dict[str, list[Question]] = {}
    left_out = 0
    records = chain.from_iterable(_records(path, form.record) for path in paths)
    for where, record in islice(records, how.limit):
        with at(where):
            key, text, asked = record.asked()
        if not (asked and text):
            left_out += 1
            continue
        if key not in bodies:
            bodies[key], groups[key] = text, []
        known = groups[key][0].document_tokens if groups[key] else how.count_tokens(text)
        groups[key] += [_question(key, known, each, how) for each in asked]
    if not groups:
        raise WorkloadError(f"{paths[0]}: holds no question on a document")
    notes = [f"{left_out} records left out: no question, or no document"] if left_out else []
    source = f"{form.what}, {paths[0].name}" + (f" and {len(paths) - 1} more" if paths[1:] else "")
    of_name = Workload(form.name, how.blocks(BLOCK_TOKENS), (), source, tuple(notes))
    return _workload(of_name, paths[0], groups, lambda key, _: bodies[key], how)


def _records(path: Path, kind: type) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        return table_records(path, kind)
    return json_records(path, kind)


def _question(key: str, tokens: int, asked: tuple[str, list[str]], how: ReadAs) -> Question:
    text, answers = asked
    words = max(how.count_tokens(text), 1)
    return Question(key, max(tokens, 1), words, answer_tokens(answers or [""]), text)


def _workload(
    empty: Workload, path: Path, groups: Mapping[str, Sequence[Question]],
    body: Callable[[str, int], str], how: ReadAs,
) -> Workload:  # fmt: skip
    """`empty` with the sessions of these questions; body: a document's text, by key and tokens."""
    read = document_sessions(empty.name, path, groups, how)
    notes = [*empty.notes, *read.notes]
    if how.count_tokens is estimated_tokens:
        notes.append(f"tokens of texts are estimated, {CHARACTERS_PER_TOKEN:g} characters each")

    def chat(session: int, turn: int) -> tuple[Message, ...]:
        question, tokens = read.questions[session][turn], read.sessions[session].document_tokens
        text = body(question.document, tokens)
        kept = math.ceil(len(text) * tokens / question.document_tokens)
        # Filler has the tokens of the cut document already.
        text = text[:kept] if tokens < question.document_tokens else text
        return of_user(f"{text}\n\n{question.text}")

    return replace(empty, sessions=read.sessions, notes=tuple(notes), texts=Texts(chat))


# --- NarrativeQA's repository --------------------------------------------------------------------

DOCUMENTS_CSV, QUESTIONS_CSV = "documents.csv", "qaps.csv"

TOKENS_PER_STORY_WORD = 1.268
"""Llama-2 tokens in a word of `story_word_count`; the built-in lengths use it, too."""

PUBLISHED = {"train": (1102, 32747), "valid": (115, 3461), "test": (355, 10557)}
"""(documents, questions) of each `set` at github.com/google-deepmind/narrativeqa."""

_FETCH = "fetch it again from github.com/google-deepmind/narrativeqa"
_LEAST_STORY = 0.9
"""A story file that has less of its published bytes is cut short or a page that replaced it; its
authors found 3.5 % of difference at most, but for one."""


class _DocumentRow(msgspec.Struct):
    document_id: str
    set: str
    story_file_size: SomeTokens
    story_word_count: SomeTokens


class _QuestionRow(msgspec.Struct):
    document_id: str
    set: str
    question: str
    answer1: str
    answer2: str


CSV_FORMATS: Mapping[str, Sequence[str]] = {
    f"NarrativeQA's {DOCUMENTS_CSV}": _DocumentRow.__struct_fields__,
    f"NarrativeQA's {QUESTIONS_CSV}": _QuestionRow.__struct_fields__,
}


def read_narrativeqa_csv(path: Path, how: ReadAs) -> Workload:
    """Read NarrativeQA's repository; path: either CSV file, the other stands beside it.

    Stories that are there as `tmp/DOCUMENT_ID.content` are measured and sent. The length of any
    other is its number of words times `TOKENS_PER_STORY_WORD`, and its text plain words; `notes`
    says of how many. `how.limit` counts questions.

    Raises:
        WorkloadError: a file is absent or damaged, or the two do not belong together.
    """
    folder = path.parent
    for name in (DOCUMENTS_CSV, QUESTIONS_CSV):
        if not (folder / name).exists():
            raise WorkloadError(f"{folder / name} is not there, beside {path.name}: {_FETCH}")
    known = by_name(csv_records(folder / DOCUMENTS_CSV, _DocumentRow), "document_id")
    asked = list(csv_records(folder / QUESTIONS_CSV, _QuestionRow))
    _check_whole(folder, known, asked)
    asked = asked[: how.limit]
    stories, notes = _stories(folder, [known[k] for k in {r.document_id: 0 for _, r in asked}])
    groups: dict[str, list[Question]] = {}
    for _, row in asked:
        key = row.document_id
        if key in groups:
            tokens = groups[key][0].document_tokens
        elif key in stories:
            tokens = how.count_tokens(_story(stories[key]))
        else:
            tokens = math.ceil(known[key].story_word_count * TOKENS_PER_STORY_WORD)
        pair = row.question, [row.answer1, row.answer2]
        groups.setdefault(key, []).append(_question(key, tokens, pair, how))

    def body(key: str, tokens: int) -> str:
        return _story(stories[key]) if key in stories else filler(key, tokens)

    source = f"NarrativeQA as in its repository, {folder / QUESTIONS_CSV}"
    empty = Workload("narrativeqa", how.blocks(BLOCK_TOKENS), (), source, tuple(notes))
    return _workload(empty, path, groups, body, how)


def _check_whole(
    folder: Path, known: Mapping[str, _DocumentRow], asked: Iterable[tuple[str, _QuestionRow]]
) -> None:
    """Refuse files of which one is cut: each question has its document, each document a question,
    and a set with its published documents has its published questions."""
    questions, in_set = Counter[str](), Counter[str]()
    for where, row in asked:
        if row.document_id not in known:
            raise WorkloadError(
                f"{where}: document {row.document_id} is not among the {len(known):,} of "
                f"{DOCUMENTS_CSV}: if that is cut short, {_FETCH}"
            )
        questions[row.document_id] += 1
        in_set[row.set] += 1
    documents = Counter(row.set for row in known.values())
    path = folder / QUESTIONS_CSV
    if len(questions) < len(known):
        raise WorkloadError(
            f"{path}: has {questions.total():,} questions on {len(questions):,} of the "
            f"{len(known):,} documents of {DOCUMENTS_CSV}: it is cut short; {_FETCH}, or leave in "
            f"{DOCUMENTS_CSV} the documents that are meant"
        )
    for name, (of_documents, of_questions) in PUBLISHED.items():
        if documents[name] == of_documents and in_set[name] != of_questions:
            raise WorkloadError(
                f"{path}: has {in_set[name]:,} of the {of_questions:,} published questions of set "
                f"{name!r}: it is cut short; {_FETCH}"
            )


def _stories(folder: Path, rows: Sequence[_DocumentRow]) -> tuple[dict[str, Path], list[str]]:
    """The story files that are there whole, by document, and what there is to say of the others."""
    found: dict[str, Path] = {}
    notes: list[str] = []
    for row in rows:
        path = folder / "tmp" / f"{row.document_id}.content"
        if not path.is_file():
            continue
        size = path.stat().st_size
        if size >= _LEAST_STORY * row.story_file_size:
            found[row.document_id] = path
        else:
            notes.append(f"{path}: {size:,} of {row.story_file_size:,} bytes: cut short, not used")
    left = len(rows) - len(found)
    notes = [*notes[:1], *([f"{len(notes) - 1} more story files like it"] if notes[1:] else [])]
    if left:
        notes.append(
            f"{left:,} of {len(rows):,} stories are not in {folder / 'tmp'}: their lengths are "
            f"{DOCUMENTS_CSV}'s words at {TOKENS_PER_STORY_WORD} tokens, their texts plain words"
        )
    return found, notes


@lru_cache(maxsize=16)
def _story(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
