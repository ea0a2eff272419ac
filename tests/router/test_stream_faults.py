"""A worker's stream on its way to the ingress, through a proxy that loses, repeats and reorders:
afterwards the ingress knows exactly what the worker holds. Real sockets on both sides."""

import asyncio
import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from router.index.prefix_hash import PrefixHasher
from router.index.prefix_index import PrefixIndex
from router.live.kv_subscriber import KVSubscriber
from workers.report_stream import ReportStream

pytestmark = pytest.mark.vllm

BLOCK = 4
_PATIENCE_S = 20.0
_BATCHES = 200
FAULTS = ("none", "lose", "repeat", "reorder", "all")


class Proxy:
    """Between a stream and its reader: does to messages what networks may do."""

    def __init__(self, upstream, fault, seed):
        self._context = zmq.asyncio.Context.instance()
        self._from = self._context.socket(zmq.SUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(upstream)
        self._to = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._to.bind_to_random_port('tcp://127.0.0.1')}"
        self.fault, self._rng, self._late = fault, np.random.default_rng(seed), None
        self._task = asyncio.create_task(self._run())

    async def _run(self):
        while True:
            frames = await self._from.recv_multipart()
            fault = self.fault if self._rng.random() < 0.3 else "none"
            if fault == "all":
                fault = ("lose", "repeat", "reorder")[int(self._rng.integers(3))]
            if fault == "lose":
                continue
            if fault == "reorder" and self._late is None:
                self._late = frames
                continue
            for _ in range(2 if fault == "repeat" else 1):
                await self._to.send_multipart(frames)
            if self._late is not None:
                await self._to.send_multipart(self._late)
                self._late = None

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
        self._encode, self._number = msgspec.msgpack.Encoder().encode, 0
        self.held: dict[int, list[int]] = {}

    def publish(self, event):
        batch = self._encode(KVEventBatch(ts=0.0, events=[event]))
        self._socket.send_multipart([b"kv", self._number.to_bytes(8, "big"), batch])
        self._number += 1

    def store(self, key):
        tokens = list(range(key * 10, key * 10 + BLOCK))
        self.held[key] = tokens
        self.publish(
            BlockStored(
                block_hashes=[key], parent_block_hash=None, token_ids=tokens, block_size=BLOCK,
                lora_id=None, medium="GPU", lora_name=None, extra_keys=[None],
            )
        )  # fmt: skip

    def remove(self, key):
        del self.held[key]
        self.publish(BlockRemoved(block_hashes=[key], medium="GPU"))

    def close(self):
        self._socket.close(linger=0)


def announcement(events, snapshots):
    return Announcement(
        worker="w", model="m", node=replace(node_profile("pcie"), name="w"),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1.0, emulated_model="",
        fingerprint="f", block_tokens=BLOCK, device_blocks=100, host_blocks=0, max_batch_tokens=64,
        max_context_tokens=64, events_endpoint=events, snapshot_endpoint=snapshots,
    )  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_the_network_does_the_index_ends_as_the_worker_is(fault):
    sockets = f"ipc://@kappa-wire-{os.getpid()}-{fault}"
    engine = Engine(f"{sockets}-kv")
    stream = ReportStream("w", "127.0.0.1", f"{sockets}-stats", f"{sockets}-kv")
    stream.start()
    proxy = Proxy(stream.events_endpoint, fault, seed=5)
    index = PrefixIndex(PrefixHasher(BLOCK, secret=9), 10_000)
    gaps = Counter()
    listener = SimpleNamespace(
        blocks=lambda events: [index.handle(event) for event in events],
        reported=lambda report: None,
        stream_gap=lambda worker: gaps.update([worker]),
        connection=lambda worker, up: None,
        task_restarted=lambda task: None,
    )
    subscriber = KVSubscriber(announcement(proxy.endpoint, stream.snapshot_endpoint), listener)
    try:
        await asyncio.sleep(0.5)  # both connections stand
        rng = np.random.default_rng(1)
        for number in range(_BATCHES):
            if engine.held and rng.random() < 0.4:
                engine.remove(int(rng.choice(sorted(engine.held))))
            else:
                engine.store(number)
            if number % 10 == 0:
                await asyncio.sleep(0.02)
        proxy.fault = "none"
        await agreed(index, engine)
        # A gap is found by the next message, which the reports make sure of.
        assert (fault in ("lose", "reorder", "all")) == bool(gaps["w"])
    finally:
        await subscriber.close()
        await proxy.close()
        stream.close()
        engine.close()


async def agreed(index, engine):
    """Return when the index knows each block that the engine holds, and no other."""
    hasher = PrefixHasher(BLOCK, secret=9)
    names = {
        key: hasher.prefix_hashes(np.arange(key * 10, key * 10 + BLOCK)) for key in range(_BATCHES)
    }

    def known():
        return {key for key, name in names.items() if index.match(name, "w").device_blocks}

    async with asyncio.timeout(_PATIENCE_S):
        while known() != set(engine.held):
            await asyncio.sleep(0.05)
