"""The load of `kappa bench predict`: sessions made from a seed, and the player that sends them.

Four kinds of act, each a short script of requests as token ids. Lengths are drawn from the agent
sessions that ship with `workload`; tokens are random, so that no two sessions share a prefix. The
next act is drawn so that the class with the fewest requests catches up, and the gap to it so that
the nodes' load stays near a target.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from kappa_benchmarks.harness import note
from kappa_benchmarks.serving.client import ClusterClient, usage
from kappa_benchmarks.serving.prediction_errors import CLASSES, Outcome, outcome_from
from kappa_workload.sessions import Session

# The recorded texts have 3.2 characters per token (Llama-2,
# workload/kappa_workload/data/README.md).
_CHARS_PER_TOKEN = 3.2
_NEW_TOKENS = (30, 900)
_PREFIX_TOKENS = (1400, 5000)
_DOCUMENT_TOKENS = (3000, 5000)
_QUESTION_TOKENS = (30, 90)
_LEAST_TOKENS = 8
_AGENT_TURNS = 5
_REVISITS = 3
_THINK_S = (0.1, 0.6)
_BURST = (4, 6)
_MAX_TOKENS = (4, 8)
# Reading Llama-3.1-8B's weights takes an H100 as long as computing this many tokens.
_STEP_TOKENS = 120
# Ids below the first are special; the tiny model's vocabulary is larger than the last.
_TOKEN_IDS = range(100, 2900)
ACT_OF_CLASS = {"device": "agent", "load": "revisit", "compute": "ask", "queue": "burst"}
"""Which act feeds which class."""
_LEAST_WEIGHT = 0.1

_WINDOW_S = 20.0
_WATCH_EVERY_S = 2.0
# Within so long workers have reported their steps.
_REPORTED_S = 1.0
_NOTE_EVERY_S = 15.0
_MAX_IN_FLIGHT = 14
# Decisions fetched while a phase runs: few, since the decider that makes them is being measured.
_RECENT = 64
_READING = 4
_DOCUMENTS = 24
_WARM_UP_DOCUMENTS = 6
_WARM_UP_TOKENS = (40, 700, 60, 900, 100, 800)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Token lengths of recorded sessions."""

    # Of whole prompts.
    prefixes: tuple[int, ...]
    # Of the tokens that a turn adds to the one before.
    growths: tuple[int, ...]


