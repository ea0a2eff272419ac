"""What `kappa bench validate` sends: recorded traces, scaled down to a small cluster. Pure.

Tokens, outputs and pauses of a trace shrink by one factor, so that ratios of cached to new tokens
stay; sessions are cut to their first turns. Prompts become token ids: a block of the trace is
always the same tokens, so prompts share exactly the prefixes that the trace shares. Each answer is
forced to one repeated token, so that a later turn can carry it in its prompt. The block ids of a
`Script` are hashes of these very tokens: the simulator gets what the cluster gets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workload.prompts import VOCABULARY, block_tokens_of
from workload.shapes import SessionShape, TurnShape, Workload, mixed

UInt64s = NDArray[np.uint64]

FORCED_TOKEN = 99
"""What every answer consists of; below the ids that prompts are made of."""

_IDLE_TOKENS = (40, 300, 1000, 40, 300, 2000) * 5
_IDLE_PAUSE_S = 0.2
_IDLE_OUTPUT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace is made small.

    tokens: factor of prompts, answers and pauses; turns: of each session, at most; pause_s: the
    longest pause after scaling, in emulated seconds; least_output_tokens, most_output_tokens: what
    answers are held between, so that a run is short (later prompts carry the uncut answer's
    tokens all the same).
    """

    tokens: float
    turns: int
    pause_s: float = 0.1
    least_output_tokens: int = 4
    most_output_tokens: int = 8


SCALINGS: Mapping[str, Scaling] = {
    "narrativeqa": Scaling(tokens=1 / 32, turns=5),
    "miniswe": Scaling(tokens=1 / 3, turns=6),
    "sharegpt": Scaling(tokens=1.0, turns=4),
}
"""How each trace is scaled by default."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request: sent `after_s` (real seconds) after the answer before it, or the start."""

    after_s: float
    prompt: NDArray[np.int64]
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One session of a run: its requests in order, the first at `start_s` (real seconds)."""

    session: str
    start_s: float
    asks: tuple[Ask, ...]

    def shape(self, block_tokens: int) -> SessionShape:
        """The same session for a simulator, in real seconds; ids are hashes of the tokens."""
        turns = []
        for ask in self.asks:
            answer = np.full(ask.output_tokens, FORCED_TOKEN, dtype=np.int64)
            kept = prefix_ids(np.concatenate([ask.prompt, answer]), block_tokens)
            blocks = kept[: len(ask.prompt) // block_tokens]
            turns.append(TurnShape(ask.after_s, len(ask.prompt), ask.output_tokens, blocks, kept))
        return SessionShape(self.session, tuple(turns))


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A scaled turn: lengths, and an id for each block that the prompt and its answer fill."""

    after_s: float
    input_tokens: int
    output_tokens: int
    kept: UInt64s
    tail: int


