"""Dynamo's own mockers and frontend as processes of a bench: started, joined to names, ended.

A mocker is a node EMULATED by Dynamo: its schedule, caches and host tier are Dynamo's, its steps
come from a table (NPZ) that is made here, by our law of a catalogue's node or from a table of real
GPUs (`kappa.silicon`), and its link is a bandwidth. The NPZ has no context for prefill: a prompt
costs as if nothing were cached before it. Time is dilated by making steps longer and links slower
alike: `--speedup-ratio` would leave the link. KV events go by the native event plane;
`--zmq-kv-events-ports` would hide the host tier from Dynamo's own router.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from kappa.cost import StepModel, StepWork, chunk_work, step_model
from kappa.hardware import NodeProfile, node_profile
from kappa.host import die_with_parent, free_port
from kappa.model import kv_bytes_per_token
from kappa.shapes import model_shape
from kappa.silicon import SiliconTable, silicon_node, silicon_of
from kappa_benchmarks.routing.peers.routers import OUR_VARIABLES, PeerError, dynamo_python

HOST = "127.0.0.1"
MODEL = "tiny"
BLOCK_TOKENS = 16
BUDGET_TOKENS = 8192
SHAPE = model_shape("llama-3.1-8b")
_STEP_FIXED_S = 0.002
_TABLE = 64
_MOST_HELD, _LONGEST_TOKENS = 262_144, 65_536
_START_S, _TERM_S = 60.0, 2.0


class Mocker(NamedTuple):
    """A node of Dynamo's."""

    name: str
    # The catalogue's node, or the table of real GPUs, that its steps are those of.
    profile: str
    # Of its host link.
    h2d_bytes_per_s: float


def _mockers(*links: tuple[str, float]) -> tuple[Mocker, ...]:
    return tuple(
        Mocker(f"{number}-{profile.split('/')[0]}-{gigabytes:g}", profile, gigabytes * 1e9)
        for number, (profile, gigabytes) in enumerate(links)
    )


_A100, _H100 = (f"{system}/{SHAPE.name}/tp1" for system in ("a100_sxm", "h100_sxm"))

CLUSTERS: Mapping[str, tuple[Mocker, ...]] = {
    "unlike": _mockers(
        ("a100-pcie4", 5), ("h100-pcie5", 25), ("h100-pcie5", 55), ("gh200-c2c", 375)
    ),
    "equal": _mockers(*[("h100-pcie5", 55)] * 4),
    "pair": _mockers(("a100-pcie4", 5), ("gh200-c2c", 375)),
    "unlike-silicon": _mockers((_A100, 5), (_H100, 25), (_H100, 55), (_H100, 375)),
    "equal-silicon": _mockers(*[(_H100, 55)] * 4),
}


@dataclass(frozen=True, slots=True)
class Emulation:
    """Settings that all mockers share."""

    nodes: tuple[Mocker, ...]
    # Wall seconds per emulated one.
    dilation: float = 1.0
    device_blocks: int = 6_000
    host_blocks: int = 60_000


def node_of(profile: str) -> NodeProfile:
    """A mocker's node, of the catalogue or with a table's GPU, and the host's seconds of a step."""
    node = silicon_node(profile) if "/" in profile else node_profile(profile)
    return replace(node, step_fixed_s=_STEP_FIXED_S, silicon=profile if "/" in profile else "")


def step_of(profile: str, dilation: float) -> StepModel:
    """A node's steps by our law in wall seconds."""
    return replace(step_model(SHAPE, node_of(profile)), dilation=dilation).real()


def tables_of(profile: str, dilation: float) -> dict[str, np.ndarray]:
    """The arrays of a mocker's NPZ; ValueError for a table that there is not, or of another
    model."""
    node = node_of(profile)
    if not node.silicon:
        return step_tables(step_of(profile, dilation))
    paced = replace(node, source="paced", dilation=dilation)
    return silicon_tables(silicon_of(SHAPE, profile).on(paced))


def step_tables(step: StepModel) -> dict[str, np.ndarray]:
    """The arrays of a mocker's NPZ: milliseconds of a prompt's chunk, and of a decoded token by all
    tokens in VRAM that decode and the context of each."""
    new = np.unique(np.concatenate([[1.0], np.linspace(8, BUDGET_TOKENS, 1024)]))
    held, context = np.linspace(1, _MOST_HELD, _TABLE), np.linspace(1, _LONGEST_TOKENS, _TABLE)
    requests = np.maximum(held[:, None] / context[None, :], 1.0)
    decode_s = step.work_s(StepWork(requests, held[:, None], held[:, None]))
    return {
        "prefill_isl": new,
        "prefill_ttft_ms": 1e3 * step.work_s(chunk_work(new, 0 * new)),
        "decode_active_kv_tokens": held,
        "decode_context_length": context,
        "decode_itl": 1e3 * decode_s,
    }


def silicon_tables(table: SiliconTable) -> dict[str, np.ndarray]:
    """The same from a table of real GPUs, at its own points: between them the mocker goes straight,
    too."""
    held = np.unique(np.outer(table.batch, table.context))
    held, context = held[held <= _MOST_HELD], table.context[table.context <= _LONGEST_TOKENS]
    decode_s = [[table.step_s([], max(h / c, 1.0), h) for c in context] for h in held]
    return {
        "prefill_isl": table.new,
        "prefill_ttft_ms": 1e3 * np.array([table.step_s([(n, 0)]) for n in table.new]),
        "decode_active_kv_tokens": held,
        "decode_context_length": context,
        "decode_itl": 1e3 * np.array(decode_s),
    }


