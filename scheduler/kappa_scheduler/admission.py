"""One iteration's admissions: starving requests, loads just in time, then a packed rest.

The half of the fair rule that decides about resources; the order and the tier of the candidates
come from the tenants' turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kappa_scheduler.blocks import Ledger
from kappa_scheduler.loads import JustInTime
from kappa_scheduler.tenant_charges import FAR_AHEAD, IN_TURN
from kappa_scheduler.work import BUDGET, CAP, LINK, RESERVED, SLOTS, VRAM, Quote, Room, Work

Floats = NDArray[np.float64]

# Loads in flight that may start although the link is not about to run empty: double buffering.
_STAGED = 2
_LACKS_BLOCKS = (VRAM, CAP, RESERVED)
# First come, first served is kept if it fills this share of what the best fill does.
_GOOD_ENOUGH = 0.98


class Candidate:
    """A waiting request as considered in one iteration."""

    def __init__(
        self, work: Work, quote: Quote, prompt_blocks: int, reserve: int, blocks_per_token: float
    ) -> None:
        self.work, self.quote, self.reserve = work, quote, reserve
        # Free blocks that it takes, now and as it decodes.
        self.blocks = quote.blocks + reserve
        # All blocks that it will hold, shared ones included.
        self.footprint = prompt_blocks + reserve
        # To be computed.
        self.new_tokens = max(work.total_tokens - quote.device_tokens - quote.host_tokens, 1)
        # It wants more of the VRAM than of the budget.
        self.high = self.blocks > self.new_tokens * blocks_per_token
        self.tier = IN_TURN
        # It has waited, or was bypassed, past its bound; then blocks may be set aside for it.
        self.starving, self.reserves = False, True
        # Must stay free beside it, for tenants with nothing running.
        self.leaves_blocks = self.leaves_slots = 0
        # The reason of a bypass, unless admitted.
        self.admitted, self.why = False, ""

    @property
    def waits(self) -> bool:
        """Neither admitted nor bypassed yet."""
        return not (self.admitted or self.why)


class WindowFill:
    """Whether the candidates looked at so far fill the iteration by themselves.

    With both classes among them the cap may bind, so then those of high ratio do not count.
    """

    __slots__ = ("_classes", "_free", "_left", "_left_low", "_spare")

    def __init__(self, ledger: Ledger, room: Room) -> None:
        self._free = ledger.free(room.memory)
        self._spare = ledger.spare(room.memory) if ledger.reserved_for is not None else math.inf
        self._left = self._left_low = room.budget_tokens if room.slots > 0 else 0
        self._classes: set[bool] = set()

    @property
    def full(self) -> bool:
        """No need to look further."""
        return self._left <= 0 and (len(self._classes) < 2 or self._left_low <= 0)

    def add(self, candidate: Candidate, reserved: bool) -> None:
        """Count another candidate; reserved: it is the request with the reservation."""
        self._classes.add(candidate.high)
        fits = candidate.blocks <= self._free and (reserved or candidate.footprint <= self._spare)
        if candidate.quote.host_tokens or not fits:
            return
        self._free -= candidate.blocks
        self._left -= candidate.new_tokens
        if not candidate.high:
            self._left_low -= candidate.new_tokens
        if not reserved:
            self._spare -= candidate.footprint


class AdmissionRound:
    """One iteration's admissions among ordered candidates.

    Args:
        ledger, link: of the engine.
        room: of the iteration; its budget and slots shrink.
        candidates: in order.
        admit: takes a candidate's blocks; False if the engine refused, perhaps with its `why`.
    """

    def __init__(
        self, ledger: Ledger, link: JustInTime, room: Room, now_s: float,
        candidates: Sequence[Candidate], admit: Callable[[Candidate], bool],
    ) -> None:  # fmt: skip
        self._ledger, self._link, self._room, self._now_s = ledger, link, room, now_s
        self._candidates, self._admit = candidates, admit
        # A starving request waits for budget or a slot, which loads that start now would take.
        self._no_loads = False
        # With nothing running, whatever fits may start: its growth then has all the rest.
        self._alone = not len(ledger) and not room.running
        self._free = ledger.free(room.memory)
        # Blocks that requests of high ratio may hold: their part of what both classes want.
        capacity = room.memory.capacity_blocks
        high = sum(c.footprint for c in candidates if c.high)
        low = sum(c.footprint for c in candidates if not c.high)
        self._cap = float(capacity)
        if low and high:
            high += ledger.high_blocks
            low += max(capacity - self._free - ledger.high_blocks, 0)
            self._cap = capacity * high / (high + low)

    # -- the steps ----------------------------------------------------------------------------

    def run(self) -> None:
        """Admit candidates, tier by tier."""
        candidates = self._candidates
        if candidates and candidates[0].work is self._ledger.reserved_for:
            self.admit_starving(candidates[0])
        for tier in sorted({candidate.tier for candidate in candidates}):
            if tier == FAR_AHEAD and self.withhold_from_far_ahead():
                break
            for candidate in candidates:
                if candidate.starving and candidate.tier == tier and candidate.waits:
                    self.admit_starving(candidate)
            waiting = [c for c in candidates if c.tier == tier and c.waits]
            self.start_loads([c for c in waiting if c.quote.host_tokens])
            self.fill_budget([c for c in waiting if not c.quote.host_tokens])
        self.stage_second_load()

    def admit_starving(self, candidate: Candidate) -> None:
        """Admit a starving request, or reserve blocks for it if its tenant is in turn."""
        if candidate.quote.host_tokens:
            if self._no_loads or not self._link.open(self._now_s):
                candidate.why = LINK
                return
        elif why := self._exhausted():
            candidate.why = why
            self._no_loads = self._no_loads or candidate.reserves
            return
        if self._fits(candidate):
            self._take(candidate)
        elif candidate.reserves and self._ledger.reserved_for is None:
            self._ledger.reserve(candidate.work, candidate.footprint, self._room.memory)

    def start_loads(self, candidates: Sequence[Candidate]) -> None:
        """Start loads while the link is about to run empty."""
        link, now_s = self._link, self._now_s
        if link.open(now_s) and not self._no_loads:
            eligible = [c for c in candidates if self._fits(c)]
            space_s = max(link.horizon_s() - link.backlog_s(now_s), 1e-9)
            # One that is longer than that may start too: the link is open.
            link_s = [min(link.load_s(c.quote.host_tokens), space_s) for c in eligible]
            for index in self._packed(eligible, np.array(link_s), space_s) if eligible else ():
                if not link.open(now_s):
                    break
                if self._fits(eligible[index]):
                    self._take(eligible[index])
        for candidate in candidates:
            if candidate.waits:
                candidate.why = RESERVED if self._no_loads else self._misfit(candidate) or LINK

    def fill_budget(self, candidates: Sequence[Candidate]) -> None:
        """Fill the budget with candidates that need no load."""
        exhausted = self._exhausted()
        if not exhausted:
            eligible = [c for c in candidates if self._fits(c)]
            for index in self._packed(eligible) if eligible else ():
                if exhausted := self._exhausted():
                    break
                if self._fits(eligible[index]):
                    self._take(eligible[index])
        for candidate in candidates:
            if candidate.waits:
                candidate.why = exhausted or self._misfit(candidate) or BUDGET

    def withhold_from_far_ahead(self) -> bool:
        """Whether a tenant in turn waits for blocks, so that tenants far ahead get none."""
        if not any(c.tier == IN_TURN and c.why in _LACKS_BLOCKS for c in self._candidates):
            return False
        for candidate in self._candidates:
            if candidate.waits:
                candidate.why = RESERVED
        return True

    def stage_second_load(self) -> None:
        """Keep a second load ready behind the first, with blocks that no other candidate wants."""
        wanted = any(c.why in _LACKS_BLOCKS and not c.quote.host_tokens for c in self._candidates)
        if self._no_loads or wanted:
            return
        for candidate in self._candidates:
            if len(self._link) >= _STAGED:
                return
            if candidate.why == LINK and not self._misfit(candidate):
                candidate.why = ""
                self._take(candidate)

    # -- what fits ----------------------------------------------------------------------------

    def _exhausted(self) -> str:
        if self._room.budget_tokens <= 0:
            return BUDGET
        return SLOTS if self._room.slots <= 0 else ""

    def _fits(self, candidate: Candidate) -> bool:
        candidate.why = self._misfit(candidate)
        return not candidate.why

    def _misfit(self, candidate: Candidate) -> str:
        """The reason why a candidate cannot have its blocks; empty if it can."""
        ledger, room = self._ledger, self._room
        if self._alone:
            return "" if candidate.quote.blocks <= room.memory.available() else VRAM
        if candidate.leaves_slots and room.slots <= candidate.leaves_slots:
            return SLOTS
        if candidate.blocks + candidate.leaves_blocks > self._free:
            return VRAM
        others = ledger.reserved_for not in (None, candidate.work)
        if others and candidate.footprint > ledger.spare(room.memory):
            return RESERVED
        capped = candidate.high and not candidate.starving and ledger.high_blocks > 0
        return CAP if capped and ledger.high_blocks + candidate.footprint > self._cap else ""

    def _packed(
        self, eligible: Sequence[Candidate], link_s: Floats | None = None, space_s: float = 0.0
    ) -> list[int]:
        """Indices of candidates to take: most tokens within blocks, link, reservation and cap."""
        ledger, memory = self._ledger, self._room.memory
        free = max(self._free, memory.available() if self._alone else 0)
        columns = [np.array([c.blocks for c in eligible], dtype=np.float64)]
        room = [float(free)]
        if self._alone:
            columns[0] = np.minimum(columns[0], free)
        if link_s is not None:
            columns.append(link_s)
            room.append(space_s)
        if (own := ledger.reserved_for) is not None:
            columns.append(np.array([0.0 if c.work is own else c.footprint for c in eligible]))
            room.append(float(ledger.spare(memory)))
        if link_s is None and any(c.high for c in eligible):
            columns.append(np.array([c.footprint if c.high else 0.0 for c in eligible]))
            # One is always allowed.
            least = 0 if ledger.high_blocks else min(c.footprint for c in eligible if c.high)
            room.append(max(self._cap - ledger.high_blocks, least))
        tokens = np.array([c.new_tokens for c in eligible], dtype=np.float64)
        budget = max(self._room.budget_tokens, 1)
        chosen = pack(tokens, np.stack(columns, axis=1), budget, np.array(room))
        if link_s is None and len(chosen) > self._room.slots:
            columns.append(np.ones(len(eligible)))
            room.append(float(self._room.slots))
            chosen = pack(tokens, np.stack(columns, axis=1), budget, np.array(room))
        return chosen

    def _take(self, candidate: Candidate) -> None:
        if not self._admit(candidate):
            candidate.why = candidate.why or VRAM
            return
        candidate.admitted = True
        self._alone = False
        self._free -= candidate.blocks
        if not candidate.quote.host_tokens:
            self._room.slots -= 1
            self._room.budget_tokens -= candidate.new_tokens


def pack(tokens: Floats, sizes: Floats, budget_tokens: float, room: Floats) -> list[int]:
    """Choose the requests that fill an iteration (paper 001, §7.4): a greedy knapsack.

    It maximises tokens up to the budget, within the room of every scarce resource. Prefill is
    chunked, so tokens beyond the budget cost nothing. The best of greedy fills in four orders comes
    close to the optimum. First come, first served is taken where it is nearly as good, so that no
    request is bypassed for a small gain.

    Args:
        tokens: of each request, shape (n,).
        sizes: needs of each request, shape (n, resources).
        budget_tokens: of the iteration.
        room: amount of each resource, shape (resources,).

    Returns:
        Indices of the chosen requests, oldest first.
    """
    if not len(tokens) or budget_tokens <= 0:
        return []
    wants, needs, have = tokens.tolist(), sizes.tolist(), room.tolist()

    def fill(order: Iterable[int]) -> tuple[list[int], float]:
        """Take requests that fit, in this order, until the budget is used."""
        chosen: list[int] = []
        left, filled = have, 0.0
        for index in order:
            after = [a - b for a, b in zip(left, needs[index], strict=True)]
            if min(after) < 0:
                continue
            left = after
            chosen.append(index)
            filled += wants[index]
            if filled >= budget_tokens:
                break
        return chosen, filled

    first_come, first_tokens = best, best_tokens = fill(range(len(wants)))
    if first_tokens >= _GOOD_ENOUGH * min(budget_tokens, float(tokens.sum())):
        return first_come
    share = (sizes / np.maximum(room, 1e-12)).max(axis=1)
    for rank in (-tokens / (share + 1e-12), -tokens, share):
        chosen, filled = fill(np.argsort(rank, kind="stable").tolist())
        if filled > best_tokens:
            best, best_tokens = chosen, filled
    good_enough = first_tokens >= _GOOD_ENOUGH * min(best_tokens, budget_tokens)
    return first_come if good_enough else sorted(best)