def prefix_ids(tokens: NDArray[np.int64], block_tokens: int) -> UInt64s:
    """Ids of the full blocks of `tokens`, each a hash of everything up to its end."""
    ids = np.empty(len(tokens) // block_tokens, dtype=np.uint64)
    state = hashlib.blake2b(digest_size=8)
    for i in range(len(ids)):
        state.update(tokens[i * block_tokens : (i + 1) * block_tokens].tobytes())
        ids[i] = int.from_bytes(state.copy().digest())
    return ids


def scripts(
    workload: Workload,
    scaling: Scaling,
    *,
    sessions_per_s: float,
    window_s: float,
    dilation: float,
    block_tokens: int,
    max_context_tokens: int,
    rng: np.random.Generator,
    salt: int,
) -> tuple[Script, ...]:
    """The sessions of one run, which arrive at random over `window_s` real seconds.

    `rng` sets sessions and arrivals; `salt` sets the tokens: runs with other salts share none.
    """
    starts = _arrivals(sessions_per_s, window_s, rng)
    order = rng.permutation(len(workload.sessions))
    made = []
    for number, start_s in enumerate(starts):
        copy, place = divmod(number, len(order))
        shape = workload.sessions[order[place]]
        turns = list(
            _scaled(shape, workload.block_tokens, scaling, block_tokens, max_context_tokens)
        )
        asks = _asks(turns, block_tokens, dilation, _seed(salt, copy))
        if asks:
            made.append(Script(f"{shape.id}#{copy}", start_s, asks))
    return tuple(made)


def salt_of(*parts: object) -> int:
    """A salt that belongs to `parts` alone: runs of different names share no tokens."""
    return _seed(*repr(parts).encode())


def digest(scripts: Sequence[Script]) -> str:
    """What two runs must agree on to be runs of the same requests: times, lengths and answers."""
    facts = [
        (
            s.session,
            round(s.start_s, 6),
            [(round(a.after_s, 6), len(a.prompt), a.output_tokens) for a in s.asks],
        )
        for s in scripts
    ]
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def idle_script(rng: np.random.Generator) -> Script:
    """Fresh prompts of several lengths, one after the other: what a request costs when idle."""
    asks = tuple(
        Ask(_IDLE_PAUSE_S, rng.choice(np.array(VOCABULARY), tokens), _IDLE_OUTPUT_TOKENS)
        for tokens in _IDLE_TOKENS
    )
    return Script("idle", 0.0, asks)


def _arrivals(rate_per_s: float, window_s: float, rng: np.random.Generator) -> list[float]:
    """Times of a Poisson process, given that it has as many as it has on average."""
    count = max(round(rate_per_s * window_s), 1)
    times: list[float] = np.sort(rng.uniform(0.0, window_s, count)).tolist()
    return times


def _scaled(
    shape: SessionShape,
    trace_block_tokens: int,
    scaling: Scaling,
    block_tokens: int,
    max_context_tokens: int,
) -> Iterator[_Turn]:
    """Turns of a session in fewer tokens; it ends before one that would not fit."""
    for number, turn in enumerate(shape.turns[: scaling.turns]):
        input_tokens = max(math.ceil(turn.input_tokens * scaling.tokens), 1)
        total = math.ceil((turn.input_tokens + turn.output_tokens) * scaling.tokens)
        output_tokens = max(total - input_tokens, scaling.least_output_tokens)
        output_tokens = min(output_tokens, scaling.most_output_tokens)
        if input_tokens + output_tokens > max_context_tokens:
            return
        own = _seed(*shape.id.encode(), number)
        blocks = -(-(input_tokens + output_tokens) // block_tokens)
        ends = np.ceil(np.arange(1, blocks + 1) * (block_tokens / scaling.tokens))
        sources = np.ceil(ends / trace_block_tokens).astype(np.int64) - 1
        known = sources < len(turn.kept_blocks)
        ids = mixed(np.arange(blocks, dtype=np.uint64) + np.uint64(own))
        ids[known] = turn.kept_blocks[sources[known]]
        # Small trace blocks may lie in one block of ours, and long ones span several.
        ids = mixed(ids ^ mixed(np.arange(blocks, dtype=np.uint64)))
        pause_s = min(turn.after_s * scaling.tokens, scaling.pause_s)
        yield _Turn(pause_s if number else 0.0, input_tokens, output_tokens, ids, own)


def _asks(turns: Sequence[_Turn], block_tokens: int, dilation: float, salt: int) -> tuple[Ask, ...]:
    """Token ids of a session's prompts; what an answer filled keeps its forced tokens."""
    answered: dict[int, NDArray[np.int64]] = {}
    asks = []
    for turn in turns:
        tokens = block_tokens_of(turn.kept, block_tokens, salt, VOCABULARY)
        for i, block in enumerate(turn.kept):
            known = answered.get(int(block))
            if known is not None:
                tokens[i] = known
        flat = tokens.reshape(-1)
        prompt = flat[: turn.input_tokens].copy()
        flat[turn.input_tokens : turn.input_tokens + turn.output_tokens] = FORCED_TOKEN
        for i in range(turn.input_tokens // block_tokens, len(turn.kept)):
            answered.setdefault(int(turn.kept[i]), tokens[i].copy())
        asks.append(Ask(turn.after_s * dilation, prompt, turn.output_tokens))
    return tuple(asks)


def _seed(*parts: int) -> int:
    data = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
