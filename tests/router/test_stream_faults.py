"""A worker's stream on its way to the decider, through a proxy that loses, repeats and reorders:
afterwards the decider knows exactly what the worker holds. Real sockets on both sides."""

import asyncio
import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
import zmq.asyncio

from kappa_router.index.prefix_hash import PrefixHasher
from kappa_router.index.prefix_index import PrefixIndex
from kappa_router.live.kv_subscriber import KVSubscriber
from kappa_workers.report_stream import ReportStream
from tests.router.building import announcement, match_worker
from tests.router.kv_batches import batch, removed, stored
from tests.router.patience import until

pytestmark = pytest.mark.vllm

BLOCK = 4
_BATCHES = 200
FAULTS = ("none", "lose", "repeat", "reorder", "all")


class Proxy:
    """Between a stream and its reader: does to messages what networks may do."""

    def __init__(self, upstream, fault, seed):
        context = zmq.asyncio.Context.instance()
        self._from, self._to = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(upstream)
        self.endpoint = f"tcp://127.0.0.1:{self._to.bind_to_random_port('tcp://127.0.0.1')}"
        self.fault, self._rng = fault, np.random.default_rng(seed)
        self._task = asyncio.create_task(self._run())

    async def _run(self):
        late = None
        while True:
            frames = await self._from.recv_multipart()
            fault = self.fault if self._rng.random() < 0.3 else "none"
            if fault == "all":
                fault = ("lose", "repeat", "reorder")[int(self._rng.integers(3))]
            if fault == "lose":
                continue
            if fault == "reorder" and late is None:
                late = frames
                continue
            for _ in range(2 if fault == "repeat" else 1):
                await self._to.send_multipart(frames)
            if late is not None:
                await self._to.send_multipart(late)
                late = None

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._from.close(linger=0)
        self._to.close(linger=0)


class Engine:
    """Publishes what an engine would, and knows what it holds."""

    def __init__(self, endpoint):
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(endpoint)
        self._number, self.held = 0, set()

    def publish(self, event):
        number = self._number.to_bytes(8, "big")
        self._socket.send_multipart([b"kv", number, batch(event)])
        self._number += 1

    def store(self, key):
        self.held.add(key)
        tokens = list(range(key * 10, key * 10 + BLOCK))
        self.publish(stored([key], size=BLOCK, token_ids=tokens, extra_keys=[None]))

    def remove(self, key):
        self.held.remove(key)
        self.publish(removed(key))

    def close(self):
        self._socket.close(linger=0)


@pytest.mark.parametrize("fault", FAULTS)
async def test_index_equals_the_worker_after_network_faults(fault):
    sockets = f"ipc://@kappa-wire-{os.getpid()}-{fault}"
    engine = Engine(f"{sockets}-kv")
    stream = ReportStream("w", "127.0.0.1", f"{sockets}-stats", f"{sockets}-kv")
    stream.start()
    proxy = Proxy(stream.events_endpoint, "none", seed=5)
    hasher, gaps = PrefixHasher(BLOCK, secret=9), Counter()
    index = PrefixIndex(hasher, 10_000)
    listener = SimpleNamespace(
        blocks=lambda events: [index.handle(event) for event in events],
        reported=lambda report: None,
        stream_gap=lambda worker: gaps.update([worker]),
        stream_flood=lambda worker: None,
        connection=lambda worker, up: None,
        task_restarted=lambda task: None,
    )
    announced = announcement(
        "w", block_tokens=BLOCK, events_endpoint=proxy.endpoint,
        snapshot_endpoint=stream.snapshot_endpoint,
    )  # fmt: skip
    subscriber = KVSubscriber(announced, listener)
    names = [hasher.prefix_hashes(np.arange(k * 10, k * 10 + BLOCK)) for k in range(_BATCHES + 1)]

    def known():
        return {
            key for key, name in enumerate(names) if match_worker(index, name, "w").device_blocks
        }

    try:
        # What is published before both connections stand is lost, and found by the next message.
        await asyncio.sleep(0.5)
        engine.store(_BATCHES)
        await until(known)
        gaps.clear()
        proxy.fault = fault
        rng = np.random.default_rng(1)
        for number in range(_BATCHES):
            if engine.held and rng.random() < 0.4:
                engine.remove(int(rng.choice(sorted(engine.held))))
            else:
                engine.store(number)
            if number % 10 == 0:
                await asyncio.sleep(0.02)
        proxy.fault = "none"
        await until(lambda: known() == engine.held)
        # A gap is found by the next message, which the reports make sure of.
        assert (fault in ("lose", "reorder", "all")) == bool(gaps["w"])
    finally:
        await subscriber.close()
        await proxy.close()
        stream.close()
        engine.close()
