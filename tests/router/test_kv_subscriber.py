"""A worker's stream over real sockets: snapshot, deltas, gaps, silence, nonsense."""

import asyncio
import gc
import itertools
import os
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio

import kappa_router.live.kv_subscriber
import kappa_router.live.supervised
from kappa.protocol import Admission, WorkerReport
from kappa_router.index.kv_event_types import BlocksStored, WorkerReset
from kappa_router.live import event_feed
from kappa_router.live.kv_subscriber import KVSubscriber
from tests.router.building import small
from tests.router.flooding import Turns, flood
from tests.router.kv_batches import published
from tests.router.patience import PATIENCE_S, until


class Worker:
    """A worker's two public sockets, under the test's control."""

    def __init__(self, context):
        self.out = context.socket(zmq.XPUB)
        self.snapshots = context.socket(zmq.ROUTER)
        self.port = self.out.bind_to_random_port("tcp://127.0.0.1")
        self.snapshot_port = self.snapshots.bind_to_random_port("tcp://127.0.0.1")

    def announcement(self):
        return small(
            "w", block_tokens=2, events_endpoint=f"tcp://127.0.0.1:{self.port}",
            snapshot_endpoint=f"tcp://127.0.0.1:{self.snapshot_port}",
        )  # fmt: skip

    async def subscribed(self):
        assert await asyncio.wait_for(self.out.recv(), PATIENCE_S) == b"\x01"

    async def requested(self):
        identity, *rest = await asyncio.wait_for(self.snapshots.recv_multipart(), PATIENCE_S)
        assert rest == [b"", b"snapshot"]
        return identity

    async def answer(self, seq, *batches):
        identity = await self.requested()
        await self.snapshots.send_multipart([identity, b"", seq.to_bytes(8, "big"), *batches])

    async def send(self, kind, seq, payload):
        await self.out.send_multipart([kind, seq.to_bytes(8, "big"), payload])


