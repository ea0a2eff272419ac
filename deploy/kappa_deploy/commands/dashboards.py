"""`kappa dashboards`: a cluster, Prometheus and traffic together, for looking at the dashboards.

Recorded sessions are replayed over and over, in groups that take turns, while Prometheus scrapes
the router and Ray. There is no Grafana here: the JSON files are for yours. With `--for` it ends by
itself and prints which panels had data. Everything started here ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections import Counter
from typing import Annotated

import typer

from kappa_deploy.commands.serve import Config, Policy, Port, interrupt, running, settings_or_exit
from kappa_deploy.prometheus import PrometheusError, prometheus, ray_targets, tool
from kappa_loadtest.client import EndpointError
from kappa_loadtest.sessions import chat_sessions, replay
from kappa_router.console import fail, warn
from kappa_workload.sessions import demo_sessions_path, read_sessions

_ANSWER_TOKENS = 16
# A group of chats comes again when the others have driven it from the device to the host tier.
_GROUPS = 3
_INTERVAL_S = 2.0
_RATE_WINDOW_S = 30.0
# The first rate needs two scrapes, and the first seconds show nothing but the warm-up.
_LEAST_S = 30.0


def dashboards(
    config: Config = None,
    policy: Policy = None,
    port: Port = None,
    prometheus_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Prometheus' port; 0: a free one.")
    ] = 9090,
    sessions: Annotated[int, typer.Option(min=1, max=64, help="Chats at once.")] = 4,
    seconds: Annotated[
        float | None,
        typer.Option("--for", min=_LEAST_S, help="Seconds until it ends; default: Ctrl-C."),
    ] = None,
) -> None:
    """Start a cluster, Prometheus and traffic, to look at the dashboards."""
    settings = settings_or_exit(config, policy, port)
    engine = settings.engine.model_copy(update={"metrics": True})
    settings = settings.model_copy(update={"engine": engine})
    from kappa_dashboards.build import DASHBOARDS, FOLDER, RULE_FILES

    rules = [FOLDER / "rules" / name for name in RULE_FILES]
    files = "\n".join(f"  {FOLDER / f'{board.uid}.json'}" for board in DASHBOARDS)
    try:
        tool("prometheus")  # before seconds are spent on the cluster
        signal.signal(signal.SIGTERM, interrupt)
        with running(settings) as cluster:
            jobs = {"kappa": [cluster.url.removeprefix("http://")], "ray": ray_targets(os.getpid())}
            with prometheus(jobs, rules, _INTERVAL_S, prometheus_port) as prometheus_url:
                print(
                    f"endpoint    {cluster.url}/v1 (metrics: {cluster.url}/metrics)\n"
                    f"Prometheus  {prometheus_url} (rules: {prometheus_url}/rules)\n"
                    f"Dashboards, for your Grafana with that Prometheus as data source:\n{files}\n"
                    "Which panels have data: .venv/bin/python -m kappa_dashboards.check "
                    f"--prometheus {prometheus_url}\nCtrl-C stops them all.",
                    flush=True,
                )
                asyncio.run(_traffic(cluster.url, sessions, seconds))
                if seconds is not None:
                    raise typer.Exit(_evaluate(prometheus_url, seconds))
    except (PrometheusError, EndpointError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _traffic(url: str, count: int, seconds: float | None) -> None:
    """Replay recorded sessions, `count` at once, until the time is up; print what failed."""
    recorded = read_sessions(demo_sessions_path())
    errors: Counter[str] = Counter()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                chats = chat_sessions(recorded, _GROUPS * count)
                for turn in itertools.count():
                    first = turn % _GROUPS * count
                    now = chats[first : first + count]
                    for record in await replay(url, now, _ANSWER_TOKENS):
                        if record.error:
                            errors[f"{record.error}: {record.error_detail}"] += 1
    finally:
        if errors:
            warn(f"requests that failed: {dict(errors)}")


def _evaluate(prometheus_url: str, seconds: float) -> int:
    """Print which panels had data; 1 if one that must have some had none."""
    from kappa_dashboards.check import ask, report

    answers = ask(prometheus_url, seconds, _RATE_WINDOW_S, time.time())
    print(report(answers))
    return 1 if any(answer.is_missing for answer in answers) else 0
