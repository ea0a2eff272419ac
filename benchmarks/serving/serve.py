"""`kappa bench serve`: streamed chats, our ingress and worker against stock Ray Serve LLM.

The systems take turns, round by round, on one Ray (`benchmarks.serving.cluster`). TTFT is measured
at the client, until the first piece of *text*: an endpoint may send an empty first event long
before its first token. That is why this is not the load test's client, which knows of tokens alone.
Each request's prompt is new, so no cache helps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.harness import Json, note, publish, quantile, result, table
from deploy.commands.serve import running, settings_or_exit

MAX_TOKENS = 16
PROMPT_WORDS = {"short": 12, "1k": 970}
"""Words in a prompt, by its name; the tiny model's tokenizer makes a token of each."""

_WORDS = ("the", "file", "test", "error", "value", "return", "class", "list", "name", "line")


def serve(
    requests: Annotated[int, typer.Option(min=1, help="Requests per round, at least.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per system and point.")] = 6,
    concurrency: Annotated[str, typer.Option(help="Clients at once, several by comma.")] = "1,8,32",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 1,
    json_output: Json = False,
) -> None:
    """Streamed chats: our ingress and worker against stock Ray Serve LLM on the same engine."""
    try:
        concurrencies = [int(part) for part in concurrency.split(",")]
    except ValueError:
        raise typer.BadParameter("give numbers with commas", param_hint="--concurrency") from None
    if min(concurrencies) < 1:
        raise typer.BadParameter("give numbers from 1", param_hint="--concurrency")
    # Imports half the system: only when it is wanted.
    from benchmarks.serving.cluster import SYSTEMS, BenchCluster, one_node

    settings = one_node(settings_or_exit(port=0))
    with running(settings, BenchCluster) as cluster:
        urls = {
            name: f"{cluster.url}{prefix}/v1/chat/completions" for name, prefix in SYSTEMS.items()
        }
        played = asyncio.run(play(urls, settings.model.id, concurrencies, requests, rounds, seed))
    facts = result(**summarize(played, "kappa"), paced=False)
    publish(facts, lambda console: _show(facts, console), json_output=json_output)


