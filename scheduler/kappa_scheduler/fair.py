"""The fair rule: fill iterations within VRAM and link, without starvation. Events in, plans out.

An iteration has three scarce things: tokens of its budget, blocks, and the link's time. Stock
engines count the first only and stop at the first request with blocks that do not fit, so a long
cached context holds up all requests behind it. Here:

- Loads start just in time (`loads`), so requests that wait for the link hold no blocks.
- Requests that can be computed at once are packed (`admission`).
- While requests of high ratio (more of VRAM than of the budget) and others both wait, each of the
  two classes may hold its part of the blocks that both want.
- Tenants go in the order of their service less the credit that waiting earns (`tenants`); within a
  tenant, first come, first served, with a head start in seconds for each class of priority.
- Where there are several tenants, those with something running leave some slots and blocks to those
  with nothing, so that no tenant waits for another's answers to end.
- A request bypassed too often, or waiting too long, is starving: it goes first in its turn, and if
  it does not fit, blocks are set aside for it (`blocks`); then it goes first of all.

Guarantees and their assumptions: docs/adr/0006. Called by the engine's adapter and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from kappa.protocol import Charge
from kappa_scheduler.admission import AdmissionRound, Candidate, WindowFill
from kappa_scheduler.blocks import Changes, Ledger
from kappa_scheduler.config import FairConfig, LinkRates
from kappa_scheduler.loads import JustInTime
from kappa_scheduler.tenant_charges import FAR_AHEAD, IN_TURN, TenantQueues
from kappa_scheduler.work import BUDGET, CAP, LINK, PENDING, SLOTS, Plan, Room, Work, last_in_line

# Weight of the newest answer in their mean length.
_NEWEST = 0.05
# How much further to look for a load to start, when the rest of the iteration is full.
_LOOK_FURTHER = 16


class _NoOp(NamedTuple):
    """The finding that no waiting request fits; valid until an event or one of these changes."""

    version: int  # of the memory
    available: int  # blocks
    budget_tokens: int | None  # of the iteration; None where the reasons do not depend on it
    for_link: bool  # some wait for the link
    starving_s: float  # when the next request is starving
    passed: dict[str, int]

    def lasts(self, room: Room, now_s: float, link: JustInTime) -> bool:
        """Whether looking again would find the same."""
        memory = room.memory
        same = (
            memory.version == self.version
            and memory.available() == self.available
            and self.budget_tokens in (None, room.budget_tokens)
        )
        return same and now_s < self.starving_s and not (self.for_link and link.open(now_s))


class Fair:
    """The default rule of every worker (`kappa_scheduler.work.Rule`)."""

    name = "fair"
    packs = True
    timed = True

    def __init__(self, config: FairConfig, link: LinkRates | None = None) -> None:
        self.config = config
        self.max_skips = 0
        self.max_wait_s = 0.0
        self._tenants = TenantQueues(config)
        self._ledger = Ledger()
        self._link = JustInTime(link)
        self._seq = 0
        self._output_tokens = float(config.expected_output_tokens)
        self._admitted_s: dict[Work, float] = {}
        self._capacity_blocks = 1
        self._no_op: _NoOp | None = None

    def __len__(self) -> int:
        return len(self._tenants)

    # -- events -------------------------------------------------------------------------------

    def add(self, work: Work, now_s: float) -> bool:
        """As `Rule.add`: a request of another tenant than those that wait may be first in turn."""
        work.join(self._seq, now_s, self.config.class_s)
        self._seq += 1
        self._event(now_s)
        self._tenants.enter(work)
        return len(self._tenants) <= self.config.window or self._tenants.waiting > 1

    def returned(self, work: Work, now_s: float) -> None:
        self._wait_again(work, now_s, preempted=False)

    def preempted(self, work: Work, now_s: float) -> None:
        self._wait_again(work, now_s, preempted=True)

    def _wait_again(self, work: Work, now_s: float, preempted: bool) -> None:
        self._release(work, now_s, over=False)
        self._link.forget(work, now_s)
        self._tenants.enter(work, preempted)

    def landed(self, work: Work, now_s: float) -> None:
        self._no_op = None
        self._tenants.loaded(work.tenant, self._link.landed(work, now_s))

    def finished(self, work: Work, output_tokens: int, now_s: float) -> None:
        self._release(work, now_s)
        # How far a load came that was broken off is not known.
        self._tenants.loaded(work.tenant, self._link.forget(work, now_s))
        if output_tokens > 0:
            self._output_tokens += _NEWEST * (output_tokens - self._output_tokens)

    def aborted(self, work: Work, now_s: float) -> None:
        self._event(now_s)
        self._tenants.leave(work)
        if self._ledger.reserved_for is work:
            self._ledger.unreserve()

    def ran(
        self, seconds: float, tokens: Mapping[str, int], now_s: float, iterations: int = 1
    ) -> None:
        self._tenants.settle(now_s, self._capacity_blocks)
        self._tenants.computed(seconds, tokens)
        self._charge(self._ledger.grow())
        self._link.ran(seconds / max(iterations, 1))

    def charged_elsewhere(
        self, charges: Mapping[str, Charge], weights: Mapping[str, float], now_s: float
    ) -> None:
        """Take other workers' cumulative charges, and the weights of some tenants."""
        self._event(now_s)
        self._tenants.charged_elsewhere(charges, weights)

    def charges(self) -> dict[str, Charge]:
        """This engine's charges so far, by tenant."""
        return self._tenants.charges()

    def victim(self, running: Sequence[Work]) -> Work:
        """The last in line (`last_in_line`) of the tenant with the most service."""
        served = {work.tenant: self._tenants.service_s(work.tenant) for work in running}
        most = max(served.values())
        return last_in_line([work for work in running if served[work.tenant] == most])

    # -- the next iteration -------------------------------------------------------------------

    def plan(self, room: Room, now_s: float) -> Plan:
        plan = Plan()
        self._capacity_blocks = room.memory.capacity_blocks
        self._tenants.settle(now_s, self._capacity_blocks)
        if not len(self):
            return plan
        if self._no_op is not None and self._no_op.lasts(room, now_s, self._link):
            plan.passed, plan.reserved = self._no_op.passed, self._ledger.reserved_for
            return plan
        candidates = self._candidates(room, now_s, plan)
        if any(candidate.tier == FAR_AHEAD for candidate in candidates):
            # Others are so far ahead that the first in turn is owed its blocks.
            first = candidates[1 if candidates[0].work is self._ledger.reserved_for else 0]
            first.starving = first.starving or first.tier == IN_TURN

        def admit(candidate: Candidate) -> bool:
            return self._admit(candidate, room, plan, now_s)

        AdmissionRound(self._ledger, self._link, room, now_s, candidates, admit).run()
        plan.reserved = self._ledger.reserved_for
        # Count bypasses by reason, and for each the requests behind it that took what it lacked.
        behind = loads_behind = 0
        for candidate in reversed(candidates):
            why, work = candidate.why, candidate.work
            if not why:
                behind += 1
                loads_behind += bool(candidate.quote.host_tokens)
                continue
            plan.passed[why] = plan.passed.get(why, 0) + 1
            work.skips += loads_behind if why == LINK else behind
            self.max_skips = max(self.max_skips, work.skips)
        self._no_op = None if plan.admitted else self._no_op_for(candidates, room, plan)
        return plan

    def _candidates(self, room: Room, now_s: float, plan: Plan) -> list[Candidate]:
        """Waiting requests in order of turn, each with its quote.

        The one with the reservation comes first. As many as the window holds, or until those seen
        fill the iteration by themselves.
        """
        config, reserved = self.config, self._ledger.reserved_for
        turns: Iterable[tuple[Work, int]] = self._tenants.in_turn(now_s)
        if reserved is not None:
            others = (turn for turn in turns if turn[0] is not reserved)
            turns = chain(((reserved, IN_TURN),), others)
        starving_since_s = now_s - config.due_after_s
        running = {work.tenant for work in self._admitted_s}
        # Left by tenants with something running to those with nothing.
        share = config.headroom if self._tenants.known > 1 else 0.0
        leaves_blocks = math.ceil(share * room.memory.capacity_blocks)
        leaves_slots = math.ceil(share * (room.slots + room.running))
        fill = WindowFill(self._ledger, room)
        further = _LOOK_FURTHER if self._link.open(now_s) else 0
        candidates: list[Candidate] = []
        for work, tier in turns:
            candidate = self._candidate(work, room)
            if candidate is None:
                plan.passed[PENDING] = plan.passed.get(PENDING, 0) + 1
                continue
            candidate.tier = tier
            waited_long = work.arrival_s + work.late_s <= starving_since_s
            candidate.starving = work.skips > config.max_skips or waited_long
            candidate.reserves = config.reserve and tier == IN_TURN
            if work.tenant in running:
                candidate.leaves_blocks, candidate.leaves_slots = leaves_blocks, leaves_slots
            # The first request of a tenant with nothing running only.
            running.add(work.tenant)
            candidates.append(candidate)
            if not fill.full:
                fill.add(candidate, work is reserved)
            elif further:
                further -= 1
            else:
                break
        return candidates

    def _candidate(self, work: Work, room: Room) -> Candidate | None:
        """A request with its quote; None while it needs blocks being loaded for another."""
        memory, total = room.memory, work.total_tokens
        quote = memory.quote(work)
        if quote is None:
            return None
        size = memory.block_tokens
        prompt_blocks = -(-total // size)
        answer_tokens = min(work.max_tokens, int(self._output_tokens))
        reserve = -(-(total + answer_tokens) // size) - prompt_blocks if quote.grows else 0
        prompt_blocks -= quote.elsewhere_blocks
        if work is self._ledger.reserved_for:
            reserve = self._ledger.promised(prompt_blocks, reserve)
        blocks_per_token = memory.capacity_blocks / max(room.budget_tokens, 1)
        return Candidate(work, quote, prompt_blocks, reserve, blocks_per_token)

    def _no_op_for(self, candidates: list[Candidate], room: Room, plan: Plan) -> _NoOp | None:
        """After an iteration without admissions: the finding, if it stays valid for a while."""
        reasons = {candidate.why for candidate in candidates}
        memory, budget = room.memory, room.budget_tokens
        if not candidates or reasons & {BUDGET, SLOTS} or budget <= 0 or room.slots <= 0:
            return None
        arrivals_s = [c.work.arrival_s + c.work.late_s for c in candidates if not c.starving]
        starving_s = min(arrivals_s, default=math.inf) + self.config.due_after_s
        state = memory.version, memory.available(), budget if CAP in reasons else None
        return _NoOp(*state, LINK in reasons, starving_s, plan.passed)

    # -- bookkeeping --------------------------------------------------------------------------

    def _admit(self, candidate: Candidate, room: Room, plan: Plan, now_s: float) -> bool:
        work, found = candidate.work, candidate.quote
        if found.shared_key and any(
            q.host_tokens and q.shared_key == found.shared_key for _, q in plan.admitted
        ):
            # A request admitted just now may be loading its blocks.
            again = room.memory.quote(work)
            if again is None:
                candidate.why = PENDING
                return False
            found = again
        quote = room.memory.take(work, found)
        if quote is None:
            return False
        self._tenants.leave(work)
        blocks = candidate.footprint - candidate.reserve
        self._charge(self._ledger.admit(work, quote, blocks, candidate.reserve, candidate.high))
        if quote.host_tokens:
            self._link.start(work, quote.host_tokens, now_s)
        self.max_wait_s = max(self.max_wait_s, now_s - work.arrival_s)
        self._admitted_s[work] = now_s
        plan.admitted.append((work, quote))
        return True

    def _event(self, now_s: float) -> None:
        self._no_op = None
        self._tenants.settle(now_s, self._capacity_blocks)

    def _release(self, work: Work, now_s: float, over: bool = True) -> None:
        self._event(now_s)
        if work not in self._ledger:
            return
        changes = self._ledger.release(work)
        share = -changes[work][1]
        held_s = now_s - self._admitted_s.pop(work, now_s)
        self._charge(changes)
        if over:
            self._tenants.ended(work.tenant, share * held_s / self._capacity_blocks)

    def _charge(self, changes: Changes) -> None:
        for tenant, blocks in changes.values():
            self._tenants.hold(tenant, blocks)
