"""Which prefixes are worth a copy on another worker before anybody asks for it there.

A prefix is hot if its requests would have had their first token sooner had others held it too. Each
request adds the seconds that it would have saved; they fade with time, so what is left is about
what the next `window_s` will bring if they are like the last. A copy is worth making if that is
more than the seconds for which it occupies network cards and, later, links. Pure and bounded: the
router tells what it routed, and asks once a period.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.fleet import Fleet, Rooms
from router.index.prefix_hash import UInt64s
from router.index.prefix_index import PrefixIndex
from router.offers import Floats, Offers
from router.policy import least

_FEWEST_REQUESTS = 1.5
# Of a host tier, left free for what requests fetch that wait for it.
_LEFT_SHARE = 0.1
# By then a copy has come, and the room that its target reports counts it.
_COPY_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Copy the blocks `hashes` from one worker to another."""

    hashes: UInt64s
    source_worker: str
    target_worker: str


@dataclass(slots=True, eq=False)
class HotPrefix:
    """What requests shared of late. saved_s, requests: sums that fade, as of `at_s`."""

    hashes: UInt64s
    saved_s: float
    requests: float
    at_s: float


@dataclass(frozen=True, slots=True)
class ReplicationRule:
    """most_prefixes: tracked at once; most_copies: asked for at once; window_s: how far the past is
    looked at, and the future paid for.
    """

    most_prefixes: int = 1024
    most_copies: int = 4
    window_s: float = 20.0


class HotPrefixes:
    """The prefixes in demand, those used longest ago forgotten first."""

    def __init__(self, rule: ReplicationRule) -> None:
        self.rule = rule
        self._tracked: OrderedDict[int, HotPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tracked)

    def used(self, hashes: UInt64s, held_blocks: int, saved_s: float, now_s: float) -> None:
        """A request came whose first `held_blocks` blocks somebody holds; `saved_s`: what it would
        have saved had others held them.
        """
        if held_blocks < 1:
            return
        # Requests of one document differ in their ends: all that agree up to a power of two of
        # blocks are one prefix, which is what they all share.
        key = int(hashes[(1 << (held_blocks.bit_length() - 1)) - 1])
        known = self._tracked.get(key)
        if known is None:
            self._tracked[key] = HotPrefix(hashes[:held_blocks].copy(), saved_s, 1.0, now_s)
            if len(self._tracked) > self.rule.most_prefixes:
                self._tracked.popitem(last=False)
            return
        self._tracked.move_to_end(key)
        self._fade(known, now_s)
        known.hashes = known.hashes[: _common_blocks(known.hashes, hashes[:held_blocks])]
        known.saved_s += saved_s
        known.requests += 1

    def hottest(self, now_s: float) -> list[HotPrefix]:
        """Those that more than one request wants and that a copy would save something, best first;
        no more than may be copied at once.
        """
        for prefix in self._tracked.values():
            self._fade(prefix, now_s)
        hot = [p for p in self._tracked.values() if p.saved_s > 0 and p.requests > _FEWEST_REQUESTS]
        hot.sort(key=lambda prefix: -prefix.saved_s)
        return hot[: self.rule.most_copies]

    def copied(self, prefix: HotPrefix) -> None:
        """A copy is under way: whether one more is needed, later requests must show."""
        prefix.saved_s = 0.0

    def _fade(self, prefix: HotPrefix, now_s: float) -> None:
        left = math.exp(min(prefix.at_s - now_s, 0.0) / self.rule.window_s)
        prefix.saved_s *= left
        prefix.requests *= left
        prefix.at_s = now_s


