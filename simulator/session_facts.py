"""What all copies of a session have in common: its course if nobody queues, and what it can reuse.

Worked out once per session of a workload, so that traffic of many copies is cheap to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kappa.slo import IdleSpeed, idle_tpot_s, idle_ttft_s
from simulator.cache import Ids, common_blocks
from workload.shapes import SessionShape, TurnShape, Workload


@dataclass(slots=True, eq=False)
class Facts:
    """What all copies of a session have in common.

    starts_s: of each turn since the session's first, if nobody queues; ends_s its last token's end.
    reuse_blocks: longest prefix of each turn that one of its predecessors left. shared_blocks:
    leading blocks of the first turn that other sessions use too. document_blocks: leading blocks
    that all turns share.
    """

    starts_s: list[float]
    end_s: float
    reuse_blocks: list[int]
    shared_blocks: int
    document_blocks: int


def session_facts(workload: Workload, speed: IdleSpeed) -> dict[str, Facts]:
    """Facts of every session of a workload, by its id; `speed` of a typical node."""
    uses = _uses(workload)
    facts: dict[str, Facts] = {}
    for session in workload.sessions:
        reuse = [0] * len(session.turns)
        for number in range(1, len(session.turns)):
            reuse[number] = longest_left(session.turns[:number], session.turns[number])
        first = session.turns[0]
        shared = sum(1 for _ in _while_shared(first.blocks, uses))
        document = document_blocks(session, reuse)
        starts, end_s = _schedule(session, reuse, workload.block_tokens, speed)
        facts[session.id] = Facts(starts, end_s, reuse, shared, document)
    return facts


def document_blocks(session: SessionShape, reuse: Sequence[int] | None = None) -> int:
    """Leading blocks of a text that all turns are about; 0 in a talk.

    Turns about a text share that and nothing else (`reuse`: longest prefix of each turn that a
    predecessor left, if known). A talk's turns go on from one another; where blocks are too long to
    show it, every prompt is longer than the one before and its answer.
    """
    turns = session.turns
    grows = all(
        later.input_tokens >= earlier.input_tokens + earlier.output_tokens
        for earlier, later in pairwise(turns)
    )
    if grows:
        return 0
    document = shared_prefix(turns[0].blocks, turns[1].blocks)
    shared = (
        reuse[1:]
        if reuse is not None
        else [longest_left(turns[:number], turn) for number, turn in enumerate(turns) if number]
    )
    return document if all(blocks == document for blocks in shared) else 0


def _while_shared(ids: Ids, uses: dict[int, int]) -> Iterator[int]:
    for block in ids.tolist():
        if uses.get(block, 0) < 2:
            return
        yield block


def _uses(workload: Workload) -> dict[int, int]:
    """In how many sessions each block occurs that occurs in several."""
    own = [
        np.unique(np.concatenate([turn.kept_blocks for turn in session.turns]))
        for session in workload.sessions
    ]
    blocks, counts = np.unique(np.concatenate(own), return_counts=True)
    several = counts > 1
    return dict(zip(blocks[several].tolist(), counts[several].tolist(), strict=True))


def _schedule(
    session: SessionShape, reuse: list[int], block_tokens: int, speed: IdleSpeed
) -> tuple[list[float], float]:
    """When each turn would start if nobody queued, and when the last one would end."""
    prompts = np.array([turn.input_tokens for turn in session.turns])
    outputs = np.array([turn.output_tokens for turn in session.turns])
    cached = np.minimum(np.array(reuse) * block_tokens, prompts - 1)
    service = idle_ttft_s(speed, cached, prompts - cached)
    service = service + (outputs - 1) * idle_tpot_s(speed, prompts, outputs)
    starts: list[float] = []
    now_s = 0.0
    for turn, service_s in zip(session.turns, service.tolist(), strict=True):
        now_s += turn.after_s
        starts.append(now_s)
        now_s += service_s
    return starts, now_s


def longest_left(earlier: Sequence[TurnShape], turn: TurnShape) -> int:
    """Longest prefix of a turn's prompt, in blocks, that one of the earlier turns left."""
    longest = 0
    # Latest first: what an earlier one left is mostly too short to hold more.
    for before in reversed(earlier):
        if len(before.kept_blocks) > longest:
            longest = max(longest, shared_prefix(before.kept_blocks, turn.blocks))
    return longest


def shared_prefix(a: Ids, b: Ids) -> int:
    """How many leading blocks two prompts share."""
    return common_blocks(a, b, 0, min(len(a), len(b)))
