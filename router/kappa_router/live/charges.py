"""Charges of every tenant in the whole cluster, added up from the workers' own counters.

Workers charge alone; a decider sends each, with its requests, what the others charged: else a
tenant would multiply its share by spreading. If one worker keeps the weighted charges of two
tenants that both wait there within U seconds of each other, W workers keep them within U + (W - 1)
* L / w in all; L is the age of its newest report, w the lesser weight; a worker charges a tenant at
most a second of a resource per second. What a worker charged between its last report and its death
is lost. Seconds are whole nanoseconds: sums are exact in any order. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kappa.protocol import MAX_TENANTS, Charge, TenantCharge

# Tenants that are sent to a worker: the most recently active.
SENT_TENANTS = 64

_NS = 1e9
_MAX_GONE = 64

_Ns = tuple[int, ...]
_ZERO: _Ns = (0, 0, 0)


@dataclass(slots=True)
class _Worker:
    """A worker's counters in its present life, as of its newest report."""

    time_s: float = float("-inf")
    steps_total: int = 0
    charged: dict[str, _Ns] = field(default_factory=dict)


@dataclass(slots=True)
class _TenantAccount:
    """A tenant's charges by all workers ever."""

    charged: _Ns = _ZERO
    # When one of them last grew.
    active_s: float = float("-inf")


class Charges:
    """The tenants' accounts; no charge of a tenant that is kept ever decreases. At most
    `max_tenants` are kept; should a forgotten one come back, it begins with its workers' counters
    as of then."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._workers: dict[str, _Worker] = {}
        self._gone: OrderedDict[str, _Worker] = OrderedDict()
        self._accounts: dict[str, _TenantAccount] = {}

    def report(
        self, worker: str, charges: Iterable[TenantCharge], time_s: float, steps_total: int = 0
    ) -> dict[str, Charge]:
        """A worker's counters, of all its tenants or of those that changed; what each gained.
        time_s: by the worker's clock; a report that is not newer changes nothing. Counters, or
        steps_total, that fall are those of a worker that started again: what the dead one charged
        stays."""
        known = self._workers.get(worker) or self._gone.pop(worker, None) or _Worker()
        self._workers[worker] = known
        if time_s <= known.time_s:
            return {}
        now = {c.tenant: tuple(round(seconds * _NS) for seconds in c.charge) for c in charges}
        fell = any(min(_minus(ns, known.charged.get(t, _ZERO))) < 0 for t, ns in now.items())
        if fell or steps_total < known.steps_total:
            known.charged = {}
        known.time_s, known.steps_total = time_s, steps_total
        gained = {}
        for tenant, ns in now.items():
            more = _minus(ns, known.charged.get(tenant, _ZERO))
            known.charged[tenant] = ns
            if any(more):
                account = self._accounts.setdefault(tenant, _TenantAccount())
                account.charged = tuple(map(sum, zip(account.charged, more, strict=True)))
                account.active_s = max(account.active_s, time_s)
                gained[tenant] = _seconds(more)
        surplus = max(len(self._accounts) - self._max_tenants, 0)
        for tenant in heapq.nsmallest(surplus, self._accounts, key=self._activity):
            del self._accounts[tenant]
            for each in (*self._workers.values(), *self._gone.values()):
                each.charged.pop(tenant, None)
        return gained

    def left(self, worker: str) -> None:
        """A worker is gone; what it charged stays, and its counters are remembered in case it comes
        back."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._gone[worker] = known
            while len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)

    def elsewhere(self, worker: str, limit: int = SENT_TENANTS) -> dict[str, Charge]:
        """Charges by all others, earlier lives of `worker` included: by tenant, the most
        recently active first, at most `limit` of them; those charged nothing are left out."""
        here = self._workers.get(worker, _Worker()).charged
        found = {}
        for tenant in heapq.nlargest(limit, self._accounts, key=self._activity):
            ns = _minus(self._accounts[tenant].charged, here.get(tenant, _ZERO))
            if any(ns):
                found[tenant] = _seconds(ns)
        return found

    def totals(self) -> dict[str, Charge]:
        """Charges of each tenant by all workers, by name."""
        return {name: _seconds(a.charged) for name, a in sorted(self._accounts.items())}

    def _activity(self, tenant: str) -> tuple[float, str]:
        return self._accounts[tenant].active_s, tenant


def credits_s(charged: Mapping[str, Charge], weights: Mapping[str, float]) -> dict[str, float]:
    """Seconds of service, by weight (1 where there is none), that each tenant is behind the mean of
    all that were charged anything; below 0: ahead. That is what the schedulers even out: the
    resource that a tenant used most."""
    served = {
        tenant: max(charge) / weights.get(tenant, 1.0)
        for tenant, charge in charged.items()
        if max(charge) > 0
    }
    mean_s = sum(served.values()) / len(served) if served else 0.0
    return {tenant: mean_s - seconds for tenant, seconds in served.items()}


def _seconds(ns: _Ns) -> Charge:
    return Charge(*(value / _NS for value in ns))


def _minus(a: _Ns, b: _Ns) -> _Ns:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]
