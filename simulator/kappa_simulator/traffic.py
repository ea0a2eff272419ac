"""Which requests are sent, and when: the same for every policy under comparison.

Sessions arrive at a given rate and run closed-loop: a turn waits for its predecessor's last token
and its pause. Another rate is the same sessions in the same order, nearer together or further
apart. Which requests belong to a run is fixed beforehand, by a schedule in which nobody queues:
the first so many by that schedule. A run starts in the middle of things: sessions that began
before it and are not over come in with the turns that they have left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, pairwise, takewhile
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kappa.slo import IdleSpeed, idle_tpot_s, idle_ttft_s
from kappa_simulator.cache import Ids, common_blocks
from kappa_workload.catalogue import arrivals_for
from kappa_workload.replay import copied, expand, matched_blocks, order_of
from kappa_workload.shapes import SessionShape, TurnShape, Workload

# Copies of a workload from this number on are for sessions that began before the run.
_COPIES_BEFORE = 1 << 40

_EARLY_SHARE = 5  # the first fifth of the requests is not measured


Retry = Literal["never", "at_once", "backoff", "retry_after"]
_AT_ONCE_S, _BACKOFF_S, _LONGEST_S, _MOST_TRIES = 0.1, 0.5, 30.0, 8


@dataclass(frozen=True, slots=True)
class Clients:
    """What clients do who are refused or wait.

    retry: `at_once`, 0.1 s later; `backoff`, from 0.5 s twice as long each time, 0.5 to 1.5 times
    that, 30 s at most; `retry_after`, when the refusal says, in whole seconds; 8 times in all.
    patience_s: since the first try, after which who still waits leaves (an engine drops it if it
    has not begun). A turn that was given up is followed by the next after its pause.
    """

    retry: Retry = "never"
    patience_s: float = math.inf

    def __post_init__(self) -> None:
        """ValueError says what to give instead."""
        if self.retry not in get_args(Retry):
            raise ValueError(f"retry {self.retry!r}: choose one of {', '.join(get_args(Retry))}")
        if not self.patience_s > 0:
            raise ValueError(f"the patience is {self.patience_s} s: give seconds above zero")

    def again_s(self, tries: int, refusal_s: float, drawn: float) -> float:
        """Seconds from a refusal, the `tries`th, to the next try; for ever: there is none.

        refusal_s: what the refusal says; drawn: evenly from 0 to 1.
        """
        if self.retry == "never" or tries >= _MOST_TRIES:
            return math.inf
        if self.retry == "retry_after":
            return float(max(math.ceil(refusal_s), 1))
        if self.retry == "at_once":
            return _AT_ONCE_S
        return min(_BACKOFF_S * 2.0 ** (tries - 1) * (0.5 + drawn), _LONGEST_S)


@dataclass(slots=True, eq=False)
class Traffic:
    """The requests of a run, numbered session by session, turn by turn.

    first_s: when each session's first request comes; turns: its requests; base: the number of the
    first; ids, tenants: its names.
    Per request of a planned run: planned_s, when it would come if nobody queued; measured;
    reuse_tokens, leading tokens that an earlier request of the run (or the warm caches) left behind
    somewhere.
    warm: prefixes that host tiers hold at the start, least recently used first. clients: whose
    requests they are.
    """

    workload: Workload
    rate_rps: float
    first_s: list[float] = field(default_factory=list)
    turns: list[tuple[TurnShape, ...]] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    warm: list[Ids] = field(default_factory=list)
    clients: Clients = field(default_factory=Clients)
    planned_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    measured: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    reuse_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, first_s: float, turns: Sequence[TurnShape], id: str, tenant: str = "") -> None:
        """Add a session, its requests numbered after those before."""
        self.base.append(self.requests)
        self.first_s.append(first_s)
        self.turns.append(tuple(turns))
        self.ids.append(id)
        self.tenants.append(tenant)

    @property
    def requests(self) -> int:
        return self.base[-1] + len(self.turns[-1]) if self.base else 0

    @property
    def session(self) -> NDArray[np.int64]:
        """The number of each request's session."""
        return np.repeat(np.arange(len(self.turns)), [len(turns) for turns in self.turns])

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        every = chain.from_iterable(self.turns)
        return np.fromiter((turn.input_tokens for turn in every), np.int64)

    @property
    def output_tokens(self) -> NDArray[np.int64]:
        every = chain.from_iterable(self.turns)
        return np.fromiter((turn.output_tokens for turn in every), np.int64)


