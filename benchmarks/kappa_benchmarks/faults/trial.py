"""Tries faults on a running cluster, one after the other, under load, and evaluates each.

A trial is: some load; the deed; load until it is healed and whatever was killed is back; the open
requests end; then the cluster must be as it was before. The next one begins only after that.
Requests are evaluated by what their clients saw, leaks by the cluster's own figures once all is
over. Nothing is rounded in the cluster's favour: a request that was refused counts as lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kappa_benchmarks.faults.catalogue import Fault
from kappa_benchmarks.faults.cluster import FaultsError, Target, aside
from kappa_benchmarks.faults.traffic import Mix, Observed, Traffic, first_answer_s, reasons

_BEFORE_S = 3.0
_AFTER_S = 4.0
_RECOVERY_S = 240.0
_IDLE_S = 60.0
_GONE_S = 20.0
_PROBES = 6


@dataclass(frozen=True, slots=True)
class After:
    """The cluster once a fault is over."""

    reservations: int = 0
    # Processes without a parent.
    orphans: Sequence[str] = ()
    # Until the killed worker was back, and its start alone by its own count; None: it is not back,
    # or none was killed.
    recovery_s: float | None = None
    start_s: float | None = None
    # Whether `Fault.shows` was seen; None: nothing was to be seen.
    shown: bool | None = None
    # Other faults, in words.
    complaints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One line of the report."""

    fault: str
    # Violated guarantees, as sentences; empty: it was kept.
    failed: tuple[str, ...]
    requests: int = 0
    # That got no answer and no begun stream.
    lost: int = 0
    # Begun streams that were cut, and those that were cut without an error.
    streams_cut: int = 0
    streams_cut_untold: int = 0
    # Lost requests that were open at the moment of the fault.
    lost_open: int = 0
    first_answer_s: float | None = None
    recovery_s: float | None = None
    start_s: float | None = None
    reservations: int = 0
    orphans: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kept": self.kept}


def evaluate(fault: Fault, requests: Sequence[Observed], at_s: float, after: After) -> Evaluation:
    """Compare the requests and the cluster with the guarantee.

    Args:
        fault: with its guarantee.
        requests: all that were sent around it.
        at_s: when it was done.
        after: the cluster, later.
    """
    failed_requests = [r for r in requests if not r.ok]
    # A stream that had begun cannot be begun again; one that had not can.
    begun = [r for r in failed_requests if r.streamed and r.status == 200 and r.first_s is not None]
    lost = [r for r in failed_requests if r not in begun]
    open_then = [r for r in lost if r.sent_s < at_s <= r.ended_s]
    # A connection that breaks says that the answer is not whole; an end in order does not.
    untold = [r for r in begun if not r.error]
    first_s = first_answer_s(requests, at_s)
    failed = list(after.complaints)
    excused = [r for r in lost if r.error in fault.may_refuse and r.ended_s >= at_s]
    excused += open_then if fault.may_lose_open else []
    counted = [r for r in lost if r not in excused]
    if counted:
        why = [f"{count} x {reason}" for reason, count in reasons(counted).items()]
        failed.append(f"{len(counted)} of {len(requests)} requests lost ({', '.join(why[:5])})")
    if untold and not fault.may_lose_open:
        failed.append(f"{len(untold)} streams ended as if they were whole")
    if fault.first_answer_s is not None and (first_s is None or first_s > fault.first_answer_s):
        took = "never" if first_s is None else f"after {first_s:.2f} s"
        failed.append(f"first answer {took}, limit {fault.first_answer_s:g} s")
    if after.reservations:
        failed.append(f"{after.reservations} reservations leaked")
    if after.orphans:
        failed.append(f"{len(after.orphans)} orphan processes: {'; '.join(after.orphans)[:200]}")
    if fault.recovers:
        failed += _late(fault, after)
    if after.shown is False:
        failed.append(f"not seen: {fault.shows}")
    return Evaluation(
        fault.name, tuple(failed), len(requests), len(lost), len(begun), len(untold),
        len(open_then), first_s, after.recovery_s, after.start_s, after.reservations,
        tuple(after.orphans),
    )  # fmt: skip


def _late(fault: Fault, after: After) -> list[str]:
    if after.recovery_s is None or after.start_s is None:
        return ["the killed worker did not come back"]
    extra_s = after.recovery_s - after.start_s
    if extra_s <= fault.recovery_extra_s:
        return []
    return [
        f"recovery took {after.recovery_s:.1f} s, {extra_s:.1f} s more than the start itself, "
        f"limit {fault.recovery_extra_s:g} s"
    ]


