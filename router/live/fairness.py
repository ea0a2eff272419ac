"""How tenants stand towards each other at this moment: credit, and the oldest that waits. Pure.

Credit is what the schedulers even out: the resource that a tenant used most, in seconds of the
whole resource, by its weight, compared with the mean of all that were charged anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kappa.protocol import Charge
from router.live.records import DecisionRecord


def credits_s(charged: Mapping[str, Charge], weights: Mapping[str, float]) -> dict[str, float]:
    """Seconds of service, by weight, that each tenant is behind the mean; below 0: ahead of it.

    weights: 1 where a tenant has none.
    """
    served = {
        tenant: max(charge) / weights.get(tenant, 1.0)
        for tenant, charge in charged.items()
        if max(charge) > 0
    }
    mean_s = sum(served.values()) / len(served) if served else 0.0
    return {tenant: mean_s - seconds for tenant, seconds in served.items()}


def oldest_waits_s(records: Iterable[DecisionRecord], now_s: float) -> dict[str, float]:
    """Seconds that each tenant's oldest request has waited for its engine to admit it."""
    oldest: dict[str, float] = {}
    for record in records:
        waits = not record.end and record.admitted is None and record.ttft_s is None
        if waits:
            waited_s = max(now_s - record.time_s, 0.0)
            oldest[record.tenant] = max(waited_s, oldest.get(record.tenant, 0.0))
    return oldest
