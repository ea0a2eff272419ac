"""`kappa bench serve --observing`: what metrics and logs (and spans) cost in requests/s.

Rounds of streamed chats in turns against two clusters that differ in nothing else, then again with
their places swapped (`observing`); the cost is that of the pairs (`paired`).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving import serve as serve_law
from benchmarks.serving.paired import cost
from deploy.commands.provenance import command, machine
from deploy.commands.serve import running, settings_or_exit

GOAL = 0.03

LEAST_ROUNDS = 2
"""Of each order: one has no spread, and an interval without width would show anything."""


def observing_cost(
    concurrencies: Sequence[int],
    requests: int,
    rounds: int,
    seed: int,
    spans: bool,
    json_output: bool,
    progress: Callable[[str], None],
) -> None:
    """Play rounds in turns, with metrics and logs (and spans) and with nothing; print the cost."""
    # Imports half the system: only when it is wanted.
    from benchmarks.serving.cluster import one_node
    from benchmarks.serving.observing import (
        BESIDE,
        ORDERS,
        SEEN,
        UNSEEN,
        Collector,
        beside,
        cpu_seconds,
        seen,
        unseen,
    )

    with tempfile.TemporaryDirectory(prefix="kappa-observing-") as folder, Collector() as collector:
        log_file = Path(folder) / "log.jsonl"
        plain = one_node(settings_or_exit(port=0))
        settings = {
            SEEN: seen(plain, log_file, collector if spans else None),
            UNSEEN: unseen(plain),
        }
        orders = []
        for first, second in ORDERS:
            progress(f"{first} at /, {second} beside it")
            with running(settings[first], beside(settings[second])) as cluster:
                urls = {
                    first: f"{cluster.url}/v1/chat/completions",
                    second: f"{cluster.url}{BESIDE}/v1/chat/completions",
                }
                playing = serve_law.play(
                    urls, plain.model.id, concurrencies, requests, rounds, seed, progress,
                    partial(cpu_seconds, first),
                )  # fmt: skip
                orders.append(asyncio.run(playing))
        lines = sum('"request_done"' in line for line in log_file.open(encoding="utf-8"))
        result = {
            **cost(orders, SEEN, UNSEEN, seed),
            "cpu": cost(orders, SEEN, UNSEEN, seed, attrgetter("per_cpu_s")),
            "cpu_ms": 1e3 / median(r.per_cpu_s for o in orders for r in o if r.system == UNSEEN),
            "goal": GOAL, "log_lines": lines,
            "spans": spans, "span_batches": collector.batches, "paced": False, "machine": machine(),
            "command": command(),
        }  # fmt: skip
    if json_output:
        print(json.dumps(result))
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    what = "metrics, logs and spans" if result["spans"] else "metrics and logs"
    table = Table(title=f"Requests/s that {what} cost, unpaced, one engine each")
    for column in ("prompt", "clients", "pairs", "cost"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for row in result["cells"]:
        table.add_row(
            row["prompt"], str(row["concurrency"]), str(row["pairs"]), f"{row['cost']:.1%}"
        )
    console = Console()
    console.print(table)
    cpu = result["cpu"]
    console.print(
        f"requests per processor second of ingress and engine ({result['cpu_ms']:.1f} ms a request "
        "unobserved): "
        f"{cpu['cost']:.1%}, 95 % within {cpu['low']:.1%} and {cpu['high']:.1%}; by place "
        f"{', '.join(f'{c:.1%}' for c in cpu['by_order'])}",
        highlight=False,
    )
    met = "met" if result["high"] < result["goal"] else "not shown"
    console.print(
        f"all: {result['cost']:.1%}, 95 % within {result['low']:.1%} and {result['high']:.1%} over "
        f"{result['pairs']} pairs; goal under {result['goal']:.0%}: {met}. "
        f"by place {', '.join(f'{c:.1%}' for c in result['by_order'])}; "
        f"{result['log_lines']} request lines, {result['span_batches']} batches of spans",
        highlight=False,
    )
    console.print(f"{result['command']}  on {result['machine']}", highlight=False)
