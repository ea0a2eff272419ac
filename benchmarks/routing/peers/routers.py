"""The routers that `kappa bench peers` puts before the emulated nodes: real ones, and ours.

sglang-router is a proxy in a process of its own; Dynamo's SelectionService, Ray's router classes
and our `router.router` are each asked over the same JSON lines, in a process of their own.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import httpx

from benchmarks.routing.peers.play import Asked, Proxy, Target
from benchmarks.routing.peers.sidecar import Sidecar, SidecarError, script_command
from benchmarks.routing.peers.venvs import DYNAMO, SGLANG_ROUTER, peer_python
from deploy.prometheus import tethered

OURS = "kappa"
START_S = 60.0
REQUEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all routers of a bench have in common; seconds are emulated ones."""

    cluster: str
    model: str
    dilation: float
    noise: float
    seconds: float
    drain_s: float
    warm_share: float
    block_tokens: int
    scale: int
    policy: str


@dataclass(slots=True)
class Nodes:
    """The emulated nodes of one run."""

    sidecar: Sidecar
    rows: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [row["name"] for row in self.rows]

    @property
    def urls(self) -> dict[str, str]:
        """Their endpoints by name."""
        return {row["name"]: row["url"] for row in self.rows}


Started = tuple[Sidecar, Target]


@dataclass(frozen=True, slots=True)
class Router:
    """A router that can be put before the nodes."""

    name: str
    version: str
    what: str
    start: Callable[[Nodes, Setting, int], Awaitable[Started]]


async def _ours(nodes: Nodes, setting: Setting, seed: int) -> Started:
    hello = {
        "nodes": nodes.rows,
        "block_tokens": setting.block_tokens,
        "policy": setting.policy,
        "seed": seed,
    }
    ours = [sys.executable, "-m", "benchmarks.routing.peers.emulated_router"]
    sidecar = await Sidecar.started(OURS, ours, hello, START_S)
    return sidecar, Asked(sidecar, nodes.urls)


def _dynamo(settings: dict[str, str]) -> Callable[[Nodes, Setting, int], Awaitable[Started]]:
    async def start(nodes: Nodes, setting: Setting, seed: int) -> Started:
        script = script_command(peer_python(DYNAMO), "dynamo_router.py")
        hello = {
            "nodes": nodes.rows,
            "block_tokens": setting.block_tokens,
            "settings": settings,
        }
        sidecar = await Sidecar.started("dynamo", script, hello, START_S)
        return sidecar, Asked(sidecar, nodes.urls)

    return start


def _ray(kind: str) -> Callable[[Nodes, Setting, int], Awaitable[Started]]:
    async def start(nodes: Nodes, setting: Setting, seed: int) -> Started:
        script = script_command(sys.executable, "ray_router.py")
        hello = {"nodes": nodes.rows, "router": kind, "seed": seed}
        sidecar = await Sidecar.started(f"ray {kind}", script, hello, START_S)
        return sidecar, Asked(sidecar, nodes.urls)

    return start


def _sglang(options: Sequence[str]) -> Callable[[Nodes, Setting, int], Awaitable[Started]]:
    async def start(nodes: Nodes, setting: Setting, seed: int) -> Started:
        port, metrics_port = _free_ports(2)
        launch = [
            str(peer_python(SGLANG_ROUTER)), "-m", "sglang_router.launch_router",
            "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
            "--prometheus-port", str(metrics_port), "--policy", "cache_aware", "--log-level",
            "error", "--request-timeout-secs", str(int(REQUEST_S)),
            "--worker-startup-check-interval", "1", *options,
            "--worker-urls", *nodes.urls.values(),
        ]  # fmt: skip
        hello = {"command": launch, "probe": f"http://127.0.0.1:{port}/readiness"}
        sidecar = await Sidecar.started("sglang-router", tethered(), hello, START_S)
        await _all_registered(f"http://127.0.0.1:{port}", len(nodes.rows))
        return sidecar, Proxy(f"http://127.0.0.1:{port}")

    return start


async def _all_registered(url: str, count: int) -> None:
    async with httpx.AsyncClient(timeout=5.0) as client:
        for _ in range(int(START_S)):
            workers = (await client.get(f"{url}/workers")).json().get("workers", [])
            if sum(bool(worker["is_healthy"]) for worker in workers) == count:
                return
            await asyncio.sleep(1.0)
    raise SidecarError(f"sglang-router: not all {count} nodes registered within {START_S:g} s")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()


def routers() -> dict[str, Router]:
    """All routers by name."""
    ray = version("ray")
    sglang = SGLANG_ROUTER.version
    in_process = "Ray's own class and defaults, no cluster: exact queue lengths, no actor calls"
    found = (
        Router(OURS, version("kappa-serve"), "router.router, fed by KV events and reports", _ours),
        Router("dynamo", DYNAMO.version, "SelectionService and its defaults", _dynamo({})),
        Router(
            "dynamo-prefill", DYNAMO.version, "SelectionService, prefill_load_scale 8 instead of 1",
            _dynamo({"DYN_ROUTER_PREFILL_LOAD_SCALE": "8"}),
        ),
        Router("sglang", sglang, "cache_aware and its defaults, a proxy", _sglang(())),
        Router(
            "sglang-balanced", sglang, "cache_aware, balance_abs_threshold 4 instead of 64",
            _sglang(("--balance-abs-threshold", "4")),
        ),
        Router("ray-prefix", ray, in_process, _ray("prefix_affinity")),
        Router("ray-pow2", ray, in_process, _ray("pow_2")),
    )  # fmt: skip
    return {router.name: router for router in found}
