"""Worker after worker killed under load, and very many streams at once: goals that need a long run.

A worker is killed every 20 s, or the next one only when the last is back, until enough requests
without a stream were answered or enough workers killed. Or many streams are opened at the same
time, and all awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kappa_benchmarks.faults.cluster import FaultsError, Target, aside, kill
from kappa_benchmarks.faults.traffic import Mix, Observed, Traffic, first_answer_s, reasons
from kappa_benchmarks.faults.trial import idle, successor
from kappa_benchmarks.harness import quantile

_POLL_S = 0.2
_BEFORE_S = 3.0
_BETWEEN_S = 2.0
_EVERY_S = 20.0


@dataclass(frozen=True, slots=True)
class KillPlan:
    """When the killing stops; a bound of 0 is none."""

    # After this many requests without a stream.
    requests: int = 0
    # After this many kills, each after the recovery from the last.
    kills: int = 0
    # In any case.
    limit_s: float = 540.0


@dataclass(slots=True)
class Kill:
    """One kill of a worker."""

    # Since the start.
    at_s: float
    node: str
    # Until the first request that was sent later got its first token; None: none did.
    first_answer_s: float | None = None
    # Until its successor was there, and the successor's own start. None: it did not come.
    recovery_s: float | None = None
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class KillResult:
    """The requests meanwhile, and what was left."""

    # Requests without a stream: all, lost ones, and the reasons.
    whole: int
    whole_lost: int
    reasons: dict[str, int]
    # Streams: all, cut ones, and those cut without an error.
    streams: int
    streams_cut: int
    streams_cut_untold: int
    kills: tuple[Kill, ...]
    # Left at the end: reservations, and processes without a parent.
    reservations: int
    orphans: tuple[str, ...]
    seconds: float


async def kill_workers(
    target: Target, plan: KillPlan, mix: Mix, seed: int, progress: Callable[[str], object]
) -> KillResult:
    """Kill workers under load, as the plan says.

    Raises:
        FaultsError: there are fewer than two workers, so that none could take over.
    """
    names = sorted(str(row["node"]) for row in await aside(target.nodes))
    if len(names) < 2:
        raise FaultsError(f"{len(names)} workers: killing needs two, or none takes over")
    kills: list[Kill] = []
    recoveries: list[asyncio.Task[None]] = []
    begun_s = time.monotonic()

    async def recover(one: Kill, worker: str) -> None:
        row = await aside(partial(successor, target, one.node, {worker}))
        if row is not None:
            one.recovery_s = time.monotonic() - begun_s - one.at_s
            one.start_s = float(row.get("start_s") or 0.0)

    async with Traffic(target.url, target.model, mix, seed, target.headers) as traffic:

        def going() -> bool:
            answered = sum(not seen.streamed for seen in traffic.seen)
            enough = plan.requests and answered >= plan.requests
            return not enough and time.monotonic() - begun_s < plan.limit_s

        await asyncio.sleep(_BEFORE_S)
        while (not plan.kills or len(kills) < plan.kills) and going():
            name = names[len(kills) % len(names)]
            row = await aside(partial(target.row, "node", name))
            if row is None:
                await asyncio.sleep(_POLL_S)  # not back yet from the last time
                continue
            worker = str(row["worker"])
            kill([await aside(partial(target.pid, worker))])
            kills.append(Kill(time.monotonic() - begun_s, name))
            progress(f"kill {len(kills)}: {name}, {len(traffic.seen)} answered")
            recoveries.append(asyncio.create_task(recover(kills[-1], worker)))
            if plan.kills:
                await recoveries[-1]
            await asyncio.sleep(_BETWEEN_S if plan.kills else _EVERY_S)
        while plan.requests and going():
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*recoveries)
        await traffic.settle()
    seconds = time.monotonic() - begun_s
    reservations, strays = await idle(target)
    whole = [seen for seen in traffic.seen if not seen.streamed]
    cut = [seen for seen in traffic.seen if seen.streamed and not seen.ok]
    for one in kills:
        one.first_answer_s = first_answer_s(traffic.seen, begun_s + one.at_s)
    return KillResult(
        whole=len(whole), whole_lost=sum(not seen.ok for seen in whole), reasons=reasons(whole),
        streams=len(traffic.seen) - len(whole), streams_cut=len(cut),
        streams_cut_untold=sum(not seen.error for seen in cut), kills=tuple(kills),
        reservations=reservations, orphans=strays, seconds=seconds,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """Streams that were open at the same time."""

    streams: int
    failed: int
    reasons: dict[str, int]
    # At one moment, as their clients saw it.
    most_open: int
    seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    reservations: int


async def open_streams(target: Target, streams: int, mix: Mix, seed: int) -> StreamsResult:
    """Open `streams` streams at once; wait for all."""
    begun_s = time.monotonic()
    quiet = replace(mix, clients=0)
    async with Traffic(target.url, target.model, quiet, seed, target.headers) as traffic:
        await asyncio.gather(*(traffic.ask(i % mix.documents, True) for i in range(streams)))
    seconds = time.monotonic() - begun_s
    reservations, _ = await idle(target)
    # Rejected requests have no first token.
    begun = [seen for seen in traffic.seen if seen.status == 200]
    ttft_s = [seen.first_s - seen.sent_s for seen in begun if seen.first_s is not None]
    why = reasons(traffic.seen)
    return StreamsResult(
        streams, sum(why.values()), why, _most_open(begun), seconds, quantile(ttft_s, 0.5) or 0.0,
        quantile(ttft_s, 0.99) or 0.0, reservations,
    )  # fmt: skip


def _most_open(seen: Sequence[Observed]) -> int:
    """The most requests that were between first token and end at one moment."""
    changes = [(one.first_s, 1) for one in seen if one.first_s is not None]
    changes += [(one.ended_s, -1) for one in seen if one.first_s is not None]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
