"""`kappa serve`: start a cluster, print its nodes, stay until Ctrl-C, leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kappa.settings.base import settings_with
from kappa.settings.cluster import ClusterSettings, home
from kappa.settings.pools import ModelSettings
from kappa_deploy.commands.console import bad_parameter, print_json, print_table, print_text
from kappa_router.console import fail, warn

_LOOK_S = 1.0
_WIDE = 100

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Cluster file (YAML); default: built in.")
]
Policy = Annotated[
    str | None, typer.Option(help="ttft, threshold, least_backlog; default: as configured.")
]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="HTTP port; 0: a free one.")]
Paced = Annotated[
    bool | None,
    typer.Option(
        "--paced/--unpaced",
        help="Without a file: a tiny model on a PCIe and a C2C node, both paced, instead of a real "
        "one at this machine's speed. --unpaced: the file's nodes at this machine's speed.",
    ),
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
    paced: Paced = None,
    log_level: LogLevel = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join: its head, HOST:PORT, or auto.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started, and its faults.")
    ] = False,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            help="With --dry-run, another machine than this one: 'gpu=4xH100-80GB, memory=512GB, "
            "shm=256GB, cpus=64, driver=580.95.05', or a JSON file of its facts. More than one: "
            "say it again."
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready, then stay.")
    ] = False,
) -> None:
    """Serve a model, on a Ray cluster started here or one that is joined, until Ctrl-C."""
    if paced and config:
        fail(f"--paced is the built-in pair of nodes: in {config} say paced: true", 2)
    defaults = not (config or address or machine or paced)
    settings = settings_or_exit(
        config, policy, port, host, paced is False, log_level, allow_open, defaults=defaults
    )
    if dry and not address:
        raise typer.Exit(print_dry_run(settings, machine or [], json_output))
    if dry or machine:
        fail("--machine goes with --dry-run, which needs no --address: describe its machines", 2)
    signal.signal(signal.SIGTERM, interrupt)
    is_ready = False
    try:
        if defaults:
            settings = with_a_model(settings)
        with running(settings, address=address) as cluster:
            print_ready(cluster.url, settings, json_output)
            is_ready = True
            while not (why := cluster.ended()):
                time.sleep(_LOOK_S)
            warn(why, "red")
    except KeyboardInterrupt:
        raise typer.Exit(0 if is_ready else 130) from None
    # What Ray does at the end of a process would wait for its dead head, for a minute.
    os._exit(1)


def with_a_model(settings: ClusterSettings) -> ClusterSettings:
    """The built-in settings, their model fetched; with the tiny one if it cannot be had."""
    from kappa_deploy.app.errors import StartError
    from kappa_deploy.app.ray_cluster import check_port
    from kappa_deploy.app.smollm2 import smollm2

    try:
        check_port(settings.http.host, settings.http.port)  # before 93 MB are fetched
    except StartError as error:
        fail(str(error), error.exit_code)
    try:
        smollm2(home() / "models", lambda what: warn(what, "dim"))
    except StartError as error:
        warn(f"{error}. Until then a tiny random model is served: its answers mean nothing", "red")
        return settings.model_copy(update={"model": ModelSettings()})
    return settings


def _disk_dir() -> Path | None:
    """The folder for the disk tier of the built-in settings; None: there is no room for it."""
    from kappa_deploy.app.machine import ON_DISK
    from kappa_deploy.app.smollm2 import NEEDED_BYTES

    folder = home() / "disk"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        warn(f"{folder}: {error.strerror}: both host tiers are in memory; set KAPPA_HOME")
        return None
    if free < ON_DISK["disk_bytes"] + NEEDED_BYTES:
        warn(f"{folder} has {free / 1e9:.1f} GB free: both host tiers are in memory; free some")
        return None
    return folder


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
    defaults: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> ClusterSettings:
    """Settings from file and options; on a fault prints it and exits with 2. `defaults`: those of
    this machine, as there is no file; changes: go before the file."""
    given: dict[str, dict[str, Any]] = {
        "router": {"policy": policy},
        "http": {"port": port, "host": host},
        "access": {"allow_open": allow_open or None},
    }
    try:
        changes = dict(changes or {})
        if defaults:
            from kappa_deploy.app.machine import read_machine, settings_without_file

            changes = settings_without_file(read_machine(), _disk_dir())
        changes |= {} if log_level is None else {"log_level": log_level}
        settings = settings_with(given, ClusterSettings, config, **changes)
    except ValueError as error:
        fail(str(error), 2)
    return settings.unpaced() if unpaced else settings


@contextlib.contextmanager
def running(
    settings: ClusterSettings, cluster_type: type | None = None, address: str | None = None
) -> Iterator[Any]:
    """A running cluster, with progress on stderr; an error of its start ends the command.

    cluster_type: `kappa_deploy.app.cluster.Cluster`, which None stands for, or a subclass.
    """
    from kappa_deploy.app.cluster import Cluster
    from kappa_deploy.app.errors import StartError

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


def print_dry_run(settings: ClusterSettings, descriptions: list[str], json_output: bool) -> int:
    """Print what a start would ask for; returns 1 if something is wrong."""
    from kappa_deploy.app.cluster import set_environment
    from kappa_deploy.app.machine import described

    with bad_parameter():
        machines = [described(text) for text in descriptions]
    set_environment(settings.log_level)
    with contextlib.redirect_stdout(sys.stderr):  # imported packages may log to it
        from kappa_deploy.app.dry_run import dry_run, faults_of

        found = dry_run(settings, machines)
    pools, wrong = found["pools"], faults_of(found)
    if json_output:
        print_json(found)
        return 1 if wrong else 0
    rows = [
        (pool["name"], _device(pool), pool["host_tier"], _ray_demand(pool), _number_of(pool))
        for pool in pools
    ]
    print_table(None, ("pool", "device", "host tier", "each worker", "workers"), rows, left=4)
    for pool in pools:
        if crossing := pool["host_weights"]:
            print_text(
                f"\npool {pool['name']}: {crossing['bytes'] / 1e9:,.3g} GB of a worker's weights "
                "lie in host memory and cross at every step, which then lasts at least "
                f"{crossing['least_step_s']:.3g} s on its node"
            )
        print_text(f"\npool {pool['name']} asks of vLLM:")
        for name, value in sorted(pool["engine_args"].items()):
            shown = json.dumps(value)
            print_text(f"  {name}: {shown if len(shown) <= _WIDE else shown[:_WIDE] + ' …'}")
        print_text(f"with {' '.join(f'{k}={v}' for k, v in sorted(pool['environment'].items()))}")
    for note in found["notes"]:
        warn(note)
    for fault in wrong:
        warn(fault, "red")
    print_text(f"\n{_verdict(wrong, found['notes'])}")
    return 1 if wrong else 0


def _verdict(wrong: Sequence[str], notes: Sequence[str]) -> str:
    if wrong:
        return f"{len(wrong)} fault(s)"
    if notes:
        return f"no fault in what could be checked; {len(notes)} note(s) above say what could not"
    return "nothing is wrong"


def _device(pool: dict[str, Any]) -> str:
    return str(pool["device"]) + (f", by {pool['silicon']}" if pool["silicon"] else "")


def _ray_demand(pool: dict[str, Any]) -> str:
    ray = pool["ray"]
    labels = [f"on {name}={value}" for name, value in ray["labels"].items()]
    return ", ".join([*(f"{count:g} {name}" for name, count in ray["worker"].items()), *labels])


def _number_of(pool: dict[str, Any]) -> str:
    least, most = pool["workers"].values()
    return str(least) if least == most else f"{least} to {most}"


def print_ready(url: str, settings: ClusterSettings, json_output: bool) -> None:
    """Print URL, models, nodes and a curl line, or all as JSON."""
    from kappa_deploy.app.build import own_headers

    headers = own_headers(settings)
    nodes = httpx.get(f"{url}/v1/nodes", headers=headers, timeout=30.0).json()["nodes"]
    served = [of_one.model for of_one in settings.by_model()]
    models = [name for model in served for name in (model.id, *model.adapters)]
    if json_output:
        print_json({"url": url, "model": models[0], "models": models, "nodes": nodes})
        return
    rows = []
    for node in nodes:
        profile = node["profile"]
        by = f" by {profile['silicon']}" if profile["silicon"] else ""
        paced = f"paced: {node['emulated_model']}{by}, 1 s takes {profile['dilation']:g}"
        disk = profile["disk_bytes_per_s"]
        rates = [f"{rate / 1e9:.3g}" for rate in (profile["h2d_bytes_per_s"], disk) if rate]
        rows.append((
            node["node"], profile["link_name"] + (" and disk" if disk else ""),
            " and ".join(rates),
            f"{profile['flops_per_s'] / 1e12:.3g}",
            "never" if node["kappa_crit"] is None else f"{node['kappa_crit']:.3g}",
            paced if node["paced"] else profile["source"],
        ))  # fmt: skip
    columns = ("node", "link", "GB/s", "TFLOP/s", "κ_crit", "speed")
    print_table(f"{', '.join(models)} at {url}/v1", columns, rows, left=2)
    body = {
        "model": models[0],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
    }
    key = '-H "authorization: Bearer $KEY" ' if headers else ""
    print_text(
        f"watch it at {url}/\npolicy {settings.router.policy}; try:\n"
        f"curl -iN {url}/v1/chat/completions -H 'content-type: application/json' {key}"
        f"-d '{json.dumps(body)}'\nCtrl-C stops the cluster."
    )
