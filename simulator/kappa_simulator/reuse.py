"""Which tokens of a workload's turns could be reused, and for how long they must be held for it.

The view of an endless cache that knows no nodes: what any cluster could at best find computed.
Used to bound what policies can reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa_simulator.traffic import document_blocks
from kappa_workload.shapes import SessionShape

Floats = NDArray[np.float64]

_MAX_VISITS = 6_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Requests as the bound sees them, one array entry each.

    `held_token_s` sums, over a request's cached tokens, the seconds since each was last used.
    """

    cached_tokens: Floats
    new_tokens: Floats
    output_tokens: Floats
    held_token_s: Floats

    def __len__(self) -> int:
        return len(self.cached_tokens)


def turns_of(
    sessions: Sequence[SessionShape], block_tokens: int, rate_rps: float, *, warm: bool = False
) -> Turns:
    """What an endless cache would hold of each turn, were sessions to start at an even rate.

    Turns follow one another by think time alone. `rate_rps` counts turns; at infinity prefixes
    shared by sessions need never be held. `warm` puts the documents that sessions are about into
    the cache beforehand, where they cost nothing to hold until their first use. Very long prompts
    are sampled every few blocks, and the cached part is then rounded up.
    """
    turns = [turn for session in sessions for turn in session.turns]
    lengths = np.array([len(turn.blocks) for turn in turns], np.int64)
    at_s = _start_times(sessions, rate_rps)
    stride = max(1, math.ceil(int(lengths.sum()) / _MAX_VISITS))
    owner, place, ids = _visits([turn.blocks for turn in turns], stride)
    kept = [turn.kept_blocks[stride - 1 :: stride][len(turn.blocks) // stride :] for turn in turns]
    since_s = _since_last_use(ids, owner, kept, at_s)

    # The first block never seen before ends the cached prefix.
    first_new = lengths.copy()
    unseen = np.isinf(since_s)
    np.minimum.at(first_new, owner[unseen], place[unseen])
    if warm:
        firsts = np.cumsum([0, *(len(session.turns) for session in sessions[:-1])])
        documents = np.array([document_blocks(session) for session in sessions])
        first_new[firsts] = np.maximum(first_new[firsts], documents)
    since_s[unseen] = 0.0
    input_tokens = np.array([turn.input_tokens for turn in turns], np.float64)
    # At least the last token is computed, however much is held.
    cached = np.minimum(first_new * block_tokens, input_tokens - 1.0).clip(min=0.0)
    reused = place < first_new[owner]
    held = np.zeros(len(turns))
    np.add.at(held, owner[reused], since_s[reused])
    sampled = np.bincount(owner[reused], minlength=len(turns))
    mean_s = np.divide(held, sampled, out=np.zeros_like(held), where=sampled > 0)
    return Turns(
        cached_tokens=cached,
        new_tokens=input_tokens - cached,
        output_tokens=np.array([turn.output_tokens for turn in turns], np.float64),
        held_token_s=cached * mean_s,
    )


def _start_times(sessions: Sequence[SessionShape], rate_rps: float) -> Floats:
    count = sum(len(session.turns) for session in sessions)
    between_s = count / len(sessions) / rate_rps
    return np.concatenate(
        [
            # A hair between sessions keeps their order at an endless rate.
            i * max(between_s, 1e-9) + np.cumsum([turn.after_s for turn in session.turns])
            for i, session in enumerate(sessions)
        ]
    )


class _Visits(NamedTuple):
    """Blocks of prompts: the turn, the place in its prompt, and the id of each."""

    owner: NDArray[np.int64]
    place: NDArray[np.int64]
    ids: NDArray[np.uint64]


def _visits(blocks: Sequence[NDArray[np.uint64]], stride: int) -> _Visits:
    """Every `stride`-th block of each turn, the last of each run."""
    ids = [b[stride - 1 :: stride] for b in blocks]
    counts = np.array([len(i) for i in ids], np.int64)
    owner = np.repeat(np.arange(len(ids)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    place = (np.arange(len(owner)) - starts) * stride + stride - 1
    return _Visits(owner, place, np.concatenate(ids) if ids else np.zeros(0, np.uint64))


def _since_last_use(
    ids: NDArray[np.uint64],
    owner: NDArray[np.int64],
    kept: Sequence[NDArray[np.uint64]],
    at_s: Floats,
) -> Floats:
    """Seconds since each visited block was last used; infinite where it never was."""
    made = np.concatenate(kept) if kept else np.zeros(0, np.uint64)
    maker = np.repeat(np.arange(len(kept)), [len(k) for k in kept])
    all_ids = np.concatenate([ids, made])
    turn = np.concatenate([owner, maker])
    all_at = at_s[turn]
    order = np.lexsort((turn, all_at, all_ids))
    since = np.full(len(order), math.inf)
    same = all_ids[order][1:] == all_ids[order][:-1]
    sorted_at = all_at[order]
    since[order[1:]] = np.where(same, sorted_at[1:] - sorted_at[:-1], math.inf)
    return since[: len(ids)]
