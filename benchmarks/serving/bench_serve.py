"""`kappa bench serve`: streamed chats, our ingress and worker against stock Ray Serve LLM.

One Ray, one HTTP proxy, one replica each: ours at `/`, stock at `/stock` (as it comes: it holds
streamed tokens for 50 ms) and at `/stock0` (told to send each at once). All engines are vLLM with
the same model and the same limits, unpaced; ours has its host tier, events and meters on top.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.serving import serve as rounds_of_chats
from benchmarks.serving.serve import progress
from deploy.commands.provenance import Json, command, machine
from deploy.commands.serve import running, settings_or_exit


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
        played = asyncio.run(
            rounds_of_chats.play(
                urls, settings.model.id, concurrencies, requests, rounds, seed, progress()
            )
        )
    result = {
        **rounds_of_chats.summarize(played, "kappa"),
        "paced": False,
        "machine": machine(),
        "command": command(),
    }
    if json_output:
        print(json.dumps(result))
    else:
        _print_serve(result)


def _print_serve(result: dict[str, Any]) -> None:
    table = Table(title="Streamed chats, unpaced, one replica each; ms at the client")
    columns = (
        "prompt",
        "clients",
        "system",
        "TTFT p50",
        "p99",
        "spread",
        "first event p50",
        "req/s",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("prompt", "system") else "right")
    for row in result["rows"]:
        table.add_row(
            row["prompt"],
            str(row["concurrency"]),
            row["system"],
            f"{1e3 * row['ttft_s']['p50']:.0f}",
            f"{1e3 * row['ttft_s']['p99']:.0f}",
            f"{100 * row['ttft_s']['spread']:.0f} %",
            f"{1e3 * row['first_event_s']['p50']:.0f}",
            f"{row['rps']['median']:.1f}",
        )
    console = Console()
    console.print(table)
    for r in result["ratio_p50"]:
        console.print(
            f"{r['prompt']}, {r['concurrency']} clients: ours / {r['against']}: "
            f"TTFT {r['ttft']:.2f}, requests/s {r['rps']:.2f}",
            highlight=False,
        )
    console.print(f"{result['command']}  on {result['machine']}", highlight=False)