def _show(facts: dict[str, Any], console: Console) -> None:
    rows = [
        (
            row["prompt"], str(row["concurrency"]), row["system"],
            f"{1e3 * row['ttft_s']['p50']:.0f}", f"{1e3 * row['ttft_s']['p99']:.0f}",
            f"{100 * row['ttft_s']['spread']:.0f} %", f"{1e3 * row['first_event_s']['p50']:.0f}",
            f"{row['rps']['median']:.1f}",
        )
        for row in facts["rows"]
    ]  # fmt: skip
    columns = (
        "prompt", "clients", "system", "TTFT p50", "p99", "spread", "first event p50", "req/s",
    )  # fmt: skip
    title = "Streamed chats, unpaced, one replica each; ms at the client"
    console.print(table(title, columns, rows, left=("system",)))
    for ratio in facts["ratio_p50"]:
        console.print(
            f"{ratio['prompt']}, {ratio['concurrency']} clients: ours / {ratio['against']}: "
            f"TTFT {ratio['ttft']:.2f}, requests/s {ratio['rps']:.2f}",
            highlight=False,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed chat as the client saw it; seconds from sending it."""

    ttft_s: float
    first_event_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one system: its answers and how long they took together."""

    system: str
    prompt: str
    concurrency: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def rps(self) -> float:
        return len(self.answers) / self.seconds


def prompt_text(kind: str, random: Random) -> str:
    """A prompt of common words behind a number, so that no two begin alike."""
    words = random.choices(_WORDS, k=PROMPT_WORDS[kind])
    return f"{random.getrandbits(48)} {' '.join(words)}"


async def ask(client: httpx.AsyncClient, url: str, model: str, text: str) -> Answer:
    """Send one streamed chat.

    Raises:
        RuntimeError: another status than 200, or a stream without text.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
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
    return Answer(ttft_s, first_event_s, time.perf_counter() - start_s)


def has_text(line: str) -> bool:
    """Whether a server-sent event of a chat holds a token rather than only a role."""
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return bool(delta.get("content")) or ("content" in delta and "role" not in delta)


@dataclass(frozen=True, slots=True)
class System:
    """An endpoint by its name in the result."""

    name: str
    url: str
    model: str


async def play_round(
    client: httpx.AsyncClient,
    system: System,
    prompt: str,
    concurrency: int,
    requests: int,
    random: Random,
) -> Round:
    """`requests` chats from `concurrency` clients, each sending when its last was answered."""
    texts = iter([prompt_text(prompt, random) for _ in range(requests)])
    answers: list[Answer] = []

    async def one_client() -> None:
        for text in texts:
            answers.append(await ask(client, system.url, system.model, text))

    start_s = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return Round(system.name, prompt, concurrency, time.perf_counter() - start_s, tuple(answers))


async def play(
    urls: Mapping[str, str],
    model: str,
    concurrencies: Sequence[int],
    requests: int,
    rounds: int,
    seed: int,
) -> list[Round]:
    """All rounds: for each prompt and concurrency the systems take turns, `rounds` times each."""
    random = Random(seed)
    systems = [System(name, url, model) for name, url in urls.items()]
    done: list[Round] = []
    limits = httpx.Limits(max_connections=128, max_keepalive_connections=128)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client:
        for system, _, kind in itertools.product(systems, range(2), PROMPT_WORDS):
            await play_round(client, system, kind, 4, 8, random)
        for prompt, concurrency in itertools.product(PROMPT_WORDS, concurrencies):
            count = max(requests, 2 * concurrency)
            for turn in range(rounds):
                # The order turns too, so that none is always first after a pause.
                first = turn % len(systems)
                for system in systems[first:] + systems[:first]:
                    done.append(
                        await play_round(client, system, prompt, concurrency, count, random)
                    )
            rows = [_row(_of(done, name, prompt, concurrency)) for name in urls]
            medians = ", ".join(f"{r['system']} {1e3 * r['ttft_s']['p50']:.0f} ms" for r in rows)
            note(f"{prompt} prompts, concurrency {concurrency}: TTFT p50 {medians}")
    return done


def summarize(rounds: Sequence[Round], baseline: str) -> dict[str, Any]:
    """Rows per system, prompt and concurrency; `ratio_p50` sets ours beside the others."""
    keys = list(dict.fromkeys((r.prompt, r.concurrency) for r in rounds))
    systems = list(dict.fromkeys(r.system for r in rounds))
    rows = [
        _row(_of(rounds, system, prompt, concurrency))
        for prompt, concurrency in keys
        for system in systems
    ]
    by_key = {(row["system"], row["prompt"], row["concurrency"]): row for row in rows}
    ratios = []
    for prompt, concurrency in keys:
        mine = by_key[baseline, prompt, concurrency]
        for other in systems:
            if other != baseline:
                theirs = by_key[other, prompt, concurrency]
                ratios.append(
                    {
                        "prompt": prompt,
                        "concurrency": concurrency,
                        "against": other,
                        "ttft": mine["ttft_s"]["p50"] / theirs["ttft_s"]["p50"],
                        "first_event": mine["first_event_s"]["p50"]
                        / theirs["first_event_s"]["p50"],
                        "rps": mine["rps"]["median"] / theirs["rps"]["median"],
                    }
                )
    return {"rows": rows, "ratio_p50": ratios}


def _of(rounds: Iterable[Round], system: str, prompt: str, concurrency: int) -> list[Round]:
    key = (system, prompt, concurrency)
    return [r for r in rounds if (r.system, r.prompt, r.concurrency) == key]


def _row(rounds: Sequence[Round]) -> dict[str, Any]:
    first = rounds[0]
    return {
        "system": first.system,
        "prompt": first.prompt,
        "concurrency": first.concurrency,
        "rounds": len(rounds),
        "requests": sum(len(r.answers) for r in rounds),
        "ttft_s": _times([[a.ttft_s for a in r.answers] for r in rounds]),
        "first_event_s": _times([[a.first_event_s for a in r.answers] for r in rounds]),
        "rps": {
            "median": statistics.median(r.rps for r in rounds),
            "spread": _spread([r.rps for r in rounds]),
        },
    }


def _times(rounds: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Quantiles over all answers; the spread is that of the rounds' medians."""
    every = [value for values in rounds for value in values]
    return {
        "p50": quantile(every, 0.5),
        "p99": quantile(every, 0.99),
        "spread": _spread([statistics.median(values) for values in rounds]),
    }


def _spread(values: Sequence[float]) -> float:
    """Largest less smallest, over the median."""
    return (max(values) - min(values)) / statistics.median(values)