def build_traffic(
    workload: Workload,
    speed: IdleSpeed,
    *,
    rate_rps: float,
    requests: int,
    seed: int,
    warm: bool = True,
) -> Traffic:
    """The requests of one run.

    Args:
        workload: the shapes of its sessions.
        speed: of a typical node, for the schedule in which nobody queues.
        rate_rps: requests a second; sessions come at this over their mean number of turns.
        requests: how many to send.
        seed: of everything random in it.
        warm: whether caches hold documents and histories at the start.
    """
    facts = session_facts(workload, speed)
    turns_mean = sum(len(s.turns) for s in workload.sessions) / len(workload.sessions)
    session_rate = rate_rps / turns_mean
    under_way = _under_way(workload, facts, session_rate, seed)
    arrivals = arrivals_for(workload.name)(1.0, np.random.default_rng((seed, 2)))
    later = zip((at / session_rate for at in arrivals), expand(workload, seed), strict=False)
    return _collect(Traffic(workload, rate_rps), facts, chain(under_way, later), requests, warm)


def _under_way(
    workload: Workload, facts: dict[str, SessionFacts], session_rate: float, seed: int
) -> list[tuple[float, SessionShape]]:
    """Sessions that began before time 0 and have turns to send yet, with when they began.

    The stream is followed back from time 0, as far as the longest session goes on sending, so that
    long ones are met in proportion to their duration.
    """
    ends_s = np.array([facts[session.id].starts_s[-1] for session in workload.sessions])
    gaps = np.random.default_rng((seed, 1))
    found: list[tuple[float, SessionShape]] = []
    age_s, copies = 0.0, count(_COPIES_BEFORE)
    while age_s < ends_s.max():
        copy = next(copies)
        order = np.array(order_of(workload, copy, seed))
        ages_s = age_s + np.cumsum(gaps.exponential(size=len(order))) / session_rate
        for at in np.flatnonzero(ends_s[order] > ages_s).tolist():
            found.append((-float(ages_s[at]), copied(workload.sessions[order[at]], copy)))
        age_s = float(ages_s[-1])
    return found[::-1]


def _collect(
    traffic: Traffic,
    facts: dict[str, SessionFacts],
    sessions: Iterable[tuple[float, SessionShape]],
    requests: int,
    warm: bool,
) -> Traffic:
    """Take sessions until the planned times of `requests` requests are known for good."""
    found: list[tuple[SessionShape, SessionFacts, float, int]] = []
    planned: list[list[float]] = []
    ahead: list[float] = []
    settled = 0
    for start_s, session in sessions:
        known = facts.get(session.id) or facts[session.id.rpartition("~")[0]]
        while ahead and ahead[0] <= start_s:
            heapq.heappop(ahead)
            settled += 1
        if settled >= requests:
            break
        times = [start_s + at for at in known.starts_s]
        done = sum(at < 0 for at in times)
        found.append((session, known, start_s, done))
        planned.append(times[done:])
        for at in times[done:]:
            heapq.heappush(ahead, at)
    every = np.fromiter((at for times in planned for at in times), dtype=np.float64)
    order = np.argsort(every, kind="stable")[:requests]
    chosen = np.zeros(len(every), dtype=np.bool_)
    chosen[order] = True
    _fill(traffic, found, planned, chosen, warm)
    rank = np.empty(traffic.requests, dtype=np.int64)
    rank[np.argsort(traffic.planned_s, kind="stable")] = np.arange(traffic.requests)
    traffic.measured = rank >= traffic.requests // _EARLY_SHARE
    return traffic