class Replicator:
    """Joins the rule to what the router knows: who holds a prefix, who has room, what it costs."""

    def __init__(self, rule: ReplicationRule) -> None:
        self.hot = HotPrefixes(rule)
        self._coming: deque[tuple[float, str, float]] = deque()

    def routed(self, offers: Offers, index: int) -> None:
        """A request goes to row `index`: note what it would have saved."""
        everywhere = offers if offers.fetch_s is not None else offers.fetching
        if everywhere is None:
            return
        held = everywhere.device_tokens + everywhere.cached_tokens
        blocks = int(held.max()) // offers.block_tokens
        saved = saved_s(offers, index, everywhere)
        self.hot.used(offers.prefix_hashes, blocks, saved, offers.now_s)

    def replicas(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        slots: NDArray[np.intp],
        columns: NDArray[np.intp],
        block_tokens: int,
        now_s: float,
    ) -> list[Replica]:
        """What to copy now. `columns`: where the index answers for each of `slots`."""
        while self._coming and self._coming[0][0] <= now_s:
            _, worker, tokens = self._coming.popleft()
            fleet.promise(worker, -tokens)
        asked: list[Replica] = []
        for prefix in self.hot.hottest(now_s):
            on_device, in_host = index.match_columns(prefix.hashes)
            held: Floats = (on_device + in_host)[columns].astype(np.float64)
            held *= block_tokens
            rooms = fleet.rooms(slots, now_s)
            ends = worthwhile(prefix, held, rooms)
            if ends is None:
                continue
            source, target = ends
            tokens = float(held[source] - held[target])
            transfer_s = tokens / float(rooms.net_tokens_per_s[[source, target]].min())
            names = fleet.workers[slots[source]], fleet.workers[slots[target]]
            fleet.transfer(slots[[source, target]], transfer_s, now_s)
            fleet.promise(names[1], tokens)
            self._coming.append((now_s + _COPY_S, names[1], tokens))
            self.hot.copied(prefix)
            asked.append(Replica(prefix.hashes[: int(held[source]) // block_tokens], *names))
        return asked


def worthwhile(prefix: HotPrefix, held_tokens: Floats, rooms: Rooms) -> tuple[int, int] | None:
    """Source and target of a copy that saves more than it costs, as rows; None if there is none.

    It costs the wait for two network cards, their time, and a load for each later use.
    """
    source = least(-held_tokens, rooms.net_backlog_s)
    tokens = float(held_tokens[source])
    target = best_target(held_tokens, tokens, rooms)
    if target < 0:
        return None
    ends = [source, target]
    rate = float(rooms.net_tokens_per_s[ends].min())
    if rate <= 0:
        return None
    cost_s = float(rooms.net_backlog_s[ends].max()) + 2 * (tokens - held_tokens[target]) / rate
    cost_s += prefix.requests * tokens * float(rooms.load_token_s[target])
    return (source, target) if prefix.saved_s > cost_s else None


def saved_s(chosen: Offers, index: int, everywhere: Offers) -> float:
    """Seconds that a request would have saved if every worker held what its best holder holds.

    everywhere: the request priced as if all fetched first; the transfer itself is left out.
    """
    start_s = np.maximum(everywhere.link_backlog_s + everywhere.load_s, everywhere.gpu_backlog_s)
    ttft_s = everywhere.fixed_s + start_s + everywhere.compute_s
    return max(float(chosen.ttft_s[index] - ttft_s.min()), 0.0)


def best_target(held_tokens: Floats, tokens: float, rooms: Rooms) -> int:
    """The fastest link with spare room for what a worker lacks, the most room among equals; -1 for
    none. Who holds all of it already, or is busier than most, is none.
    """
    lacks = tokens - held_tokens
    room = rooms.spare_tokens - _LEFT_SHARE * rooms.host_tokens
    fits: NDArray[np.bool_] = (lacks > 0) & (lacks <= room)
    fits &= rooms.backlog_s <= np.median(rooms.backlog_s)
    rows = np.flatnonzero(fits)
    if not len(rows):
        return -1
    links = rooms.h2d_bytes_per_s[rows]
    fastest = rows[links == links.max()]
    return int(fastest[room[fastest].argmax()])


def _common_blocks(a: UInt64s, b: UInt64s) -> int:
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter
