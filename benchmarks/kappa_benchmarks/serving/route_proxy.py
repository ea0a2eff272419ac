"""`kappa bench route-proxy`: the cost of passing through `kappa route`, and requests lost when a
server or an endpoint picker dies. On EMULATED servers that answer almost at once."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kappa.host import free_port, free_ports
from kappa_benchmarks.harness import (
    Json,
    note,
    numbers,
    publish,
    quantile,
    result,
    spread,
    usage_errors,
)
from kappa_benchmarks.serving.gateway import AnswersMode, gateway
from kappa_benchmarks.serving.processes import cpu_by_role
from kappa_benchmarks.serving.route import EMULATED, HOST, front, process, ready
from kappa_loadtest.client import Endpoint, EndpointSettings, Prepared
from kappa_loadtest.run_folder import RequestRecord

_DOWN_S = 5.0
_ROUNDS = 5
# The end of each prompt is its own; the rest is the conversation so far.
_OWN_BYTES = 360
# Caches hold whole conversations: the engine's own seconds are not the subject here.
_DEVICE_TOKENS = 2_000_000


@dataclass(frozen=True, slots=True)
class ProxyLoad:
    """The requests of one row."""

    # Requests a second, open loop.
    rate: float
    # Bytes of each prompt.
    size: int
    # Tokens of each answer.
    output: int


def route_proxy(
    requests: Annotated[
        int, typer.Option(min=0, help="Sent while one is killed and back; 0: none is.")
    ] = 10_000,
    rate: Annotated[
        str, typer.Option(help="Requests a second, open loop; one, or by comma one a size.")
    ] = "100",
    paired: Annotated[int, typer.Option(min=10, help="Requests each way for the overhead.")] = 500,
    size: Annotated[
        str, typer.Option(help="Bytes of each prompt, such as 1e3,1e5,5e5,2e6; kills: the first.")
    ] = "1000",
    output: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 8,
    speed: Annotated[float, typer.Option(min=0.1, help="Of the emulated servers.")] = 1000.0,
    epp: Annotated[
        AnswersMode | None,
        typer.Option(help="A foreign gateway asks us; how it lets us see answers."),
    ] = None,
    pickers: Annotated[
        int, typer.Option(min=1, max=2, help="With --epp; of two one is killed, not a server.")
    ] = 1,
    json_output: Json = False,
) -> None:
    """Seconds that the proxy adds to a first token, what it costs, and requests lost as a server or
    a picker is killed."""
    with usage_errors():
        loads = loads_of(size, rate, output)
        if pickers > 1 and not epp:
            raise ValueError("--pickers: a gateway has pickers, give --epp")
    lost = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        log, ports = folder / "servers.log", free_ports(HOST, 2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        first, second = (
            ("-m", EMULATED, str(port), "--speed", str(speed), "--load-token-us", "0",
             "--device-tokens", str(_DEVICE_TOKENS))
            for port in ports
        )  # fmt: skip
        stack.enter_context(process(*first, log=log))
        servers: dict[str, Any] = {
            "backends": [{"url": url, "profile": "h100-pcie5"} for url in urls]
        }
        if epp:
            servers["epp"] = {"port": free_port(HOST)}
        other = {**servers, "epp": {"port": free_port(HOST)}}
        second_server = partial(process, *second, log=log, kill=True)
        second_picker = partial(front, other, "on", folder / "k", kill=True)
        with second_server():
            for url in urls:
                ready(url)
            url, *pids = stack.enter_context(front(servers, "on", folder / "j"))
            if epp:
                asked = [one["epp"]["port"] for one in (servers, other)[:pickers]]
                url, gateway_pid = stack.enter_context(gateway(asked, ports, folder, epp))
                pids.append(gateway_pid)
            rows = []
            for load in loads:
                rows.append(asdict(load) | overhead((urls[0], url), pids, load, paired))
                added = rows[-1]["added_p50_ms"]
                note(f"{load.size} bytes, {load.rate:g}/s: {added['median']:.2f} ms added")
            if requests and pickers > 1:
                lost = losses(*asyncio.run(under_kills(url, requests, loads[0], second_picker)))
        if requests and pickers == 1:
            # It is dead from here on, comes back, and is killed and back again under load.
            lost = losses(*asyncio.run(under_kills(url, requests, loads[0], second_server)))
    facts = result(emulated=True, speed=speed, rows=rows, **lost)
    publish(facts, lambda console: console.print(facts), json_output=json_output)


def loads_of(size: str, rate: str, output: int) -> list[ProxyLoad]:
    """A load for each size, at its own rate or at the one that is given.

    Raises:
        ValueError: a size below each prompt's own end; or rates that are neither one nor one for
            each size.
    """
    sizes, rates = numbers(size, "--size", 64e6), numbers(rate, "--rate")
    if min(sizes) < _OWN_BYTES:
        raise ValueError(f"--size: give at least {_OWN_BYTES} bytes")
    if len(rates) not in (1, len(sizes)):
        raise ValueError(f"--rate: give one, or one for each of {len(sizes)} sizes")
    each = rates if len(rates) > 1 else rates * len(sizes)
    return [ProxyLoad(r, int(s), output) for s, r in zip(sizes, each, strict=True)]


def overhead(
    urls: tuple[str, str], pids: Sequence[int], load: ProxyLoad, paired: int
) -> dict[str, Any]:
    """TTFTs of requests to a server and through `kappa route`, by their urls, and CPU-ms of the
    latter's processes and their children; in turns, so that other work on the machine hits both."""
    ttfts_s: dict[str, list[float]] = {"direct": [], "through": []}
    used_ms, added_ms, sent = list[Counter[str]](), list[float](), paired // _ROUNDS
    for _ in range(_ROUNDS):
        middle_s = list[float]()
        for name, url in zip(ttfts_s, urls, strict=True):
            before_s = sum(map(cpu_by_role, pids), Counter[str]())
            records = asyncio.run(send(url, sent, load))
            used_s = sum(map(cpu_by_role, pids), Counter[str]()) - before_s
            ttfts_s[name] += (now := [ttft_s(r) for r in records if not r.error])
            middle_s.append(statistics.median(now))
        added_ms.append(1e3 * (middle_s[1] - middle_s[0]))
        used_ms.append(Counter({what: 1e3 * s / sent for what, s in used_s.items()}))
    return {
        **{f"{name}_p{q}_s": quantile(found, q / 100) for name, found in ttfts_s.items()
           for q in (50, 99)},
        "added_p50_ms": spread(added_ms),
        "cpu_ms_per_request": {what: spread([one[what] for one in used_ms]) for what in used_ms[0]},
    }  # fmt: skip


