"""Servers that publish KV events as vLLM does: what they hold is what they say."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

import kappa_router.front.front
from kappa_router.front.backend import Backend
from kappa_router.live import event_feed
from tests.router.flooding import Turns, flood
from tests.router.front.conftest import routing
from tests.router.front.offering import FakeServer, serving
from tests.router.kv_batches import batch, stored
from tests.router.patience import PATIENCE_S, until

TEXT = "0123456789abcdef" * 8
PATH = "/v1/completions"


def body(text=TEXT):
    return {"model": "llama-3.1-8b", "prompt": text, "stream": True}


class Publisher:
    """A server's ZMQ publisher; numbers batches from `seq` on."""

    def __init__(self, seq=0):
        self.socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint, self.seq = f"tcp://127.0.0.1:{port}", seq

    async def stored(self, text, size=16):
        tokens = list(text.encode())
        hashes = list(range(1, len(tokens) // size + 1))
        await self.send([stored(hashes, size=size, token_ids=tokens)])

    async def send(self, events, rank=None):
        payload = batch(*events, time_s=time.time(), rank=rank)
        await self.socket.send_multipart([b"", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1


@asynccontextmanager
async def two_servers():
    """A front over two servers, of which one publishes."""
    publisher = Publisher(seq=7)
    try:
        async with serving(FakeServer(), FakeServer()) as servers:
            rows = [
                {"url": servers[0].url, "profile": "pcie", "name": "a",
                 "events": publisher.endpoint},
                {"url": servers[1].url, "profile": "pcie", "name": "b"},
            ]  # fmt: skip
            async with routing(*rows) as front:
                front.servers, front.publisher = servers, publisher
                yield front
    finally:
        publisher.socket.close()


async def held(http, text=TEXT):
    """Device tokens of a prompt that each server is expected to have."""
    answer = await (await http.post("/v1/route", json=body(text))).json()
    return {one["worker"]: one["device_tokens"] for one in answer["candidates"]}


async def published(http, publisher, text=TEXT, tokens=112):
    """Publish until it is heard: who subscribes late misses what came before."""

    async def heard():
        await publisher.stored(text)
        return (await held(http))["a"] == tokens

    while not await heard():
        pass


async def test_blocks_that_a_server_announces_are_expected_there():
    async with two_servers() as it:
        await published(it.http, it.publisher)
        assert (await held(it.http))["b"] == 0
        await (await it.http.post(PATH, json=body())).read()
        assert next(reversed(it.live.records.values())).decision.worker == "a"
        await it.publisher.send([{"type": "AllBlocksCleared"}])
        await until(lambda: not it.live.router.index.stats()["names"])
        assert (await held(it.http))["a"] == 0


RANK = "x-data-parallel-rank"


@asynccontextmanager
async def ranked(size=2, **sections):
    """A front over a server of several ranks and one of a single rank; `ask` sends a prompt and
    gives the ranks that the servers were told."""
    publishers = [Publisher() for _ in range(size)]
    try:
        async with serving(FakeServer(), FakeServer()) as servers:
            rows = [
                {"url": servers[0].url, "profile": "pcie", "name": "a", "data_parallel_size": size,
                 "events": [one.endpoint for one in publishers]},
                {"url": servers[1].url, "profile": "pcie", "name": "b"},
            ]  # fmt: skip
            async with routing(*rows, **sections) as front:
                front.publishers, front.servers = publishers, servers

                async def ask(text=TEXT, **headers):
                    before = [len(server.seen) for server in servers]
                    async with front.http.post(PATH, json=body(text), headers=headers) as answer:
                        assert answer.status == 200, await answer.text()
                        await answer.read()
                    await front.settled()
                    return [
                        [told.get(RANK) for _, path, told, _ in server.seen[at:] if path == PATH]
                        for server, at in zip(servers, before, strict=True)
                    ]

                yield front, ask
    finally:
        for one in publishers:
            one.socket.close()


async def test_request_goes_to_the_rank_that_holds_its_prompt():
    async with ranked() as (it, ask):
        tokens = list(TEXT.encode())
        event = stored(list(range(1, len(tokens) // 16 + 1)), size=16, token_ids=tokens)
        async with asyncio.timeout(PATIENCE_S):
            while not (await held(it.http))["a#1"]:
                await it.publishers[1].send([event], rank=1)
        assert await held(it.http) == {"a#0": 0, "a#1": 112, "b": 0}
        assert await ask(**{RANK: "7"}) == [["1"], []], "a client names no rank"
        assert next(reversed(it.live.records.values())).decision.worker == "a#1"
        # What a rank is said to hold at another's port is left out.
        strange = it.front.backends["a#0"].events
        async with asyncio.timeout(PATIENCE_S):
            while not strange["other_rank"]:
                await it.publishers[0].send([event], rank=1)
                await asyncio.sleep(0.01)
        assert (await held(it.http))["a#0"] == 0


async def test_server_of_one_rank_is_told_none_even_after_another():
    async with ranked() as (it, ask):
        a, _ = it.servers
        told = [await ask(f"{letter}" * 400) for letter in "abcdefgh"]
        assert {rank for one in told for rank in one[0]} <= {"0", "1"}
        assert {rank for one in told for rank in one[1]} <= {None}
        a.status = 503
        for text in ("xyz", "uvw", "rst"):
            at_a, at_b = await ask(text * 100)
            assert at_b == [None] and len(at_a) <= 1, "ranks of one server fail together"


async def test_server_holds_what_was_sent_until_its_events_come():
    async with two_servers() as it:
        for server in it.servers:
            server.hold.clear()
        texts = ["x" * 64, "y" * 64]
        both = [asyncio.create_task(it.http.post(PATH, json=body(text))) for text in texts]
        await until(lambda: all(len(server.seen) > 0 for server in it.servers))
        for server in it.servers:
            server.hold.set()
        for one in both:
            await (await one).read()
        found = [await held(it.http, text) for text in texts]
        # The last block is computed again.
        assert sorted(one["b"] for one in found) == [0, 48]
        assert sorted(one["a"] for one in found) == [0, 48]
        await published(it.http, it.publisher)
        assert [(await held(it.http, text))["a"] for text in texts] == [0, 0]
        assert sorted([(await held(it.http, text))["b"] for text in texts]) == [0, 48]


async def test_events_that_never_come_are_reported_once():
    publisher = Publisher()
    async with serving(FakeServer()) as (server,):
        row = {"url": server.url, "profile": "pcie", "events": publisher.endpoint}
        async with routing(row) as it:
            with capture_logs() as logs:
                for _ in range(7):
                    await (await it.http.post(PATH, json=body())).read()
                    await it.settled()
    publisher.socket.close()
    missing = [one for one in logs if one["event"] == "backend_events_missing"]
    assert [one["url"] for one in missing] == [server.url]
    assert "tcp://*:PORT" in missing[0]["remedy"]


async def test_gap_of_one_rank_forgets_nothing_of_another():
    async with two_servers() as it:
        await published(it.http, it.publisher)
        before, it.publisher.seq = it.publisher.seq, 3
        await it.publisher.send([stored([77], size=16)], rank=1)
        names = it.live.router.index.stats
        await until(lambda: names()["names"] == len(TEXT) // 16 + 1)
        it.publisher.seq = 9
        await it.publisher.send([], rank=1)
        await until(lambda: names()["names"] == len(TEXT) // 16)
        it.publisher.seq = before
        assert (await held(it.http))["a"] == 112


@pytest.mark.parametrize("then", [lambda seq: seq + 3, lambda seq: 0], ids=["gap", "restart"])
async def test_blocks_are_forgotten_after_a_gap_or_a_restart(then):
    async with two_servers() as it:
        await published(it.http, it.publisher)
        it.publisher.seq = then(it.publisher.seq)
        await it.publisher.send([])
        await until(lambda: not it.live.router.index.stats()["names"])
        await published(it.http, it.publisher)


async def test_tasks_get_turns_while_a_server_floods(monkeypatch):
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1e9)
    turns = Turns()

    class Counting(Backend):
        def _heard(self, events):
            turns.message()
            super()._heard(events)

    monkeypatch.setattr(kappa_router.front.front, "Backend", Counting)
    async with serving(FakeServer()) as (server,):
        with flood(payload=batch(stored([1], size=16))) as endpoint:
            row = {"url": server.url, "profile": "pcie", "events": endpoint}
            async with turns.counted(), routing(row) as it:
                await until(lambda: turns.heard > 5000)
                assert (await it.http.get("/ready")).status == 200
    assert turns.longest <= 64


async def test_flood_is_dropped_counted_and_said_once(monkeypatch):
    monkeypatch.setattr(event_feed, "_PAUSES_S", (0.01,))
    async with two_servers() as it:
        await published(it.http, it.publisher)
        with capture_logs() as logs:
            monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1.0)
            for _ in range(2):
                before = floods(it.front)
                async with asyncio.timeout(PATIENCE_S):
                    while floods(it.front) == before:
                        await it.publisher.stored("z" * 64)
                        await asyncio.sleep(0.001)
            await until(lambda: not it.live.router.index.stats()["names"])
            monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1e4)
        said = [one for one in logs if one["event"] == "kv_events_flood"]
        assert [one["worker"] for one in said] == ["a"]
        await published(it.http, it.publisher)


def floods(front):
    """How often a server flooded, by the metrics."""
    lines = front.live.metrics.exposition().decode().splitlines()
    counts = (line.split()[-1] for line in lines if line.startswith("kappa_stream_floods_total{"))
    return sum(map(float, counts))


async def test_frame_beyond_the_bound_is_not_taken(monkeypatch):
    monkeypatch.setattr(event_feed, "_MOST_FRAME_BYTES", 1 << 16)
    monkeypatch.setattr(event_feed, "_RECONNECT_S", 0.01)
    async with two_servers() as it:
        await published(it.http, it.publisher)
        await it.publisher.send([{"type": "x" * (1 << 17)}])
        # What comes after it is heard, and that something is missing before.
        await it.publisher.socket.send_multipart([b"", b"\0" * 8, b"\x93\0\x90\0"])
        async with asyncio.timeout(PATIENCE_S):
            while it.live.router.index.stats()["names"]:
                await it.publisher.send([])
                await asyncio.sleep(0.01)
        assert not it.backends["a"].events["type:" + "x" * (1 << 17)]
        await published(it.http, it.publisher)


async def test_blocks_of_another_size_are_left_out_and_counted():
    async with two_servers() as it:
        await published(it.http, it.publisher)
        await it.publisher.stored("x" * 64, size=32)
        events = it.backends["a"].events
        await until(lambda: events["other_size"] == 1)
        assert (await held(it.http))["a"] == 112


async def test_garbage_on_the_socket_does_not_end_the_feed():
    async with two_servers() as it:
        await published(it.http, it.publisher)
        await it.publisher.socket.send_multipart([b"", b"\0" * 8, b"\xc1garbage"])
        await it.publisher.socket.send_multipart([b"alone"])
        await published(it.http, it.publisher)
        assert (await it.http.post(PATH, json=body())).status == 200


async def test_request_without_tokens_goes_to_the_least_backlog():
    async with two_servers() as it:
        answer = await it.http.post("/v1/chat/completions", json={"messages": [{"content": "x"}]})
        assert answer.status == 200
        record = next(reversed(it.live.records.values()))
        assert record.decision.reason == "uninformed_least_backlog"


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"", b"\0" * 8, b"\x93\0\x91\x92\xa6Stored\x01\0"], "unknown kinds: type:Stored"),
        ([b"", b"\0" * 8, b"\xc1garbage"], "malformed KV event batch"),
        ([b"alone"], "1 frames"),
    ],
)
async def test_events_of_an_unknown_form_are_said_once(frames, why):
    async with two_servers() as it:
        await published(it.http, it.publisher)
        with capture_logs() as logs:
            for _ in range(3):
                await it.publisher.socket.send_multipart(frames)
            await until(lambda: it.backends["a"].events["unreadable"])
            await published(it.http, it.publisher)
        said = [one for one in logs if one["event"] == "backend_events_unreadable"]
        assert [one["url"] for one in said] == [it.servers[0].url]
        assert why in said[0]["why"]
        assert said[0]["server"] == "version 0.5.9"
        assert "docs/route.md" in said[0]["remedy"]
        assert not [one for one in logs if "restart" in one["event"]]
        assert (await it.http.post(PATH, json=body())).status == 200


async def test_tiers_of_hicache_are_expected_where_events_tell_them():
    async with two_servers() as it:
        tokens = list(TEXT.encode())
        hashes = list(range(-8, 0))
        publisher = it.publisher

        async def told(*events, device, cached):
            async def expected():
                await publisher.send(list(events))
                answer = await (await it.http.post("/v1/route", json=body())).json()
                here = next(one for one in answer["candidates"] if one["worker"] == "a")
                return (here["device_tokens"], here["cached_tokens"]) == (device, cached)

            while not await expected():
                pass

        pages = ["BlockStored", hashes, None, tokens, 16, None]
        await told([*pages, "GPU"], [*pages, "CPU_PINNED"], device=112, cached=0)
        await told(["BlockRemoved", hashes, "GPU"], device=0, cached=112)
        await told(["BlockRemoved", hashes[4:], "CPU_PINNED"], device=0, cached=64)
        await told(["AllBlocksCleared"], device=0, cached=0)
