"""Sessions of requests for a load test, with arrivals, lengths, expected reuse and prompts.

One lazy iterator for every workload, built-in or given: memory does not grow with the number of
requests. Workloads of texts become chats, those of lengths token ids or plain words that really
share prefixes. Load is raised by adding sessions, never by hurrying them: copy after copy of the
workload, each in an order of its own and with block ids of its own, so that sharing inside a copy
stays, and copies share nothing. `Reuse` models an unlimited cache.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from kappa_workload.prompts import TokenIds, prompt_ids, prompt_tokens, prompt_words
from kappa_workload.shapes import BlockIds, Message, SessionShape, TurnShape, Workload, salt_of


def expand(workload: Workload, seed: int) -> Iterator[SessionShape]:
    """Endless sessions: copy 0 with the workload's own ids, then copies 1, 2, … with fresh ones.

    The order inside each copy is random and fixed by `seed`; the ids do not depend on the seed.
    Session ids of copy k end in `~k`, except for copy 0.
    """
    if not workload.sessions:
        return
    for copy in count():
        for index in order_of(workload, copy, seed):
            yield copied(workload.sessions[index], copy)


def order_of(workload: Workload, copy: int, seed: int) -> list[int]:
    """The order of a copy's sessions: their places in the workload, shuffled."""
    places = np.random.default_rng((seed, copy)).permutation(len(workload.sessions))
    return [int(place) for place in places]


def copied(session: SessionShape, copy: int) -> SessionShape:
    """A session with the ids of a copy; copy 0 has the session itself."""
    if not copy:
        return session
    salt = salt_of(copy)
    return replace(
        session,
        id=f"{session.id}~{copy}",
        turns=tuple(_salted_turn(turn, salt) for turn in session.turns),
    )


def _salted_turn(turn: TurnShape, salt: np.uint64) -> TurnShape:
    kept = turn.kept_blocks ^ salt
    return replace(turn, blocks=kept[: len(turn.blocks)], kept_blocks=kept)


ENGINE_BLOCK_TOKENS = 16
"""Tokens in a cache block of vLLM by default."""


class Reuse:
    """An unlimited cache, which counts the tokens of a prompt that it holds, in full blocks.

    Args:
        source_block_tokens: block size of the workload.
        block_tokens: block size of the cache.
        outputs_kept: whether prompts find the blocks of earlier answers.
    """

    def __init__(self, source_block_tokens: int, block_tokens: int, *, outputs_kept: bool) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: give at least 1")
        self._source_block_tokens = source_block_tokens
        self._block_tokens = block_tokens
        self._outputs_kept = outputs_kept
        self._seen: set[int] = set()
        self._parts: dict[int, int] = {}  # id of a block that a prompt fills in part -> how far

    def visit(self, session: SessionShape, turn: int) -> int:
        """Tokens held of the turn's prompt, which is then kept."""
        held = self._held_tokens(session, turn)
        self._keep(session, turn)
        return held

    def _held_tokens(self, session: SessionShape, turn: int) -> int:
        """An engine computes a prompt's last token in any case."""
        shape = session.turns[turn]
        size = self._source_block_tokens
        blocks = matched_blocks(shape.blocks, self._seen)
        shared = blocks * size
        document = session.document_tokens
        if blocks and blocks == document // size:
            shared = document  # beyond the last full block, ids cannot tell
        elif self._parts:
            shared += self._parts.get(int(prompt_ids(session, turn)[blocks]), 0)
        usable = min(shared, shape.input_tokens - 1)
        return usable // self._block_tokens * self._block_tokens

    def _keep(self, session: SessionShape, turn: int) -> None:
        shape = session.turns[turn]
        self._seen.update((shape.kept_blocks if self._outputs_kept else shape.blocks).tolist())
        rest = shape.input_tokens % self._source_block_tokens
        if self._outputs_kept or self._source_block_tokens == self._block_tokens:
            return  # tokens behind the prompt are not known, or never fill a block
        part = int(prompt_ids(session, turn)[-1])
        self._parts[part] = max(rest, self._parts.get(part, 0))


def matched_blocks(blocks: BlockIds, seen: set[int]) -> int:
    """The number of leading blocks in `seen`, which holds whole prefixes only."""
    return bisect_left(range(len(blocks)), True, key=lambda at: blocks.item(at) not in seen)


