"""The contract between a scheduling rule and the engine that it plans for.

An engine, real or simulated, owns the blocks and runs the iterations; a `Rule` owns what waits and
says, iteration by iteration, what is admitted. Nothing here knows a clock: times are arguments, in
seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Protocol

IN_LINE = attrgetter("place_s", "seq")
"""The order of `Work` in line."""

# Why a request was bypassed in an iteration.
VRAM, LINK, BUDGET, SLOTS, RESERVED, CAP, PENDING = (
    "vram", "link", "budget", "slots", "reserved", "cap", "pending",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Work:
    """One request inside an engine."""

    # Must be in the cache before it decodes: its prompt and, after a preemption, its answer so far.
    total_tokens: int
    arrival_s: float
    max_tokens: int = 1  # bound on its answer
    tenant: str = ""  # is charged for it
    priority: int = 0  # its class; lower goes first
    # Of `total_tokens`, those in the cache, scheduled ones included.
    computed_tokens: int = field(default=0, init=False)
    # Blocks that it took since its admission, as it decoded; the engine counts them.
    grown_blocks: int = field(default=0, init=False)
    # How often a request behind it took blocks or budget that it lacked.
    skips: int = field(default=0, init=False)
    # Set by the rule: order of arrival, how far its class sets it back, and its place in line.
    seq: int = field(default=-1, init=False)
    late_s: float = field(default=0.0, init=False)
    place_s: float = field(default=0.0, init=False)

    def join(self, seq: int, now_s: float, class_s: float) -> None:
        """Take a place in line. Each class stands `class_s` seconds behind the one before it: a
        request of a higher class that comes later than that does not pass it."""
        self.seq, self.late_s = seq, class_s * self.priority
        self.place_s = now_s + self.late_s


def last_in_line(running: Sequence[Work]) -> Work:
    """Who of those running gives up first: the last of them in line if they are of several classes,
    else the last that was admitted."""
    if len({work.priority for work in running}) == 1:
        return running[-1]
    return max(running, key=IN_LINE)


class Quote(NamedTuple):
    """What admitting a request would take now.

    blocks: of those available (unused or evictable), hits that were evictable included.
    device_tokens: found on the device; host_tokens: to be loaded behind them. shared_blocks: found
    and held by others already, which cost nothing now; shared_key: names the request's first block
    (held or not), so that those with one prefix are known; 0 if it has no full block.
    elsewhere_blocks: of its prompt, those that need no block here: they stay in host memory; grows:
    those of its answer need blocks here.
    """

    blocks: int
    device_tokens: int
    host_tokens: int
    shared_blocks: int = 0
    shared_key: int = 0
    elsewhere_blocks: int = 0
    grows: bool = True


class Memory(Protocol):
    """Blocks on the device, as a rule sees them.

    version: rises whenever something may fit that did not before. capacity_blocks: all of them.
    """

    block_tokens: int

    @property
    def version(self) -> int: ...

    @property
    def capacity_blocks(self) -> int: ...

    def quote(self, work: Work) -> Quote | None:
        """What admitting `work` takes; None while blocks that it needs are being loaded.

        Called often: an engine may answer from what it looked up a moment ago.
        """

    def available(self) -> int:
        """Blocks unused or evictable."""

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """Reserve what was quoted; what was in fact taken, or None: it does not fit after all."""


@dataclass(slots=True)
class Room:
    """What the coming iteration has to give.

    budget_tokens: of the iteration's budget, after those already running. slots: requests that may
    still be added to those running. running: requests that hold blocks, loading ones included.
    """

    memory: Memory
    budget_tokens: int
    slots: int
    running: int


@dataclass(slots=True)
class Plan:
    """What is admitted now, in order: (request, what it took). passed: how many waiting requests
    were looked at and left, by reason. reserved: the request whose blocks are set aside."""

    admitted: list[tuple[Work, Quote]] = field(default_factory=list)
    passed: dict[str, int] = field(default_factory=dict)
    reserved: Work | None = None


class Rule(Protocol):
    """Owns the waiting requests of one engine; is informed of all that happens to the others.

    packs: it goes on past a request that does not fit, as a router's forecast should know. timed:
    an iteration may admit what the one before could not though nothing happened in between.
    `len()`: requests that wait, those that wait for another's load included.
    """

    name: str
    packs: bool
    timed: bool
    max_skips: int
    max_wait_s: float

    def __len__(self) -> int: ...

    def add(self, work: Work, now_s: float) -> bool:
        """A request arrived; whether the next iteration may have something for it."""

    def plan(self, room: Room, now_s: float) -> Plan:
        """Admit for the coming iteration: takes from `room.memory`, forgets what it admitted."""

    def returned(self, work: Work, now_s: float) -> None:
        """The engine could not admit what was planned: it waits again, where it was."""

    def landed(self, work: Work, now_s: float) -> None:
        """The load of an admitted request is on the device."""

    def preempted(self, work: Work, now_s: float) -> None:
        """A running request lost its blocks and waits again, before those that never ran."""

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        """An admitted request is over, its blocks are free; aborted ones too."""

    def aborted(self, work: Work, now_s: float) -> None:
        """A waiting request's client left."""

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Iterations ended that took so long in all, with so many tokens of each tenant."""

    def victim(self, running: Sequence[Work]) -> Work:
        """Which of `running` (in order of admission, not empty) gives up its blocks."""
