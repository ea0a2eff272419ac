"""`kappa bench serve`: streamed chats, ours against stock Ray Serve LLM and plain vLLM.

The systems take turns, round by round, on one Ray (`benchmarks.serving.cluster`). TTFT is measured
at the client, until the first piece of *text*: an endpoint may send an empty first event long
before its first token. That is why this is not the load test's client, which knows of tokens alone.
Each request's prompt is new, so no cache helps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.harness import (
    Json,
    note,
    numbers,
    publish,
    quantile,
    result,
    table,
    usage_errors,
)
from benchmarks.serving.processes import cpu_by_role
from benchmarks.serving.settings import Config, ModelName, bench_settings
from deploy.commands.serve import running

MAX_TOKENS = 16
PROMPT_WORDS = {"short": 12, "1k": 970}
"""Words in a prompt, by its name; the tiny model's tokenizer makes a token of each."""

_WORDS = ("the", "file", "test", "error", "value", "return", "class", "list", "name", "line")
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
            help="Of kappa, kappa_envoy, stock, stock_no_batching "
            "and vllm, several by comma; kappa is always there."
        ),
    ] = "kappa,kappa_envoy,stock,stock_no_batching,vllm",
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
    # Imports half the system: only when it is wanted.
    from benchmarks.serving.cluster import SYSTEMS, BenchCluster, one_node

    wanted = systems.split(",")
    with usage_errors():
        if not set(wanted) <= set(SYSTEMS):
            raise ValueError(f"--systems: give some of {', '.join(SYSTEMS)}")
    chosen = type("Chosen", (BenchCluster,), {"systems": wanted})
    settings = one_node(bench_settings(config, model, True))
    points = list(itertools.product(PROMPT_WORDS, clients))
    with running(settings, chosen) as cluster:
        urls = {name: f"{url}/v1/chat/completions" for name, url in cluster.urls.items()}
        bench = Bench(urls, settings.model.id, requests, Random(seed))
        played = asyncio.run(bench.play(points, rounds))
    facts = result(**summarize(played), paced=False)
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def show(facts: Row, console: Console) -> None:
    """A row per system and point, and ours over the others."""
    rows = [
        (
            row["prompt"], str(row["concurrency"]), row["system"],
            f"{1e3 * row['ttft_s']['p50']:.0f}", f"{1e3 * row['ttft_s']['p99']:.0f}",
            f"{100 * row['ttft_s']['spread']:.0f} %", f"{1e3 * row['first_event_s']['p50']:.0f}",
            f"{row['rps']['median']:.1f}", *_cpu_shown(row.get("cpu_ms", {})),
        )
        for row in facts["rows"]
    ]  # fmt: skip
    columns = (
        "prompt", "clients", "system", "TTFT p50", "p99", "spread", "first event p50", "req/s",
        "CPU-ms", "by role",
    )  # fmt: skip
    title = "Streamed chats, unpaced, one replica each; ms at the client"
    console.print(table(title, columns, rows, left=("system",)))
    for ratio in facts["ratio_p50"]:
        console.print(
            f"{ratio['prompt']}, {ratio['concurrency']} clients: ours / {ratio['against']}: "
            f"TTFT {ratio['ttft']:.2f}, requests/s {ratio['rps']:.2f}"
            + (f", CPU {ratio['cpu']:.2f}" if "cpu" in ratio else ""),
            highlight=False,
        )


def _cpu_shown(cpu_ms: Mapping[str, float]) -> tuple[str, str]:
    """The sum, and the roles with the most; earlier results have none."""
    roles = " ".join(f"{role} {ms:.1f}" for role, ms in cpu_ms.items() if ms >= _SHOWN_MS)
    return f"{sum(cpu_ms.values()):.1f}", roles


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed chat as the client saw it; seconds from sending it."""

    ttft_s: float
    first_event_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one system: its answers, how long they took together, and the CPU seconds that
    all processes but the client's used meanwhile, by role."""

    system: str
    prompt: str
    concurrency: int
    seconds: float
    answers: tuple[Answer, ...]
    cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def rps(self) -> float:
        return len(self.answers) / self.seconds