Prompt = str | tuple[Message, ...] | TokenIds
"""Text for a completion, messages of a chat, or token ids."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Tokens are those of the source, or as measured by the given tokenizer."""

    session: str
    turn: int  # in its session, from 0
    tenant: str
    after_s: float  # pause after the predecessor's last token; 0 for turn 0
    input_tokens: int
    output_tokens: int
    # Prompt tokens that an unlimited cache of full blocks of earlier prompts holds, and the rest.
    cached_tokens: int
    new_tokens: int
    make_prompt: Callable[[], Prompt]  # gives the same at every call


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """The requests of one session: each is sent when the one before has ended and it has paused."""

    id: str
    arrival_s: float  # from the start of the run
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options for turning a workload into requests; None: no bound."""

    as_text: bool = False  # plain words instead of token ids, where a prompt is no chat
    # A session ends before its first turn that is longer, output included.
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None  # longer outputs are cut
    max_turns: int | None = None  # of a session
    pause_factor: float = 1.0  # multiplies pauses
    copies: int | None = None  # of the workload
    salt: int = 0  # runs of different salts share no tokens


def replay_sessions(
    workload: Workload,
    *,
    arrivals: Iterator[float] | None,
    seed: int,
    options: ReplayOptions | None = None,
    trace_speed: float = 1.0,
) -> Iterator[ReplaySession]:
    """Sessions in order of their arrival; endless unless `options.copies` or `arrivals` ends them.

    arrivals: when sessions come, in seconds from the start of the run, not going back; None for
    the times of the source, in its order, divided by `trace_speed` (pauses stay as they are).
    seed: of the order of sessions.

    Raises:
        ValueError: the source has no times, or no request fits `options`.
    """
    options = options or ReplayOptions()
    if not workload.sessions:
        raise ValueError(f"workload {workload.name!r} holds no sessions to replay")
    if not any(_fitting(session, options) for session in workload.sessions):
        raise ValueError(
            f"no session of workload {workload.name!r} begins with a request that fits "
            f"{options.max_context_tokens} tokens with its output: raise max_context_tokens"
        )
    if arrivals is None:
        return _played(workload, _at_trace_times(workload, trace_speed, options.copies), options)
    return _played(workload, _at(workload, arrivals, seed, options), options)


def requests(sessions: Iterable[ReplaySession]) -> Iterator[Request]:
    """The requests of sessions, session after session."""
    for session in sessions:
        yield from session.requests


def mean_turns(workload: Workload) -> float:
    """Requests a session, on average: divide a rate of requests by it for one of sessions."""
    return sum(len(session.turns) for session in workload.sessions) / len(workload.sessions)


_Placed = tuple[float, int, int]  # arrival in seconds, copy, place of the session in the workload


def _at(
    workload: Workload, arrivals: Iterator[float], seed: int, options: ReplayOptions
) -> Iterator[_Placed]:
    """Sessions that have something to send, each with the next arrival."""
    for copy in _copies(options.copies):
        for place in order_of(workload, copy, seed):
            if not _fitting(workload.sessions[place], options):
                continue
            arrival_s = next(arrivals, None)
            if arrival_s is None:
                return
            yield arrival_s, copy, place


def _at_trace_times(
    workload: Workload, trace_speed: float, copies: int | None
) -> Iterator[_Placed]:
    """Sessions at the source's times, sped up; a copy begins where the one before has ended."""
    if not (math.isfinite(trace_speed) and trace_speed > 0):
        raise ValueError(f"trace_speed is {trace_speed}: give a factor above zero")
    times_s = [session.arrival_s for session in workload.sessions]
    known = [time_s for time_s in times_s if time_s is not None]
    if len(known) < len(times_s):
        raise ValueError(
            f"workload {workload.name!r} does not say when its sessions came: choose arrivals, "
            "such as poisson:5 (only mooncake and azure have times)"
        )
    order = sorted(range(len(known)), key=known.__getitem__)
    length_s = max(known) * (1 + 1 / len(known))  # and one mean gap before the next copy
    return (
        ((copy * length_s + known[place]) / trace_speed, copy, place)
        for copy in _copies(copies)
        for place in order
    )


def _copies(copies: int | None) -> Iterable[int]:
    return count() if copies is None else range(copies)


def _played(
    workload: Workload, placed: Iterator[_Placed], options: ReplayOptions
) -> Iterator[ReplaySession]:
    """Requests of the placed sessions. Copies share nothing, so each has a cache of its own."""
    of_copy = -1
    for arrival_s, copy, place in placed:
        if copy != of_copy:
            # Answers are not those that were recorded: prompts do not find their blocks.
            reuse = Reuse(workload.block_tokens, ENGINE_BLOCK_TOKENS, outputs_kept=False)
            of_copy = copy
        shape = copied(workload.sessions[place], copy)
        made = tuple(
            _request(workload, shape, turn, (copy, place), reuse, options)
            for turn in range(_fitting(shape, options))
        )
        if made:
            yield ReplaySession(shape.id, arrival_s, made)


def _fitting(session: SessionShape, options: ReplayOptions) -> int:
    """The number of a session's turns that may be sent."""
    turns = session.turns[: options.max_turns]
    if options.max_context_tokens is None:
        return len(turns)
    for number, turn in enumerate(turns):
        if turn.input_tokens + _output_tokens(turn, options) > options.max_context_tokens:
            return number
    return len(turns)


def _output_tokens(turn: TurnShape, options: ReplayOptions) -> int:
    return min(turn.output_tokens, options.max_output_tokens or turn.output_tokens)


def _request(
    workload: Workload,
    session: SessionShape,
    turn: int,
    placed: tuple[int, int],
    reuse: Reuse,
    options: ReplayOptions,
) -> Request:
    shape, (copy, place) = session.turns[turn], placed
    cached_tokens = reuse.visit(session, turn)
    make_prompt: Callable[[], Prompt]
    if workload.texts is not None:
        make_prompt = partial(workload.texts.messages, place, turn, copy)
    else:
        make = prompt_words if options.as_text else prompt_tokens
        make_prompt = partial(make, session, turn, workload.block_tokens, salt=options.salt)
    return Request(
        session=session.id,
        turn=turn,
        tenant=session.tenant,
        after_s=shape.after_s * options.pause_factor if turn else 0.0,
        input_tokens=shape.input_tokens,
        output_tokens=_output_tokens(shape, options),
        cached_tokens=cached_tokens,
        new_tokens=shape.input_tokens - cached_tokens,
        make_prompt=make_prompt,
    )
