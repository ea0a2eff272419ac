"""A tenant's small request beside another tenant's worst traffic, kind by kind.

Its time to the first token is held against that beside ordinary traffic of the other tenant, at
equal weight and as much as the cluster can serve: its fair share. The hostile client is a process
of its own, so that its work is not measured.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from kappa_benchmarks.faults.bodies import CHAT, COMPLETION, ROUTE, Bad
from kappa_benchmarks.faults.cluster import Target, aside, key_of
from kappa_benchmarks.faults.fuzz import HONEST
from kappa_benchmarks.faults.traffic import Beside, Traffic

_PROBE = replace(HONEST, pause_s=0.1)
_RAMP_S = 5.0
_DRAIN_S = 180.0
_REFUSED_PAUSE_S = 0.02
_SLOW_S = 1.0
_MOST_RATIO = 2.0
_AS_JSON = (("content-type", "application/json"),)
_LOOP = "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic."""

    title: str
    # Makes the requests that its clients send in turn, for a model.
    pool: Callable[[Rng, str], Sequence[Bad]]
    # At a time.
    clients: int = 16
    # Bodies arrive byte by byte.
    trickled: bool = False
    # Answers are read 64 bytes a second.
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The small request beside one kind of traffic."""

    kind: str
    title: str
    ttft: Beside
    # Of the medians and of the 90 % quantiles, over those beside fair traffic.
    ratio: float
    tail_ratio: float
    # Of the other tenant's answers.
    statuses: dict[str, int]
    # Left at the end.
    reservations: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "broken": self.broken()}

    def broken(self) -> list[str]:
        """Violated guarantees, as sentences."""
        found = {
            f"{self.ratio:.1f} times its fair time": self.ratio > _MOST_RATIO,
            f"{self.tail_ratio:.1f} times at the 90 % quantile": self.tail_ratio > _MOST_RATIO,
            f"failed: {self.ttft.failed}": self.ttft.failed,
            f"{self.reservations} reservations are left": self.reservations,
        }
        return [words for words, so in found.items() if so]


def _words(rng: Rng, count: int) -> str:
    return " ".join(f"{word} counts." for word in rng.integers(0, 9973, count).tolist())


def _letters(rng: Rng, count: int) -> str:
    """Words that no vocabulary holds, `count` bytes in all."""
    drawn = rng.integers(97, 123, count, dtype=np.uint8)
    drawn[7::8] = 32
    return drawn.tobytes().decode()


def _sent(path: str, **body: Any) -> Bad:
    return Bad(path, json.dumps(body).encode(), _AS_JSON)


def _chats(
    rng: Rng, model: str, count: int = 48, words: int = 200, path: str = CHAT, **more: Any
) -> list[Bad]:
    """Chats that differ in their prompts; `more`: fields of all."""
    options = {"model": model, "max_tokens": 12, "ignore_eos": True, "stream": True, **more}
    texts = [_words(rng, words) for _ in range(count)]
    return [_sent(path, messages=[{"role": "user", "content": t}], **options) for t in texts]


def _texts(model: str, prompts: Sequence[Any], **more: Any) -> list[Bad]:
    return [_sent(COMPLETION, model=model, max_tokens=12, prompt=each, **more) for each in prompts]


def _big(rng: Rng, model: str) -> list[Bad]:
    texts = [_letters(rng, 3_900_000) for _ in range(3)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [_sent(CHAT, model=model, max_tokens=1, messages=each) for each in messages]


def _grammars(rng: Rng, model: str) -> list[Bad]:
    """Structured answers by grammars that take long to compile, no two alike."""
    found = []
    for number in range(64):
        name = f"g{number}-{int(rng.integers(1 << 30))}"
        size = (20, 80, 300)[number % 3]
        options = []
        for i in range(size):
            fields = {f"{name}{i}-{j}": {"type": "string"} for j in range(20)}
            options.append({"type": "object", "properties": fields})
        schema = {"name": "a", "schema": {"anyOf": options}}
        form = {"type": "json_schema", "json_schema": schema}
        found += _chats(rng, model, 1, 5, response_format=form, max_tokens=4)
        rule = "root ::= " + " | ".join(f'"{name}{i}" root' for i in range(40 * size)) + ' | "z"'
        found += _chats(rng, model, 1, 5, structured_outputs={"grammar": rule}, max_tokens=4)
    return found


def _untokenizable(rng: Rng, model: str) -> list[Bad]:
    texts = _texts(model, [[_letters(rng, 6000), "a"] for _ in range(24)])
    return texts + _chats(rng, model, 24, truncate_prompt_tokens=-1)


def _n_times_prompts(rng: Rng, model: str) -> list[Bad]:
    found = []
    for n, count in ((128, 1024), (128, 1), (1, 128), (16, 8), (8, 8)):
        prompts = [_words(rng, 8) for _ in range(count)]
        found += _texts(model, [prompts], n=n, temperature=1.0, ignore_eos=True)
    return found


def _stray_messages(rng: Rng, model: str) -> list[Bad]:
    stray = [{"role": "user", "content": "a"}]
    return _texts(model, [_words(rng, 900) for _ in range(24)], messages=stray)


def _decisions(rng: Rng, model: str) -> list[Bad]:
    return [Bad(f"/v1/decisions?limit={n}", b"", (), "GET") for n in (1, 100, 1000)]


_beams = partial(_chats, count=24, words=60, use_beam_search=True, n=8, stream=False, max_tokens=40)
_one_piece = partial(_chats, words=60, max_tokens=400, stream_interval=100_000)
FAIR = Kind("ordinary chats", _chats)
KINDS: Mapping[str, Kind] = {
    "big_prompts": Kind("prompts of 3.9 MB", _big, clients=4),
    "slow_streams": Kind("300 long streams, read slowly",
                         partial(_chats, words=60, max_tokens=2000), clients=300, slow=True),
    "beam_search": Kind("beam search", _beams),
    "n_times_prompts": Kind("n times prompts", _n_times_prompts),
    "stream_interval": Kind("streams in one piece", _one_piece),
    "grammars": Kind("grammars slow to compile", _grammars),
    "untokenizable": Kind("prompts not tokenized at the decider", _untokenizable),
    "stray_messages": Kind("completions with messages", _stray_messages),
    "templates": Kind("templates of the client",
                      partial(_chats, count=4, words=5, chat_template=_LOOP), clients=4),
    "trickling": Kind("bodies that trickle", _chats, clients=300, trickled=True),
    "decisions": Kind("GET /v1/decisions", _decisions),
    "route": Kind("POST /v1/route", partial(_chats, words=900, path=ROUTE)),
}  # fmt: skip


async def isolation(
    target: Target, kinds: Sequence[str], seconds: float, progress: Callable[[str], object]
) -> list[Row]:
    """Measure beside fair traffic, then beside each kind, then beside fair traffic once more.

    Args:
        target: the cluster.
        kinds: names in `KINDS`.
        seconds: that each is measured for.
        progress: called with each row's name before it is measured.
    """
    rows: list[Row] = []
    fair: Beside | None = None
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        flood = partial(attack, target.url, target.model)
        # A flood of no length, so that the process has started before any is measured.
        await loop.run_in_executor(pool, flood, "fair", 0.0)
        for name in ("fair", *kinds, "fair"):
            progress(name)
            going = loop.run_in_executor(pool, flood, name, _RAMP_S + seconds)
            await asyncio.sleep(_RAMP_S)
            honest = key_of("honest")
            async with Traffic(target.url, target.model, _PROBE, 0, honest) as traffic:
                await asyncio.sleep(seconds)
                await traffic.settle()
            seen, statuses = Beside.of(traffic.seen, first_token=True), await going
            fair = fair or seen
            # The traffic's own reservations go first.
            await aside(lambda: target.until(lambda: target.reservations() == 0, _DRAIN_S))
            left = await aside(target.reservations)
            ratios = seen.p50_s / fair.p50_s, seen.p90_s / fair.p90_s
            rows.append(Row(name, _kind(name).title, seen, *ratios, statuses, left))
    return rows


def attack(url: str, model: str, name: str, seconds: float) -> dict[str, int]:
    """Send traffic of a kind for so long; statuses of the answers, in a process of its own."""
    kind = _kind(name)
    requests = kind.pool(np.random.default_rng(0), model)
    return dict(asyncio.run(_flood(kind, requests, url, seconds)))


def _kind(name: str) -> Kind:
    return FAIR if name == "fair" else KINDS[name]


async def _flood(kind: Kind, requests: Sequence[Bad], url: str, seconds: float) -> Counter[str]:
    until_s, statuses = time.monotonic() + seconds, Counter[str]()

    async def client(session: aiohttp.ClientSession, turn: int) -> None:
        while time.monotonic() < until_s:
            status = await _one(session, kind, url, requests[turn % len(requests)])
            turn += kind.clients
            statuses[status] += 1
            if status != "200":
                await asyncio.sleep(_REFUSED_PAUSE_S)

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(client(session, turn) for turn in range(kind.clients)))
    return statuses


async def _one(session: aiohttp.ClientSession, kind: Kind, url: str, bad: Bad) -> str:
    headers = {**key_of("hostile"), **dict(bad.headers)}
    body = _trickle(bad.body) if kind.trickled else bad.body
    try:
        async with session.request(
            bad.method, f"{url}{bad.path}", headers=headers, data=body
        ) as answer:
            while await answer.content.read(64 if kind.slow else -1):
                await asyncio.sleep(_SLOW_S if kind.slow else 0.0)
            return str(answer.status)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return type(error).__name__


async def _trickle(body: bytes) -> AsyncIterator[bytes]:
    for at in range(len(body)):
        yield body[at : at + 1]
        await asyncio.sleep(_SLOW_S)
