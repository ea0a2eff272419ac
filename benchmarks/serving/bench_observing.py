"""`kappa bench serve --observing`: what metrics and logs (and spans) cost in requests/s.

Rounds of streamed chats in turns against two clusters on one Ray and one HTTP proxy, each with one
unpaced engine, all settings alike but the observing ones: at one metrics, a JSON line per request
in a file and, if wanted, spans of every request to a collector here; at the other none of that.
Then again with their places swapped; the cost is that of the pairs (`paired`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.serving.paired import cost
from benchmarks.serving.serve import Progress, play
from deploy.commands.provenance import command, machine
from deploy.commands.serve import running, settings_or_exit
from kappa.settings.cluster import ClusterSettings
from kappa.settings.routing import ObservingSettings

if TYPE_CHECKING:
    from deploy.app.cluster import Cluster

GOAL = 0.03
LEAST_ROUNDS = 2
"""Of each order: one has no spread, and an interval without width would show anything."""

SEEN, UNSEEN = "seen", "unseen"
ORDERS = ((SEEN, UNSEEN), (UNSEEN, SEEN))
"""Who stands at `/` and who beside it: the place alone may be worth some requests/s."""

BESIDE = "/beside"
_BESIDE_APP = "beside"

_UNSEEN = ObservingSettings(metrics=False, request_log=False)


class Collector:
    """Takes spans and throws them away; counts the requests that brought them."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                collector.batches += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.batches = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def seen(settings: ClusterSettings, log_file: Path, collector: Collector | None) -> ClusterSettings:
    """The settings with metrics and logs, and spans of every request if somebody takes them."""
    endpoint = collector.url if collector is not None else None
    observing = ObservingSettings(log_format="json", log_file=str(log_file), otlp_endpoint=endpoint)
    return settings.model_copy(update={"observing": observing})


def unseen(settings: ClusterSettings) -> ClusterSettings:
    """The settings with nothing observed."""
    return settings.model_copy(update={"observing": _UNSEEN})


def cpu_seconds(first: str, system: str) -> float:
    """Processor seconds so far of a system's ingress and engine; `first` is the one at `/`."""
    from deploy.app.ray_cluster import APP

    title = f"ray::ServeReplica:{APP if system == first else _BESIDE_APP}:"
    total_s = 0.0
    for process in psutil.process_iter():
        # A process may end while it is looked at; the engines stay.
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process.cmdline() or [""])[0].startswith(title):
                for each in (process, *process.children(recursive=True)):
                    used = each.cpu_times()
                    total_s += used.user + used.system
    return total_s


def beside(second: ClusterSettings) -> type[Cluster]:
    """A kind of cluster that has another one beside it, on the same Ray and proxy."""
    # Imports half the system: only when it is wanted.
    from deploy.app.build import build_app
    from deploy.app.cluster import Cluster
    from deploy.app.model import prepare_model

    class PairCluster(Cluster):
        engines_beside = 1

        def _start(self) -> None:
            super()._start()
            from ray import serve

            self._progress("starting the one beside it")
            app = build_app(second, prepare_model(second))
            serve.run(app, name=_BESIDE_APP, route_prefix=BESIDE)

    return PairCluster


def observing_cost(
    concurrencies: Sequence[int],
    requests: int,
    rounds: int,
    seed: int,
    spans: bool,
    json_output: bool,
    progress: Progress,
) -> None:
    """Play rounds in turns, with metrics and logs (and spans) and with nothing; print the cost."""
    from benchmarks.serving.cluster import one_node

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
                playing = play(
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
