"""The host tier's copy engine: bytes, order, waiting and pace, on real tensors and threads."""

import threading

import msgspec
import numpy as np
import pytest
import torch
import zmq
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from workers.host_tier import CURRENT, HostTierWorker, Link, LinkPace
from workers.stats_channel import StatsSender

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK_TOKENS = 24, 16
WIDTHS = (64, 192)


class HostIds(BlockIDsLoadStoreSpec):
    pass


def device_ids(ids):
    return GPULoadStoreSpec(list(ids), group_sizes=(len(ids),), block_indices=(0,))


@pytest.fixture
def stats(tmp_path):
    """An endpoint and a function that returns the next message sent there."""
    endpoint = f"ipc://{tmp_path}/stats"
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.bind(endpoint)
    yield endpoint, lambda: msgspec.msgpack.decode(socket.recv())
    context.destroy(linger=0)


@pytest.fixture
def tier(stats):
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randint(-128, 128, (BLOCKS, width), dtype=torch.int8, generator=generator)
        for width in WIDTHS
    ]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors], group_data_refs=[]
    )
    made = []

    def make(pace=LinkPace(), host_blocks=40):
        worker = HostTierWorker(caches, host_blocks, BLOCK_TOKENS, pace, StatsSender(stats[0]))
        made.append(worker)
        return worker, tensors

    yield make
    for worker in made:
        worker.shutdown()
        CURRENT.remove(worker)


def test_blocks_come_back_byte_for_byte_wherever_they_are_put(tier):
    worker, device = tier()
    rng = np.random.default_rng(5)
    before = [tensor.clone() for tensor in device]
    stored, kept = rng.permutation(BLOCKS)[:10], rng.permutation(40)[:10]
    assert worker.submit_store(1, device_ids(stored), HostIds(kept))
    worker.wait({1})
    for tensor in device:
        tensor.zero_()
    # Half of them, in another order, to other places.
    order, places = rng.permutation(10)[:5], rng.permutation(BLOCKS)[:5]
    assert worker.submit_load(2, HostIds(kept[order]), device_ids(places))
    worker.wait({2})
    for tensor, old in zip(device, before, strict=True):
        assert torch.equal(tensor[places], old[stored[order]])
        untouched = np.setdiff1d(np.arange(BLOCKS), places)
        assert not tensor[untouched].any()


def test_a_finished_transfer_is_told_once_with_its_bytes(tier):
    worker, _ = tier()
    worker.submit_store(7, device_ids([0, 1, 2]), HostIds([5, 6, 7]))
    worker.wait({7})
    (done,) = worker.get_finished()
    assert (done.job_id, done.success) == (7, True)
    assert done.transfer_size == 3 * sum(WIDTHS)
    assert done.transfer_time >= 0
    assert worker.get_finished() == []


def test_loads_end_in_the_order_they_were_asked_for(tier):
    worker, _ = tier()
    jobs = list(range(20))
    for job in jobs:
        worker.submit_load(job, HostIds([job]), device_ids([job]))
    worker.wait(set(jobs))
    assert [done.job_id for done in worker.get_finished()] == jobs


def test_every_transfer_is_reported_with_its_tokens_and_bytes(tier, stats):
    worker, _ = tier()
    worker.submit_store(1, device_ids([0, 1]), HostIds([0, 1]))
    worker.wait({1})
    report, waited = sorted((stats[1](), stats[1]()), key=lambda message: message["kind"])
    assert (report["kind"], waited["kind"]) == ("store", "wait")
    assert report["tokens"] == 2 * BLOCK_TOKENS
    assert report["bytes"] == 2 * sum(WIDTHS)
    assert report["took_s"] >= report["copy_s"] >= 0
    assert report["pace_s"] == 0
    assert waited["took_s"] >= 0


