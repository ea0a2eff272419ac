"""The endpoint picker behind a real Envoy, set up as gateways do for an InferencePool."""

import asyncio
import contextlib
import json
import os
import signal

import aiohttp
import pytest

from kappa.host import free_port
from kappa_benchmarks.serving.gateway import DUPLEX, gateway
from kappa_benchmarks.serving.route import front
from tests.router.front.conftest import chat
from tests.router.front.gie import before
from tests.router.front.offering import FakeServer, stream_of
from tests.router.patience import until

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def envoy(picker, servers, folder, answers=DUPLEX, others=()):
    """The url of a gateway before them, and before other pickers, by their ports."""
    ports = [one.port for one in servers]
    running = gateway([picker.here.gateway.port, *others], ports, folder, answers)
    url, _ = await asyncio.to_thread(running.__enter__)
    try:
        yield url
    finally:
        running.__exit__(None, None, None)


@pytest.mark.parametrize("answers", [DUPLEX, "STREAMED", "NONE"])
async def test_traffic_passes_whatever_of_answers_is_shown(answers, tmp_path):
    servers = FakeServer(), FakeServer()
    async with (
        before(*servers) as picker,
        envoy(picker, servers, tmp_path, answers) as url,
        aiohttp.ClientSession(url) as http,
    ):
        for size in (10, 500_000):
            body = json.dumps(chat("x" * size, stream=True)).encode()
            answer = await http.post(CHAT, data=body)
            assert (answer.status, await answer.read()) == (200, stream_of(servers[0]))
            assert answer.headers["x-kappa-node"] in ("h100-pcie5", "gh200-c2c")
            await picker.settled()
            record = picker.live.records[answer.headers["x-request-id"]]
            assert record.end == "done"
            seen = {server.seen[-1][3] for server in servers if server.seen}
            assert body in seen
        assert (await (await http.get("/v1/models")).json())["data"]
        assert (await http.get("/nowhere")).status == 404


async def test_nothing_unbegun_is_lost_as_a_server_goes(tmp_path):
    servers = FakeServer(ttft_s=0.01), FakeServer(ttft_s=0.01)
    lost = []

    async def ask(http, number):
        try:
            answer = await http.post(CHAT, json=chat(f"{number} hello", stream=True))
            read = await answer.read()
            if answer.status != 200:
                lost.append((number, answer.status, read))
        except aiohttp.ClientPayloadError:
            pass  # It had begun.

    async with before(*servers, router={"policy": "least_backlog"}) as picker:
        async with (
            envoy(picker, servers, tmp_path) as url,
            aiohttp.ClientSession(url) as http,
            asyncio.TaskGroup() as sending,
        ):
            for number in range(300):
                sending.create_task(ask(http, number))
                await asyncio.sleep(0.01)
                if number == 100:
                    await servers[1].stop()
                if number == 200:
                    await servers[1].start()
                    await until(lambda: picker.live.choosable == 2)
        await picker.settled()
    assert lost == []
    assert all(server.seen for server in servers)


@contextlib.asynccontextmanager
async def second_picker(servers, folder):
    """A picker's process: its port, its id, and what kills it."""
    port = free_port("127.0.0.1")
    given = {
        "backends": [{"url": one.url, "profile": "h100-pcie5"} for one in servers],
        "epp": {"port": port},
    }
    running = front(given, "on", folder / "second", kill=True)
    _, pid = await asyncio.to_thread(running.__enter__)
    with contextlib.ExitStack() as stack:
        stack.push(running)
        yield port, pid, stack.close


async def test_only_what_a_killed_picker_had_chosen_is_lost(tmp_path):
    servers = FakeServer(), FakeServer()
    statuses = []

    async def ask(http):
        answer = await http.post(CHAT, json=chat(stream=True))
        await answer.read()
        statuses.append(answer.status)

    def asked(http, group, count):
        for _ in range(count):
            group.create_task(ask(http))

    async with (
        before(*servers) as picker,
        second_picker(servers, tmp_path) as (port, pid, kill),
        envoy(picker, servers, tmp_path, others=[port]) as url,
        aiohttp.ClientSession(url) as http,
    ):
        for server in servers:
            server.hold.clear()
        async with asyncio.TaskGroup() as group:
            asked(http, group, 6)
            await until(lambda: sum(len(server.seen) for server in servers) == 6)
            chosen_there = 6 - len(picker.live.router.flights)
            os.kill(pid, signal.SIGSTOP)
            asked(http, group, 10)
            await until(lambda: sum(len(server.seen) for server in servers) > 6)
            kill()
            await until(lambda: sum(len(server.seen) for server in servers) == 16)
            for server in servers:
                server.hold.set()
        async with asyncio.TaskGroup() as group:
            asked(http, group, 20)
        assert chosen_there > 0
        assert sorted(statuses) == [200] * (36 - chosen_there) + [500] * chosen_there


async def test_client_that_leaves_frees_its_place(tmp_path):
    server = FakeServer()
    async with before(server) as picker:
        async with envoy(picker, [server], tmp_path) as url:
            server.hold.clear()
            async with aiohttp.ClientSession(url) as http:
                asked = asyncio.create_task(http.post(CHAT, json=chat(stream=True)))
                await until(lambda: server.seen)
                asked.cancel()
            await picker.settled()
            server.hold.set()
        assert [record.end for record in picker.live.records.values()] == ["client_gone"]
