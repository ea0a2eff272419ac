"""The figures of a load test by owner: by node, by tenant, by class of request.

A class is what bounds a request on the node that served it: `memory-bound` if its ratio is at or
above the node's critical ratio, else `compute-bound`. The number of owners is bounded, so that a
file that names a tenant per request cannot fill the memory; those beyond share one row.
"""

from __future__ import annotations

from typing import Any

from loadtest.replay.quantiles import Quantiles
from loadtest.replay.record import Record

MOST_OWNERS = 512
OTHERS = "(all others)"


def judged_class(record: Record) -> str:
    """What bounds it on its node; empty where the endpoint does not tell."""
    if record.ratio is None or record.crit is None:
        return ""
    return "memory-bound" if record.ratio >= record.crit else "compute-bound"


class _Owner:
    def __init__(self) -> None:
        self.requests = self.completed = self.judged = self.met = 0
        self.expected_cached = self.told = self.device = self.cached = self.new = 0
        self.ttft, self.tpot, self.e2e, self.ratio = (Quantiles() for _ in range(4))
        self.speed, self.tokens_per_s = Quantiles(), Quantiles()

    def add(self, record: Record, tpot_s: float, met: bool | None, speed: float) -> None:
        self.requests += 1
        self.judged += met is not None
        self.met += bool(met)
        self.expected_cached += record.cached_tokens
        if record.ratio is not None:
            self.ratio.add(record.ratio)
        actual = record.actual or {}
        if actual.get("cached_tokens") is not None:
            self.told += 1
            self.device += int(actual.get("device_tokens") or 0)
            self.cached += int(actual["cached_tokens"])
            self.new += int(actual.get("new_tokens") or 0)
        if record.error:
            return
        self.completed += 1
        e2e_s = record.ended_s - record.scheduled_s
        self.e2e.add(e2e_s)
        self.tpot.add(tpot_s)
        self.speed.add(speed)
        if record.ttft_s is not None:
            self.ttft.add(record.ttft_s)
        if e2e_s > 0:
            self.tokens_per_s.add(record.generated_tokens / e2e_s)

    def row(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "completed": self.completed,
            "failed": self.requests - self.completed,
            "ttft_s": self.ttft.spread(),
            "tpot_s": self.tpot.spread(),
            "e2e_s": self.e2e.spread(),
            "met": self.met / self.judged if self.judged else None,
            "kappa_p50": self.ratio.quantile(0.5),
            "expected_cached_tokens": self.expected_cached,
            "device_tokens": self.device if self.told else None,
            "cached_tokens": self.cached if self.told else None,
            "new_tokens": self.new if self.told else None,
        }


class Groups:
    """Owners by name."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}

    def add(self, name: str, record: Record, tpot_s: float, met: bool | None, speed: float) -> None:
        """Count a request as its owner's; tpot_s and speed (idle over actual TTFT) may be NaN, and
        met None if there is no objective for it."""
        if name not in self._owners and len(self._owners) >= MOST_OWNERS:
            name = OTHERS
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner()
        owner.add(record, tpot_s, met, speed)

    def rows(self, nameless: str) -> list[dict[str, Any]]:
        """A row per owner, the one with most requests first; none if there is only the nameless."""
        if set(self._owners) <= {""}:
            return []
        ordered = sorted(self._owners.items(), key=lambda pair: (-pair[1].requests, pair[0]))
        return [{"name": name or nameless, **owner.row()} for name, owner in ordered]

    def means(self, figure: str) -> list[float]:
        """The mean of `speed` or `tokens_per_s` of every owner that has one."""
        found = [getattr(owner, figure).mean for owner in self._owners.values()]
        return [value for value in found if value is not None]