async def try_faults(
    target: Target, faults: Sequence[Fault], mix: Mix, seed: int,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Evaluation]:  # fmt: skip
    """Try each, those that end the cluster last; a fault that cannot be tried has failed."""
    evaluations = []
    for turn, fault in enumerate(sorted(faults, key=lambda fault: fault.ends_cluster)):
        progress(f"{fault.name}: {fault.title}")
        try:
            one = await try_fault(target, fault, mix, seed + turn, turn)
        except FaultsError as error:
            one = Evaluation(fault.name, (f"not tried: {error}",))
        progress(f"{fault.name}: {'kept' if one.kept else 'BROKEN: ' + '; '.join(one.failed)}")
        evaluations.append(one)
    return evaluations


async def try_fault(target: Target, fault: Fault, mix: Mix, seed: int, turn: int = 0) -> Evaluation:
    """One trial.

    Raises:
        FaultsError: it cannot be tried on this cluster, or that does not answer to begin with.
    """
    action = await aside(lambda: fault.action(target, turn))
    if fault.ends_cluster:
        # Without load: whatever clients sent would be lost with the cluster.
        at_s = time.monotonic()
        await aside(action.do)
        shown = await aside(action.shown)
        left = tuple(await aside(target.family.survivors))
        return evaluate(fault, (), at_s, After(orphans=left, shown=shown))
    workers = {str(row["worker"]) for row in await aside(target.nodes)}
    back: tuple[float, float] | None = None
    async with Traffic(target.url, target.model, mix, seed, target.headers) as traffic:
        await asyncio.sleep(_BEFORE_S)
        at_s = time.monotonic()
        await aside(action.do)
        try:
            row = await aside(lambda: successor(target, action.node, workers, fault.recovers))
            if row is not None:
                back = time.monotonic() - at_s, float(row.get("start_s") or 0.0)
            await asyncio.sleep(max(at_s + fault.lasts_s - time.monotonic(), 0.0))
        finally:
            await aside(action.heal)
        await asyncio.sleep(_AFTER_S)
        shown = await aside(action.shown)
        await traffic.settle()
        after = await settled(target, fault, traffic, shown, back)
        return evaluate(fault, traffic.seen, at_s, after)


def successor(
    target: Target, node: str, workers: set[str], awaited: bool = True
) -> dict[str, Any] | None:
    """The row of the node's worker once it is none of these, awaited for a while; else None."""

    def found() -> dict[str, Any] | None:
        row = target.row("node", node)
        return row if row is not None and row["worker"] not in workers else None

    return target.until(found, _RECOVERY_S) if awaited else None


async def idle(target: Target) -> tuple[int, tuple[str, ...]]:
    """Reservations and stray processes once there are none, or after a while."""
    await aside(lambda: target.until(lambda: target.reservations() == 0, _IDLE_S))
    await aside(lambda: target.until(lambda: not target.family.strays(), _GONE_S))
    return await aside(target.reservations), tuple(target.family.strays())


async def settled(
    target: Target, fault: Fault, traffic: Traffic, shown: bool | None,
    back: tuple[float, float] | None,
) -> After:  # fmt: skip
    """The cluster once the load has ended. back: seconds until the killed worker's successor was
    announced, and those of the successor's start."""
    complaints = []
    if fault.name.startswith("events_"):
        complaints += await wrong_predictions(target, traffic)
    reservations, strays = await idle(target)
    if reservations < 0:
        complaints.append("the router does not report whether reservations leaked")
    recovery_s, start_s = back if back is not None else (None, None)
    return After(max(reservations, 0), strays, recovery_s, start_s, shown, tuple(complaints))


async def wrong_predictions(target: Target, traffic: Traffic) -> list[str]:
    """Ask for documents twice: the router must expect of the second exactly the cached tokens."""
    wrong: list[str] = []
    compared = 0
    for document in range(_PROBES):
        for _ in range(2):
            probe = await traffic.ask(document, streamed=False)
            await asyncio.sleep(0.6)  # for the report of its admission
        decisions = await aside(lambda: target.decisions(limit=1))
        if not probe.ok or not decisions:
            wrong.append(f"probe {document} was not answered: {probe.error}")
            continue
        predicted, actual = decisions[-1]["predicted"], decisions[-1]["actual"]
        for tier in ("device_tokens", "cached_tokens"):
            if actual[tier] is not None:
                compared += 1
                if predicted[tier] != actual[tier]:
                    what = f"{predicted[tier]} {tier} predicted, {actual[tier]} found"
                    wrong.append(f"document {document}: {what}")
    if not wrong and not compared:
        wrong.append("no probe's outcome was reported: predictions could not be checked")
    return wrong
