"""`kappa bench serve`: streamed chats, ours against stock Ray Serve LLM and plain vLLM.

The systems take turns, round by round (`kappa_benchmarks.serving.cluster`). TTFT is measured at the
client, until the first piece of *text*: an endpoint may send an empty first event long before its
first token. The load test's client counts tokens alone, so it cannot be used here. Each short
prompt is new, so no cache helps. Long ones are conversations: the first turn is new, of a follow-up
turn all but some words are cached on the device.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from kappa_benchmarks.harness import (
    Column,
    Json,
    names,
    note,
    numbers,
    publish,
    quantile,
    result,
    rows_table,
    usage_errors,
)
from kappa_benchmarks.serving.processes import cpu_by_role
from kappa_benchmarks.serving.prompts import (
    MAX_TOKENS,
    PROMPT_WORDS,
    TALK_WORDS,
    follow_up,
    most_tokens,
    opening,
    prompt_text,
)
from kappa_benchmarks.serving.settings import Config, ModelName, bench_settings
from kappa_deploy.commands.serve import running

_WARM_UP_ROUNDS = 2
OURS = "kappa"
# CPU-ms a request, of a role that is shown.
_SHOWN_MS = 0.2

Row = dict[str, Any]


def serve(
    requests: Annotated[int, typer.Option(min=1, help="Requests per round, at least.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per system and point.")] = 6,
    concurrency: Annotated[str, typer.Option(help="Clients at once, several by comma.")] = "1,8,32",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 1,
    systems: Annotated[
        str,
        typer.Option(
            help="Of kappa, stock, stock_no_batching, direct (streaming, behind HAProxy) and vllm, "
            "several by comma; kappa is always there."
        ),
    ] = "kappa,stock,stock_no_batching,direct,vllm",
    prompts: Annotated[
        str,
        typer.Option(help="Of short, 1k, and as conversations 8k, 32k and 128k, several by comma."),
    ] = "short,1k",
    config: Config = None,
    model: ModelName = None,
    json_output: Json = False,
) -> None:
    """Streamed chats: ours against stock Ray Serve LLM and plain vLLM on the same engine.

    The first pool of the cluster file is the node that all run on, at its own speed.
    """
    with usage_errors():
        clients = [int(number) for number in numbers(concurrency, "--concurrency")]
        if min(clients) < 1:
            raise ValueError("--concurrency: give numbers from 1")
        kinds = names(prompts, [*PROMPT_WORDS, *TALK_WORDS], "--prompts")
    # Imports half the system: only when it is wanted.
    from kappa_benchmarks.serving.cluster import SYSTEMS, BenchCluster, one_node, with_room

    with usage_errors():
        wanted = names(systems, SYSTEMS, "--systems")
    chosen = type("Chosen", (BenchCluster,), {"systems": wanted})
    points = list(itertools.product(kinds, clients))
    most = max((most_tokens(kind, requests) for kind in kinds), default=0)
    with tempfile.TemporaryDirectory() as folder:
        settings = with_room(one_node(bench_settings(config, model, True)), most, Path(folder))
        with running(settings, chosen) as cluster:
            children = {name: child.pid for name, child in cluster.children.items()}
            bench = Bench(cluster.urls, children, settings.model.id, requests, Random(seed))
            played = asyncio.run(bench.play(points, rounds))
    facts = result(**summarize(played), paced=False)
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def _roles(row: Mapping[str, Any]) -> str:
    cpu_ms = row.get("cpu_ms", {}).items()  # earlier results have none
    return " ".join(f"{role} {ms:.1f}" for role, ms in cpu_ms if ms >= _SHOWN_MS)


_SHOWN: dict[str, Column] = {
    "prompt": "prompt", "clients": "concurrency", "system": "system", "TTFT p50": "ttft_s.p50:ms",
    "p99": "ttft_s.p99:ms", "spread": "ttft_s.spread:.0%",
    "first event p50": "first_event_s.p50:ms", "less the engine": "beyond_engine_s:ms",
    "req/s": "rps.median:.1f",
    "CPU-ms": lambda row: f"{sum(row.get('cpu_ms', {}).values()):.1f}", "by role": _roles,
    "client's": "client_ms:.1f",
}  # fmt: skip


def show(facts: Row, console: Console) -> None:
    """A row per system and point, and ours over the others."""
    title = "Streamed chats, unpaced, one replica each; ms at the client"
    console.print(rows_table(title, _SHOWN, facts["rows"], left=("system",)))
    for ratio in facts["ratio_p50"]:
        console.print(
            f"{ratio['prompt']}, {ratio['concurrency']} clients: ours / {ratio['against']}: "
            f"TTFT {ratio['ttft']:.2f}, requests/s {ratio['rps']:.2f}"
            + (f", CPU {ratio['cpu']:.2f}" if "cpu" in ratio else ""),
            highlight=False,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed chat as the client saw it; seconds from sending it."""

    # Until the first piece of text.
    ttft_s: float
    # Until the first event, which may hold no text.
    first_event_s: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one system at one point."""

    system: str
    prompt: str
    # Clients at once.
    concurrency: int
    # From the first request to the last answer.
    seconds: float
    answers: tuple[Answer, ...]
    # CPU seconds of the system's processes meanwhile, by role; and of the client.
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    client_s: float = 0.0
    # Mean seconds from a request's first step to its first token, as the engine reports it. None:
    # it does not; only plain vLLM's does.
    engine_s: float | None = None

    @property
    def rps(self) -> float:
        return len(self.answers) / self.seconds


def delta_of(line: str) -> Mapping[str, Any]:
    """What a server-sent event of a chat adds."""
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return choices[0].get("delta") or {}


def has_token(delta: Mapping[str, Any]) -> bool:
    """Whether an event holds a token rather than only a role."""
    return bool(delta.get("content")) or ("content" in delta and "role" not in delta)


@dataclass(frozen=True, slots=True)
class Bench:
    """Plays rounds against endpoints."""

    # By system.
    urls: Mapping[str, str]
    # Of the other systems: the id of the process that all of theirs are below.
    children: Mapping[str, int]
    model: str
    # Of a round, at least.
    requests: int
    # Of the prompts.
    random: Random

    async def play(self, points: Sequence[tuple[str, int]], rounds: int) -> list[Round]:
        """All rounds: at each (prompt, clients) the systems take turns, `rounds` times each."""
        done: list[Round] = []
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=128)
        async with httpx.AsyncClient(timeout=120.0, limits=limits) as client:
            for system, _, kind in itertools.product(
                self.urls, range(_WARM_UP_ROUNDS), PROMPT_WORDS
            ):
                await self._round(client, system, kind, 4, 8)
            for prompt, clients in points:
                count = max(self.requests, 2 * clients)
                order = list(self.urls)
                for _ in range(rounds):
                    for system in order:
                        done += await self._rounds(client, system, prompt, clients, count)
                    # The order turns too, so that none is always first after a pause.
                    order.append(order.pop(0))
                rows = summarize(done)["rows"][-len(self.urls) :]
                medians = (f"{r['system']} {1e3 * r['ttft_s']['p50']:.0f} ms" for r in rows)
                shown = rows[0]["prompt"]
                note(f"{shown} prompts, concurrency {clients}: TTFT p50 {', '.join(medians)}")
        return done

    async def _rounds(
        self, client: httpx.AsyncClient, system: str, kind: str, clients: int, requests: int
    ) -> list[Round]:
        """One round of single chats; or of conversations, one of first and one of later turns."""
        if kind in PROMPT_WORDS:
            return [await self._round(client, system, kind, clients, requests)]
        talks = [opening(kind, self.random) for _ in range(clients)]

        async def turns(talk: list[dict[str, str]], count: int) -> list[Answer]:
            answers = []
            for _ in range(count):
                answers.append(await self._chat(client, self.urls[system], talk))
                talk += [
                    {"role": "assistant", "content": answers[-1].text},
                    {"role": "user", "content": follow_up(self.random)},
                ]
            return answers

        return [
            await self._measured(system, f"{kind} {name}", [turns(talk, count) for talk in talks])
            for name, count in (("first", 1), ("follow-up", -(-requests // clients)))
        ]

    async def _round(
        self, client: httpx.AsyncClient, system: str, prompt: str, clients: int, requests: int
    ) -> Round:
        """`requests` chats from `clients` clients, each sending when its last was answered."""
        texts = iter([prompt_text(prompt, self.random) for _ in range(requests)])

        async def one_client() -> list[Answer]:
            return [
                await self._chat(client, self.urls[system], [{"role": "user", "content": text}])
                for text in texts
            ]

        return await self._measured(system, prompt, [one_client() for _ in range(clients)])

    async def _measured(
        self, system: str, prompt: str, clients: Sequence[Coroutine[Any, Any, list[Answer]]]
    ) -> Round:
        pid = self.children.get(system)
        others = [] if pid is not None else list(self.children.values())
        engine, before = await self._prefills(system), cpu_by_role(pid, others)
        client_s, start_s = time.process_time(), time.perf_counter()
        answers = itertools.chain.from_iterable(await asyncio.gather(*clients))
        seconds, client_s = time.perf_counter() - start_s, time.process_time() - client_s
        used = cpu_by_role(pid, others)
        used.subtract(before)
        computed_s, count = (
            b - a for a, b in zip(engine, await self._prefills(system), strict=True)
        )
        engine_s = computed_s / count if count else None
        return Round(
            system, prompt, len(clients), seconds, tuple(answers), used, client_s, engine_s
        )

    async def _prefills(self, system: str) -> tuple[float, float]:
        """Seconds of prompts in plain vLLM's engine so far, and how many there were."""
        if system != "vllm":
            return 0.0, 0.0
        async with httpx.AsyncClient(timeout=10.0) as client:
            text = (await client.get(f"{self.urls[system]}/metrics")).raise_for_status().text
        sums = (
            re.findall(rf"^vllm:request_prefill_time_seconds_{name}{{.*}} (.+)$", text, re.M)
            for name in ("sum", "count")
        )
        seconds, count = (sum(map(float, found)) for found in sums)
        return seconds, count

    async def _chat(
        self, client: httpx.AsyncClient, url: str, messages: Sequence[Mapping[str, str]]
    ) -> Answer:
        """Send one streamed chat.

        Raises:
            RuntimeError: another status than 200, or a stream without text.
        """
        body = {
            "model": self.model, "messages": messages,
            "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        content = json.dumps(body).encode()
        start_s = time.perf_counter()
        first_event_s = ttft_s = None
        text = ""
        sent = client.stream(
            "POST", f"{url}/v1/chat/completions", content=content,
            headers={"content-type": "application/json"},
        )  # fmt: skip
        async with sent as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{url}: {answer.status_code} {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                since_s = time.perf_counter() - start_s
                first_event_s = first_event_s or since_s
                delta = delta_of(line)
                text += delta.get("content") or ""
                if ttft_s is None and has_token(delta):
                    ttft_s = since_s
        if first_event_s is None or ttft_s is None:
            raise RuntimeError(f"{url}: the stream held no text")
        return Answer(ttft_s, first_event_s, text)


def summarize(rounds: Iterable[Round]) -> Row:
    """Rows per prompt, concurrency and system; `ratio_p50` sets ours beside the others."""
    points: dict[tuple[str, int], dict[str, list[Round]]] = defaultdict(lambda: defaultdict(list))
    for one in rounds:
        points[one.prompt, one.concurrency][one.system].append(one)
    found, ratios = [], []
    for (prompt, concurrency), systems in points.items():
        rows = [_row(played) for _, played in sorted(systems.items(), key=lambda s: s[0] != OURS)]
        # All systems run the same engine, so plain vLLM's seconds hold for each.
        engine_s = next((row["engine_s"] for row in rows if row["engine_s"] is not None), None)
        for row in rows:
            beyond = None if engine_s is None else row["ttft_s"]["p50"] - engine_s
            row["beyond_engine_s"] = beyond
        found += rows
        mine = rows[0]
        ratios += [
            {
                "prompt": prompt, "concurrency": concurrency, "against": row["system"],
                "ttft": mine["ttft_s"]["p50"] / row["ttft_s"]["p50"],
                "first_event": mine["first_event_s"]["p50"] / row["first_event_s"]["p50"],
                "rps": mine["rps"]["median"] / row["rps"]["median"],
                "cpu": _ratio(sum(mine["cpu_ms"].values()), sum(row["cpu_ms"].values())),
            }
            for row in rows[1:]
        ]  # fmt: skip
    return {"rows": found, "ratio_p50": ratios}


def _ratio(ours: float, other: float) -> float:
    return ours / other if other else float("nan")


def _row(rounds: Sequence[Round]) -> Row:
    """One system at one point: quantiles over all answers, spread of the rounds' medians."""

    def spread(values: Sequence[float]) -> float:
        return (max(values) - min(values)) / statistics.median(values)

    def times(name: str) -> Row:
        by_round = [[getattr(answer, name) for answer in one.answers] for one in rounds]
        every = list(itertools.chain.from_iterable(by_round))
        medians = [statistics.median(values) for values in by_round]
        return {
            "p50": quantile(every, 0.5), "p99": quantile(every, 0.99), "spread": spread(medians),
        }  # fmt: skip

    first, rps = rounds[0], [one.rps for one in rounds]
    engine_s = [one.engine_s for one in rounds if one.engine_s is not None]
    return {
        "system": first.system, "prompt": first.prompt, "concurrency": first.concurrency,
        "rounds": len(rounds), "requests": sum(len(one.answers) for one in rounds),
        "ttft_s": times("ttft_s"), "first_event_s": times("first_event_s"),
        "rps": {"median": statistics.median(rps), "spread": spread(rps)},
        "engine_s": statistics.median(engine_s) if engine_s else None,
        "cpu_ms": _cpu_ms(rounds), "load": os.getloadavg()[0],
        "client_ms": 1e3 * sum(r.client_s for r in rounds) / sum(len(r.answers) for r in rounds),
    }  # fmt: skip


def _cpu_ms(rounds: Sequence[Round]) -> dict[str, float]:
    """By role, a request."""
    requests, total = sum(len(one.answers) for one in rounds), Counter[str]()
    for one in rounds:
        total.update(one.cpu_s)
    return {role: 1e3 * used_s / requests for role, used_s in total.most_common()}