class Listener:
    """What the subscriber reported, in order."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def blocks(self, events):
        for event in events:
            reset = isinstance(event, WorkerReset)
            self.queue.put_nowait("reset" if reset else event.engine_hashes)
            assert reset or isinstance(event, BlocksStored)

    def reported(self, report):
        self.queue.put_nowait(report)

    def stream_gap(self, worker):
        self.queue.put_nowait(f"gap {worker}")

    def stream_flood(self, worker):
        self.queue.put_nowait(f"flood {worker}")

    def connection(self, worker, up):
        pass

    def task_restarted(self, task):
        pass

    async def next(self, count=1):
        items = [await asyncio.wait_for(self.queue.get(), PATIENCE_S) for _ in range(count)]
        return items if count > 1 else items[0]


@pytest.fixture
async def follow(monkeypatch):
    """Makes a worker and a subscriber that reports to a listener."""
    monkeypatch.setattr(kappa_router.live.supervised, "PAUSES_S", (0.01,))
    context, made = zmq.asyncio.Context(), []

    def make(listener, kind=KVSubscriber, **announced):
        worker = Worker(context)
        made.append(kind(replace(worker.announcement(), **announced), listener))
        return worker, listener, made[-1]

    yield make
    for subscriber in made:
        if subscriber.alive:
            await subscriber.close()
    context.destroy(linger=0)


@pytest.fixture
async def scene(follow):
    made = follow(Listener())
    await made[0].subscribed()
    return made


async def test_snapshot_comes_first_then_what_happened_after_it(scene):
    worker, listener, _ = scene
    # Published before the snapshot's number: the snapshot has them.
    await worker.send(b"kv", 4, published(99))
    await worker.send(b"kv", 5, published(98))
    await worker.answer(5, published(1, 2), published(3))
    await worker.send(b"kv", 6, published(4))
    assert await listener.next(4) == ["reset", (1, 2), (3,), (4,)]


async def test_report_arrives_whole(scene):
    worker, listener, _ = scene
    await worker.answer(0)
    report = WorkerReport("w", 1.5, steps_total=3, admitted=(Admission("r", 1, 2, 3),))
    await worker.send(b"report", 1, msgspec.msgpack.encode(report.to_dict()))
    assert await listener.next(2) == ["reset", report]


async def test_gap_is_reported_and_mended_by_a_new_snapshot(scene):
    worker, listener, _ = scene
    await worker.answer(0, published(1))
    await worker.send(b"kv", 1, published(2))
    await worker.send(b"kv", 3, published(4))  # number 2 was lost
    await worker.answer(3, published(1, 2), published(3, 4))
    await worker.send(b"kv", 4, published(5))
    received = await listener.next(7)
    assert received == ["reset", (1,), (2,), "gap w", "reset", (1, 2), (3, 4)]
    assert await listener.next() == (5,)


async def test_flood_is_dropped_and_mended_by_a_snapshot(scene, monkeypatch):
    worker, listener, subscriber = scene
    monkeypatch.setattr(event_feed, "_PAUSES_S", (0.01,))
    await worker.answer(0, published(1))
    assert await listener.next(2) == ["reset", (1,)]
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1.0)
    for number in range(1, 8):
        await worker.send(b"kv", number, published(number))
    received = [await listener.next()]
    while received[-1] != "flood w":
        received.append(await listener.next())
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1e4)
    assert await listener.next() == "reset" and not subscriber.synced
    await worker.answer(9, published(1, 2), published(8, 9))
    assert await listener.next(3) == ["reset", (1, 2), (8, 9)]
    await until(lambda: subscriber.synced)
    # Not connected yet when the first ones are sent: a gap, and a snapshot again.
    number = 10
    while listener.queue.empty():
        await worker.send(b"kv", number, published(number))
        number += 1
        await asyncio.sleep(0.01)
    assert await listener.next() in ((10,), "gap w")
    assert subscriber.connected


async def test_tasks_get_turns_while_a_worker_floods(follow, monkeypatch):
    monkeypatch.setattr(event_feed, "_EVENTS_PER_S", 1e9)

    class Counting(KVSubscriber):
        async def _receive(self, *message):
            turns.message()
            return await super()._receive(*message)

    # Of one number, so that no message is a gap.
    with flood(b"kv", numbers=itertools.repeat(1)) as endpoint:
        async with Turns().counted() as turns:
            worker, listener, subscriber = follow(Listener(), Counting, events_endpoint=endpoint)
            await worker.answer(0)
            await until(lambda: turns.heard > 5000)
            await subscriber.close()
    assert await listener.next(2) == ["reset", (1,)]
    assert turns.longest <= 64


async def test_blocks_are_counted_by_tier_and_unknown_media_apart(scene):
    worker, listener, subscriber = scene
    await worker.answer(0, published(1, 2))
    await worker.send(b"kv", 1, published(3, medium="CPU"))
    await worker.send(b"kv", 2, published(4, medium="TAPE"))
    await worker.send(b"kv", 3, published(5))
    assert await listener.next(4) == ["reset", (1, 2), (3,), (5,)]
    assert subscriber.events == {"device": 3, "host": 1, "medium:TAPE": 1}


async def test_repeated_message_is_ignored(scene):
    worker, listener, _ = scene
    await worker.answer(0)
    for seq in (1, 1, 2):
        await worker.send(b"kv", seq, published(seq))
    assert await listener.next(3) == ["reset", (1,), (2,)]


async def test_reset_from_the_worker_is_passed_on(scene):
    worker, listener, _ = scene
    await worker.answer(0, published(1))
    await worker.send(b"reset", 1, b"")
    assert await listener.next(3) == ["reset", (1,), "reset"]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(kappa_router.live.kv_subscriber, "_SNAPSHOT_TIMEOUT_S", 0.05)


async def test_silent_worker_is_queried_again_until_it_answers(impatient, scene, monkeypatch):
    worker, listener, _ = scene
    for _ in range(3):
        await worker.requested()  # and does not answer
    monkeypatch.setattr(kappa_router.live.kv_subscriber, "_SNAPSHOT_TIMEOUT_S", PATIENCE_S)
    while listener.queue.empty():
        await worker.answer(0, published(7))
        await asyncio.sleep(0.01)
    assert await listener.next(2) == ["reset", (7,)]


async def test_unreadable_snapshot_is_requested_again(scene):
    worker, listener, _ = scene
    await worker.answer(0, b"\xc1 nonsense")
    await worker.answer(0, published(1))
    assert await listener.next(2) == ["reset", (1,)]


@pytest.mark.parametrize("kind", [b"kv", b"report"])
async def test_unreadable_message_is_skipped(scene, kind):
    worker, listener, _ = scene
    await worker.answer(0)
    await worker.send(kind, 1, b"\xc1 nonsense")
    await worker.send(b"report", 2, msgspec.msgpack.encode({"worker": "w", "unheard_of": 1}))
    await worker.send(b"kv", 3, published(1))
    assert await listener.next(2) == ["reset", (1,)]


async def test_close_ends_the_task_while_it_waits_for_a_snapshot(follow):
    worker, listener, subscriber = follow(Listener())
    await worker.requested()
    await subscriber.close()
    assert listener.queue.empty()


@pytest.mark.parametrize("turns", range(6))
async def test_close_works_at_the_moment_a_snapshot_arrives(follow, turns):
    arrived, requested = asyncio.Event(), asyncio.Event()

    class Arriving(KVSubscriber):
        async def _snapshot(self):
            requested.set()
            await arrived.wait()
            return 0, []

    _, _, subscriber = follow(Listener(), Arriving)
    await requested.wait()
    arrived.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S / 10):
        await subscriber.close()


async def test_workers_that_come_and_go_leave_no_descriptor(scene):
    worker, listener, _ = scene
    await worker.answer(0)
    assert await listener.next() == "reset"

    def open_now():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def come_and_go():
        subscriber = KVSubscriber(worker.announcement(), listener)
        await worker.answer(0)
        assert await listener.next() == "reset"
        await subscriber.close()

    await come_and_go()
    before = open_now()
    for _ in range(4):
        await come_and_go()
    async with asyncio.timeout(PATIENCE_S):
        # libzmq's own thread closes what was handed to it.
        while open_now() > before + 3:
            await asyncio.sleep(0.01)


async def test_error_while_a_snapshot_is_applied_costs_one_more(follow):
    failures = [OSError(28, "No space left on device"), RuntimeError("a fault of ours")]

    class Failing(Listener):
        def blocks(self, events):
            if failures:
                raise failures.pop()
            super().blocks(events)

    worker, listener, subscriber = follow(Failing())
    await worker.subscribed()
    for _ in range(3):
        await worker.answer(0, published(1))
    assert await listener.next(2) == ["reset", (1,)]
    await worker.send(b"kv", 1, published(2))
    assert await listener.next() == (2,)
    assert subscriber.synced and subscriber.alive
    await subscriber.close()
    assert not subscriber.alive


async def test_tasks_whose_callbacks_fail_restart_and_are_counted(follow):
    failures, restarted = {"gap", "connection"}, []

    class FailingOnce(Listener):
        def stream_gap(self, worker):
            self.fail("gap")

        def connection(self, worker, up):
            self.fail("connection")

        def task_restarted(self, task):
            restarted.append(task)

        def fail(self, where):
            if where in failures:
                failures.remove(where)
                raise RuntimeError("a fault of ours")

    worker, listener, subscriber = follow(FailingOnce())
    await worker.subscribed()
    await worker.answer(0, published(1))
    assert await listener.next(2) == ["reset", (1,)]
    await worker.send(b"kv", 5, published(2))  # a gap
    await worker.answer(5, published(1))
    assert await listener.next(2) == ["reset", (1,)]
    await worker.send(b"kv", 6, published(3))
    assert await listener.next() == (3,)
    await until(lambda: sorted(restarted) == ["feed", "line"])
    assert subscriber.alive
