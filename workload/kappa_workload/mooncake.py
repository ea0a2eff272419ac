"""Mooncake traces: requests with prefix-chained block numbers, from which sessions are inferred.

JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, one number for each
512-token block of the prompt, the last one perhaps partly filled; aiperf's may lack the time, the
length of the answer or the numbers: a prompt without them shares nothing. The source names no
sessions: a request with a prompt that extends an earlier one is taken for its next turn. The
recorded gap between two requests is taken for the pause, though it also holds the time of the first
one's answer.
Source: kvcache-ai/Mooncake, FAST 2025.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kappa_workload.reading import (
    DEFAULT_OUTPUT_TOKENS,
    Seconds,
    SomeTokens,
    Tokens,
    WorkloadError,
    json_lines,
)
from kappa_workload.shapes import (
    BlockIds,
    SessionShape,
    TurnShape,
    Workload,
    key_of,
    recorded_ids,
    stream_ids,
    turn_of,
)

BLOCK_TOKENS = 512
SOURCE = "Mooncake conversation trace, kvcache-ai/Mooncake (FAST 2025), Apache-2.0"

# A block in more requests than this is a system prompt or a popular text, not a conversation of
# one user. In the conversation trace of FAST 2025 one block is in all 12,031 requests, and the next
# most frequent is in 43.
_COMMON_REQUESTS = 100


class _MooncakeRecord(msgspec.Struct):
    input_length: SomeTokens
    timestamp: Seconds | None = None  # in milliseconds
    output_length: Tokens = DEFAULT_OUTPUT_TOKENS
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]] = []

    def __post_init__(self) -> None:
        if not self.hash_ids:
            return
        blocks = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"field 'hash_ids' has {len(self.hash_ids)} numbers, but {self.input_length} "
                f"tokens are {blocks} blocks of {BLOCK_TOKENS}"
            )


@dataclass(slots=True, eq=False)
class _Request:
    index: int
    where: str  # file and line
    t_ms: float
    input_tokens: int
    output_tokens: int
    numbers: list[int]  # of the prompt's blocks, the last one perhaps partly filled
    timed: bool = True  # the source has times
    follower: int = -1  # index of the first request that extends this one; -1: none

    @property
    def full(self) -> int:
        return self.input_tokens // BLOCK_TOKENS


def read_mooncake(path: Path) -> Workload:
    """Read a Mooncake trace; `.gz` is read as is.

    A prompt's blocks keep the sharing of the trace. The blocks of an output have the ids that the
    next turn gives them, or ids of their own if there is no next turn.
    """
    requests = _read(path)
    _require_chained(requests)
    chains = _link(requests)
    kept, timed = _kept_ids(requests), requests[0].timed
    sessions = tuple(
        SessionShape(
            id=f"mooncake-{chain[0]}",
            turns=_turns(requests, chain, kept),
            arrival_s=(requests[chain[0]].t_ms - requests[0].t_ms) / 1e3 if timed else None,
        )
        for chain in chains
    )
    return Workload("mooncake", BLOCK_TOKENS, sessions, SOURCE)


def _read(path: Path) -> list[_Request]:
    requests: list[_Request] = []
    before_ms, timed, fresh = 0.0, None, count(1 << 62)
    for where, record in json_lines(path, _MooncakeRecord):
        if timed is None:
            timed = record.timestamp is not None
        time_ms = 0.0 if record.timestamp is None else record.timestamp
        if timed is not (record.timestamp is not None):
            raise WorkloadError(f"{where}: either every line has a timestamp, or none has")
        if time_ms < before_ms:
            raise WorkloadError(
                f"{where}: timestamp {time_ms} is before the line above's {before_ms}"
            )
        before_ms = time_ms
        lengths = record.input_length, record.output_length
        numbers = record.hash_ids or list(islice(fresh, -(-record.input_length // BLOCK_TOKENS)))
        requests.append(_Request(len(requests), where, time_ms, *lengths, numbers, timed))
    return requests


def _require_chained(requests: list[_Request]) -> None:
    """Refuse a number that follows different blocks: equal numbers must mean equal prefixes."""
    predecessor: dict[int, int] = {}
    for request in requests:
        before = -1
        for number in request.numbers:
            if predecessor.setdefault(number, before) != before:
                raise WorkloadError(
                    f"{request.where}: hash_ids are not prefix-chained: {number} follows "
                    f"{before} here and {predecessor[number]} in an earlier line"
                )
            before = number


def _link(requests: list[_Request]) -> list[list[int]]:
    """Group requests into sessions, each in order of time.

    A request continues the latest earlier one with a shorter prompt and with full blocks that it
    begins with, unless those blocks are common to too many requests.
    """
    uses = Counter(number for request in requests for number in request.numbers)
    ends_with: dict[int, list[int]] = {}  # last full block -> requests, in order of time
    session_of: list[int] = []
    chains: list[list[int]] = []
    for request in requests:
        full = request.numbers[: request.full]
        earlier = _latest_extended(requests, request, full, ends_with)
        if earlier < 0:
            session_of.append(len(chains))
            chains.append([request.index])
        else:
            session_of.append(session_of[earlier])
            chains[session_of[earlier]].append(request.index)
            if requests[earlier].follower < 0:
                requests[earlier].follower = request.index
        if full and uses[full[-1]] <= _COMMON_REQUESTS:
            ends_with.setdefault(full[-1], []).append(request.index)
    return chains


def _latest_extended(
    requests: list[_Request], request: _Request, full: list[int], ends_with: dict[int, list[int]]
) -> int:
    latest = -1
    for number in full:
        for index in reversed(ends_with.get(number, ())):
            if index < latest:
                break
            if requests[index].input_tokens < request.input_tokens:
                latest = index
                break
    return latest


def _turns(
    requests: list[_Request], chain: list[int], kept: list[BlockIds]
) -> tuple[TurnShape, ...]:
    turns: list[TurnShape] = []
    before_ms = requests[chain[0]].t_ms
    for request in (requests[index] for index in chain):
        after_s, lengths = request.t_ms - before_ms, (request.input_tokens, request.output_tokens)
        turns.append(turn_of(after_s / 1e3, *lengths, kept[request.index], BLOCK_TOKENS))
        before_ms = request.t_ms
    return tuple(turns)


def _kept_ids(requests: list[_Request]) -> list[BlockIds]:
    """Ids of the full blocks of each request's prompt and output."""
    numbers = [number for request in requests for number in request.numbers]
    ids = recorded_ids(np.array(numbers, dtype=np.uint64))
    ends = np.cumsum([len(request.numbers) for request in requests]).tolist()
    stops = [
        (request.input_tokens + max(request.output_tokens, 1)) // BLOCK_TOKENS
        for request in requests
    ]
    known: list[BlockIds] = []
    for request, stop in zip(requests, stops, strict=True):
        named_by = request if request.follower < 0 else requests[request.follower]
        first = ends[named_by.index] - len(named_by.numbers)
        known.append(ids[first : first + min(named_by.full, stop)])
    # Outputs without a next turn are texts of their own: consecutive pieces of one stream.
    missing = [stop - len(part) for stop, part in zip(stops, known, strict=True)]
    own = stream_ids(key_of("mooncake outputs"), 0, sum(missing))
    kept: list[BlockIds] = []
    first = 0
    for part, more in zip(known, missing, strict=True):
        kept.append(np.concatenate([part, own[first : first + more]]) if more else part)
        first += more
    return kept
