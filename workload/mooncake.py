"""Mooncake traces: requests with prefix-chained block numbers, from which sessions are inferred.

JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, one number for each
512-token block of the prompt, the last one perhaps partly filled. The source names no sessions: a
request whose prompt extends an earlier one's is taken for its next turn. The recorded gap between
two requests is taken for the pause, though it also holds the time of the first one's answer.
Source: kvcache-ai/Mooncake, FAST 2025.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workload.block_ids import key_of, recorded_ids, stream_ids
from workload.errors import WorkloadError
from workload.lines import found, json_object, number_field, numbered_lines, tokens_field
from workload.shapes import BlockIds, SessionShape, TurnShape, Workload

BLOCK_TOKENS = 512
SOURCE = "Mooncake conversation trace, kvcache-ai/Mooncake (FAST 2025), Apache-2.0"

# A block in more requests than this is a system prompt or a popular text, no conversation: who
# begins with it need not be the same user. In the conversation trace of FAST 2025 one block is in
# all 12,031 requests, and the next most frequent is in 43.
_COMMON_REQUESTS = 100


@dataclass(slots=True, eq=False)
class _Request:
    index: int
    line: int
    t_ms: float
    input_tokens: int
    output_tokens: int
    numbers: list[int]  # of the prompt's blocks, the last one perhaps partly filled
    follower: int = -1  # the first request that extends this one

    @property
    def full(self) -> int:
        return self.input_tokens // BLOCK_TOKENS


def read_mooncake(path: str | Path) -> Workload:
    """Read a Mooncake trace; `.gz` is read as is.

    A prompt's blocks keep the sharing of the trace. The blocks of an output have the ids that the
    next turn gives them, or ids of their own if nobody continues.

    Raises:
        WorkloadError: if the file is absent, damaged, or breaks the format.
    """
    path = Path(path)
    requests = _read(path)
    _require_chained(path, requests)
    chains = _link(requests)
    kept = _kept_ids(requests)
    sessions = tuple(
        SessionShape(
            id=f"mooncake-{chain[0]}",
            turns=_turns(requests, chain, kept),
            arrival_s=(requests[chain[0]].t_ms - requests[0].t_ms) / 1e3,
        )
        for chain in chains
    )
    return Workload("mooncake", BLOCK_TOKENS, sessions, SOURCE)


def _read(path: Path) -> list[_Request]:
    requests: list[_Request] = []
    before_ms = 0.0
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            request = _parse(len(requests), number, line)
            if request.t_ms < before_ms:
                raise ValueError(f"timestamp {request.t_ms} is before the line above's {before_ms}")
        except ValueError as error:
            raise WorkloadError(f"{path}:{number}: {error}") from error
        before_ms = request.t_ms
        requests.append(request)
    if not requests:
        raise WorkloadError(f"{path}: holds no requests")
    return requests


def _parse(index: int, number: int, line: str) -> _Request:
    record = json_object(line)
    t_ms = number_field(record, "timestamp")
    input_tokens = tokens_field(record, "input_length", least=1)
    output_tokens = tokens_field(record, "output_length")
    numbers = record.get("hash_ids")
    if not isinstance(numbers, list) or not all(type(item) is int for item in numbers):
        raise ValueError(
            f"field 'hash_ids' must be a list of integers, found {found(record, 'hash_ids')}"
        )
    if numbers and not (min(numbers) >= 0 and max(numbers) < 1 << 63):
        raise ValueError("field 'hash_ids' must hold numbers from 0 to 2**63 - 1")
    blocks = -(-input_tokens // BLOCK_TOKENS)
    if len(numbers) != blocks:
        raise ValueError(
            f"field 'hash_ids' has {len(numbers)} numbers, but {input_tokens} tokens are "
            f"{blocks} blocks of {BLOCK_TOKENS}"
        )
    return _Request(index, number, t_ms, input_tokens, output_tokens, numbers)


def _require_chained(path: Path, requests: list[_Request]) -> None:
    """Refuse a number that follows different blocks: equal numbers must mean equal prefixes."""
    predecessor: dict[int, int] = {}
    for request in requests:
        before = -1
        for number in request.numbers:
            if predecessor.setdefault(number, before) != before:
                raise WorkloadError(
                    f"{path}:{request.line}: hash_ids are not prefix-chained: {number} follows "
                    f"{before} here and {predecessor[number]} in an earlier line"
                )
            before = number


def _link(requests: list[_Request]) -> list[list[int]]:
    """Requests grouped into sessions, each in order of time.

    A request goes to the session of the latest earlier one whose full blocks it begins with and
    whose prompt is shorter, unless those blocks are common to too many requests.
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
    for index in chain:
        request = requests[index]
        turns.append(
            TurnShape(
                after_s=(request.t_ms - before_ms) / 1e3,
                input_tokens=request.input_tokens,
                output_tokens=max(request.output_tokens, 1),
                blocks=kept[index][: request.full],
                kept_blocks=kept[index],
            )
        )
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
        told_by = request if request.follower < 0 else requests[request.follower]
        first = ends[told_by.index] - len(told_by.numbers)
        known.append(ids[first : first + min(told_by.full, stop)])
    # What nobody continued is text of its own: consecutive pieces of one stream.
    missing = [stop - len(part) for stop, part in zip(stops, known, strict=True)]
    own = stream_ids(key_of("mooncake outputs"), 0, sum(missing))
    kept: list[BlockIds] = []
    first = 0
    for part, count in zip(known, missing, strict=True):
        kept.append(np.concatenate([part, own[first : first + count]]) if count else part)
        first += count
    return kept
