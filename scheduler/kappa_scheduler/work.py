"""The contract between a scheduling rule and the engine that it plans for.

An engine, real or simulated, owns the blocks and runs the iterations; a `Rule` owns the waiting
requests and decides, iteration by iteration, which to admit. Nothing here knows a clock: times are
arguments, in seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Protocol

IN_LINE = attrgetter("place_s", "seq")
"""The order of `Work` in line."""

# Reasons why a request was bypassed in an iteration.
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
    """The running request that gives up its blocks first: the last in line if they are of several
    classes, else the last admitted."""
    if len({work.priority for work in running}) == 1:
        return running[-1]
    return max(running, key=IN_LINE)


class Quote(NamedTuple):
    """The cost of admitting a request now."""

    blocks: int  # of those available (unused or evictable), evictable hits included
    device_tokens: int  # found on the device
    host_tokens: int  # to be loaded behind them
    shared_blocks: int = 0  # found and held by others already, which cost nothing now
    # Names the request's first block, held or not, so that requests with one prefix are known; 0 if
    # it has no full block.
    shared_key: int = 0
    elsewhere_blocks: int = 0  # prompt blocks that stay in host memory and need none here
    grows: bool = True  # its answer needs blocks here


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
        """The cost of admitting `work`; None while blocks that it needs are being loaded.

        Called often: an engine may answer from a recent look-up.
        """

    def available(self) -> int:
        """The number of blocks that are unused or evictable."""

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """Reserve a quote's blocks; returns what was taken, None if it does not fit after all."""


_ANY = 1 << 60


@dataclass(slots=True)
class Room:
    """The resources left for the coming iteration."""

    memory: Memory
    budget_tokens: int  # left by the running requests
    slots: int  # requests that may still be added to the running ones
    running: int  # requests that hold blocks, loading ones included
    prompt_tokens: int = _ANY  # most that one prompt may compute


class StepState(NamedTuple):
    """What a rule bounds a step by: its token budget, the requests that decode in it, and those
    with a prompt to compute, waiting and loading ones included."""

    budget_tokens: int
    decoding: int
    prompts: int


class StepBound(NamedTuple):
    """Most tokens of a step, those that decode included, and of one prompt in it."""

    step_tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Plan:
    """The admissions of an iteration."""

    # (request, what it took), in order.
    admitted: list[tuple[Work, Quote]] = field(default_factory=list)
    # Number of waiting requests that were looked at and left, by reason.
    passed: dict[str, int] = field(default_factory=dict)
    # The request with blocks set aside for it.
    reserved: Work | None = None


class Rule(Protocol):
    """Owner of the waiting requests of one engine, informed of every event of the others.

    `len()`: requests that wait, those that wait for another's load included.
    """

    # A rule that bounds steps besides has a method `bound(StepState) -> StepBound`.
    name: str
    packs: bool  # it goes on past a request that does not fit; routers' forecasts use this
    # Time alone may let it admit what the iteration before could not.
    timed: bool
    max_skips: int
    max_wait_s: float

    def __len__(self) -> int: ...

    def add(self, work: Work, now_s: float) -> bool:
        """A request arrived; returns whether the next iteration may admit it."""

    def plan(self, room: Room, now_s: float) -> Plan:
        """Admit for the coming iteration: takes from `room.memory`, forgets what it admitted."""

    def returned(self, work: Work, now_s: float) -> None:
        """The engine could not admit a planned request, which waits again in its place."""

    def landed(self, work: Work, now_s: float) -> None:
        """The load of an admitted request is on the device."""

    def preempted(self, work: Work, now_s: float) -> None:
        """A running request lost its blocks and waits again, before those that never ran."""

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        """An admitted request ended, or was aborted; its blocks are free."""

    def aborted(self, work: Work, now_s: float) -> None:
        """A waiting request's client left."""

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        """Iterations ended: their seconds together, and the tokens of each tenant in them."""

    def victim(self, running: Sequence[Work]) -> Work:
        """The request of `running` (not empty, in order of admission) that gives up its blocks."""
