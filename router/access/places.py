"""Who may have how many of a bounded number of places, so that no tenant takes them from another.

While places are free anybody gets one. When they are all taken, a tenant with less than its share
of them still gets one, above the bound: those of others run and cannot be taken back. So a tenant
below its share is never turned away for what other tenants hold. Equal tenants that come one after
the other, each filling what it may, hold at most `limit * (1 + 1/2 + ... + 1/n)` places. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from router.access.tenants import Tenant


def refused(
    open_by_tenant: Mapping[str, int],
    weights: Mapping[str, float],
    tenant: str,
    limit: int,
    elsewhere: int = 0,
) -> bool:
    """Whether one more request of `tenant` is turned away.

    A tenant's share is the part of `limit` that its weight is of all tenants' that have requests
    open, its own among them, and at least one place.

    open_by_tenant: requests open here; weights: of them and of `tenant`; elsewhere: requests open
    at other ingresses, whose tenants are not known here: taken to be spread as those here are.
    """
    here = sum(open_by_tenant.values())
    if here + elsewhere < limit:
        return False
    own = open_by_tenant.get(tenant, 0) * (1 + elsewhere / here if here else 1.0)
    active = {name for name, count in open_by_tenant.items() if count} | {tenant}
    share = limit * weights[tenant] / sum(weights[name] for name in active)
    return own + 1 > max(share, 1.0)


@dataclass(slots=True)
class Places:
    """The places that are taken. shared: whether tenants can be told apart; if not, the bound is
    all there is."""

    limit: int
    shared: bool = True
    _held: dict[Hashable, Tenant] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def take(self, holder: Hashable, tenant: Tenant, elsewhere: int = 0) -> bool:
        """Take a place for `holder` until it leaves; False: it gets none."""
        if len(self._held) + elsewhere >= self.limit and self._refused(tenant, elsewhere):
            return False
        self._held[holder] = tenant
        return True

    def leave(self, holder: Hashable) -> None:
        """Give a place back; harmless for one that holds none."""
        self._held.pop(holder, None)

    def _refused(self, tenant: Tenant, elsewhere: int) -> bool:
        if not self.shared:
            return True
        held = Counter(one.name for one in self._held.values())
        weights = {one.name: one.weight for one in (*self._held.values(), tenant)}
        return refused(held, weights, tenant.name, self.limit, elsewhere)
