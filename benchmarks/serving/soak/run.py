"""A soak: baseline, load with faults at random times, and the same idle state again.

The baseline is the cluster as it started, its workers fresh. After the load every worker is killed
and comes back empty, so that index and descriptors have one state to return to. The ingress and
Serve's controller are left alone in between: a process that starts anew has no slope.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.faults.actions import action_for
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.processes import kill
from benchmarks.faults.target import FaultsError, Target
from benchmarks.faults.traffic import Mix, Traffic
from benchmarks.faults.verdict import Seen
from benchmarks.serving.soak.leaks import Slope, left_behind, slopes
from benchmarks.serving.soak.samples import Sample, Sampler, look

SPARED = ("ingress_killed", "controller_killed", "ingress_clock_forward", "ingress_clock_back")
_LASTS_S = 10.0
_BACK_S = 240.0
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """minutes: of load; pause_s: mean time between two faults; sample_s: between two looks."""

    minutes: float
    pause_s: float = 45.0
    sample_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What came of it. faults: (seconds since the start, name, node)."""

    seconds: float
    requests: int
    lost: int
    streams_cut: int
    streams_cut_untold: int
    faults: tuple[tuple[float, str, str], ...]
    slopes: tuple[Slope, ...]
    left_behind: tuple[str, ...]
    samples: tuple[Sample, ...]

    @property
    def kept(self) -> bool:
        """Whether nothing was lost, nothing grew and nothing was left; without slopes who knows."""
        steady = bool(self.slopes) and all(slope.kept for slope in self.slopes)
        return steady and not (self.lost or self.left_behind or self.streams_cut_untold)


async def soak(target: Target, plan: Plan, mix: Mix, progress: Callable[[str], None]) -> SoakResult:
    """Run it.

    Raises:
        FaultsError: the cluster did not come to its idle state.
    """
    await asyncio.sleep(_SETTLE_S)
    before: Sample = await _aside(lambda: look(target, time.monotonic()))
    start_s = time.monotonic()
    done: list[tuple[float, str, str]] = []
    async with (
        Sampler(target, plan.sample_s, start_s) as sampler,
        Traffic(target.url, target.model, mix, plan.seed + 1, target.headers) as traffic,
    ):
        await _harm(target, plan, start_s, done, progress)
        await traffic.settle()
    after = await _emptied(target, progress)
    return _result(traffic.seen, sampler.samples, done, before, after, time.monotonic() - start_s)


async def _harm(
    target: Target, plan: Plan, start_s: float, done: list[tuple[float, str, str]],
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Faults at random until the time is up; each is healed before the next."""
    rng = np.random.default_rng(plan.seed)
    faults = [f for f in FAULTS if f.engine == "emulated" and f.name not in SPARED]
    end_s = start_s + 60.0 * plan.minutes
    turn = 0
    while True:
        pause_s = float(rng.exponential(plan.pause_s))
        if time.monotonic() + pause_s + _LASTS_S > end_s:
            await asyncio.sleep(max(end_s - time.monotonic(), 0.0))
            return
        await asyncio.sleep(pause_s)
        fault = faults[int(rng.integers(len(faults)))]
        turn += 1
        try:
            action = await _aside(partial(action_for, fault, target, turn))
        except FaultsError:
            continue  # its victim is on the way back from the last one
        done.append((time.monotonic() - start_s, fault.name, action.node))
        progress(f"{done[-1][0]:6.0f} s  {fault.name} {action.node}")
        await _aside(action.do)
        try:
            await asyncio.sleep(min(fault.lasts_s or 1.0, _LASTS_S))
        finally:
            await _aside(action.heal)


async def _emptied(target: Target, progress: Callable[[str], None]) -> Sample:
    """Every worker anew and idle; what is held then."""
    progress("every worker starts anew")
    rows = await _aside(target.nodes)
    old = {str(row["worker"]) for row in rows}
    await _aside(lambda: kill([target.pid(worker) for worker in old]))

    def back() -> bool:
        now = target.nodes()
        return len(now) == len(rows) and not old & {str(row["worker"]) for row in now}

    if not await _aside(lambda: target.until(back, _BACK_S)):
        raise FaultsError(f"not all of {len(rows)} workers were back within {_BACK_S:g} s")
    await asyncio.sleep(_SETTLE_S)
    sample: Sample = await _aside(lambda: look(target, time.monotonic()))
    return sample


def _result(
    seen: list[Seen], samples: list[Sample], done: list[tuple[float, str, str]], before: Sample,
    after: Sample, seconds: float,
) -> SoakResult:  # fmt: skip
    cut = [r for r in seen if r.streamed and not r.ok]
    # An answer that refuses is no stream that had begun.
    begun = [r for r in cut if r.status == 200 and r.first_s is not None]
    lost = [r for r in seen if not r.ok and r not in begun]
    return SoakResult(
        seconds, len(seen), len(lost), len(begun), sum(not r.told for r in begun), tuple(done),
        tuple(slopes(samples)), tuple(left_behind(before, after)), tuple(samples),
    )  # fmt: skip


async def _aside(question: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, question)
