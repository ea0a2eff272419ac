"""What `kappa bench predict` sends: sessions made from a seed, in the shapes of real agent ones.

Four kinds of act, each a short script of requests as token ids. Lengths are drawn from the agent
sessions that ship with `workload`; tokens are random, so that no two sessions share a prefix.
A traffic plan picks the next act so that the class with the fewest requests catches up. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from workload.sessions import Session

# The recorded texts have 3.2 characters per token (Llama-2, workload/data/README.md).
_CHARS_PER_TOKEN = 3.2
_NEW_TOKENS = (30, 900)
_PREFIX_TOKENS = (1400, 5000)
_DOCUMENT_TOKENS = (3000, 5000)
_QUESTION_TOKENS = (30, 90)
_AGENT_TURNS = 5
_REVISITS = 3
_THINK_S = (0.1, 0.6)
_BURST = (4, 6)
_MAX_TOKENS = (4, 8)
# Reading Llama-3.1-8B's weights takes an H100 as long as computing this many tokens.
_STEP_TOKENS = 120
# Ids below the first are special; the tiny model's vocabulary is larger than the last.
_TOKEN_IDS = range(100, 2900)
# Which act feeds which class.
ACT_OF_CLASS = {"device": "agent", "load": "revisit", "compute": "ask", "queue": "burst"}
_EACH = 0.1


@dataclass(frozen=True, slots=True)
class Shapes:
    """Token lengths of recorded sessions: whole prompts, and what a turn adds to the one before."""

    prefixes: tuple[int, ...]
    growths: tuple[int, ...]


def shapes_of(sessions: Sequence[Session]) -> Shapes:
    """Shapes of recorded sessions, in the bounds that the benchmark names."""
    prefixes, growths = [], []
    for session in sessions:
        for turn in session.turns:
            prefixes.append(_clip(len(turn.input_text), _PREFIX_TOKENS))
        for before, after in itertools.pairwise(session.turns):
            added = len(after.input_text) - len(before.input_text) + len(before.output_text)
            growths.append(_clip(added, _NEW_TOKENS))
    return Shapes(tuple(prefixes), tuple(growths))


def _clip(chars: int, bounds: tuple[int, int]) -> int:
    return min(max(round(chars / _CHARS_PER_TOKEN), bounds[0]), bounds[1])


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `wait_s` after the previous one of its act was answered, or at once."""

    prompt: tuple[int, ...]
    max_tokens: int
    new_tokens: int
    wait_s: float = 0.0

    @property
    def cost_tokens(self) -> int:
        """GPU work in tokens: those to compute, and a read of the weights per token to decode."""
        return max(self.new_tokens, _STEP_TOKENS) + (self.max_tokens - 1) * _STEP_TOKENS


@dataclass(frozen=True, slots=True)
class Act:
    """Requests that belong together: one after the other (`chained`), or all at once."""

    name: str
    asks: tuple[Ask, ...]
    chained: bool = True

    @property
    def cost_tokens(self) -> int:
        """GPU work of all its requests, in tokens."""
        return sum(ask.cost_tokens for ask in self.asks)


class Traffic:
    """Makes acts, from a seed and from what was counted so far."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self._shapes, self._random = shapes, Random(seed)
        self._documents: list[tuple[int, ...]] = []
        self._visits = 0

    def next_act(self, counted: Mapping[str, int], wanted: int) -> Act:
        """The next act, more likely one for a class that has fewer than `wanted` requests."""
        weights = [
            _EACH + max(wanted - counted.get(kind, 0), 0) / max(wanted, 1) for kind in ACT_OF_CLASS
        ]
        (name,) = self._random.choices(list(ACT_OF_CLASS.values()), weights)
        return self.act(name)

    def act(self, name: str) -> Act:
        """An act by name: ask, agent, revisit or burst."""
        act: Act = getattr(self, f"_{name}")()
        return act

    def first_visits(self, count: int) -> list[Act]:
        """First questions on `count` new documents, which `revisit` will come back to."""
        least, most = _DOCUMENT_TOKENS
        lengths = [n for n in self._shapes.prefixes if n >= least] or [least, most]
        new = [self._tokens(self._random.choice(lengths)) for _ in range(count)]
        self._documents.extend(new)
        return [Act("visit", (self._question(document, len(document)),)) for document in new]

    def pair(self, tokens: int) -> Act:
        """Two fresh prompts of this length at once, so that two idle nodes get one each."""
        asks = (self._fresh(tokens), self._fresh(tokens))
        return Act("pair", asks, chained=False)

    def _ask(self) -> Act:
        return Act("ask", (self._fresh(self._length()),))

    def _burst(self) -> Act:
        asks = tuple(self._fresh(self._length()) for _ in range(self._random.randint(*_BURST)))
        return Act("burst", asks, chained=False)

    def _agent(self) -> Act:
        prompt = self._tokens(self._random.choice(self._shapes.prefixes))
        asks = [self._request(prompt, len(prompt))]
        for _ in range(_AGENT_TURNS):
            grown = self._random.choice(self._shapes.growths)
            prompt = (*prompt, *self._tokens(grown))
            asks.append(self._request(prompt, grown, self._random.uniform(*_THINK_S)))
        return Act("agent", tuple(asks))

    def _revisit(self) -> Act:
        """Questions on the documents that were asked about longest ago, one after the other."""
        if not self._documents:
            raise ValueError("no documents to come back to: play `first_visits` before")
        asks = []
        for _ in range(_REVISITS):
            document = self._documents[self._visits % len(self._documents)]
            self._visits += 1
            asks.append(self._question(document, 0, self._random.uniform(*_THINK_S)))
        return Act("revisit", tuple(asks))

    def _question(self, document: tuple[int, ...], unread: int, wait_s: float = 0.0) -> Ask:
        question = self._tokens(self._random.randint(*_QUESTION_TOKENS))
        return self._request((*document, *question), unread + len(question), wait_s)

    def _length(self) -> int:
        """Log-uniform over the bounds of new tokens: short prompts are as common as long ones."""
        low, high = (math.log(bound) for bound in _NEW_TOKENS)
        return round(math.exp(self._random.uniform(low, high)))

    def _fresh(self, tokens: int) -> Ask:
        return self._request(self._tokens(tokens), tokens)

    def _request(self, prompt: tuple[int, ...], new_tokens: int, wait_s: float = 0.0) -> Ask:
        return Ask(prompt, self._random.randint(*_MAX_TOKENS), new_tokens, wait_s)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(_TOKEN_IDS, k=count))


class Governor:
    """Sets the gaps between acts so that the nodes' load stays near a target.

    An act's gap follows its cost; the seconds that a token costs follow the load, slowly.
    """

    def __init__(self, target: float, nodes: int, token_s: float) -> None:
        """`token_s` is a first guess of the real seconds that a token costs a node."""
        self._target, self._nodes, self._guess_s = target, nodes, token_s
        self.token_s = token_s

    def gap_s(self, act: Act) -> float:
        """Mean seconds from this act to the next."""
        return act.cost_tokens * self.token_s / (self._target * self._nodes)

    def observe(self, load: float) -> None:
        """The load over the last few seconds; at most a twentieth at a time, a factor 2 in all."""
        factor = min(max(load / self._target, 0.95), 1.05)
        self.token_s = min(max(self.token_s * factor, self._guess_s / 2), self._guess_s * 2)
