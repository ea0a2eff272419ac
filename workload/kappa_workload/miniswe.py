"""mini-SWE agent sessions: tens of turns, each of which sees nearly all of the one before.

A Parquet table of `session`, `t_s`, `input_length`, `output_length`, `cached_C`, `new_N` (lengths
in Llama-2 tokens; C is what an unlimited cache of 16-token prompt blocks held), or the recorded
texts themselves. A prompt extends the one before it, without the recorded replies. The recorded gap
between two turns is taken for the pause, though it also holds the time of the first one's answer.
Source: LMCache/lmcache-agent-trace.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kappa_workload.reading import (
    DEFAULT,
    ReadAs,
    Seconds,
    SomeTokens,
    TokenCounter,
    Tokens,
    at,
    table_records,
)
from kappa_workload.sessions import Session, read_sessions
from kappa_workload.shapes import (
    BlockIds,
    SessionShape,
    Texts,
    TurnShape,
    Workload,
    extended,
    key_of,
    of_user,
    turn_of,
)

BLOCK_TOKENS = 64
SOURCE = "mini-SWE agent traces, LMCache/lmcache-agent-trace, Apache-2.0"

_CACHE_BLOCK_TOKENS = 16  # of the cache that `cached_C` was computed with


class _SweRow(msgspec.Struct):
    """One request."""

    session: str
    t_s: Seconds
    input_tokens: SomeTokens = msgspec.field(name="input_length")
    output_tokens: Tokens = msgspec.field(name="output_length")
    # Of the prompt, those that had been seen before, and the others.
    cached_tokens: Tokens = msgspec.field(name="cached_C")
    new_tokens: Tokens = msgspec.field(name="new_N")


@dataclass(slots=True, eq=False)
class _Prompts:
    """Block ids of earlier prompts, for prompts that repeat them."""

    last: dict[str, BlockIds]  # session -> its latest prompt
    of_length: dict[int, BlockIds]  # prompt length in whole cache blocks -> the latest such prompt

    def ids(self, row: _SweRow, number: int, stop: int, block_tokens: int) -> BlockIds:
        """Ids of the row's prompt and output; its prompt is noted.

        The cached part came from the session's previous prompt, or else from another session's
        prompt of just that length, which this one repeats. The rest is new.
        """
        shared = row.cached_tokens // block_tokens
        before = self.last.get(row.session, np.empty(0, dtype=np.uint64))
        if len(before) < shared:
            before = self.of_length.get(row.cached_tokens // _CACHE_BLOCK_TOKENS, before)
        before = before[:shared]
        ids = extended(before, key_of("miniswe", row.session, number), stop)
        prompt = ids[: row.input_tokens // block_tokens]
        self.last[row.session] = prompt
        self.of_length[row.input_tokens // _CACHE_BLOCK_TOKENS] = prompt
        return ids


def read_miniswe(path: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read the table of lengths."""
    block_tokens, prompts = how.blocks(BLOCK_TOKENS), _Prompts({}, {})
    turns: dict[str, list[TurnShape]] = {}
    latest_s: dict[str, float] = {}
    for where, row in table_records(path, _SweRow):
        before_s = latest_s.get(row.session, row.t_s)
        with at(where):
            if row.cached_tokens + row.new_tokens != row.input_tokens:
                raise ValueError(
                    f"columns 'cached_C' {row.cached_tokens} and 'new_N' {row.new_tokens} do not "
                    f"add up to 'input_length' {row.input_tokens}"
                )
            if row.t_s < before_s:
                raise ValueError(f"column 't_s' {row.t_s} is before the previous turn's {before_s}")
        latest_s[row.session] = row.t_s
        group = turns.setdefault(row.session, [])
        stop = (row.input_tokens + max(row.output_tokens, 1)) // block_tokens
        ids = prompts.ids(row, len(group), stop, block_tokens)
        lengths = row.input_tokens, row.output_tokens
        group.append(turn_of(row.t_s - before_s, *lengths, ids, block_tokens, row.new_tokens))
    sessions = tuple(SessionShape(id=name, turns=tuple(group)) for name, group in turns.items())
    return Workload("miniswe", block_tokens, sessions, SOURCE)


def read_miniswe_texts(path: Path, how: ReadAs = DEFAULT) -> Workload:
    """Read recorded sessions (`workload.sessions`)."""
    return shapes_of(read_sessions(path), how)


def shapes_of(sessions: list[Session], how: ReadAs = DEFAULT) -> Workload:
    """Shapes of recorded sessions: lengths by `how.count_tokens`, sharing by common beginnings."""
    count_tokens, block_tokens = how.count_tokens, how.blocks(BLOCK_TOKENS)
    prompts = _CommonBeginnings([], [], count_tokens, block_tokens)
    shapes: list[SessionShape] = []
    for session in sessions:
        turns: list[TurnShape] = []
        before_s = session.turns[0].t_s
        for number, turn in enumerate(session.turns):
            input_tokens = max(count_tokens(turn.input_text), 1)
            output_tokens = turn.output_tokens or max(count_tokens(turn.output_text), 1)
            known = prompts.shared_ids(turn.input_text)[: input_tokens // block_tokens]
            stop = (input_tokens + output_tokens) // block_tokens
            ids = extended(known, key_of("recorded", session.id, number), stop)
            turns.append(
                turn_of(turn.t_s - before_s, input_tokens, output_tokens, ids, block_tokens)
            )
            prompts.add(turn.input_text, turns[-1].blocks)
            before_s = turn.t_s
        shapes.append(SessionShape(id=session.id, turns=tuple(turns)))
    texts = Texts(lambda session, turn: of_user(sessions[session].turns[turn].input_text))
    return Workload("miniswe", block_tokens, tuple(shapes), SOURCE, texts=texts)


@dataclass(slots=True, eq=False)
class _CommonBeginnings:
    """Prompts in alphabetical order, where the longest common beginning is with a neighbour."""

    texts: list[str]
    ids: list[BlockIds]
    count_tokens: TokenCounter
    block_tokens: int

    def shared_ids(self, text: str) -> BlockIds:
        """Ids of the full blocks that `text` shares with an earlier prompt."""
        place = bisect_left(self.texts, text)
        best, ids = 0, np.empty(0, dtype=np.uint64)
        for neighbour in range(max(place - 1, 0), min(place + 1, len(self.texts))):
            common = _common_length(self.texts[neighbour], text)
            if common > best:
                best, ids = common, self.ids[neighbour]
        return ids[: self.count_tokens(text[:best]) // self.block_tokens] if best else ids

    def add(self, text: str, ids: BlockIds) -> None:
        """Note a prompt."""
        place = bisect_left(self.texts, text)
        self.texts.insert(place, text)
        self.ids.insert(place, ids)


def _common_length(one: str, other: str) -> int:
    """The number of characters that two texts share from the start."""
    most = range(1, min(len(one), len(other)) + 1)
    return bisect_left(most, True, key=lambda length: one[:length] != other[:length])
