"""`kappa route` behind Envoy: what a client, a tenant or a server can break or lose."""

import asyncio
import os
from collections import Counter

import aiohttp
import pytest

from kappa_router.api.tenants import Lease
from tests.router.front.conftest import chat, fronted, routing, served
from tests.router.front.offering import FakeServer, serving, stream_of
from tests.router.patience import until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KEY = "sk-alice-0123456"
ALICE = {"authorization": f"Bearer {KEY}"}
KEYS = {"by_key": {KEY: "alice", "sk-bob-0123456789": "bob"}, "unknown": "refuse"}
TEXT = "word " * 4000
REQUESTS = int(os.environ.get("KAPPA_REQUESTS", "1000"))


def limited(tokens):
    return {**KEYS, "limits": {"alice": {"tokens_per_minute": tokens}}}


async def raw(front, text):
    """The first line of the answer to a request as it stands there."""
    port = int(front.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    async with asyncio.timeout(10):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.fixture
def paid(monkeypatch):
    """What requests that were served, or that an engine worked for, have paid."""
    found, close = [], Lease.close

    def noted(lease, now_s, *, served):
        if served or lease.worked:
            found.append(lease._used)
        close(lease, now_s, served=served)

    monkeypatch.setattr(Lease, "close", noted)
    return found


# -- paths ---------------------------------------------------------------------------------------


async def test_paths_that_are_almost_ours_go_nowhere():
    paths = (
        "//", "/health/", "/ready/", "/metrics/", "/v1/../metrics", "/%76%31/completions",
        f"{CHAT}/", "/v1/chat%2fcompletions",
    )  # fmt: skip
    async with fronted(FakeServer(), tenants=KEYS) as (front, servers):
        for path in paths:
            for key in ("", f"authorization: Bearer {KEY}\r\n"):
                head = f"POST {path} HTTP/1.1\r\nhost: a\r\n{key}content-length: 1\r\n\r\nx"
                assert await raw(front, head.encode()) == 404, path
        assert not servers[0].seen


async def test_tenants_do_not_reach_what_operates_a_server():
    paths = ("/flush_cache", "/update_weights_from_disk", "/sleep", "/collective_rpc")
    async with fronted(FakeServer(), tenants=KEYS) as (front, servers):
        for path in (*paths, "/v1/load_lora_adapter", "/v1/files"):
            answer = await front.http.post(path, headers=ALICE, json={})
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
        assert not servers[0].seen


async def test_paths_that_the_operator_names_are_passed():
    async with fronted(FakeServer(), tenants=KEYS, passed=["/v1/files"]) as (front, servers):
        assert (await front.http.get("/v1/files?limit=2")).status == 401
        assert (await front.http.get("/v1/files?limit=2", headers=ALICE)).status == 200
        assert servers[0].seen[-1][1] == "/v1/files?limit=2"


async def test_prefix_is_not_left():
    async with serving(FakeServer()) as servers:
        row = {"url": f"{servers[0].url}/team-a", "profile": "pcie", "name": "a"}
        async with routing(row, ready=False) as front:
            for path in ("/v1/../../team-b", "/..%2fteam-b", "/v1/%2e%2e/completions"):
                assert await raw(front, f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode()) == 404


# -- tokens --------------------------------------------------------------------------------------


CHARGED = (
    (COMPLETION, {"prompt": [TEXT]}, 4900),
    (COMPLETION, {"prompt": [TEXT[:2000]] * 10}, 4900),
    (COMPLETION, {"prompt": [[7] * 1000] * 5}, 4900),
    ("/v1/embeddings", {"input": TEXT}, 4900),
    ("/v1/embeddings", {"input": [TEXT]}, 4900),
    (COMPLETION, {"prompt": "a", "max_tokens": 40, "n": 128}, 5100),
    (COMPLETION, {"prompt": ["a"] * 100, "max_tokens": 50}, 5000),
    (COMPLETION, {"prompt": "a", "max_tokens": 50, "best_of": 100}, 5000),
)
"""Paths, bodies, and tokens that each pays at least."""


async def test_request_is_charged_however_it_is_written():
    async with fronted(FakeServer(), tenants=limited(1000)) as (front, servers):
        for path, body, least in CHARGED:
            given = {"model": "llama-3.1-8b", **body}
            answer = await front.http.post(path, headers=ALICE, json=given)
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (400, "request_over_limit")
            assert int(error["message"].split("come to ")[1].split()[0]) >= least, body
        assert not servers[0].seen


async def test_stream_interval_above_one_is_refused():
    async with fronted(FakeServer()) as (front, _):
        answer = await front.http.post(CHAT, json=chat(stream=True, stream_interval=1_000_000))
        assert answer.status == 400
        assert not any(name.lower().startswith("x-envoy") for name in answer.headers)
        assert (await answer.json())["error"]["param"] == "stream_interval"
        assert (await front.http.post(CHAT, json=chat(stream_interval=1))).status == 200


async def test_request_pays_what_its_server_counted(paid):
    async with fronted(FakeServer()) as (front, _):
        for stream in (True, False):
            await (await front.http.post(CHAT, json=chat(TEXT, stream=stream))).read()
            await front.settled()
        assert paid == [104, 104]


async def test_stream_without_usage_pays_for_its_events(paid):
    server = FakeServer(tokens=300, tells_usage=False)
    async with fronted(server) as (front, _):
        await served(front, TEXT)
        assert 5300 <= paid[0] <= 5310


async def test_client_that_leaves_pays_for_what_it_got(paid):
    async with fronted(FakeServer(tokens=1 << 30)) as (front, _):
        answer, read = await front.http.post(CHAT, json=chat(TEXT, stream=True)), 0
        while read < 100_000:
            read += len(await answer.content.readany())
        answer.close()
        await front.settled()
        assert next(iter(front.live.records.values())).end == "client_gone"
        assert paid[0] >= 5000 + read // 200


# -- headers and failures ------------------------------------------------------------------------


async def test_expectation_of_a_client_costs_no_server():
    async with fronted(FakeServer()) as (front, servers):
        for _ in range(6):
            answer = await front.http.post(CHAT, json=chat(), expect100=True)
            assert answer.status == 200
        assert not any("expect" in headers for _, _, headers, _ in servers[0].seen)
        assert not front.live.members.blocked().failing


async def test_headers_of_one_connection_are_not_passed_on():
    async with fronted(FakeServer()) as (front, servers):
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close, x-a\r\nx-a: 1\r\n"
            b"x-kappa-to-id: forged\r\nx-gateway-destination-endpoint: 127.0.0.1:9\r\n"
            b"content-length: 2\r\n\r\n{}"
        )
        assert await raw(front, request) == 200
        headers = servers[0].seen[-1][2]
        assert "x-a" not in headers and headers["x-kappa-to-id"] != "forged"


