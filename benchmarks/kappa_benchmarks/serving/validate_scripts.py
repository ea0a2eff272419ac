"""The traffic of `kappa bench validate`: recorded traces, scaled down to a small cluster. Pure.

Tokens, outputs and pauses of a trace shrink by one factor, so that ratios of cached to new tokens
stay; sessions are cut to their first turns. Prompts become token ids: a block of the trace is
always the same tokens, so prompts share exactly the prefixes that the trace shares. Each answer is
forced to one repeated token, so that a later turn can carry it in its prompt. The block ids of a
`Script` are hashes of these very tokens: the simulator gets what the cluster gets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kappa_router.index.prefix_hash import PrefixHasher
from kappa_workload.prompts import VOCABULARY, block_tokens_of
from kappa_workload.shapes import BlockIds, SessionShape, TurnShape, Workload, key_of, mixed

Tokens = NDArray[np.int64]

FORCED_TOKEN = 99
"""The token that every answer repeats; below the ids of prompts."""

_IDLE_TOKENS = (40, 300, 1000, 40, 300, 2000) * 5
_IDLE_PAUSE_S = 0.2
_IDLE_OUTPUT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scaling of a trace to a small cluster."""

    # Factor of prompts, answers and pauses.
    tokens: float
    # Of each session, at most.
    turns: int
    # The longest pause after scaling, in emulated seconds.
    pause_s: float = 0.1
    # Bounds of answers, so that a run is short; later prompts carry the uncut answer all the same.
    least_output_tokens: int = 4
    most_output_tokens: int = 8


SCALINGS: Mapping[str, Scaling] = {
    "narrativeqa": Scaling(tokens=1 / 32, turns=5),
    "miniswe": Scaling(tokens=1 / 3, turns=6),
    "sharegpt": Scaling(tokens=1.0, turns=4),
}


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request: sent `after_s` (real seconds) after the answer before it, or the start."""

    after_s: float
    prompt: Tokens
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One session of a run: its requests in order, the first at `start_s` (real seconds)."""

    session: str
    start_s: float
    requests: tuple[Request, ...]

    def shape(self, block_tokens: int) -> SessionShape:
        """The same session for a simulator, in real seconds; ids are hashes of the tokens."""
        turns, hasher = [], PrefixHasher(block_tokens, secret=0)
        for one in self.requests:
            answer = np.full(one.output_tokens, FORCED_TOKEN, dtype=np.int64)
            kept = hasher.prefix_hashes(np.concatenate([one.prompt, answer]))
            blocks = kept[: len(one.prompt) // block_tokens]
            turns.append(TurnShape(one.after_s, len(one.prompt), one.output_tokens, blocks, kept))
        return SessionShape(self.session, tuple(turns))


@dataclass(frozen=True, slots=True)
class ScriptMaker:
    """Makes the sessions of one trace that arrive at random over `window_s` real seconds.

    dilation: real seconds per emulated one. seed: sets sessions and arrivals.
    """

    workload: Workload
    scaling: Scaling
    window_s: float
    dilation: float
    block_tokens: int
    max_context_tokens: int
    seed: int

    def scripts(self, sessions_per_s: float, salt: int = 0) -> list[Script]:
        """The sessions at a rate; `salt` sets the tokens: runs with other salts share none."""
        rng = np.random.default_rng(self.seed)
        # A Poisson process, given that it has as many arrivals as it has on average.
        count = max(round(sessions_per_s * self.window_s), 1)
        starts_s: list[float] = np.sort(rng.uniform(0.0, self.window_s, count)).tolist()
        order = rng.permutation(len(self.workload.sessions))
        made = []
        for number, start_s in enumerate(starts_s):
            copy, place = divmod(number, len(order))
            shape = self.workload.sessions[order[place]]
            requests = tuple(self._requests(shape, salt_of(salt, copy)))
            if requests:
                made.append(Script(f"{shape.id}#{copy}", start_s, requests))
        return made

    def _requests(self, shape: SessionShape, salt: int) -> list[Request]:
        """A session in fewer tokens; it ends before a request that would not fit.

        Later prompts hold the forced tokens of earlier answers.
        """
        scaling, size = self.scaling, self.block_tokens
        answered: dict[int, Tokens] = {}
        made: list[Request] = []
        for number, turn in enumerate(shape.turns[: scaling.turns]):
            input_tokens = max(math.ceil(turn.input_tokens * scaling.tokens), 1)
            total = math.ceil((turn.input_tokens + turn.output_tokens) * scaling.tokens)
            output_tokens = max(total - input_tokens, scaling.least_output_tokens)
            output_tokens = min(output_tokens, scaling.most_output_tokens)
            end = input_tokens + output_tokens
            if end > self.max_context_tokens:
                break
            ids = self._block_ids(turn, -(-end // size), salt_of(shape.id, number))
            tokens = block_tokens_of(ids, size, salt, VOCABULARY)
            blocks = ids.tolist()
            for i, block in enumerate(blocks):
                if block in answered:
                    tokens[i] = answered[block]
            flat = tokens.reshape(-1)
            prompt = flat[:input_tokens].copy()
            flat[input_tokens:end] = FORCED_TOKEN
            for i in range(input_tokens // size, len(blocks)):
                answered.setdefault(blocks[i], tokens[i].copy())
            pause_s = min(turn.after_s * scaling.tokens, scaling.pause_s) if number else 0.0
            made.append(Request(pause_s * self.dilation, prompt, output_tokens))
        return made

    def _block_ids(self, turn: TurnShape, blocks: int, own: int) -> BlockIds:
        """An id for each block of ours, by the trace's block that its end lies in."""
        ends = np.ceil(np.arange(1, blocks + 1) * (self.block_tokens / self.scaling.tokens))
        sources = np.ceil(ends / self.workload.block_tokens).astype(np.int64) - 1
        known = sources < len(turn.kept_blocks)
        ids = mixed(np.arange(blocks, dtype=np.uint64) + np.uint64(own))
        ids[known] = turn.kept_blocks[sources[known]]
        # Small trace blocks may lie in one block of ours, and long ones span several.
        return mixed(ids ^ mixed(np.arange(blocks, dtype=np.uint64)))


def salt_of(*parts: object) -> int:
    """A salt that belongs to `parts` alone: runs of different names share no tokens."""
    return int(key_of(repr(parts)))


def digest(scripts: Sequence[Script]) -> str:
    """A digest of times, lengths and answers: equal for two runs of the same requests."""
    facts = []
    for script in scripts:
        requests = [(round(r.after_s, 6), len(r.prompt), r.output_tokens) for r in script.requests]
        facts.append((script.session, round(script.start_s, 6), requests))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def idle_script(rng: np.random.Generator) -> Script:
    """Fresh prompts of several lengths, one after the other, for an idle cluster."""
    requests = tuple(
        Request(_IDLE_PAUSE_S, rng.choice(np.array(VOCABULARY), tokens), _IDLE_OUTPUT_TOKENS)
        for tokens in _IDLE_TOKENS
    )
    return Script("idle", 0.0, requests)