def test_a_paced_load_lasts_at_least_its_pace(tier, stats):
    pace = LinkPace(token_s=1e-3, store_token_s=5e-4, fixed_s=0.01)
    worker, _ = tier(pace)
    worker.submit_load(1, HostIds([0, 1, 2]), device_ids([3, 4, 5]))
    worker.submit_load(2, HostIds([3]), device_ids([6]))
    worker.wait({1, 2})
    worker.submit_store(3, device_ids([0]), HostIds([0]))
    worker.wait({3})
    messages = [stats[1]() for _ in range(5)]
    loads = [m for m in messages if m["kind"] == "load"]
    (store,) = (m for m in messages if m["kind"] == "store")
    assert [m["pace_s"] for m in loads] == pytest.approx([0.01 + 48e-3, 0.01 + 16e-3])
    assert store["pace_s"] == pytest.approx(0.01 + 16 * 5e-4)
    for message in (*loads, store):
        assert message["took_s"] >= message["pace_s"] * (1 - 1e-9)
    # The second load could start only when the first had ended.
    assert loads[1]["queued_s"] <= loads[0]["took_s"]


def test_pace_arithmetic():
    pace = LinkPace(token_s=2.0, store_token_s=3.0, fixed_s=0.5)
    assert (pace.load_s(10), pace.store_s(10)) == (20.5, 30.5)
    assert (LinkPace(fixed_s=9.0).load_s(10), LinkPace().store_s(10)) == (0.0, 0.0)


def test_waiting_for_what_is_not_there_returns(tier):
    worker, _ = tier()
    worker.wait({99})
    assert worker.wait_for_load(60.0) is False


def test_waiting_for_a_load_ends_with_the_load(tier):
    worker, _ = tier(LinkPace(token_s=1e-3))
    worker.submit_load(1, HostIds([0]), device_ids([0]))
    # True: a load was in flight. It may end while we look, so ask until it is told.
    while worker.wait_for_load(60.0) and not (done := worker.get_finished()):
        pass
    assert [d.job_id for d in done] == [1]


def test_wait_blocks_until_the_transfer_has_ended():
    gate = threading.Event()

    def hold(_tokens):
        gate.wait(20.0)
        return 0.0

    host, device = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 8, dtype=torch.int8)
    link = Link("store", [device], [host], 16, hold, lambda _: None)
    try:
        link.submit(1, np.array([0]), np.array([0]))
        waiter = threading.Thread(target=link.wait, args=({1},))
        waiter.start()
        assert waiter.is_alive() and link.has_unfinished()
        gate.set()
        waiter.join(20.0)
        assert not waiter.is_alive() and not link.has_unfinished()
    finally:
        gate.set()
        link.close()


def test_sources_and_targets_must_pair_up():
    tensor = torch.zeros(4, 8, dtype=torch.int8)
    link = Link("load", [tensor], [tensor.clone()], 16, lambda _: 0.0, lambda _: None)
    try:
        with pytest.raises(ValueError, match="load job 1: 2 source blocks, 1 targets"):
            link.submit(1, np.array([0, 1]), np.array([0]))
        assert not link.has_unfinished()
    finally:
        link.close()


def test_a_transfer_that_cannot_be_made_is_told_as_failed(tier):
    worker, _ = tier(host_blocks=4)
    worker.submit_load(1, HostIds([400]), device_ids([0]))
    worker.submit_load(2, HostIds([1]), device_ids([1]))
    worker.wait({1, 2})
    assert [(d.job_id, d.success) for d in worker.get_finished()] == [(1, False), (2, True)]


def test_closing_lets_waiters_go_and_drops_what_is_queued():
    tensor = torch.zeros(4, 8, dtype=torch.int8)
    link = Link("load", [tensor], [tensor.clone()], 16, lambda _: 0.2, lambda _: None)
    for job in range(50):
        link.submit(job, np.array([0]), np.array([0]))
    link.close()
    link.wait(set(range(50)))
    assert len(link.take_finished()) < 50
