"""The tenants of one engine: their waiting requests, their charges, and their turns.

A tenant is charged for three resources, each in seconds of the whole resource: VRAM (blocks held
over time over all blocks), gpu (its tokens' part of each iteration) and link (its loads). Its
*service* is the greatest of the three over its weight (dominant resource fairness, Ghodsi et al.,
NSDI 2011). The tenant with the least service goes first, as with the virtual counters of VTC (Sheng
et al., OSDI 2024): a cached token costs no compute, but its blocks and its load are not free.

When a tenant without waiting requests gets one, its service is lifted to the least among tenants
that wait, less its arrears from when it last waited, so that it cannot save up. If no other tenant
waits there are no arrears, and it is lifted to the greatest of all.

Charges of other workers count like those of this one: spreading over workers gains no share.

A class of priority is a place in line (`Work.join`). Within a tenant it decides the order; among
tenants it is worth, once, what waiting as long would earn. Shares come from weights alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain

from kappa.protocol import Charge
from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import IN_LINE, Work

# Tiers of tenants: in turn; ahead; so far ahead that they get nothing while a tenant in turn lacks
# blocks.
IN_TURN, AHEAD, FAR_AHEAD = range(3)

_VRAM, _GPU, _LINK = 0, 1, 2
# Weight of the newest in the mean charge of a request.
_NEWEST = 0.2
# Less than any charge: the rounding error of blocks given back.
_NOTHING_BLOCKS = 1e-6


@dataclass(slots=True, eq=False)
class _Tenant:
    weight: float
    # Its requests that wait, in line; those that ran before go first.
    fresh: list[Work] = field(default_factory=list)
    preempted: list[Work] = field(default_factory=list)
    # Seconds of VRAM, gpu and link charged here and by other workers.
    own: list[float] = field(default_factory=lambda: [0.0] * 3)
    elsewhere: list[float] = field(default_factory=lambda: [0.0] * 3)
    lift_s: float = 0.0
    # How far it was behind the least of the others when the last of its requests went.
    behind_s: float = 0.0
    # Held by its admitted requests.
    blocks: float = 0.0
    # Mean charge of a request.
    mean_s: float = 0.0

    def service_s(self) -> float:
        own, other = self.own, self.elsewhere
        most_s = max(own[0] + other[0], own[1] + other[1], own[2] + other[2])
        return self.lift_s + most_s / self.weight


class TenantQueues:
    """All tenants that ever came, since charges must never fall. `len()`: requests that wait."""

    def __init__(self, config: FairConfig) -> None:
        self._config = config
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, _Tenant] = {}
        self._count = 0
        self._capacity_blocks = 1.0
        self._at_s = 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def known(self) -> int:
        """The number of tenants that ever came."""
        return len(self._tenants)

    @property
    def waiting(self) -> int:
        """The number of tenants with waiting requests."""
        return len(self._waiting)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            weight = self._config.weights.get(name, self._config.default_weight)
            tenant = self._tenants[name] = _Tenant(weight)
        return tenant

    # -- who waits ----------------------------------------------------------------------------

    def enter(self, work: Work, preempted: bool = False) -> None:
        """Add a waiting request in its place in line; preempted ones go before the others."""
        tenant = self._tenant(work.tenant)
        if work.tenant not in self._waiting:
            if len(self._tenants) > 1:
                level_s = self._least_waiting_s()
                if level_s is None:
                    level_s = max(t.service_s() for t in self._tenants.values())
                else:
                    level_s -= tenant.behind_s
                tenant.lift_s += max(level_s - tenant.service_s(), 0.0)
            self._waiting[work.tenant] = tenant
        insort(tenant.preempted if preempted else tenant.fresh, work, key=IN_LINE)
        self._count += 1

    def leave(self, work: Work) -> None:
        """Remove a request that was admitted or is gone; `KeyError` if it did not wait."""
        tenant = self._waiting[work.tenant]
        for works in (tenant.fresh, tenant.preempted):
            at = bisect_left(works, IN_LINE(work), key=IN_LINE)
            if at < len(works) and works[at] is work:
                del works[at]
                break
        else:
            raise KeyError(work)
        self._count -= 1
        if not (tenant.fresh or tenant.preempted):
            del self._waiting[work.tenant]
            level_s = self._least_waiting_s()
            tenant.behind_s = 0.0 if level_s is None else max(level_s - tenant.service_s(), 0.0)

    def _least_waiting_s(self) -> float | None:
        return min((tenant.service_s() for tenant in self._waiting.values()), default=None)

    def in_turn(self, now_s: float) -> Iterator[tuple[Work, int]]:
        """Waiting requests in order of turn, each with its tier, as many as the window holds.

        A tenant's key is its service, less the credit that the first in its queue has earned (until
        that is starving), plus the expected cost of requests before this one in its queue. A tenant
        is far ahead if its key exceeds the least by more than the slack and the most credit.
        """
        config, left = self._config, self._config.window
        queues: dict[str, Iterator[Work]] = {
            name: chain(tenant.preempted, tenant.fresh) for name, tenant in self._waiting.items()
        }
        if len(queues) == 1:
            for work in next(iter(queues.values())):
                if not left:
                    return
                left -= 1
                yield work, IN_TURN
            return
        heads: list[tuple[float, int, str, Work, Iterator[Work]]] = []
        for name, queue in queues.items():
            work, tenant = next(queue), self._waiting[name]
            # Bounded, or a tenant that floods the queue would gain by how long its own wait.
            waited_s = min(max(now_s - work.arrival_s, 0.0), config.due_after_s)
            key = tenant.service_s() - config.credit * (waited_s - work.late_s)
            heads.append((key, work.seq, name, work, queue))
        heapify(heads)
        limit = heads[0][0] + config.slack_s
        far = limit + config.credit * config.due_after_s
        far_ahead = {name for key, _, name, _, _ in heads if key > far}
        while heads and left:
            key, _, name, work, queue = heads[0]
            left -= 1
            yield work, FAR_AHEAD if name in far_ahead else IN_TURN if key <= limit else AHEAD
            following = next(queue, None)
            if following is None:
                heappop(heads)
            else:
                key += self._tenants[name].mean_s
                heapreplace(heads, (key, following.seq, name, following, queue))

    # -- what is charged ----------------------------------------------------------------------

    def settle(self, now_s: float, capacity_blocks: int) -> None:
        """Charge for the blocks held until now."""
        seconds = now_s - self._at_s
        if seconds > 0:
            share = seconds / self._capacity_blocks
            for tenant in self._tenants.values():
                if tenant.blocks > 0:
                    tenant.own[_VRAM] += share * tenant.blocks
            self._at_s = now_s
        self._capacity_blocks = float(max(capacity_blocks, 1))

    def hold(self, name: str, blocks: float) -> None:
        """Add blocks to those that a tenant holds, or remove them; `settle` comes first."""
        tenant = self._tenant(name)
        held = tenant.blocks + blocks
        tenant.blocks = held if held > _NOTHING_BLOCKS else 0.0

    def computed(self, seconds: float, tokens: Mapping[str, int]) -> None:
        """Charge iterations' seconds to tenants by their tokens."""
        total = sum(tokens.values())
        for name, count in tokens.items() if total > 0 else ():
            self._tenant(name).own[_GPU] += seconds * count / total

    def loaded(self, name: str, seconds: float) -> None:
        """Charge a load's link seconds."""
        self._tenant(name).own[_LINK] += seconds

    def ended(self, name: str, seconds: float) -> None:
        """Add the charge of a request that ended to the tenant's mean."""
        tenant = self._tenant(name)
        tenant.mean_s += _NEWEST * (seconds / tenant.weight - tenant.mean_s)

    def charged_elsewhere(
        self, charges: Mapping[str, Charge], weights: Mapping[str, float]
    ) -> None:
        """Take other workers' cumulative charges, none below zero, and weights above it; late and
        repeated reports change nothing."""
        for name, weight in weights.items():
            self._tenant(name).weight = weight
        for name, charge in charges.items():
            known = self._tenant(name).elsewhere
            known[:] = map(max, known, charge)

    def service_s(self, name: str) -> float:
        """A tenant's seconds of its dominant resource over its weight, lifts included."""
        return self._tenant(name).service_s()

    def charges(self) -> dict[str, Charge]:
        """This engine's charges so far, of tenants that have any."""
        return {name: Charge(*t.own) for name, t in self._tenants.items() if any(t.own)}