async def test_failures_of_passed_paths_open_no_breaker():
    async with fronted(FakeServer(), FakeServer()) as (front, servers):
        for server in servers:
            server.status = 500
        for _ in range(20):
            assert (await front.http.post("/v1/embeddings", json={"input": "a"})).status == 500
        await front.settled()
        assert not front.live.members.blocked().failing
        for server in servers:
            server.status = 200
        assert (await front.http.post(CHAT, json=chat())).status == 200


# -- servers that die ----------------------------------------------------------------------------


class Mortal(FakeServer):
    """Dies of what says `poison`, with all of its connections."""

    async def _answer(self, request, body):
        if b"poison" in body:
            for site in list(self._runner.sites):
                await site.stop()
            for connection in self._runner.server.connections:
                connection.transport.abort()
        return await super()._answer(request, body)


async def test_request_that_kills_its_server_kills_no_other():
    async with fronted(*(Mortal() for _ in range(3))) as (front, servers):
        answer = await front.http.post(CHAT, json=chat("poison"))
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "engine_died")
        assert sum(len(server.seen) for server in servers) == 1
        await until(lambda: front.live.choosable == 2)
        answer = await front.http.post(CHAT, json=chat("poison"))
        assert (answer.status, (await answer.json())["error"]["code"]) == (422, "killed_an_engine")
        answer = await front.http.post(CHAT, json=chat("poison"))
        assert answer.status == 422
        assert sum(len(server.seen) for server in servers) == 2
        assert (await front.http.post(CHAT, json=chat("food"))).status == 200


class Breaking(FakeServer):
    """Breaks every connection with a request that it should answer."""

    async def _answer(self, request, body):
        request.transport.abort()
        return await super()._answer(request, body)


async def test_broken_connection_to_a_live_server_is_tried_elsewhere():
    async with fronted(Breaking(), FakeServer()) as (front, servers):
        for i in range(8):
            answer = await front.http.post(CHAT, json=chat(f"{i}"))
            assert answer.status == 200
        assert len(servers[1].seen) == 8 and servers[0].seen
        await front.settled()
        assert {one.end for one in front.live.records.values()} == {"done"}


async def asked(front, i, whole):
    """What one request saw that is worth telling: how it was lost, or "cut" for an answer that had
    begun; empty if it got all. Even numbers are streamed."""
    status, streamed = 0, i % 2 == 0
    try:
        async with front.http.post(CHAT, json=chat(f"{i}", stream=streamed)) as answer:
            status = answer.status
            body = await answer.read()
    except aiohttp.ClientError as error:
        return "cut" if status == 200 else f"{i}: {error!r}"
    if status != 200:
        return f"{i}: {status} {body.decode()[:200]}"
    fine = body == whole if streamed else b"usage" in body
    return "" if fine else f"{i}: an answer of 200 that ends with {body[-80:]!r}"


async def test_no_unbegun_request_is_lost_when_servers_are_killed():
    servers = [FakeServer(tokens=2), FakeServer(tokens=2)]
    whole = stream_of(servers[0])
    async with fronted(*servers) as (front, _):
        seen, places = [], asyncio.Semaphore(20)

        async def one(i):
            async with places:
                seen.append(await asked(front, i, whole))

        async def kills():
            for kill in range(REQUESTS // 250):
                server = servers[kill % 2]
                await until(lambda kill=kill: len(seen) > 200 * (kill + 1), 60.0)
                await server.stop()
                await asyncio.sleep(0.2)
                await server.start()
                await until(lambda: front.live.choosable == 2)
                # Those that were decided before know of one server alone: let them end.
                count = min(len(seen) + 20, REQUESTS)
                await until(lambda count=count: len(seen) >= count, 60.0)

        killing = asyncio.create_task(kills())
        await asyncio.gather(*(one(i) for i in range(REQUESTS)))
        await killing
        lost = [how for how in seen if how not in ("", "cut")]
        ends = Counter(one.end for one in front.live.records.values())
        told = f"{len(lost)} lost, {seen.count('cut')} cut of {REQUESTS}: {lost[:10]}; {ends}"
        assert not lost, told
        print(told)
        await front.settled()
        assert min(len(server.seen) for server in servers) > REQUESTS // 10
