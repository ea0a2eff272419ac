"""What a subscription takes of a publisher that sends too much: over real sockets."""

import asyncio
import threading
from collections import Counter

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from kappa_router.index.kv_event_types import Batch
from kappa_router.live import event_feed
from kappa_router.live.event_feed import EventFeed, FloodError
from tests.router.flooding import Turns, flood
from tests.router.kv_batches import published
from tests.router.patience import PATIENCE_S, until


class Publisher:
    """A publisher in the test's hands."""

    def __init__(self):
        self.socket = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    async def subscribed(self):
        assert await asyncio.wait_for(self.socket.recv(), PATIENCE_S) == b"\x01"

    async def send(self, *payloads):
        for payload in payloads:
            await self.socket.send_multipart([b"", b"", payload])


@pytest.fixture
async def publisher():
    made = Publisher()
    yield made
    made.socket.close()


@pytest.fixture
async def feed(publisher):
    made = EventFeed("w", publisher.endpoint)
    made.connect()
    await publisher.subscribed()
    yield made
    made.close()


async def received(feed):
    return (await asyncio.wait_for(feed.receive(), PATIENCE_S))[2]


async def sent_again(feed, publisher, payload):
    """What comes first once a message is sent until the feed is connected again."""
    waiting = asyncio.create_task(received(feed))
    while not waiting.done():  # It ends in time by itself.
        await publisher.send(payload)
        await asyncio.sleep(0.01)
    return await waiting


async def test_tasks_get_a_turn_after_64_messages_at_most(monkeypatch):
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1e9)
    with flood() as endpoint:
        feed = EventFeed("w", endpoint)
        feed.connect()
        async with Turns().counted() as turns:
            while turns.heard < 5000:
                await feed.receive()
                turns.message()
        feed.close()
    assert turns.longest <= 64


async def test_events_of_one_message_are_handed_over_in_turns(feed):
    lots = []
    async with Turns().counted() as turns:
        await feed.hand_over(list(range(1000)), lambda lot: (lots.extend(lot), turns.message()))
    assert lots == list(range(1000))
    assert 1 < turns.longest <= 64


async def test_events_above_the_rate_are_dropped(feed, publisher, monkeypatch):
    monkeypatch.setattr(event_feed, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1.0)
    feed._left = 1.0
    await publisher.send(*(published(n) for n in range(8)))
    assert await received(feed) == published(0)
    with pytest.raises(FloodError, match="w sends more than 1 events a second"):
        await received(feed)
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1e4)
    with capture_logs() as logs:
        for _ in range(2):
            await feed.pause()
    assert [(line["event"], line["worker"]) for line in logs] == [("kv_events_flood", "w")]
    assert await sent_again(feed, publisher, published(9)) == published(9)


@pytest.mark.parametrize("payload", [published(*range(3)) * 1000, b""])
async def test_message_counts_for_its_bytes_and_its_events(feed, publisher, payload, monkeypatch):
    event = published(1)[11:-1]
    payload = payload or published(1)[:9] + b"\xdc" + (500).to_bytes(2, "big") + event * 500 + b"\0"
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 20.0)
    await publisher.send(payload)
    feed._left = 20.0
    with pytest.raises(FloodError):
        await feed.batch(await received(feed), Counter())


async def test_frame_beyond_the_bound_closes_the_connection(publisher, monkeypatch):
    monkeypatch.setattr(event_feed, "_MOST_FRAME_BYTES", 1 << 16)
    monkeypatch.setattr(event_feed, "_RECONNECT_S", 0.01)
    feed = EventFeed("w", publisher.endpoint)
    feed.connect()
    heard = []
    watching = asyncio.create_task(feed.watch(heard.append))
    await publisher.subscribed()
    await publisher.send(bytes(1 << 17))
    assert await sent_again(feed, publisher, published(1)) == published(1)
    await until(lambda: heard == [True, False, True])
    watching.cancel()
    feed.close()


@pytest.mark.parametrize(("blocks", "apart"), [(10, False), (30_000, True)])
async def test_large_batches_are_decoded_on_a_thread(feed, monkeypatch, blocks, apart):
    threads = []

    def decode(payload, worker, counts, groups):
        threads.append(threading.get_ident())
        counts["remote"] += 1
        return Batch(0, [])

    monkeypatch.setattr(event_feed, "decode", decode)
    counts = Counter(remote=1)
    await feed.decoded(published(*range(blocks), size=8), counts)
    assert (threads != [threading.get_ident()]) is apart
    assert counts == {"remote": 2}
