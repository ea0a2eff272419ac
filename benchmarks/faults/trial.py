"""Tries faults on a running cluster, one after the other, under load, and judges each.

A trial is: some load; the deed; load until it is healed and whatever was killed is back; the open
requests end; then the cluster must be as it was before. The next one begins only after that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.faults.actions import Action, action_for
from benchmarks.faults.catalogue import Fault
from benchmarks.faults.target import FaultsError, Target, aside
from benchmarks.faults.traffic import Mix, Traffic
from benchmarks.faults.verdict import After, Seen, Verdict, judge

_BEFORE_S = 3.0
_AFTER_S = 4.0
_RECOVERY_S = 240.0
_IDLE_S = 60.0
_GONE_S = 20.0
_PROBES = 6

Progress = Callable[[str], None]


async def try_faults(
    target: Target,
    faults: Sequence[Fault],
    mix: Mix,
    seed: int,
    progress: Progress = lambda _: None,
) -> list[Verdict]:
    """Try each; a fault that cannot be tried is a verdict too, and not a kept one."""
    verdicts = []
    for turn, fault in enumerate(faults):
        progress(f"{fault.name}: {fault.title}")
        try:
            verdicts.append(await try_fault(target, fault, mix, seed + turn, turn))
        except FaultsError as error:
            verdicts.append(_untried(fault, str(error)))
        said = "kept" if verdicts[-1].kept else f"BROKEN: {'; '.join(verdicts[-1].failed)}"
        progress(f"{fault.name}: {said}")
    return verdicts


async def try_fault(target: Target, fault: Fault, mix: Mix, seed: int, turn: int = 0) -> Verdict:
    """One trial.

    Raises:
        FaultsError: it cannot be tried on this cluster, or that does not answer to begin with.
    """
    action = await aside(lambda: action_for(fault, target, turn))
    workers = {str(row["worker"]) for row in await aside(target.nodes)}
    async with Traffic(target.url, target.model, mix, seed, target.headers) as traffic:
        await asyncio.sleep(_BEFORE_S)
        at_s = time.monotonic()
        await aside(action.do)
        try:
            back = await _recovered(target, fault, action, workers, at_s)
            await asyncio.sleep(max(at_s + fault.lasts_s - time.monotonic(), 0.0))
        finally:
            await aside(action.heal)
        await asyncio.sleep(_AFTER_S)
        shown = await aside(action.shown)
        await traffic.settle()
        after = await _settled(target, fault, traffic, action, shown, back)
        return judge(fault, traffic.seen, at_s, after)


async def _recovered(
    target: Target, fault: Fault, action: Action, workers: set[str], at_s: float
) -> tuple[float, float] | None:
    """Seconds until a successor of the victim was announced, and those that its start took."""
    if not fault.recovers:
        return None

    def successor() -> dict[str, Any] | None:
        row = target.node(action.node)
        return row if row is not None and row["worker"] not in workers else None

    row = await aside(lambda: target.until(successor, _RECOVERY_S))
    if row is None:
        return None
    return time.monotonic() - at_s, float(row.get("start_s") or 0.0)


async def _settled(
    target: Target, fault: Fault, traffic: Traffic, action: Action, shown: bool | None,
    back: tuple[float, float] | None,
) -> After:  # fmt: skip
    complaints = []
    if fault.name.startswith("events_"):
        complaints += await _index_lies(target, traffic)

    def none_left() -> bool:
        return target.reservations() == 0

    await aside(lambda: target.until(none_left, _IDLE_S))
    await aside(lambda: target.until(lambda: not target.family.strays(), _GONE_S))
    recovery_s, start_s = back if back is not None else (None, None)
    reservations = await aside(target.reservations)
    if reservations < 0:
        complaints.append("nobody says whether reservations leaked")
    return After(
        max(reservations, 0), tuple(target.family.strays()), recovery_s, start_s, shown,
        tuple(complaints),
    )  # fmt: skip


async def _index_lies(target: Target, traffic: Traffic) -> list[str]:
    """Ask for documents twice: what the router expects of the second must be what is there."""
    lies: list[str] = []
    compared = 0
    for document in range(_PROBES):
        for _ in range(2):
            probe: Seen = await traffic.ask(document, streamed=False)
            await asyncio.sleep(0.6)  # for the report of its admission
        decisions = await aside(lambda: target.decisions(limit=1))
        if not probe.ok or not decisions:
            lies.append(f"probe {document} was not answered: {probe.error}")
            continue
        predicted, actual = decisions[-1]["predicted"], decisions[-1]["actual"]
        for tier in ("device_tokens", "cached_tokens"):
            if actual[tier] is None:
                continue
            compared += 1
            if predicted[tier] != actual[tier]:
                lies.append(f"document {document}: {predicted[tier]} {tier} predicted, "
                            f"{actual[tier]} found")  # fmt: skip
    if not lies and not compared:
        lies.append("no probe's outcome was reported: predictions could not be checked")
    return lies


def _untried(fault: Fault, why: str) -> Verdict:
    return Verdict(fault.name, (f"not tried: {why}",), 0, 0, 0, 0, 0, None, None, None, 0, ())