def losses(records: list[RequestRecord], kills: int) -> dict[str, Any]:
    """Requests lost under kills, by error and before or after their first token."""
    errors = Counter(r.error for r in records if r.error)
    begun = sum(bool(r.error) and r.first_token_s is not None for r in records)
    return {
        "requests": len(records), "kills": kills, "errors": dict(errors),
        "lost_before_their_first_token": errors.total() - begun, "lost_after_it": begun,
    }  # fmt: skip


def ttft_s(record: RequestRecord) -> float:
    """From sending to the first token."""
    assert record.first_token_s is not None
    return record.first_token_s - record.sent_s


async def send(url: str, requests: int, load: ProxyLoad) -> list[RequestRecord]:
    """Send `requests` at a steady rate, whatever becomes of those before."""
    begun_s = time.monotonic()
    settings = EndpointSettings(url, "emulated", timeout_s=120.0)
    records = [RequestRecord(str(k), 0) for k in range(requests)]
    before = ("word " * (load.size // 5 + 1))[: load.size - _OWN_BYTES]
    async with Endpoint(settings, lambda: time.monotonic() - begun_s) as endpoint:

        async def one(k: int, prepared: Prepared) -> None:
            await endpoint.send(prepared, records[k])

        async with asyncio.TaskGroup() as group:
            for k in range(requests):
                prepared = settings.prepare(before + f"{k:08d} " * (_OWN_BYTES // 9), load.output)
                await asyncio.sleep(max(begun_s + k / load.rate - time.monotonic(), 0.0))
                group.create_task(one(k, prepared))
    return records


async def under_kills(
    url: str, requests: int, load: ProxyLoad,
    up: Callable[[], contextlib.AbstractContextManager[object]],
) -> tuple[list[RequestRecord], int]:  # fmt: skip
    """Send requests while a process is `up` and down in turns; how often it was killed."""
    sending, kills = asyncio.create_task(send(url, requests, load)), 0
    while not sending.done():
        with contextlib.ExitStack() as stack:
            # It may take seconds to start, while which requests go on.
            await asyncio.to_thread(stack.enter_context, up())
            await asyncio.wait([sending], timeout=3 * _DOWN_S)
            kills += not sending.done()
        await asyncio.wait([sending], timeout=_DOWN_S)
    return await sending, kills
