"""What a fault did to clients and cluster, compared with its promise: pass or fail. Pure.

Requests are judged by what their clients saw; leaks by the cluster's own figures once all is over.
Nothing is rounded in the cluster's favour: a request that was refused counts as lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.faults.catalogue import Fault


@dataclass(frozen=True, slots=True)
class Observed:
    """One request as its client saw it; times by one monotonic clock. first_s: of its first token,
    or of the whole answer where it was not streamed; None: never. announced: a stream that failed
    sent an error event."""

    sent_s: float
    first_s: float | None
    ended_s: float
    status: int
    streamed: bool
    complete: bool
    announced: bool = False
    node: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the client got all that it asked for."""
        return self.status == 200 and self.complete


@dataclass(frozen=True, slots=True)
class After:
    """The cluster once a fault is over. recovery_s: until the killed worker was back; start_s: what
    its start took of that, by its own count. shown: whether `Fault.shows` was seen; None: nothing
    was to be seen. complaints: what else is wrong, in words."""

    reservations: int = 0
    orphans: Sequence[str] = ()
    recovery_s: float | None = None
    start_s: float | None = None
    shown: bool | None = None
    complaints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One line of the report: `failed` says why the promise was broken; empty: it was kept."""

    fault: str
    failed: tuple[str, ...]
    requests: int
    lost: int
    streams_cut: int
    streams_cut_untold: int
    lost_open: int
    first_answer_s: float | None
    recovery_s: float | None
    start_s: float | None
    reservations: int
    orphans: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def kept(self) -> bool:
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kept": self.kept}


def first_answer_s(requests: Sequence[Observed], at_s: float) -> float | None:
    """How long after `at_s` the first request that was sent from then on got its first token."""
    answers = [r.first_s for r in requests if r.sent_s >= at_s and r.ok and r.first_s is not None]
    return min(answers) - at_s if answers else None


def evaluate(fault: Fault, requests: Sequence[Observed], at_s: float, after: After) -> Evaluation:
    """Hold what was seen against the promise.

    Args:
        fault: with its promise.
        requests: all that were sent around it.
        at_s: when it was done.
        after: the cluster, later.
    """
    whole = [r for r in requests if not r.streamed and not r.ok]
    cut = [r for r in requests if r.streamed and not r.ok]
    # A stream that had begun cannot be begun again; one that had not can.
    begun = [r for r in cut if r.status == 200 and r.first_s is not None]
    unbegun = [r for r in cut if r not in begun]
    lost = whole + unbegun
    open_then = [r for r in lost if r.sent_s < at_s <= r.ended_s]
    untold = [r for r in begun if not r.announced]
    first_s = first_answer_s(requests, at_s)
    failed = list(after.complaints)
    counted = [r for r in lost if not (fault.may_lose_open and r in open_then)]
    if counted:
        failed.append(f"{len(counted)} of {len(requests)} requests lost ({_why(counted)})")
    if untold and not fault.may_lose_open:
        failed.append(f"{len(untold)} streams ended without a word")
    if fault.first_answer_s is not None and (first_s is None or first_s > fault.first_answer_s):
        failed.append(f"first answer after {_seconds(first_s)}, limit {fault.first_answer_s:g} s")
    if after.reservations:
        failed.append(f"{after.reservations} reservations leaked")
    if after.orphans:
        failed.append(f"{len(after.orphans)} orphan processes: {'; '.join(after.orphans)[:200]}")
    failed += _recovery(fault, after)
    if after.shown is False:
        failed.append(f"not seen: {fault.shows}")
    return Evaluation(
        fault.name, tuple(failed), len(requests), len(lost), len(begun), len(untold),
        len(open_then), first_s, after.recovery_s, after.start_s, after.reservations,
        tuple(after.orphans),
    )  # fmt: skip


def _recovery(fault: Fault, after: After) -> list[str]:
    if not fault.recovers:
        return []
    if after.recovery_s is None or after.start_s is None:
        return ["the killed worker did not come back"]
    extra_s = after.recovery_s - after.start_s
    if extra_s <= fault.recovery_extra_s:
        return []
    return [
        f"recovery took {after.recovery_s:.1f} s, {extra_s:.1f} s more than the start itself, "
        f"limit {fault.recovery_extra_s:g} s"
    ]


def _why(requests: Sequence[Observed]) -> str:
    reasons: dict[str, int] = {}
    for r in requests:
        reason = r.error or str(r.status)
        reasons[reason] = reasons.get(reason, 0) + 1
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())[:5])


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
