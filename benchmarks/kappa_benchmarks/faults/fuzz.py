"""Requests that no client should send, sent to a whole cluster beside those of an honest client.

Every answer must come in time, in OpenAI's shape where it is a refusal, and none may say that we
failed. No process of a worker may die, nothing stay reserved; and the honest client, who is another
tenant, must hardly notice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from kappa_benchmarks.faults.bodies import Bad, bad_requests, fields_known
from kappa_benchmarks.faults.cluster import FaultsError, Target, alive, aside, key_of
from kappa_benchmarks.faults.hostile_values import Schema
from kappa_benchmarks.faults.traffic import Beside, Mix, Observed, Traffic

MARKER = "zqxsecretprompt"
HONEST = Mix(clients=1, streamed_share=1.0, documents=1, words=12, max_tokens=4, pause_s=0.5)
"""A small chat, sent again half a second after its answer."""

_IDLE_S = 20.0
_READ_S = 10.0
_LOOK_S = 2.0
_LASTING_S = 0.5
_SETTLE_S = 120.0
_MOST_SHOWN = 20
_MOST_SLOW = 5
_BYTES_SHOWN = 600
_MOST_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class FuzzPlan:
    """The hostile requests."""

    requests: int
    seed: int
    # JSON schemas of chat and completion requests, by path.
    schemas: Mapping[str, Schema]
    # Requests at a time.
    at_once: int = 16
    # Within which each must be answered.
    bound_s: float = 75.0


@dataclass(frozen=True, slots=True)
class Death:
    """Processes of a worker that ended."""

    # When it was seen, from the start.
    at_s: float
    lost: tuple[str, ...]
    # Requests that were open then or had just been answered, the latest last.
    suspects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """Answers to the hostile requests, and the honest client beside them."""

    requests: int
    seconds: float
    # Answers by status, or by the client's error.
    statuses: dict[str, int]
    # Wrong answers: how many, and the first twenty with their faults.
    wrong_total: int
    wrong: tuple[str, ...]
    slowest_s: float
    deaths: tuple[Death, ...]
    # Left at the end.
    reservations: int
    # Known request fields, and those that no request tried.
    fields: int
    untried: tuple[str, ...]
    # The honest client before and meanwhile.
    idle: Beside
    honest: Beside
    # Its slowest requests, each with hostile ones that took long at that time.
    slow: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        per_s = self.requests / self.seconds
        return {**asdict(self), "per_s": per_s, "ratios": self.ratios, "broken": self.broken()}

    @property
    def ratios(self) -> dict[str, float]:
        """The honest client's time meanwhile over its idle median."""
        times_s = {name: getattr(self.honest, f"{name}_s") for name in ("p50", "p99", "max")}
        return {name: time_s / self.idle.p50_s for name, time_s in times_s.items()}

    def broken(self) -> list[str]:
        """Violated guarantees, as sentences."""
        worst = self.ratios["max"]
        found = {
            f"{self.wrong_total} answers were wrong": self.wrong_total,
            f"workers' processes died {len(self.deaths)} times": self.deaths,
            f"{self.reservations} reservations are left": self.reservations,
            f"the honest client failed: {self.honest.failed}": self.honest.failed,
            f"the honest client waited {worst:.1f} times its idle time": worst > _MOST_RATIO,
        }
        return [words for words, so in found.items() if so]

    def summary(self) -> str:
        """One line."""
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in self.ratios.items())
        return (
            f"fuzz: {self.requests} requests in {self.seconds:.0f} s "
            f"({self.requests / self.seconds:.1f}/s), {self.fields - len(self.untried)} of "
            f"{self.fields} fields tried; statuses {dict(sorted(self.statuses.items()))}; "
            f"slowest {self.slowest_s:.1f} s; honest client over its idle "
            f"{self.idle.p50_s:.2f} s: {ratios}; "
            f"{'; '.join(self.broken()) or 'every promise kept'}"
        )


async def fuzz(
    target: Target, plan: FuzzPlan, advance: Callable[[], object] = lambda: None
) -> FuzzResult:
    """Send all of the plan as one tenant, beside another, and wait until nothing is reserved.

    advance: called after every request.
    """
    before = await _honest_during(target, plan.seed, asyncio.sleep(_IDLE_S))
    run = _Run(target, plan, advance)
    meanwhile = await _honest_during(target, plan.seed, run.all())
    await aside(lambda: target.until(lambda: target.reservations() == 0, _SETTLE_S))
    known = fields_known(plan.schemas)
    return FuzzResult(
        sum(run.statuses.values()), run.seconds, dict(run.statuses), run.wrong_total,
        tuple(run.wrong), run.slowest_s, tuple(run.deaths), await aside(target.reservations),
        len(known), tuple(sorted(known - run.tried)), Beside.of(before, first_token=False),
        Beside.of(meanwhile, first_token=False), run.beside(meanwhile),
    )  # fmt: skip


async def _honest_during(target: Target, seed: int, work: Awaitable[object]) -> list[Observed]:
    """The honest client's requests while `work` went on."""
    async with Traffic(target.url, target.model, HONEST, seed, key_of("honest")) as traffic:
        await work
        await traffic.settle()
    return traffic.seen


