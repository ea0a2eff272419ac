"""What each tenant has been given, and who goes first.

A tenant is charged for three resources, each in seconds of the whole of it: VRAM (blocks held over
time over all blocks), gpu (its tokens' part of each iteration) and link (its loads). Its *service*
is the greatest of the three over its weight (dominant resource fairness, Ghodsi et al., NSDI 2011),
and whoever has had least goes first, as with the virtual counters of VTC (Sheng et al., OSDI 2024):
a cached token costs no compute, but its blocks and its load are not free. A tenant of which nothing
waited is lifted, when something does, to the least service among those who wait, less what it was
behind when it last waited, so that it cannot save up; if nobody else waits, nobody is owed
anything, and it is lifted to the greatest of all.

What other workers charged counts like one's own: a tenant does not multiply its share by spreading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kappa.protocol import Charge

_VRAM, _GPU, _LINK = 0, 1, 2
# Weight of the newest in the mean charge of a request.
_NEWEST = 0.2
# Less than any charge: what rounding leaves of blocks given back.
_NOTHING_BLOCKS = 1e-6


class _Account:
    """behind_s: how far it was behind the least of the others when the last of its requests went.
    waiting: its requests that wait; blocks: those that the others hold; mean_s: what one cost."""

    __slots__ = ("behind_s", "blocks", "elsewhere", "lift_s", "mean_s", "own", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.own = [0.0, 0.0, 0.0]
        self.elsewhere = [0.0, 0.0, 0.0]
        self.lift_s = 0.0
        self.behind_s = 0.0
        self.waiting = 0
        self.blocks = 0.0
        self.mean_s = 0.0

    def service_s(self) -> float:
        own, other = self.own, self.elsewhere
        most_s = max(own[0] + other[0], own[1] + other[1], own[2] + other[2])
        return self.lift_s + most_s / self.weight


class Accounts:
    """The tenants of one engine; as many as ever came, for their charges must never fall.

    Args:
        weights: share of each tenant that is named.
        default_weight: of all others.
    """

    def __init__(self, weights: Mapping[str, float], default_weight: float) -> None:
        self._weights = dict(weights)
        self._default_weight = default_weight
        self._accounts: dict[str, _Account] = {}
        self._capacity_blocks = 1.0
        self._at_s = 0.0

    def __len__(self) -> int:
        return len(self._accounts)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = _Account(self._weights.get(tenant, self._default_weight))
            self._accounts[tenant] = account
        return account

    # -- events -------------------------------------------------------------------------------

    def came(self, tenant: str) -> None:
        """One more request of this tenant waits."""
        account = self._account(tenant)
        if not account.waiting and len(self._accounts) > 1:
            level_s = self._least_waiting_s()
            if level_s is None:
                level_s = max(a.service_s() for a in self._accounts.values())
            else:
                level_s -= account.behind_s
            account.lift_s += max(level_s - account.service_s(), 0.0)
        account.waiting += 1

    def left(self, tenant: str) -> None:
        """One fewer waits: it was admitted, or is gone."""
        account = self._accounts[tenant]
        account.waiting -= 1
        if not account.waiting:
            level_s = self._least_waiting_s()
            account.behind_s = 0.0 if level_s is None else max(level_s - account.service_s(), 0.0)

    def _least_waiting_s(self) -> float | None:
        waiting = (a.service_s() for a in self._accounts.values() if a.waiting)
        return min(waiting, default=None)

    def settle(self, now_s: float, capacity_blocks: int) -> None:
        """Charge for the blocks held until now."""
        seconds = now_s - self._at_s
        if seconds > 0:
            share = seconds / self._capacity_blocks
            for account in self._accounts.values():
                if account.blocks > 0:
                    account.own[_VRAM] += share * account.blocks
            self._at_s = now_s
        self._capacity_blocks = float(max(capacity_blocks, 1))

    def hold(self, tenant: str, blocks: float) -> None:
        """It holds so many blocks more, or fewer; `settle` comes first."""
        account = self._account(tenant)
        held = account.blocks + blocks
        account.blocks = held if held > _NOTHING_BLOCKS else 0.0

    def computed(self, seconds: float, tokens: Mapping[str, int]) -> None:
        """Iterations took so long, with so many tokens of each."""
        total = sum(tokens.values())
        if total <= 0:
            return
        for tenant, count in tokens.items():
            self._account(tenant).own[_GPU] += seconds * count / total

    def loaded(self, tenant: str, seconds: float) -> None:
        """Its load occupied the link for so long."""
        self._account(tenant).own[_LINK] += seconds

    def ended(self, tenant: str, seconds: float) -> None:
        """One of its requests is over and was charged so much; teaches the mean."""
        account = self._account(tenant)
        account.mean_s += _NEWEST * (seconds / account.weight - account.mean_s)

    def charged_elsewhere(
        self, charges: Mapping[str, Charge], weights: Mapping[str, float]
    ) -> None:
        """What other workers charged so far; late and repeated reports change nothing."""
        for tenant, weight in weights.items():
            if math.isfinite(weight) and weight > 0:
                self._weights[tenant] = weight
                self._account(tenant).weight = weight
        for tenant, charge in charges.items():
            known = self._account(tenant).elsewhere
            for resource, seconds in enumerate(charge):
                if math.isfinite(seconds):
                    known[resource] = max(known[resource], seconds)

    # -- questions ----------------------------------------------------------------------------

    def service_s(self, tenant: str) -> float:
        """Seconds of its dominant resource over its weight, lifts included."""
        return self._account(tenant).service_s()

    def weight(self, tenant: str) -> float:
        return self._account(tenant).weight

    def mean_s(self, tenant: str) -> float:
        """Service that one of its requests cost, on average; 0 before one has ended."""
        return self._account(tenant).mean_s

    def charges(self) -> dict[str, Charge]:
        """What this engine has charged each tenant so far, if anything."""
        return {tenant: Charge(*a.own) for tenant, a in self._accounts.items() if any(a.own)}
