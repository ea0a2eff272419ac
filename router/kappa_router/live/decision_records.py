"""The last decisions and what became of each, as workers and streams report: `GET /v1/decisions`.
Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kappa.protocol import Admission, Spent
from kappa_router.decision import Decision
from kappa_router.rollout import Arm, ShadowDecision

MEMORY = 4096

SENT_MARK = "~"
"""Stands in an id that workers are given before what no other decider, and no client, knows."""


@dataclass(slots=True)
class DecisionRecord:
    """A decision and its outcome; seconds are real ones."""

    decision: Decision
    # Since the epoch.
    time_s: float
    # The share of workers that had something to do.
    load: float
    tenant: str = ""
    # None until the first token.
    ttft_s: float | None = None
    # As its worker reports, None until then: tokens found, and seconds spent.
    admitted: Admission | None = None
    spent: Spent | None = None
    # Of its answers; None until its worker reports its end.
    generated_tokens: int | None = None
    # Its engine failed while it answered.
    engine_failed: bool = False
    # As `LiveRouter.release` names it; empty while it is open.
    end: str = ""
    # 1 if another worker had failed the request before.
    attempt: int = 0
    # Workers passed over because their breaker was open or they were leaving.
    avoided: tuple[str, ...] = ()
    # The rule that steered it, and our decision where another did.
    steered: Arm = "kappa"
    shadow: ShadowDecision | None = None
    # The id by which its worker knows it.
    sent_as: str = ""
    # Node and predicted TTFT of the soonest worker besides the chosen one.
    soonest_other: tuple[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the candidates."""
        decision, chosen = self.decision, self.decision.chosen
        actual, spent, ttft_s = self.admitted, self.spent, self.ttft_s
        queue_s = None
        if spent is not None and ttft_s is not None:
            # What neither its own load nor the steps that computed its prompt account for.
            queue_s = max(ttft_s - spent.load_s - spent.compute_s, 0.0)
        return {
            "request_id": decision.request_id,
            "time_s": self.time_s,
            "tenant": self.tenant,
            "node": chosen.node.name,
            "paced": chosen.node.source == "paced",
            "policy": decision.policy,
            "reason": decision.reason,
            "kind": decision.kind,
            "bound": chosen.bound,
            "ratio": chosen.counts.ratio,
            "kappa_crit": chosen.kappa_crit,
            "predicted": {"recomputed_tokens": chosen.recomputed_tokens, **chosen.predicted},
            "actual": {
                "device_tokens": actual.device_tokens if actual else None,
                "cached_tokens": actual.host_tokens if actual else None,
                "disk_tokens": actual.disk_tokens if actual else None,
                "new_tokens": actual.new_tokens if actual else None,
                "queue_s": queue_s,
                "load_s": spent.load_s if spent else None,
                "compute_s": spent.compute_s if spent else None,
                "ttft_s": ttft_s,
            },
            "soonest_other": dict(zip(("node", "ttft_s"), self.soonest_other, strict=True))
            if self.soonest_other
            else None,
            "load": self.load,
            "attempt": self.attempt,
            "avoided": list(self.avoided),
            "steered": self.steered,
            "shadow": self.shadow.to_dict() if self.shadow else None,
            "end": self.end,
        }

    def log_line(self) -> dict[str, Any]:
        chosen = self.decision.chosen
        return {
            "request_id": self.decision.request_id,
            "tenant": self.tenant,
            "node": chosen.node.name,
            "paced": chosen.node.source == "paced",
            "reason": self.decision.reason,
            "ratio": round(chosen.counts.ratio, 2),
            "predicted_ttft_s": round(chosen.ttft_s, 4),
            "ttft_s": round(self.ttft_s, 4) if self.ttft_s is not None else None,
            "end": self.end,
            **({"steered": self.steered} if self.steered != "kappa" else {}),
        }


class Records(OrderedDict[str, DecisionRecord]):
    """Records by request id, at most `memory`, the oldest first. The oldest that are over go."""

    def __init__(self, memory: int = MEMORY) -> None:
        super().__init__()
        self.memory = memory

    def add(self, record: DecisionRecord) -> None:
        """Keep a record; one of the same id, of an earlier attempt, is replaced."""
        request_id = record.decision.request_id
        self.pop(request_id, None)
        self[request_id] = record
        while len(self) > self.memory:
            # One that is still served is needed until it ends, however old; they are few.
            del self[next((old for old, kept in self.items() if kept.end), next(iter(self)))]

    def own(self, sent_as: str) -> str:
        """The request that a worker knows by that id, if it is ours as it was last sent; else the
        id itself, which is then a stranger's: another decider's, or an earlier attempt's."""
        request_id = sent_as.rpartition(SENT_MARK)[0]
        record = self.get(request_id)
        return request_id if record is not None and record.sent_as == sent_as else sent_as

    def of(self, request_id: str, worker: str) -> DecisionRecord | None:
        """The record of a request if it is on that worker; the report of another is late."""
        record = self.get(request_id)
        return record if record is not None and record.decision.worker == worker else None

    def reused_tokens(self) -> Counter[str]:
        """Prompt tokens, by worker, that its caches spared these requests, as was predicted."""
        spared = Counter[str]()
        for record in self.values():
            counts = record.decision.chosen.counts
            spared[record.decision.worker] += counts.device_tokens + counts.cached_tokens
        return spared


def oldest_waits_s(records: Iterable[DecisionRecord], now_s: float) -> dict[str, float]:
    """Seconds that each tenant's oldest request has waited for its engine to admit it."""
    oldest: dict[str, float] = {}
    for record in records:
        if not record.end and record.admitted is None and record.ttft_s is None:
            waited_s = max(now_s - record.time_s, 0.0)
            oldest[record.tenant] = max(waited_s, oldest.get(record.tenant, 0.0))
    return oldest
