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
from benchmarks.faults.evaluation import After, Evaluation, Observed, evaluate
from benchmarks.faults.target import FaultsError, Target, aside
from benchmarks.faults.traffic import Mix, Traffic

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
) -> list[Evaluation]:
    """Try each, those that end the cluster last; a fault that cannot be tried has failed."""
    evaluations = []
    for turn, fault in enumerate(sorted(faults, key=lambda fault: fault.ends_cluster)):
        progress(f"{fault.name}: {fault.title}")
        try:
            evaluations.append(await try_fault(target, fault, mix, seed + turn, turn))
        except FaultsError as error:
            evaluations.append(_not_tried(fault, str(error)))
        outcome = "kept" if evaluations[-1].kept else f"BROKEN: {'; '.join(evaluations[-1].failed)}"
        progress(f"{fault.name}: {outcome}")
    return evaluations


async def try_fault(target: Target, fault: Fault, mix: Mix, seed: int, turn: int = 0) -> Evaluation:
    """One trial.

    Raises:
        FaultsError: it cannot be tried on this cluster, or that does not answer to begin with.
    """
    action = await aside(lambda: action_for(fault, target, turn))
    if fault.ends_cluster:
        return await _ended(target, fault, action)
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
        return evaluate(fault, traffic.seen, at_s, after)


async def _ended(target: Target, fault: Fault, action: Action) -> Evaluation:
    """Without load: whatever clients sent would be lost with the cluster."""
    at_s = time.monotonic()
    await aside(action.do)
    shown = await aside(action.shown)
    left = tuple(await aside(target.family.survivors))
    return evaluate(fault, (), at_s, After(orphans=left, shown=shown))


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
        complaints += await _wrong_predictions(target, traffic)

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


async def _wrong_predictions(target: Target, traffic: Traffic) -> list[str]:
    """Ask for documents twice: what the router expects of the second must be what is there."""
    wrong: list[str] = []
    compared = 0
    for document in range(_PROBES):
        for _ in range(2):
            probe: Observed = await traffic.ask(document, streamed=False)
            await asyncio.sleep(0.6)  # for the report of its admission
        decisions = await aside(lambda: target.decisions(limit=1))
        if not probe.ok or not decisions:
            wrong.append(f"probe {document} was not answered: {probe.error}")
            continue
        predicted, actual = decisions[-1]["predicted"], decisions[-1]["actual"]
        for tier in ("device_tokens", "cached_tokens"):
            if actual[tier] is None:
                continue
            compared += 1
            if predicted[tier] != actual[tier]:
                wrong.append(f"document {document}: {predicted[tier]} {tier} predicted, "
                            f"{actual[tier]} found")  # fmt: skip
    if not wrong and not compared:
        wrong.append("no probe's outcome was reported: predictions could not be checked")
    return wrong


def _not_tried(fault: Fault, why: str) -> Evaluation:
    return Evaluation(fault.name, (f"not tried: {why}",), 0, 0, 0, 0, 0, None, None, None, 0, ())
