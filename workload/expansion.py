"""More sessions from the same shapes: load is raised by adding sessions, never by hurrying them.

Copy after copy of the workload, each in an order of its own and with block ids of its own: what
is shared inside a copy stays shared, and copies share nothing. The simulator and the load test
take as many sessions as they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from workload.block_ids import salt_of
from workload.shapes import SessionShape, TurnShape, Workload


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
    """In which order the sessions of a copy come: their places in the workload, shuffled."""
    places = np.random.default_rng((seed, copy)).permutation(len(workload.sessions))
    return [int(place) for place in places]


def copied(session: SessionShape, copy: int) -> SessionShape:
    """A session as it is in a copy; itself in copy 0."""
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
    return TurnShape(
        after_s=turn.after_s,
        input_tokens=turn.input_tokens,
        output_tokens=turn.output_tokens,
        blocks=kept[: len(turn.blocks)],
        kept_blocks=kept,
        new_tokens=turn.new_tokens,
    )