class Harness(NamedTuple):
    """A running frontend with its mockers."""

    url: str
    # Dynamo's ids by node.
    instances: dict[str, int]
    # Addresses of KV events.
    events: list[str]


@asynccontextmanager
async def dynamo(
    emulation: Emulation, router: Sequence[str], model: Path, folder: Path
) -> AsyncIterator[Harness]:
    """Fresh mockers, and a frontend with these options of its router; all ended on the way out.

    Raises:
        PeerError: they were not ready in time; with the last words of a log.
    """
    python, store = dynamo_python(), folder / "discovery"
    store.mkdir()
    environment = _environment(store)
    running: list[asyncio.subprocess.Process] = []

    async def start(name: str, *command: str, **variables: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            running.append(
                await asyncio.create_subprocess_exec(
                    python, "-m", *command, env={**environment, **variables}, stdout=log,
                    stderr=log, stdin=asyncio.subprocess.DEVNULL, cwd=folder,
                    start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
                )
            )  # fmt: skip

    ports, url = {}, f"http://{HOST}:{(port := free_port(HOST))}"
    try:
        for node in emulation.nodes:
            table = folder / f"{node.name}.npz"
            arrays: Any = tables_of(node.profile, emulation.dilation)
            np.savez(table, **arrays)
            ports[node.name] = _small_port()
            link = str(node.h2d_bytes_per_s / emulation.dilation / 1e9)
            await start(
                node.name, "dynamo.mocker", *_common(emulation, model),
                "--planner-profile-data", str(table), "--host-offload-h2d-bandwidth-gbps", link,
                "--host-offload-d2h-bandwidth-gbps", link, DYN_SYSTEM_PORT=str(ports[node.name]),
            )  # fmt: skip
        await start(
            "frontend", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port),
            "--kv-cache-block-size", str(BLOCK_TOKENS), *router,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_START_S):
                ids = await _joined(url, ports, running)
                found = Harness(url, ids, await _events(store, len(ports)))
        except TimeoutError:
            raise PeerError(f"Dynamo was not ready: {_last_words(folder)}") from None
        yield found
        if any(process.returncode is not None for process in running):
            # Its requests would only look failed or slow.
            raise PeerError(f"a process of Dynamo's ended: {_last_words(folder)}")
    finally:
        await _end(running)


def _last_words(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return " | ".join(f"{log.name}: {log.read_text(errors='replace')[-300:]}" for log in logs)


def _small_port() -> int:
    """A free port that a signed 16-bit number holds: Dynamo reads DYN_SYSTEM_PORT as one."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise PeerError("no free port from 20000 to 31999 for a mocker")


def _common(emulation: Emulation, model: Path) -> list[str]:
    return [
        "--model-path", str(model), "--model-name", MODEL, "--num-workers", "1",
        "--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(BUDGET_TOKENS),
        "--num-gpu-blocks-override", str(emulation.device_blocks),
        "--num-host-blocks", str(emulation.host_blocks),
        "--kv-bytes-per-token", str(int(kv_bytes_per_token(SHAPE))),
    ]  # fmt: skip


def _environment(store: Path) -> dict[str, str]:
    environment = os.environ.items()
    kept = {k: v for k, v in environment if k not in OUR_VARIABLES and not k.startswith("DYN_")}
    local = ("TCP_RPC", "HTTP_RPC", "SYSTEM", "EVENT_PLANE", "TCP_RESPONSE_STREAM")
    return {
        **kept, **{f"DYN_{name}_HOST": HOST for name in local}, "DYN_FILE_KV": str(store),
        "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq",
        "DYN_NAMESPACE": "kappa", "DYN_RUNTIME_NUM_WORKER_THREADS": "2", "HF_HUB_OFFLINE": "1",
        "DYN_LOG": "info", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


async def _joined(
    url: str, ports: Mapping[str, int], running: Sequence[asyncio.subprocess.Process]
) -> dict[str, int]:
    """Wait until the frontend serves the model on all nodes; their ids."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http:
        while True:
            if any(process.returncode is not None for process in running):
                raise TimeoutError
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                found = (await _json(http, f"{url}/health"))["instances"]
                known = {row["instance_id"] for row in found if row["endpoint"] == "generate"}
                ids = {name: await _instance(http, port) for name, port in ports.items()}
                served = (await _json(http, f"{url}/v1/models"))["data"]
                if served and known == set(ids.values()):
                    return ids
            await asyncio.sleep(0.2)


async def _json(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as answer:
        return await answer.json()


async def _instance(http: aiohttp.ClientSession, port: int) -> int:
    """The id of a mocker, which its own metrics have in hexadecimals."""
    async with http.get(f"http://{HOST}:{port}/metrics") as answer:
        found = re.search(r'worker_id="([0-9a-f]+)"', await answer.text())
    if found is None:
        raise ValueError("no worker_id yet")
    return int(found[1], 16)


async def _events(store: Path, nodes: int) -> list[str]:
    while True:
        texts = [path.read_text() for path in store.rglob("*topic%2Fkv%2Devents*")]
        found = [address for text in texts for address in re.findall(r'"(tcp://[^"]+)"', text)]
        if len(found) >= nodes:
            return found
        await asyncio.sleep(0.1)


async def _end(running: Sequence[asyncio.subprocess.Process]) -> None:
    """Ask all to end, and kill those that have not in time, each with what it started."""
    for number, wait_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
        for process in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        until_s = time.monotonic() + wait_s
        for process in running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), max(until_s - time.monotonic(), 0.0))
