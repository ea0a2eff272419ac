"""A worker's stream over real sockets: snapshot, deltas, gaps, silence, nonsense."""

import asyncio
import gc
import os

import msgspec
import pytest
import zmq
import zmq.asyncio

import router.live.feed
import router.live.supervised
from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Admission, Announcement, WorkerReport
from router.index.kv_events import BlocksStored, WorkerReset
from router.live.feed import WorkerFeed

_PATIENCE_S = 30.0


def kv(*hashes):
    """A batch of blocks, one after the other, as vLLM publishes it."""
    event = {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None,
        "token_ids": list(range(2 * len(hashes))), "block_size": 2, "lora_id": None,
        "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return msgspec.msgpack.encode([0.0, [event], 0])


class Worker:
    """A worker's two public sockets, under the test's control."""

    def __init__(self, context):
        self.out = context.socket(zmq.XPUB)
        self.snapshots = context.socket(zmq.ROUTER)
        self.port = self.out.bind_to_random_port("tcp://127.0.0.1")
        self.snapshot_port = self.snapshots.bind_to_random_port("tcp://127.0.0.1")

    def announcement(self):
        return Announcement(
            worker="w", model="m", node=node_profile("pcie"), step=StepModel(1e-5, 0, 1e-3, 0),
            kv_bytes_per_token=1.0, emulated_model="", fingerprint="f", block_tokens=2,
            device_blocks=9, host_blocks=0, max_batch_tokens=64, max_context_tokens=64,
            events_endpoint=f"tcp://127.0.0.1:{self.port}",
            snapshot_endpoint=f"tcp://127.0.0.1:{self.snapshot_port}",
        )  # fmt: skip

    async def subscribed(self):
        assert await asyncio.wait_for(self.out.recv(), _PATIENCE_S) == b"\x01"

    async def asked(self):
        identity, *rest = await asyncio.wait_for(self.snapshots.recv_multipart(), _PATIENCE_S)
        assert rest == [b"", b"snapshot"]
        return identity

    async def answer(self, seq, *batches):
        identity = await self.asked()
        await self.snapshots.send_multipart([identity, b"", seq.to_bytes(8, "big"), *batches])

    async def send(self, kind, seq, payload):
        await self.out.send_multipart([kind, seq.to_bytes(8, "big"), payload])


class Heard:
    """What the feed said, in order."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def blocks(self, events):
        for event in events:
            reset = isinstance(event, WorkerReset)
            self.queue.put_nowait("reset" if reset else event.engine_hashes)
            assert reset or isinstance(event, BlocksStored)

    def report(self, report):
        self.queue.put_nowait(report)

    def gap(self, worker):
        self.queue.put_nowait(f"gap {worker}")

    async def next(self, count=1):
        items = [await asyncio.wait_for(self.queue.get(), _PATIENCE_S) for _ in range(count)]
        return items if count > 1 else items[0]


@pytest.fixture
async def scene(monkeypatch):
    monkeypatch.setattr(router.live.supervised, "PAUSES_S", (0.01,))
    context = zmq.asyncio.Context()
    worker, heard = Worker(context), Heard()
    feed = WorkerFeed(worker.announcement(), heard.blocks, heard.report, heard.gap)
    await worker.subscribed()
    yield worker, heard, feed
    await feed.close()
    context.destroy(linger=0)


async def test_the_snapshot_comes_first_then_what_happened_after_it(scene):
    worker, heard, _ = scene
    # Published before the snapshot's number: part of it already.
    await worker.send(b"kv", 4, kv(99))
    await worker.send(b"kv", 5, kv(98))
    await worker.answer(5, kv(1, 2), kv(3))
    await worker.send(b"kv", 6, kv(4))
    assert await heard.next(4) == ["reset", (1, 2), (3,), (4,)]


async def test_a_report_arrives_whole(scene):
    worker, heard, _ = scene
    await worker.answer(0)
    report = WorkerReport("w", 1.5, steps_total=3, admitted=(Admission("r", 1, 2, 3),))
    await worker.send(b"report", 1, msgspec.msgpack.encode(report.to_dict()))
    assert await heard.next(2) == ["reset", report]


async def test_a_gap_is_told_and_mended_by_a_new_snapshot(scene):
    worker, heard, _ = scene
    await worker.answer(0, kv(1))
    await worker.send(b"kv", 1, kv(2))
    await worker.send(b"kv", 3, kv(4))  # number 2 was lost
    await worker.answer(3, kv(1, 2), kv(3, 4))
    await worker.send(b"kv", 4, kv(5))
    told = await heard.next(7)
    assert told == ["reset", (1,), (2,), "gap w", "reset", (1, 2), (3, 4)]
    assert await heard.next() == (5,)


async def test_a_repeated_message_is_ignored(scene):
    worker, heard, _ = scene
    await worker.answer(0)
    for seq in (1, 1, 2):
        await worker.send(b"kv", seq, kv(seq))
    assert await heard.next(3) == ["reset", (1,), (2,)]


async def test_a_reset_from_the_worker_is_passed_on(scene):
    worker, heard, _ = scene
    await worker.answer(0, kv(1))
    await worker.send(b"reset", 1, b"")
    assert await heard.next(3) == ["reset", (1,), "reset"]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(router.live.feed, "_SNAPSHOT_TIMEOUT_S", 0.05)


async def test_a_silent_worker_is_asked_again_until_it_answers(impatient, scene, monkeypatch):
    worker, heard, _ = scene
    for _ in range(3):
        await worker.asked()  # and says nothing
    monkeypatch.setattr(router.live.feed, "_SNAPSHOT_TIMEOUT_S", _PATIENCE_S)
    while heard.queue.empty():
        await worker.answer(0, kv(7))
        await asyncio.sleep(0.01)
    assert await heard.next(2) == ["reset", (7,)]


async def test_an_unreadable_snapshot_is_asked_for_again(scene):
    worker, heard, _ = scene
    await worker.answer(0, b"\xc1 nonsense")
    await worker.answer(0, kv(1))
    assert await heard.next(2) == ["reset", (1,)]


@pytest.mark.parametrize("kind", [b"kv", b"report"])
async def test_an_unreadable_message_is_skipped(scene, kind):
    worker, heard, _ = scene
    await worker.answer(0)
    await worker.send(kind, 1, b"\xc1 nonsense")
    await worker.send(b"report", 2, msgspec.msgpack.encode({"worker": "w", "unheard_of": 1}))
    await worker.send(b"kv", 3, kv(1))
    assert await heard.next(2) == ["reset", (1,)]


async def test_closing_ends_the_task_also_while_it_waits_for_a_snapshot():
    context = zmq.asyncio.Context()
    worker, heard = Worker(context), Heard()
    feed = WorkerFeed(worker.announcement(), heard.blocks, heard.report, heard.gap)
    await worker.asked()
    await feed.close()
    assert heard.queue.empty()
    context.destroy(linger=0)


@pytest.mark.parametrize("turns", range(6))
async def test_it_closes_even_at_the_moment_when_its_snapshot_arrives(turns):
    arrived, asked = asyncio.Event(), asyncio.Event()

    class Arriving(WorkerFeed):
        async def _snapshot(self):
            asked.set()
            await arrived.wait()
            return 0, []

    context = zmq.asyncio.Context()
    heard = Heard()
    said = Worker(context).announcement()
    feed = Arriving(said, heard.blocks, heard.report, heard.gap)
    await asked.wait()
    arrived.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.create_task(feed.close())
    done, _ = await asyncio.wait({closing}, timeout=_PATIENCE_S / 10)
    closing.cancel()
    context.destroy(linger=0)
    assert done


async def test_workers_that_come_and_go_leave_no_descriptor(scene):
    worker, heard, _ = scene
    await worker.answer(0)
    assert await heard.next() == "reset"

    def open_now():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def come_and_go():
        feed = WorkerFeed(worker.announcement(), heard.blocks, heard.report, heard.gap)
        await worker.answer(0)
        assert await heard.next() == "reset"
        await feed.close()

    await come_and_go()
    before = open_now()
    for _ in range(10):
        await come_and_go()
    async with asyncio.timeout(_PATIENCE_S):
        # libzmq's own thread closes what was handed to it.
        while open_now() > before + 5:
            await asyncio.sleep(0.01)


async def test_an_error_while_a_snapshot_is_applied_costs_only_a_second_snapshot(monkeypatch):
    monkeypatch.setattr(router.live.supervised, "PAUSES_S", (0.01,))
    context = zmq.asyncio.Context()
    worker, heard = Worker(context), Heard()
    failures = [OSError(28, "No space left on device"), RuntimeError("a fault of ours")]

    def blocks(events):
        if failures:
            raise failures.pop()
        heard.blocks(events)

    feed = WorkerFeed(worker.announcement(), blocks, heard.report, heard.gap)
    for _ in range(3):
        await worker.answer(0, kv(1))
    assert await heard.next(2) == ["reset", (1,)]
    await worker.send(b"kv", 1, kv(2))
    assert await heard.next() == (2,)
    assert feed.synced and feed.alive
    await feed.close()
    assert not feed.alive
    context.destroy(linger=0)


async def test_a_feed_whose_callbacks_fail_is_started_again_and_counted(monkeypatch):
    monkeypatch.setattr(router.live.supervised, "PAUSES_S", (0.01,))
    context = zmq.asyncio.Context()
    worker, heard, restarted = Worker(context), Heard(), []
    failures = {"gap": 1, "line": 1}

    def gap(_worker):
        if failures["gap"]:
            failures["gap"] = 0
            raise RuntimeError("a fault of ours")

    def line(_worker, _up):
        if failures["line"]:
            failures["line"] = 0
            raise RuntimeError("a fault of ours")

    feed = WorkerFeed(
        worker.announcement(), heard.blocks, heard.report, gap, line, restarted.append
    )
    await worker.answer(0, kv(1))
    assert await heard.next(2) == ["reset", (1,)]
    await worker.send(b"kv", 5, kv(2))  # a gap
    await worker.answer(5, kv(1))
    assert await heard.next(2) == ["reset", (1,)]
    await worker.send(b"kv", 6, kv(3))
    assert await heard.next() == (3,)
    assert sorted(restarted) == ["feed", "line"] and feed.alive
    await feed.close()
    context.destroy(linger=0)
