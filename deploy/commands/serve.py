"""`kappa serve`: bring the cluster up, say what is there, stay until Ctrl-C, leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from deploy.commands.console import fail, print_json, print_table, print_text, warn
from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings, load_settings

_LOOK_S = 1.0

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Cluster file (YAML); default: the demo.")
]
Policy = Annotated[
    str | None, typer.Option(help="threshold, ttft or least_backlog; default: as configured.")
]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="HTTP port; 0: a free one.")]
Unpaced = Annotated[
    bool, typer.Option("--unpaced", help="Real speed of this machine instead of paced nodes.")
]
LogLevel = Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")]


def serve(
    config: Config = None,
    policy: Policy = None,
    port: Port = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Listen beyond loopback without keys.")
    ] = False,
    unpaced: Unpaced = False,
    log_level: LogLevel = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join: its head, HOST:PORT, or auto."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready, then stay.")
    ] = False,
) -> None:
    """Serve a model, on a Ray cluster started here or one that is joined, until Ctrl-C."""
    settings = settings_or_exit(config, policy, port, host, unpaced, log_level, allow_open)
    signal.signal(signal.SIGTERM, interrupt)
    is_ready = False
    try:
        with running(settings, address=address) as cluster:
            # Ray has put its own handler there, which dumps the stack and exits.
            signal.signal(signal.SIGTERM, interrupt)
            print_ready(cluster.url, settings, json_output)
            is_ready = True
            while not (why := cluster.ended()):
                time.sleep(_LOOK_S)
            warn(why, "red")
    except KeyboardInterrupt:
        raise typer.Exit(0 if is_ready else 130) from None
    # What Ray does at the end of a process would wait for its dead head, for a minute.
    os._exit(1)


def interrupt(*_: object) -> None:
    """A handler of signals: as if Ctrl-C had been pressed."""
    raise KeyboardInterrupt


def settings_or_exit(
    config: Path | None = None,
    policy: str | None = None,
    port: int | None = None,
    host: str | None = None,
    unpaced: bool = False,
    log_level: str | None = None,
    allow_open: bool = False,
) -> ClusterSettings:
    """Settings from file and options; on a fault prints it and exits with 2."""
    given: dict[str, dict[str, Any]] = {
        "router": {"policy": policy},
        "http": {"port": port, "host": host},
        "access": {"allow_open": allow_open or None},
    }
    try:
        settings = load_settings(config)
        changes: dict[str, Any] = {} if log_level is None else {"log_level": log_level}
        for section, options in given.items():
            changed = {name: value for name, value in options.items() if value is not None}
            if changed:
                changes[section] = {**getattr(settings, section).model_dump(), **changed}
        if changes:
            settings = load_settings(config, **changes)
    except SettingsError as error:
        fail(str(error), 2)
    return settings.unpaced() if unpaced else settings


@contextlib.contextmanager
def running(
    settings: ClusterSettings, cluster_type: type | None = None, address: str | None = None
) -> Iterator[Any]:
    """A running cluster, with progress on stderr; what keeps it from starting ends the command.

    `cluster_type` is `deploy.app.cluster.Cluster` or a subclass of it.
    """
    from deploy.app.cluster import Cluster
    from deploy.app.model import StartError

    start = time.monotonic()

    def progress(what: str) -> None:
        warn(f"{time.monotonic() - start:5.1f} s  {what}", "dim")

    try:
        with (cluster_type or Cluster)(settings, progress, address) as cluster:
            progress("ready")
            try:
                yield cluster
            finally:
                warn("stopping …", "dim")
    except StartError as error:
        fail(str(error), error.exit_code)


def print_ready(url: str, settings: ClusterSettings, json_output: bool) -> None:
    """URL, model, nodes and a curl line; or all of it as JSON."""
    from deploy.app.build import own_headers

    headers = own_headers(settings)
    nodes = httpx.get(f"{url}/v1/nodes", headers=headers, timeout=30.0).json()["nodes"]
    if json_output:
        print_json({"url": url, "model": settings.model.id, "nodes": nodes})
        return
    rows = []
    for node in nodes:
        profile = node["profile"]
        paced = f"paced: {node['emulated_model']}, 1 s takes {profile['dilation']:g}"
        rows.append((
            node["node"], profile["link_name"], f"{profile['h2d_bytes_per_s'] / 1e9:.3g}",
            f"{profile['flops_per_s'] / 1e12:.3g}", f"{node['kappa_crit']:.3g}",
            paced if node["paced"] else profile["source"],
        ))  # fmt: skip
    columns = ("node", "link", "GB/s", "TFLOP/s", "κ_crit", "speed")
    print_table(f"{settings.model.id} at {url}/v1", columns, rows, left=2)
    body = {
        "model": settings.model.id,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
    }
    key = '-H "authorization: Bearer $KEY" ' if headers else ""
    print_text(
        f"policy {settings.router.policy}; try:\n"
        f"curl -i {url}/v1/chat/completions -H 'content-type: application/json' {key}"
        f"-d '{json.dumps(body)}'\nCtrl-C stops the cluster."
    )
