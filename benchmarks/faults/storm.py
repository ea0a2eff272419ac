"""Worker after worker killed under load, and very many streams at once: goals that need a long run.

A storm kills one worker every so many seconds, or the next one only when the last is back, until
enough requests that are not streamed were answered or enough workers killed. A crowd opens so many
streams at the same time and waits for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.faults.processes import kill
from benchmarks.faults.target import FaultsError, Target, aside
from benchmarks.faults.traffic import Mix, Traffic
from benchmarks.faults.verdict import Seen, first_answer_s

_POLL_S = 0.2
_IDLE_S = 60.0
_GONE_S = 20.0
_RECOVERY_S = 300.0


@dataclass(frozen=True, slots=True)
class Storm:
    """What is done. requests: stop after so many that are not streamed; kills: or after so many
    kills. every_s: between two kills; patient: the next only after recovery. engines: kill the
    engine's process and not the worker's. limit_s: end in any case."""

    requests: int
    kills: int
    every_s: float = 20.0
    patient: bool = False
    engines: bool = False
    limit_s: float = 540.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: when (seconds since the start), whom, and how it was survived."""

    at_s: float
    node: str
    first_answer_s: float | None
    recovery_s: float | None
    start_s: float | None


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def storm(
    target: Target, plan: Storm, mix: Mix, seed: int, progress: Callable[[str], None]
) -> StormResult:
    """Run it.

    Raises:
        FaultsError: there are fewer than two workers, so that nobody could take over.
    """
    rows = await aside(target.nodes)
    names = sorted(str(row["node"]) for row in rows)
    if len(names) < 2:
        raise FaultsError(f"{len(names)} workers: a storm needs two, or nobody takes over")
    start_s = time.monotonic()
    killed: list[tuple[float, str, float | None, float | None]] = []
    waiting: list[asyncio.Task[None]] = []
    async with Traffic(target.url, target.model, mix, seed, target.headers) as traffic:
        await asyncio.sleep(3.0)
        while len(killed) < plan.kills and time.monotonic() - start_s < plan.limit_s:
            if _answered(traffic.seen) >= plan.requests:
                break
            name = names[len(killed) % len(names)]
            worker = await aside(partial(_kill, target, name, plan.engines))
            if worker is None:
                await asyncio.sleep(_POLL_S)  # not back yet from the last time
                continue
            number, at_s = len(killed), time.monotonic()
            killed.append((at_s, name, None, None))
            progress(f"kill {number + 1}: {name}, {_answered(traffic.seen)} answered")
            follow = asyncio.create_task(_follow(target, killed, number, worker))
            waiting.append(follow)
            if plan.patient:
                await follow
                await asyncio.sleep(2.0)
            else:
                await asyncio.sleep(plan.every_s)
        while _answered(traffic.seen) < plan.requests:
            if time.monotonic() - start_s > plan.limit_s:
                break
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*waiting)
        await traffic.settle()
    seconds = time.monotonic() - start_s
    await aside(lambda: target.until(lambda: target.reservations() == 0, _IDLE_S))
    await aside(lambda: target.until(lambda: not target.family.strays(), _GONE_S))
    return _result(target, traffic.seen, killed, start_s, seconds)


def _kill(target: Target, name: str, engines: bool) -> str | None:
    """Kill the worker of that node, if it is there; its name."""
    row = target.node(name)
    if row is None:
        return None
    pid = target.pid(str(row["worker"]))
    below = target.family.below(pid)
    if engines and not below:
        raise FaultsError(f"worker {row['worker']} has no engine process of its own")
    kill(below[:1] if engines else [pid])
    return str(row["worker"])


async def _follow(
    target: Target, killed: list[tuple[float, str, float | None, float | None]], number: int,
    worker: str,
) -> None:  # fmt: skip
    """Note when the killed worker's successor is there."""
    at_s, name, _, _ = killed[number]

    def successor() -> dict[str, Any] | None:
        row = target.node(name)
        return row if row is not None and row["worker"] != worker else None

    row = await aside(lambda: target.until(successor, _RECOVERY_S))
    if row is not None:
        killed[number] = at_s, name, time.monotonic() - at_s, float(row.get("start_s") or 0.0)


def _answered(seen: list[Seen]) -> int:
    return sum(not r.streamed for r in seen)


def _result(
    target: Target, seen: list[Seen], killed: list[tuple[float, str, float | None, float | None]],
    start_s: float, seconds: float,
) -> StormResult:  # fmt: skip
    whole = [r for r in seen if not r.streamed]
    streams = [r for r in seen if r.streamed]
    cut = [r for r in streams if not r.ok]
    reasons: dict[str, int] = {}
    for r in [r for r in whole if not r.ok]:
        reason = r.error or str(r.status)
        reasons[reason] = reasons.get(reason, 0) + 1
    return StormResult(
        whole=len(whole),
        whole_lost=sum(reasons.values()),
        reasons=reasons,
        streams=len(streams),
        streams_cut=len(cut),
        streams_cut_untold=sum(not r.told for r in cut),
        kills=tuple(
            Kill(at_s - start_s, name, first_answer_s(seen, at_s), recovery_s, took_s)
            for at_s, name, recovery_s, took_s in killed
        ),
        reservations=target.reservations(),
        orphans=tuple(target.family.strays()),
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True)
class CrowdResult:
    """Streams that were open at the same time. most_open: as their clients saw it."""

    streams: int
    failed: int
    reasons: dict[str, int]
    most_open: int
    seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    reservations: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def crowd(target: Target, streams: int, mix: Mix, seed: int) -> CrowdResult:
    """Open so many streams at once; wait for all."""
    idle = Mix(
        clients=0, documents=mix.documents, words=mix.words, max_tokens=mix.max_tokens,
        timeout_s=mix.timeout_s,
    )  # fmt: skip
    start_s = time.monotonic()
    async with Traffic(target.url, target.model, idle, seed, target.headers) as traffic:
        await asyncio.gather(*(traffic.ask(i % mix.documents, True) for i in range(streams)))
    seconds = time.monotonic() - start_s
    await aside(lambda: target.until(lambda: target.reservations() == 0, _IDLE_S))
    failed = [r for r in traffic.seen if not r.ok]
    reasons: dict[str, int] = {}
    for r in failed:
        reasons[r.error or str(r.status)] = reasons.get(r.error or str(r.status), 0) + 1
    # What was refused has no first token.
    begun = [r for r in traffic.seen if r.status == 200]
    first = sorted(r.first_s - r.sent_s for r in begun if r.first_s is not None)
    return CrowdResult(
        streams, len(failed), reasons, _most_open(begun), seconds,
        first[len(first) // 2] if first else 0.0,
        first[min(int(0.99 * len(first)), len(first) - 1)] if first else 0.0,
        target.reservations(),
    )  # fmt: skip


def _most_open(seen: list[Seen]) -> int:
    """The most requests that were between first token and end at one moment."""
    marks = [(r.first_s, 1) for r in seen if r.first_s is not None]
    marks += [(r.ended_s, -1) for r in seen if r.first_s is not None]
    most = now = 0
    for _, step in sorted(marks):
        now += step
        most = max(most, now)
    return most