@dataclass(slots=True)
class _Run:
    """The hostile client, and a look at the workers' processes now and then."""

    target: Target
    plan: FuzzPlan
    advance: Callable[[], object]
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    wrong_total: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    tried: set[str] = field(default_factory=set)
    deaths: list[Death] = field(default_factory=list)
    _lasting: list[tuple[float, float, str]] = field(default_factory=list)
    _open: dict[int, Bad] = field(default_factory=dict)
    _known: dict[str, list[int]] = field(default_factory=dict)
    _start_s: float = 0.0
    _done: deque[Bad] = field(default_factory=lambda: deque(maxlen=24))

    async def all(self) -> None:
        plan = self.plan
        drawn = bad_requests(plan.seed, plan.requests, self.target.model, MARKER, plan.schemas)
        self._known = await aside(self._processes)
        self._start_s = time.monotonic()
        watch = asyncio.create_task(self._watch())
        timeout = aiohttp.ClientTimeout(total=plan.bound_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._sender(session, drawn) for _ in range(plan.at_once)))
        self.seconds = time.monotonic() - self._start_s
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await asyncio.sleep(_LOOK_S)  # for the death that the last one caused
        await self._look()

    def beside(self, seen: Sequence[Observed]) -> tuple[tuple[str, ...], ...]:
        """The slowest of these requests, each with what took long and overlapped it the most."""
        found = []
        for r in sorted(seen, key=lambda r: r.sent_s - r.ended_s)[:_MOST_SLOW]:
            overlaps = [
                (min(end_s, r.ended_s) - max(start_s, r.sent_s), f"{end_s - start_s:.1f} s: {text}")
                for start_s, end_s, text in self._lasting
            ]
            beside = [text for both_s, text in sorted(overlaps, reverse=True)[:8] if both_s > 0]
            at_s = r.sent_s - self._start_s
            found.append((f"{r.ended_s - r.sent_s:.1f} s, at {at_s:.0f} s", *beside))
        return tuple(found)

    async def _sender(self, session: aiohttp.ClientSession, drawn: Iterator[Bad]) -> None:
        for bad in drawn:
            self._open[id(bad)] = bad
            sent_s = time.monotonic()
            status, complaint = await self._send(session, bad)
            ended_s = time.monotonic()
            self.slowest_s = max(self.slowest_s, ended_s - sent_s)
            if ended_s - sent_s > _LASTING_S:
                self._lasting.append((sent_s, ended_s, f"{status} {_shown(bad)}"))
            self._done.append(self._open.pop(id(bad)))
            self.statuses[status] += 1
            self.tried.update(bad.fields)
            if complaint:
                self.wrong_total += 1
                if len(self.wrong) < _MOST_SHOWN:
                    self.wrong.append(f"{complaint}: {_shown(bad)}")
            self.advance()

    async def _send(self, session: aiohttp.ClientSession, bad: Bad) -> tuple[str, str]:
        """The status, and a complaint or ""; a long stream is left after a while."""
        url, headers = f"{self.target.url}{bad.path}", {**key_of("hostile"), **dict(bad.headers)}
        read = []
        try:
            async with session.request(bad.method, url, data=bad.body, headers=headers) as answer:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_READ_S if answer.status == 200 else None):
                        async for chunk in answer.content.iter_any():
                            read.append(chunk)
                text = b"".join(read).decode(errors="replace")
                return str(answer.status), complaint_of(answer.status, text)
        except (TimeoutError, aiohttp.ClientError, ValueError, OSError) as error:
            return type(error).__name__, repr(error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        """Note the processes that have died since the last look."""
        known, now = self._known, await aside(self._processes)
        pids = [(name, pid) for name, mine in known.items() for pid in mine]
        lost = [f"{name} {pid}" for name, pid in pids if not alive(pid)]
        if any(now.values()):
            lost += [f"worker {name}" for name in known if not now.get(name)]
        if lost:
            suspects = [_shown(bad) for bad in (*self._done, *self._open.values())]
            at_s = time.monotonic() - self._start_s
            self.deaths.append(Death(at_s, tuple(lost), tuple(suspects)))
            known = now
        self._known = {**known, **now}

    def _processes(self) -> dict[str, list[int]]:
        """Pids of each worker that the router knows and of its engine."""
        engines = set(self.target.family.of_role("engine"))
        found = {}
        for row in self.target.nodes():
            name = str(row["worker"])
            with suppress(FaultsError):
                pid = self.target.pid(name)
                found[name] = [pid, *(p for p in self.target.family.below(pid) if p in engines)]
        return found


def complaint_of(status: int, text: str) -> str:
    """A complaint about an answer, or about the error event of a stream; empty if it is right."""
    if status == 500:
        return f"500 {text[:200]}"
    events = [line[6:] for line in text.splitlines() if line.startswith('data: {"error"')]
    for error in [text] if status >= 400 else events:
        if not _shaped(error):
            return f"{status} in another shape: {error[:200]}"
    return ""


def _shaped(text: str) -> bool:
    try:
        error = json.loads(text)["error"]
        return set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        return False


def _shown(bad: Bad) -> str:
    body = bad.body
    if len(body) > _BYTES_SHOWN:
        body = body[: _BYTES_SHOWN // 2] + b" ... " + body[-_BYTES_SHOWN // 2 :]
    return f"{bad.method} {bad.path} {bad.fields} {body!r} {bad.headers}"