def _fill(
    traffic: Traffic,
    found: list[tuple[SessionShape, SessionFacts, float, int]],
    planned: list[list[float]],
    chosen: NDArray[np.bool_],
    warm: bool,
) -> None:
    size = traffic.workload.block_tokens
    seen: set[int] = set()
    histories: list[Ids] = []
    documents: list[Ids] = []
    times: list[float] = []
    reuse: list[int] = []
    at = 0
    for (session, known, _, done), planned_s in zip(found, planned, strict=True):
        mine = int(chosen[at : at + len(planned_s)].sum())
        at += len(planned_s)
        if not mine:
            continue
        # Planned times rise within a session, so the chosen ones are its next turns.
        turns = session.turns[done : done + mine]
        first = turns[0].blocks
        held = known.shared_blocks if not done else 0
        held = matched_blocks(first[:held], seen)
        if warm and done:
            history = _history(session, done)
            histories.append(history)
            held = max(held, common_blocks(history, first, 0, min(len(history), len(first))))
        elif warm and known.document_blocks:
            documents.append(first[: known.document_blocks])
            held = max(held, known.document_blocks)
        seen.update(first[: known.shared_blocks].tolist())
        traffic.add(planned_s[0], turns, session.id, session.tenant)
        times += planned_s[:mine]
        for number, turn in enumerate(turns):
            blocks = held
            if number and (not done or warm):
                blocks = known.reuse_blocks[done + number]
            elif number:
                blocks = longest_left(turns[:number], turn)
            usable = (turn.input_tokens - 1) // size
            reuse.append(min(blocks, usable) * size)
    # Sessions that come later were used longest ago; those under way most recently.
    traffic.warm = [*reversed(documents), *histories]
    traffic.planned_s = np.array(times)
    traffic.reuse_tokens = np.array(reuse, dtype=np.int64)


def _history(session: SessionShape, done: int) -> Ids:
    """What the turns before the next one left of its prefix; the last turn's blocks if nothing."""
    following = session.turns[done].blocks
    best = max(session.turns[:done], key=lambda turn: shared_prefix(turn.kept_blocks, following))
    return best.kept_blocks


# -- what all copies of a session have in common --------------------------------------------------


@dataclass(slots=True, eq=False)
class SessionFacts:
    """What all copies of a session have in common.

    starts_s: of each turn since the session's first, if nobody queues.
    reuse_blocks: longest prefix of each turn that one of its predecessors left. shared_blocks:
    leading blocks of the first turn that other sessions use too. document_blocks: leading blocks
    that all turns share.
    """

    starts_s: list[float]
    reuse_blocks: list[int]
    shared_blocks: int
    document_blocks: int


def session_facts(workload: Workload, speed: IdleSpeed) -> dict[str, SessionFacts]:
    """Facts of every session of a workload, by its id; `speed` of a typical node."""
    in_several = _shared_blocks(workload)
    facts: dict[str, SessionFacts] = {}
    for session in workload.sessions:
        reuse = _left_before(session)
        first = session.turns[0]
        shared = sum(1 for _ in takewhile(in_several.__contains__, first.blocks.tolist()))
        document = document_blocks(session, reuse)
        starts = _schedule(session, reuse, workload.block_tokens, speed)
        facts[session.id] = SessionFacts(starts, reuse, shared, document)
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
    return document if {*(reuse or _left_before(session))[1:]} == {document} else 0


def _left_before(session: SessionShape) -> list[int]:
    """The longest prefix of each turn, in blocks, that one of its predecessors left."""
    return [longest_left(session.turns[:n], turn) for n, turn in enumerate(session.turns)]


def _shared_blocks(workload: Workload) -> set[int]:
    """The blocks that occur in several sessions."""
    own = [
        np.unique(np.concatenate([turn.kept_blocks for turn in session.turns]))
        for session in workload.sessions
    ]
    blocks, counts = np.unique(np.concatenate(own), return_counts=True)
    return set(blocks[counts > 1].tolist())


def _schedule(
    session: SessionShape, reuse: list[int], block_tokens: int, speed: IdleSpeed
) -> list[float]:
    """When each turn would start if nobody queued."""
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
    return starts


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
