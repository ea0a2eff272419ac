"""ShareGPT conversations: each prompt is the whole talk so far, the model's answers included.

Either the table of turns (`conv_id`, `split_offset_msgs`, `turn`, `cached_C`, `new_N`, `out`,
`cached_C_unsplit_est`; lengths in Llama-2 tokens), or a file in the layout of
ShareGPT_V3_unfiltered_cleaned_split.json, which holds the texts and may not be redistributed.
Conversations share nothing with one another. The source has no times; the pauses are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from kappa_workload.reading import (
    CHARACTERS_PER_TOKEN,
    DEFAULT,
    MOST_TOKENS,
    ReadAs,
    TokenCounter,
    Tokens,
    WorkloadError,
    at,
    estimated_tokens,
    json_items,
    table_records,
)
from kappa_workload.shapes import (
    Message,
    SessionShape,
    Texts,
    Workload,
    key_of,
    stream_ids,
    turn_of,
)

BLOCK_TOKENS = 64
SOURCE = "ShareGPT lengths, derived from a sample of ShareGPT_V3_unfiltered_cleaned_split"

# An assumption, since the source has only texts: mean pause between an answer and the next query.
MEAN_THINK_S = 15.0

_Speaker = Literal["human", "user", "system", "gpt", "chatgpt", "bing", "bard"]
_ROLES: dict[str, str] = {"human": "user", "user": "user", "system": "system"}
"""All other speakers are assistants."""

_Lengths = list[tuple[int, int, int]]  # (prompt, output, new) tokens of each turn


class _TurnRow(msgspec.Struct):
    conv_id: str
    turn: int
    out: Tokens
    cached: Tokens = msgspec.field(name="cached_C")
    new: Tokens = msgspec.field(name="new_N")
    # With what was cut off before the piece, estimated.
    uncut: Tokens = msgspec.field(name="cached_C_unsplit_est")


def read_sharegpt_table(path: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read the table of turns; the source cuts conversations into pieces of about 2,000 tokens."""
    conversations: dict[str, _Lengths] = {}
    for where, row in table_records(path, _TurnRow):
        lengths = conversations.setdefault(row.conv_id, [])
        prompt = (row.uncut if how.whole_history else row.cached) + row.new
        with at(where):
            if row.turn != len(lengths):
                raise ValueError(
                    f"column 'turn' must be {len(lengths)} for this conversation, found {row.turn}"
                )
            _check_prompt(prompt, row.cached + row.new, lengths)
        lengths.append((prompt, row.out, row.new))
    return _workload(conversations.items(), how)


def _check_prompt(prompt: int, in_piece: int, before: _Lengths) -> None:
    if in_piece < 1 or max(in_piece, prompt) > MOST_TOKENS:
        raise ValueError(
            f"columns 'cached_C' and 'new_N' make a prompt of {in_piece} tokens, {prompt} with its "
            f"history: give 1 to {MOST_TOKENS}"
        )
    left = sum(before[-1][:2]) if before else 0
    if prompt < left:
        raise ValueError(
            f"columns 'cached_C' and 'new_N' make a prompt of {prompt} tokens, but the turn "
            f"before left {left}"
        )


class _Message(msgspec.Struct):
    speaker: _Speaker = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Message]
    id: str = ""

    def as_chat(self) -> tuple[Message, ...]:
        return tuple(
            {"role": _ROLES.get(m.speaker, "assistant"), "content": m.value}
            for m in self.conversations
        )


def read_sharegpt_texts(path: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read a list of `{id, conversations: [{from, value}]}`.

    A turn is every answer that something precedes; its prompt is all that came before, with no
    chat template. Conversations without a turn are left out, and `notes` counts them.
    """
    conversations: list[tuple[str, _Lengths]] = []
    talks: list[tuple[Message, ...]] = []
    prompts: list[tuple[int, ...]] = []
    number = 0
    items = islice(json_items(path, _Conversation), how.limit)
    for number, (_, conversation) in enumerate(items, start=1):
        talk = conversation.as_chat()
        sent, lengths = _measured(talk, how.count_tokens)
        if lengths:
            conversations.append((f"{conversation.id}/{number - 1}", lengths))
            talks.append(talk)
            prompts.append(sent)
    if not conversations:
        raise WorkloadError(f"{path}: holds no conversation with an answer")
    left_out = number - len(conversations)
    notes: list[str] = []
    if how.count_tokens is estimated_tokens:
        notes.append(f"tokens are estimated, {CHARACTERS_PER_TOKEN:g} characters each")
    if left_out:
        notes.append(f"{left_out} of {number} conversations left out: no answer to anything")
    texts = Texts(lambda session, turn: talks[session][: prompts[session][turn]])
    source = f"texts in the layout of ShareGPT, {path.name}"
    made = _workload(conversations, how)
    return replace(made, source=source, notes=tuple(notes), texts=texts)


def _measured(
    talk: tuple[Message, ...], count_tokens: TokenCounter
) -> tuple[tuple[int, ...], _Lengths]:
    """(number of messages that each turn sends, lengths of each turn)."""
    sent: list[int] = []
    lengths: _Lengths = []
    context = answered = 0
    for place, message in enumerate(talk):
        tokens = count_tokens(message["content"])
        if message["role"] == "assistant" and context:
            sent.append(place)
            lengths.append((context, tokens, context - answered))
            answered = context + tokens
        context += tokens
    return tuple(sent), lengths


def _workload(conversations: Iterable[tuple[str, _Lengths]], how: ReadAs) -> Workload:
    """The workload of these conversations, with exponential pauses of mean `MEAN_THINK_S`."""
    block_tokens, rng = how.blocks(BLOCK_TOKENS), np.random.default_rng(how.seed)
    sessions: list[SessionShape] = []
    for name, lengths in conversations:
        think_s = rng.exponential(MEAN_THINK_S, len(lengths))
        think_s[0] = 0.0
        # One text: every prompt, with or without its answer, is a beginning of this text.
        stop = max(prompt + max(output, 1) for prompt, output, _ in lengths) // block_tokens
        ids = stream_ids(key_of("sharegpt", name), 0, stop)
        turns = tuple(
            turn_of(after_s, prompt, output, ids, block_tokens, new)
            for (prompt, output, new), after_s in zip(lengths, think_s.tolist(), strict=True)
        )
        sessions.append(SessionShape(id=name, turns=turns))
    return Workload("sharegpt", block_tokens, tuple(sessions), SOURCE)
