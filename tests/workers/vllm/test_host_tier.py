"""The host tier's copy engine: bytes, order, waiting and pace, on real tensors and threads."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    get_offload_block_hash,
    make_offload_key,
)

from scheduler.link_order import FULL, HALF
from workers.stats_channel import StatsSender
from workers.vllm.connector import HostTierConnector
from workers.vllm.host_tier import HostTierWorker, TierSize
from workers.vllm.host_tier_manager import HostTierManager
from workers.vllm.load_sources import LOAD_SOURCES
from workers.vllm.options import LinkPace, LinkRules

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

    def make(pace=LinkPace(), host_blocks=40, rules=LinkRules()):
        size = TierSize(host_blocks, BLOCK_TOKENS)
        worker = HostTierWorker(caches, size, pace, StatsSender(stats[0]), rules)
        made.append(worker)
        return worker, tensors

    yield make
    for worker in made:
        worker.shutdown()
        assert worker not in LOAD_SOURCES


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


def test_a_finished_transfer_is_reported_once_with_its_bytes(tier):
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


def test_the_seconds_of_a_requests_loads_are_taken_once(tier):
    worker, _ = tier()
    worker.submit_store(1, device_ids([0, 1]), HostIds([0, 1]))
    worker.wait({1})
    for job, request in ((2, "a"), (3, "a"), (4, "b")):
        worker.loading(job, request)
        worker.submit_load(job, HostIds([0, 1]), device_ids([4, 5]))
    worker.wait({2, 3, 4})
    done = {done.job_id: done.transfer_time for done in worker.get_finished()}
    assert worker.take_load_s("a") == pytest.approx(done[2] + done[3])
    assert worker.take_load_s("b") == pytest.approx(done[4])
    assert worker.take_load_s("a") == worker.take_load_s("unknown") == 0.0


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
    messages = [stats[1]() for _ in range(4)]
    loads = [m for m in messages if m["kind"] == "load"]
    (store,) = (m for m in messages if m["kind"] == "store")
    assert [m["pace_s"] for m in loads] == pytest.approx([0.01 + 48e-3, 0.01 + 16e-3])
    assert store["pace_s"] == pytest.approx(0.01 + 16 * 5e-4)
    for message in (*loads, store):
        assert message["took_s"] >= message["pace_s"] * (1 - 1e-9)
    # The second load could start only when the first had ended.
    assert loads[1]["queued_s"] <= loads[0]["took_s"]


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


def test_a_transfer_that_cannot_be_made_is_reported_as_failed(tier):
    worker, _ = tier(host_blocks=4)
    worker.submit_load(1, HostIds([400]), device_ids([0]))
    worker.submit_load(2, HostIds([1]), device_ids([1]))
    worker.wait({1, 2})
    assert [(d.job_id, d.success) for d in worker.get_finished()] == [(1, False), (2, True)]


def test_what_was_not_dropped_comes_back_as_it_was_stored(tier):
    """On a busy shared link; half of the stores are overwritten as soon as `wait` allows."""
    pace = LinkPace(token_s=2e-5, store_token_s=5e-4, fixed_s=2e-4)
    worker, device = tier(
        pace, host_blocks=200, rules=LinkRules(duplex=HALF, late_wait_s=0.0)
    )  # fmt: skip
    rng = np.random.default_rng(11)
    stored, results, dropped = {}, {}, set()

    def collect():
        results.update({done.job_id: done.success for done in worker.get_finished()})
        dropped.update(worker.take_dropped())

    for job in range(16):
        source = rng.permutation(20)[: rng.integers(4, 10)]
        kept = list(range(10 * job, 10 * job + len(source)))
        worker.submit_load(1000 + job, HostIds([199]), device_ids([23]))
        stored[job] = (source, kept, [tensor[source].clone() for tensor in device])
        worker.submit_store(job, device_ids(source), HostIds(kept))
        if job % 2:
            worker.wait({job})
            collect()
        while job not in results:
            collect()
        for tensor in device:
            tensor[source] = torch.randint(-128, 128, tensor[source].shape, dtype=torch.int8)
    assert all(results[job] for job in stored)
    assert dropped and dropped <= {job for job in stored if job % 2}
    for job in set(stored) - dropped:
        source, kept, before = stored[job]
        places = list(range(len(source)))
        worker.submit_load(3000 + job, HostIds(kept), device_ids(places))
        worker.wait({3000 + job})
        for tensor, old in zip(device, before, strict=True):
            assert torch.equal(tensor[places], old), job


@pytest.mark.parametrize(("duplex", "links"), [(FULL, 2), (HALF, 1)])
def test_a_half_duplex_link_is_one_server(tier, duplex, links):
    worker, _ = tier(rules=LinkRules(duplex=duplex))
    assert len(worker.links) == links


def test_an_engine_that_only_stores_naps_but_is_told_that_no_load_is_there(tier):
    worker, _ = tier(LinkPace(token_s=1e-3, store_token_s=1e-3))
    worker.submit_store(1, device_ids([0]), HostIds([0]))
    assert worker.wait_for_load(60.0) is False
    worker.wait({1})


# -- the manager: what may be looked up -----------------------------------------------------------

WHO = ReqContext(req_id="r")


@pytest.fixture
def manager():
    reports = []

    def make(backlog_s=1.0, **pace):
        made = HostTierManager(
            num_blocks=8, enable_events=True, pace=LinkPace(**pace), block_tokens=BLOCK_TOKENS,
            backlog_s=backlog_s, report=reports.append,
        )  # fmt: skip
        made.reports = reports
        return made

    return make


def keys(*names):
    return [name.encode() for name in names]


def test_a_store_that_was_given_up_is_never_found_nor_announced(manager):
    tier = manager()
    tier.prepare_store(keys("a", "b"), WHO)
    assert tier.lookup(b"a", WHO) == LookupResult.HIT_PENDING
    tier.stores_lost(keys("a", "b"), 0.0)
    tier.complete_store(keys("a", "b"), WHO)
    assert [tier.lookup(key, WHO) for key in keys("a", "b")] == [LookupResult.MISS] * 2
    assert list(tier.take_events()) == []
    # Its room is free again, and the next attempt counts.
    assert len(tier.prepare_store(keys("a", *"cdefghi"), WHO).keys_to_store) == 8
    tier.complete_store(keys("a", *"cdefghi"), WHO)
    assert tier.lookup(b"a", WHO) == LookupResult.HIT


def test_what_a_waiting_request_will_load_is_evicted_last(manager):
    tier = manager()
    old, new, fresh = (
        [make_offload_key(f"{name}{i}".encode(), 0) for i in range(4)]
        for name in ("old", "new", "fresh")
    )
    for stored in (old, new):
        tier.prepare_store(stored, WHO)
        tier.complete_store(stored, WHO)
    scheduler = object.__new__(OffloadingConnectorScheduler)
    group = SimpleNamespace(group_idx=0, hashes_per_chunk=1, sliding_window_size_in_chunks=None)
    scheduler.config = SimpleNamespace(kv_group_configs=(group,))
    scheduler.manager, scheduler._req_status = tier, {}
    connector = object.__new__(HostTierConnector)
    connector.connector_scheduler = scheduler
    hashes = [get_offload_block_hash(key) for key in old]
    connector.on_new_request(
        SimpleNamespace(request_id="r", block_hashes=hashes, kv_transfer_params=None)
    )
    assert set(tier.prepare_store(fresh, WHO).evicted_keys) == set(new)


def test_stores_are_refused_while_too_many_seconds_are_queued(manager):
    tier = manager(backlog_s=1.0, store_token_s=0.02, fixed_s=0.1)  # 0.42 s for one block
    assert tier.prepare_store(keys("a"), WHO).keys_to_store == keys("a")
    assert tier.prepare_store(keys("b"), WHO).keys_to_store == keys("b")
    assert tier.prepare_store(keys("c", "d"), WHO).keys_to_store == []
    assert tier.lookup(b"c", WHO) == LookupResult.MISS
    assert tier.reports == [
        {"kind": "store_dropped", "blocks": 2, "tokens": 2 * BLOCK_TOKENS, "why": "backlog"}
    ]
    tier.complete_store(keys("a"), WHO)
    assert tier.prepare_store(keys("c"), WHO).keys_to_store == keys("c")


def test_a_store_longer_than_the_bound_goes_when_nothing_else_waits(manager):
    tier = manager(backlog_s=0.1, store_token_s=0.02)
    assert tier.prepare_store(keys("a", "b"), WHO).keys_to_store == keys("a", "b")


def test_what_is_stored_already_is_no_backlog(manager):
    tier = manager(backlog_s=0.5, store_token_s=0.02)
    tier.prepare_store(keys("a"), WHO)
    tier.complete_store(keys("a"), WHO)
    tier.prepare_store(keys("b"), WHO)
    assert tier.prepare_store(keys("a"), WHO).keys_to_store == []
    assert tier.reports == []


def test_without_a_pace_the_measured_copy_bounds_the_stores(manager):
    tier = manager(backlog_s=1.0)
    for name in "abc":
        tier.prepare_store(keys(name), WHO)
    assert tier.reports == []
    tier.reset_cache()
    tier.stores_lost([], 0.6)
    for name in "abc":
        tier.prepare_store(keys(name), WHO)
    assert len(tier.reports) == 2


def test_after_a_reset_nothing_counts_as_queued_or_lost(manager):
    tier = manager(backlog_s=0.5, store_token_s=0.02)
    tier.prepare_store(keys("a"), WHO)
    tier.stores_lost(keys("a"), 0.0)
    tier.reset_cache()
    assert tier.prepare_store(keys("a"), WHO).keys_to_store == keys("a")
    tier.complete_store(keys("a"), WHO)
    assert tier.lookup(b"a", WHO) == LookupResult.HIT