def prompt_text(kind: str, random: Random) -> str:
    """A prompt of common words behind a number, so that no two begin alike."""
    words = random.choices(_WORDS, k=PROMPT_WORDS[kind])
    return f"{random.getrandbits(48)} {' '.join(words)}"


def has_text(line: str) -> bool:
    """Whether a server-sent event of a chat holds a token rather than only a role."""
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return bool(delta.get("content")) or ("content" in delta and "role" not in delta)


@dataclass(frozen=True, slots=True)
class Bench:
    """Plays rounds against endpoints by name, at least so many requests each."""

    urls: Mapping[str, str]
    model: str
    requests: int
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
                        done.append(await self._round(client, system, prompt, clients, count))
                    # The order turns too, so that none is always first after a pause.
                    order.append(order.pop(0))
                rows = summarize(done)["rows"][-len(self.urls) :]
                medians = (f"{r['system']} {1e3 * r['ttft_s']['p50']:.0f} ms" for r in rows)
                note(f"{prompt} prompts, concurrency {clients}: TTFT p50 {', '.join(medians)}")
        return done

    async def _round(
        self, client: httpx.AsyncClient, system: str, prompt: str, clients: int, requests: int
    ) -> Round:
        """`requests` chats from so many clients, each sending when its last was answered."""
        texts = iter([prompt_text(prompt, self.random) for _ in range(requests)])
        answers: list[Answer] = []

        async def one_client() -> None:
            for text in texts:
                answers.append(await self._chat(client, self.urls[system], text))

        before, start_s = cpu_by_role(), time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(clients)))
        seconds, used = time.perf_counter() - start_s, cpu_by_role()
        used.subtract(before)
        return Round(system, prompt, clients, seconds, tuple(answers), used)

    async def _chat(self, client: httpx.AsyncClient, url: str, text: str) -> Answer:
        """Send one streamed chat.

        Raises:
            RuntimeError: another status than 200, or a stream without text.
        """
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}],
            "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        start_s = time.perf_counter()
        first_event_s = ttft_s = None
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{url}: {answer.status_code} {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                since_s = time.perf_counter() - start_s
                first_event_s = first_event_s or since_s
                if ttft_s is None and has_text(line):
                    ttft_s = since_s
        if first_event_s is None or ttft_s is None:
            raise RuntimeError(f"{url}: the stream held no text")
        return Answer(ttft_s, first_event_s)


def summarize(rounds: Iterable[Round]) -> Row:
    """Rows per prompt, concurrency and system; `ratio_p50` sets ours beside the others."""
    points: dict[tuple[str, int], dict[str, list[Round]]] = defaultdict(lambda: defaultdict(list))
    for one in rounds:
        points[one.prompt, one.concurrency][one.system].append(one)
    found, ratios = [], []
    for (prompt, concurrency), systems in points.items():
        rows = [_row(played) for _, played in sorted(systems.items(), key=lambda s: s[0] != OURS)]
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
    return {
        "system": first.system, "prompt": first.prompt, "concurrency": first.concurrency,
        "rounds": len(rounds), "requests": sum(len(one.answers) for one in rounds),
        "ttft_s": times("ttft_s"), "first_event_s": times("first_event_s"),
        "rps": {"median": statistics.median(rps), "spread": spread(rps)},
        "cpu_ms": _cpu_ms(rounds), "load": os.getloadavg()[0],
    }  # fmt: skip


def _cpu_ms(rounds: Sequence[Round]) -> dict[str, float]:
    """By role, a request."""
    requests, total = sum(len(one.answers) for one in rounds), Counter[str]()
    for one in rounds:
        total.update(one.cpu_s)
    return {role: 1e3 * used_s / requests for role, used_s in total.most_common()}