def shapes_of(sessions: Sequence[Session]) -> Shapes:
    """Shapes of recorded sessions, clipped to the bounds of this bench."""

    def clipped(chars: int, bounds: tuple[int, int]) -> int:
        return min(max(round(chars / _CHARS_PER_TOKEN), bounds[0]), bounds[1])

    prefixes, growths = [], []
    for session in sessions:
        prefixes += [clipped(len(turn.input_text), _PREFIX_TOKENS) for turn in session.turns]
        for before, after in itertools.pairwise(session.turns):
            added = len(after.input_text) - len(before.input_text) + len(before.output_text)
            growths.append(clipped(added, _NEW_TOKENS))
    return Shapes(tuple(prefixes), tuple(growths))


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `wait_s` after the previous one of its act was answered, or at once."""

    prompt: tuple[int, ...]
    max_tokens: int
    new_tokens: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Act:
    """Requests that belong together: one after the other (`chained`), or all at once."""

    name: str
    requests: tuple[Request, ...]
    chained: bool = True

    @property
    def cost_tokens(self) -> int:
        """GPU work in tokens: those to compute, and a read of the weights per token to decode."""
        return sum(
            max(one.new_tokens, _STEP_TOKENS) + (one.max_tokens - 1) * _STEP_TOKENS
            for one in self.requests
        )


class Traffic:
    """Makes acts, from a seed and the counts by class so far; all lengths divided by `scale`."""

    def __init__(self, shapes: Shapes, seed: int, scale: float = 1.0) -> None:
        self._shapes, self._random, self._scale = shapes, Random(seed), scale
        self._documents: list[tuple[int, ...]] = []
        self._visits = 0

    def next_act(self, counted: Mapping[str, int], wanted: int) -> Act:
        """The next act, more likely one for a class that has fewer than `wanted` requests."""
        weights = [
            _LEAST_WEIGHT + max(wanted - counted.get(kind, 0), 0) / max(wanted, 1)
            for kind in ACT_OF_CLASS
        ]
        (name,) = self._random.choices(list(ACT_OF_CLASS.values()), weights)
        return self.act(name)

    def act(self, name: str) -> Act:
        """An act by name: `ask`, a fresh prompt; `agent`, turns that grow; `revisit`, questions on
        the documents that were read longest ago; `burst`, fresh prompts at once.

        Raises:
            ValueError: a revisit before `first_visits`.
        """
        random = self._random
        if name == "burst":
            count = random.randint(*_BURST)
            fresh = tuple(self._fresh(self._length()) for _ in range(count))
            return Act(name, fresh, chained=False)
        if name == "ask":
            return Act(name, (self._fresh(self._length()),))
        requests = []
        if name == "agent":
            prompt = self._tokens(self._cut(random.choice(self._shapes.prefixes)))
            requests.append(self._request(prompt, len(prompt)))
            for _ in range(_AGENT_TURNS):
                grown = self._cut(random.choice(self._shapes.growths))
                prompt = (*prompt, *self._tokens(grown))
                requests.append(self._request(prompt, grown, random.uniform(*_THINK_S)))
            return Act(name, tuple(requests))
        if not self._documents:
            raise ValueError("no documents to come back to: play `first_visits` before")
        for _ in range(_REVISITS):
            document = self._documents[self._visits % len(self._documents)]
            self._visits += 1
            requests.append(self._question(document, 0, random.uniform(*_THINK_S)))
        return Act(name, tuple(requests))

    def first_visits(self, count: int) -> list[Act]:
        """First questions on `count` new documents, which `revisit` will come back to."""
        least, most = _DOCUMENT_TOKENS
        lengths = [n for n in self._shapes.prefixes if n >= least] or [least, most]
        new = [self._tokens(self._cut(self._random.choice(lengths))) for _ in range(count)]
        self._documents.extend(new)
        return [Act("visit", (self._question(document, len(document)),)) for document in new]

    def pair(self, tokens: int) -> Act:
        """Two fresh prompts of this length at once, so that two idle nodes get one each."""
        cut = self._cut(tokens)
        return Act("pair", (self._fresh(cut), self._fresh(cut)), chained=False)

    def _cut(self, tokens: int) -> int:
        return max(round(tokens / self._scale), _LEAST_TOKENS)

    def _question(self, document: tuple[int, ...], unread: int, wait_s: float = 0.0) -> Request:
        question = self._tokens(self._cut(self._random.randint(*_QUESTION_TOKENS)))
        return self._request((*document, *question), unread + len(question), wait_s)

    def _length(self) -> int:
        """Log-uniform over the bounds of new tokens: short prompts are as common as long ones."""
        low, high = (math.log(bound) for bound in _NEW_TOKENS)
        return self._cut(round(math.exp(self._random.uniform(low, high))))

    def _fresh(self, tokens: int) -> Request:
        return self._request(self._tokens(tokens), tokens)

    def _request(self, prompt: tuple[int, ...], new_tokens: int, wait_s: float = 0.0) -> Request:
        return Request(prompt, self._random.randint(*_MAX_TOKENS), new_tokens, wait_s)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(_TOKEN_IDS, k=count))


class Governor:
    """Sets the gaps between acts so that the load of `nodes` nodes stays near a target.

    An act's gap follows its cost; `token_s`, the real seconds that a token costs a node, begins as
    a guess, is what the first acts cost once they are over, and then follows the load, slowly.
    """

    def __init__(self, target: float, nodes: int, token_s: float) -> None:
        self.target, self._nodes = target, nodes
        self.begin(token_s)

    def begin(self, token_s: float) -> None:
        """Start from this many seconds a token."""
        self._guess_s = self.token_s = token_s

    def gap_s(self, act: Act) -> float:
        """Mean seconds from this act to the next."""
        return act.cost_tokens * self.token_s / (self.target * self._nodes)

    def observe(self, load: float) -> None:
        """The load over the last few seconds; at most a twentieth at a time, a factor 2 in all."""
        factor = min(max(load / (self.target or load or 1.0), 0.95), 1.05)
        self.token_s = min(max(self.token_s * factor, self._guess_s / 2), self._guess_s * 2)


@dataclass(frozen=True, slots=True)
class Size:
    """Amounts and bounds of a measurement."""

    # At least, in all and of each class.
    requests: int
    per_class: int
    # At most.
    limit_s: float
    # Outcomes to learn from before.
    calibrate: int
    # GPU load of the nodes; 0: one act after the other.
    load: float
    # Divides all lengths.
    scale: float = 1.0


@dataclass(slots=True)
class Phase:
    """One phase: outcomes by its end, the client's TTFT by request id, failures by reason."""

    outcomes: list[Outcome] = field(default_factory=list)
    client_ttft_s: dict[str, float] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    nodes_before: list[dict[str, Any]] = field(default_factory=list)
    nodes_after: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Player:
    """Plays acts against one endpoint, one phase at a time."""

    def __init__(self, client: ClusterClient, governor: Governor) -> None:
        self._client, self._governor = client, governor
        self._phase = Phase()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._counted: Counter[str] = Counter()

    async def warm_up(self, traffic: Traffic, requests: int) -> Phase:
        """Calibrate: pairs on idle nodes first, then every kind of act, `requests` in all."""
        phase = self._phase = Phase(nodes_before=await self._client.nodes())
        pairs = [traffic.pair(tokens) for tokens in _WARM_UP_TOKENS * 2]
        for pair in pairs:
            await self._play(pair)
        await asyncio.sleep(_REPORTED_S)
        busy_s = usage(phase.nodes_before, await self._client.nodes()).busy_s
        self._governor.begin(busy_s / sum(pair.cost_tokens for pair in pairs))
        await self._read_documents(traffic, _WARM_UP_DOCUMENTS)
        kinds = itertools.cycle(("revisit", "ask", "agent", "burst"))
        while len(phase.client_ttft_s) + len(self._tasks) < requests:
            act = traffic.act(next(kinds))
            self._spawn(act)
            await self._pause(act)
        return await self._finish()

    async def prepare(self, traffic: Traffic) -> Phase:
        """Have the documents read that `measure` will come back to."""
        self._phase = Phase()
        await self._read_documents(traffic, _DOCUMENTS)
        return await self._finish()

    async def measure(self, traffic: Traffic, random: Random, size: Size) -> Phase:
        """Send until there are enough requests in all and of each class, or time is up."""
        phase = self._phase = Phase(nodes_before=await self._client.nodes())
        start_s = time.monotonic()
        watcher = asyncio.create_task(self._watch())
        try:
            while time.monotonic() - start_s < size.limit_s:
                counts = [self._counted[kind] for kind in CLASSES]
                if sum(counts) >= size.requests and min(counts) >= size.per_class:
                    break
                act = traffic.next_act(self._counted, size.per_class)
                self._spawn(act)
                await self._pause(act, random.expovariate(1.0))
        finally:
            watcher.cancel()
        # Before the last requests drain: an emptying cluster is not under load.
        phase.nodes_after = await self._client.nodes()
        phase.seconds = time.monotonic() - start_s
        return await self._finish()

    async def _read_documents(self, traffic: Traffic, count: int) -> None:
        for act in traffic.first_visits(count):
            while len(self._tasks) >= _READING:
                await asyncio.sleep(0.05)
            self._spawn(act)

    async def _pause(self, act: Act, share: float = 1.0) -> None:
        """Until the next act: at a load of none, until this one is over."""
        if not self._governor.target:
            await asyncio.gather(*self._tasks)
            return
        await asyncio.sleep(share * self._governor.gap_s(act))
        while self._in_flight >= _MAX_IN_FLIGHT:
            await asyncio.sleep(0.02)

    async def _finish(self) -> Phase:
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._phase.outcomes = await self._outcomes(len(self._phase.client_ttft_s) + _RECENT)
        return self._phase

    def _spawn(self, act: Act) -> None:
        task = asyncio.create_task(self._play(act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, act: Act) -> None:
        if not act.chained:
            await asyncio.gather(*map(self._send, act.requests))
            return
        for request in act.requests:
            await asyncio.sleep(request.wait_s)
            if not await self._send(request):
                return

    async def _send(self, request: Request) -> bool:
        self._in_flight += 1
        try:
            prepared = self._client.prepare(request.prompt, request.max_tokens)
            record = await self._client.send(prepared)
        finally:
            self._in_flight -= 1
        if record.error or record.first_token_s is None:
            self._phase.failures[record.error] += 1
            return False
        self._phase.client_ttft_s[record.request_id] = record.first_token_s - record.sent_s
        return True

    async def _outcomes(self, limit: int) -> list[Outcome]:
        outcomes = map(outcome_from, await self._client.decisions(limit))
        mine = self._phase.client_ttft_s
        return [o for o in outcomes if o is not None and o.request_id in mine]

    async def _watch(self) -> None:
        """Keep the governor and the counts by class up to date; note progress now and then."""
        seen = [await self._client.nodes()]
        kinds: dict[str, str] = {}
        start_s = noted_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                seen.append(await self._client.nodes())
                load = usage(seen[0], seen[-1]).load
                recent = await self._outcomes(_RECENT)
            except (httpx.HTTPError, ValueError):
                continue
            del seen[: -round(_WINDOW_S / _WATCH_EVERY_S)]
            self._governor.observe(load)
            kinds.update((o.request_id, o.kind) for o in recent)
            self._counted = Counter(kinds.values())
            now_s = time.monotonic()
            if now_s - noted_s >= _NOTE_EVERY_S:
                noted_s = now_s
                counts = ", ".join(f"{self._counted[kind]} {kind}" for kind in CLASSES)
                note(f"{now_s - start_s:4.0f} s  load {load:.2f}  {counts}")
