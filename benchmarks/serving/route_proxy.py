"""`kappa bench route-proxy`: what passing through `kappa route` costs, and what it loses when a
server dies. On EMULATED servers that answer almost at once."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.harness import Json, note, publish, quantile, result
from benchmarks.serving.route import EMULATED, HOST, front, process, ready
from kappa.host import free_port
from loadtest.client import Endpoint, EndpointSettings, Prepared
from loadtest.journal import RequestRecord

_DOWN_S = 5.0


def route_proxy(
    requests: Annotated[int, typer.Option(min=100)] = 10_000,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second, open loop.")] = 100.0,
    paired: Annotated[int, typer.Option(min=10, help="Requests each way for the overhead.")] = 500,
    output: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 4,
    speed: Annotated[float, typer.Option(min=0.1, help="Of the emulated servers.")] = 1000.0,
    data_plane: Annotated[str, typer.Option(help="python or envoy.")] = "python",
    json_output: Json = False,
) -> None:
    """Seconds that the proxy adds to a first token, what it costs, and requests lost as a server is
    killed."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        log, ports = folder / "servers.log", (free_port(HOST), free_port(HOST))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        first, second = (
            ("-m", EMULATED, str(port), "--speed", str(speed), "--load-token-us", "0")
            for port in ports
        )
        stack.enter_context(process(*first, log=log))
        servers = {
            "backends": [{"url": url, "profile": "h100-pcie5"} for url in urls],
            "http": {"data_plane": data_plane},
        }
        with process(*second, log=log):
            for url in urls:
                ready(url)
            url, pid = stack.enter_context(front(servers, "on", folder / "j"))
            # In turns, so that what else the machine does hits both.
            direct: list[float] = []
            through: list[float] = []
            used_s = Counter[str]()
            for _ in range(5):
                records = asyncio.run(send(urls[0], paired // 5, rate, output))
                direct += [ttft_s(r) for r in records if not r.error]
                before_s = cpu_s(pid)
                records = asyncio.run(send(url, paired // 5, rate, output))
                used_s.update(cpu_s(pid) - before_s)
                through += [ttft_s(r) for r in records if not r.error]
            note(f"overhead of {len(through)} requests measured; now a server is killed")
        # It is dead from here on, comes back, and is killed and back again under load.
        records, killed = asyncio.run(under_kills(url, requests, rate, output, second, log))
    errors = Counter(r.error for r in records if r.error)
    begun = sum(bool(r.error) and r.first_token_s is not None for r in records)
    facts = result(
        emulated=True, data_plane=data_plane, output=output, speed=speed, rate=rate,
        requests=len(records), kills=killed, errors=dict(errors),
        lost_before_their_first_token=errors.total() - begun, lost_after_it=begun,
        direct_p50_s=quantile(direct, 0.5), through_p50_s=quantile(through, 0.5),
        direct_p99_s=quantile(direct, 0.99), through_p99_s=quantile(through, 0.99),
        cpu_ms_per_request={what: 1e3 * s / len(through) for what, s in used_s.items()},
    )  # fmt: skip
    publish(facts, lambda console: console.print(facts), json_output=json_output)


def cpu_s(pid: int) -> Counter[str]:
    """Processor seconds that a process and its children have used, by what they are."""
    found = Counter[str]()
    for one in (psutil.Process(pid), *psutil.Process(pid).children()):
        times = one.cpu_times()
        found["envoy" if "envoy" in one.name() else "python"] += times.user + times.system
    return found


def ttft_s(record: RequestRecord) -> float:
    """From sending to the first token."""
    assert record.first_token_s is not None
    return record.first_token_s - record.sent_s


async def send(url: str, requests: int, rate: float, output: int) -> list[RequestRecord]:
    """Send `requests` small ones at a steady rate, whatever becomes of those before."""
    begun_s = time.monotonic()
    settings = EndpointSettings(url, "emulated", timeout_s=120.0)
    records = [RequestRecord(str(k), 0) for k in range(requests)]
    async with Endpoint(settings, lambda: time.monotonic() - begun_s) as endpoint:

        async def one(k: int, prepared: Prepared) -> None:
            await endpoint.send(prepared, records[k])

        async with asyncio.TaskGroup() as group:
            for k in range(requests):
                await asyncio.sleep(max(begun_s + k / rate - time.monotonic(), 0.0))
                group.create_task(one(k, settings.prepare(f"{k:08d} " * 40, output)))
    return records


async def under_kills(
    url: str, requests: int, rate: float, output: int, server: tuple[Any, ...], log: Path
) -> tuple[list[RequestRecord], int]:
    """Send requests while a server is up and down in turns; how often it was killed."""
    sending, kills = asyncio.create_task(send(url, requests, rate, output)), 0
    while not sending.done():
        with process(*server, log=log, kill=True):
            await asyncio.wait([sending], timeout=3 * _DOWN_S)
        kills += not sending.done()
        await asyncio.wait([sending], timeout=_DOWN_S)
    return await sending, kills
