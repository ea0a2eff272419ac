"""Worker after worker killed under load, and very many streams at once: goals that need a long run.

A storm kills one worker every so many seconds, or the next one only when the last is back, until
enough non-streaming requests were answered or enough workers killed. Or so many
streams are opened at the same time, and all awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.faults.evaluation import Observed, first_answer_s
from benchmarks.faults.processes import kill
from benchmarks.faults.target import FaultsError, Target, aside
from benchmarks.faults.traffic import Mix, Traffic
from benchmarks.harness import quantile

_POLL_S = 0.2
_IDLE_S = 60.0
_GONE_S = 20.0
_RECOVERY_S = 300.0
_BEFORE_S = 3.0
_BETWEEN_S = 2.0


@dataclass(frozen=True, slots=True)
class Storm:
    """What is done. requests: stop after so many non-streaming ones; kills: or after so many kills.
    every_s: between two kills; patient: the next only after recovery. limit_s: end in any case."""

    requests: int
    kills: int
    every_s: float = 20.0
    patient: bool = False
    limit_s: float = 540.0


@dataclass(slots=True)
class Kill:
    """One kill: when (seconds since the start), whom, and how it was survived."""

    at_s: float
    node: str
    first_answer_s: float | None = None
    recovery_s: float | None = None
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class StormResult:
    """What became of it."""

    whole: int
    whole_lost: int
    reasons: dict[str, int]
    streams: int
    streams_cut: int
    streams_cut_untold: int
    kills: tuple[Kill, ...]
    reservations: int
    orphans: tuple[str, ...]
    seconds: float


async def storm(
    target: Target, plan: Storm, mix: Mix, seed: int, progress: Callable[[str], None]
) -> StormResult:
    """Run it.

    Raises:
        FaultsError: there are fewer than two workers, so that nobody could take over.
    """
    names = sorted(str(row["node"]) for row in await aside(target.nodes))
    if len(names) < 2:
        raise FaultsError(f"{len(names)} workers: a storm needs two, or nobody takes over")
    async with Traffic(target.url, target.model, mix, seed, target.headers) as traffic:
        run = _Run(target, plan, names, traffic.seen, progress)
        await asyncio.sleep(_BEFORE_S)
        await run.kill_workers()
        while run.answered() < plan.requests and run.elapsed_s() < plan.limit_s:
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*run.recoveries)
        await traffic.settle()
    seconds = run.elapsed_s()
    await aside(lambda: target.until(lambda: target.reservations() == 0, _IDLE_S))
    await aside(lambda: target.until(lambda: not target.family.strays(), _GONE_S))
    whole = [seen for seen in traffic.seen if not seen.streamed]
    cut = [seen for seen in traffic.seen if seen.streamed and not seen.ok]
    reasons = _reasons(whole)
    for one in run.kills:
        one.first_answer_s = first_answer_s(traffic.seen, run.begun_s + one.at_s)
    return StormResult(
        whole=len(whole), whole_lost=sum(reasons.values()), reasons=reasons,
        streams=len(traffic.seen) - len(whole), streams_cut=len(cut),
        streams_cut_untold=sum(not seen.announced for seen in cut), kills=tuple(run.kills),
        reservations=target.reservations(), orphans=tuple(target.family.strays()), seconds=seconds,
    )  # fmt: skip


@dataclass(slots=True)
class _Run:
    target: Target
    plan: Storm
    names: Sequence[str]
    seen: Sequence[Observed]
    progress: Callable[[str], None]
    kills: list[Kill] = field(default_factory=list)
    recoveries: list[asyncio.Task[None]] = field(default_factory=list)
    begun_s: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    def answered(self) -> int:
        """Non-streaming requests that have ended."""
        return sum(not seen.streamed for seen in self.seen)

    async def kill_workers(self) -> None:
        plan = self.plan
        while len(self.kills) < plan.kills and self.elapsed_s() < plan.limit_s:
            if self.answered() >= plan.requests:
                return
            name = self.names[len(self.kills) % len(self.names)]
            row = await aside(partial(self.target.node, name))
            if row is None:
                await asyncio.sleep(_POLL_S)  # not back yet from the last time
                continue
            kill([await aside(partial(self.target.pid, str(row["worker"])))])
            self.kills.append(Kill(self.elapsed_s(), name))
            self.progress(f"kill {len(self.kills)}: {name}, {self.answered()} answered")
            recovery = asyncio.create_task(self._recover(self.kills[-1], str(row["worker"])))
            self.recoveries.append(recovery)
            if plan.patient:
                await recovery
            await asyncio.sleep(_BETWEEN_S if plan.patient else plan.every_s)

    async def _recover(self, one: Kill, worker: str) -> None:
        """Note when the killed worker's successor is there."""

        def successor() -> dict[str, Any] | None:
            row = self.target.node(one.node)
            return row if row is not None and row["worker"] != worker else None

        row = await aside(lambda: self.target.until(successor, _RECOVERY_S))
        if row is not None:
            one.recovery_s = self.elapsed_s() - one.at_s
            one.start_s = float(row.get("start_s") or 0.0)


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """Streams that were open at the same time. most_open: as their clients saw it."""

    streams: int
    failed: int
    reasons: dict[str, int]
    most_open: int
    seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    reservations: int


async def open_streams(target: Target, streams: int, mix: Mix, seed: int) -> StreamsResult:
    """Open so many streams at once; wait for all."""
    begun_s = time.monotonic()
    idle = replace(mix, clients=0)
    async with Traffic(target.url, target.model, idle, seed, target.headers) as traffic:
        await asyncio.gather(*(traffic.ask(i % mix.documents, True) for i in range(streams)))
    seconds = time.monotonic() - begun_s
    await aside(lambda: target.until(lambda: target.reservations() == 0, _IDLE_S))
    # What was rejected has no first token.
    begun = [seen for seen in traffic.seen if seen.status == 200]
    ttft_s = [seen.first_s - seen.sent_s for seen in begun if seen.first_s is not None]
    reasons = _reasons(traffic.seen)
    return StreamsResult(
        streams, sum(reasons.values()), reasons, _most_open(begun), seconds,
        quantile(ttft_s, 0.5) or 0.0, quantile(ttft_s, 0.99) or 0.0, target.reservations(),
    )  # fmt: skip


def _reasons(seen: Sequence[Observed]) -> dict[str, int]:
    """Those that failed, by why."""
    return dict(Counter(one.error or str(one.status) for one in seen if not one.ok))


def _most_open(seen: Sequence[Observed]) -> int:
    """The most requests that were between first token and end at one moment."""
    changes = [(one.first_s, 1) for one in seen if one.first_s is not None]
    changes += [(one.ended_s, -1) for one in seen if one.first_s is not None]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
