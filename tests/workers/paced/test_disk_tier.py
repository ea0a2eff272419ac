"""The disk tier: which blocks are written and found, and what becomes of rows that are lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    LookupResult,
    ReqContext,
    make_offload_key,
)

from kappa_workers.paced import disk_tier
from kappa_workers.paced.connector import CpuHostTierConnector
from kappa_workers.paced.disk_file import DiskFile
from kappa_workers.paced.disk_tier import DiskNews, DiskRoute, DiskTierManager, DiskWrite
from kappa_workers.paced.host_tier import HostTierWorker, TierSize
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.options import LinkPace

pytestmark = pytest.mark.vllm

HOST, DISK, TOKENS = 8, 12, 16
CONTEXT = ReqContext(req_id="r")
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def key(number):
    return make_offload_key(number.to_bytes(32, "big"), 0)


def keys(*numbers):
    return [key(n) for n in numbers]


class Scene:
    """A manager and what it reported; its disk writes succeed unless said otherwise."""

    def __init__(self, kind=DiskTierManager, **rows):
        self.reported = []
        self.manager = kind(
            **{"num_blocks": HOST, **rows}, cache_policy="lru",
            enable_events=True, block_tokens=TOKENS, backlog_s=1e9,
            report=self.reported.append,
        )  # fmt: skip

    def store(self, *numbers):
        output = self.manager.prepare_store(keys(*numbers), CONTEXT)
        self.manager.complete_store(output.keys_to_store, CONTEXT)
        return output

    def write_all(self, success=True):
        lots = []
        while (write := self.manager.take_work()) is not None:
            assert self.manager.take_work() is None, "one at a time"
            lots.append(write)
            self.manager.take_news(DiskNews(written={write.number: success}))
        return lots

    def load(self, *numbers):
        wanted = keys(*numbers)
        ids = self.manager.prepare_load(wanted, CONTEXT).block_ids.tolist()
        return ids, self.manager.take_loaded()

    def found(self, *numbers):
        return [self.manager.lookup(one, CONTEXT) for one in keys(*numbers)]

    def events(self):
        known = {key(n): n for n in range(100)}
        return [
            (event.medium.name, event.removed, sorted(known[k] for k in event.keys))
            for event in self.manager.take_events()
        ]


@pytest.fixture
def scene():
    return Scene(disk_blocks=DISK)


def test_nothing_is_written_before_half_of_host_memory_is_in_use(scene):
    scene.store(0, 1, 2, 3)
    assert scene.manager.take_work() is None and not scene.manager.has_pending_work()
    scene.store(4)
    assert scene.manager.has_pending_work()
    (write,) = scene.write_all()
    assert len(write.rows) == len(set(write.rows)) == 5
    assert ("STORAGE", False, [0, 1, 2, 3, 4]) in scene.events()
    assert not scene.manager.has_pending_work()


def test_manager_loads_from_disk_what_host_memory_evicted(scene):
    scene.store(0, 1, 2, 3, 4, 5)
    (write,) = scene.write_all()
    scene.events()
    scene.store(10, 11, 12, 13)
    assert ("CPU", True, [0, 1]) in scene.events()
    assert scene.found(0, 1, 2, 10, 99) == [HIT, HIT, HIT, HIT, MISS]
    rows = dict(zip((0, 1, 2, 3, 4, 5), write.rows, strict=True))
    ids, from_disk = scene.load(0, 10, 1)
    assert ids[::2] == [HOST + rows[0], HOST + rows[1]] and ids[1] < HOST and from_disk == 2
    assert scene.manager.take_loaded() == 0, "counted once"
    scene.manager.complete_load(keys(0, 10, 1), CONTEXT)
    assert not scene.reported


def test_manager_stores_a_block_in_host_again_after_a_disk_load(scene):
    scene.store(0, 1, 2, 3, 4, 5)
    scene.write_all()
    scene.store(10, 11, 12, 13)
    assert scene.store(0).keys_to_store == [], "on disk, and not loaded"
    scene.load(0)
    scene.manager.complete_load(keys(0), CONTEXT)
    assert scene.store(0, 1).keys_to_store == keys(0)
    ids, from_disk = scene.load(0)
    assert ids[0] < HOST and from_disk == 0
    scene.manager.complete_load(keys(0), CONTEXT)
    assert len(scene.write_all()[0].rows) == 4, "10 to 13; the other is on disk already"


def test_manager_counts_blocks_evicted_before_they_were_written(scene):
    scene.store(*range(8))
    scene.store(10, 11)
    assert scene.found(0, 1, 2) == [MISS, MISS, HIT]
    assert scene.reported == [{"kind": "store_dropped", "why": "disk", "blocks": 2}]
    # A block that is being written stays until the write ends.
    write = scene.manager.take_work()
    assert len(write.rows) == 8
    assert scene.manager.prepare_store(keys(20), CONTEXT) is None
    scene.manager.take_news(DiskNews(written={write.number: True}))
    scene.store(20)
    assert len(scene.reported) == 1 and scene.found(2) == [HIT]


def test_disk_evicts_the_least_recently_used_but_none_in_a_load(scene):
    for start in (0, 6, 12):
        scene.store(*range(start, start + 6))
        scene.write_all()
        scene.manager.touch(keys(0), CONTEXT)
    # 18 blocks were written to 12 rows; 0 was touched each time.
    assert scene.found(0, 1, 5, 6) == [HIT, MISS, MISS, MISS]
    scene.load(0, 7)
    scene.store(*range(20, 26))
    scene.write_all()
    assert scene.found(0, 7, 8) == [HIT, HIT, MISS]
    scene.manager.complete_load(keys(0, 7), CONTEXT)
    held = [n for n in range(30) if scene.found(n) == [HIT]]
    assert len(held) <= HOST + DISK and len(scene.manager._rows) == DISK


def test_a_lot_that_could_not_be_written_is_not_on_disk(scene):
    scene.store(*range(6))
    scene.write_all(success=False)
    assert scene.found(0) == [HIT], "it is in host memory still"
    scene.store(*range(10, 18))
    assert scene.found(0) == [MISS] and len(scene.manager._free) == DISK
    assert all(medium == "CPU" for medium, _, _ in scene.events())


def test_rows_that_could_not_be_read_are_forgotten_and_announced(scene):
    scene.store(*range(6))
    (write,) = scene.write_all()
    scene.store(*range(10, 16))
    scene.load(0, 1, 2)
    scene.events()
    scene.manager.take_news(DiskNews(lost={write.rows[1]}))
    scene.manager.complete_load(keys(0, 1, 2), CONTEXT)
    assert scene.found(0, 1, 2) == [HIT, MISS, HIT]
    assert scene.events() == [("STORAGE", True, [1])]
    assert scene.store(1).keys_to_store == keys(1)


def test_reset_empties_both_tiers_and_ignores_an_earlier_write(scene):
    scene.store(*range(6))
    scene.write_all()
    scene.store(*range(10, 12))
    write = scene.manager.take_work()
    scene.manager.reset_cache()
    scene.manager.take_news(DiskNews(written={write.number: True}))
    assert set(scene.found(*range(12))) == {MISS} and len(scene.manager._free) == DISK
    scene.store(*range(8))
    assert scene.load(0)[0][0] < HOST


# -- the worker -----------------------------------------------------------------------------------


class Bench:
    """A device of 10 blocks, host memory of 4 and a file of 6."""

    def __init__(self, folder, loading=lambda: False):
        generator = torch.Generator().manual_seed(1)
        self.device = [torch.randint(-128, 128, (10, w), dtype=torch.int8, generator=generator)
                       for w in (64, 192)]  # fmt: skip
        self.host = [tensor[:4].clone() for tensor in self.device]
        self.reported, self.file = [], DiskFile(folder, 6, [64, 192])
        self.route = DiskRoute(self.host, self.device, self.file, loading, self.reported.append)

    def close(self):
        self.route.close()

    def written(self, *writes):
        for write in writes:
            self.route.submit(write)
        self.route._thread.submit(lambda: None).result(20.0)
        return self.route.take_news()


@pytest.fixture
def bench(tmp_path, closing):
    return lambda **options: closing(Bench(tmp_path, **options))


def test_one_load_brings_blocks_of_host_memory_and_of_the_disk(bench):
    here = bench()
    assert here.written(DiskWrite(1, [1, 3], [5, 0])).written == {1: True}
    assert not here.route.writes and here.route.take_news() == DiskNews()
    # Rows 5 and 0 are ids 4 + 5 and 4 + 0: blocks 1 and 3 of host memory.
    ids = np.array([9, 0, 4, 2])
    assert here.route.disk_blocks(ids) == 2
    here.route.copy(ids, np.array([6, 7, 8, 9]))
    for tensor, old in zip(here.device, here.host, strict=True):
        assert torch.equal(tensor[6:], old[[1, 0, 3, 2]])
    assert not here.route.take_lost() and not here.reported


def test_route_copies_the_rest_when_one_disk_block_is_missing(bench):
    here = bench()
    here.written(DiskWrite(1, [0], [2]))
    here.route.copy(np.array([6, 7, 1]), np.array([5, 8, 9]))  # row 3 was never written
    assert here.route.take_lost() == {8} and here.route.take_lost() == set()
    assert here.route.take_news().lost == {3}
    assert here.reported == [{"kind": "tier_failed", "why": "load"}]
    assert torch.equal(here.device[0][5], here.host[0][0])
    assert torch.equal(here.device[1][9], here.host[1][1])


def test_writes_give_way_to_loads_for_a_moment(bench, monkeypatch):
    monkeypatch.setattr(disk_tier, "_GIVE_WAY_S", 20.0)
    looks = iter([True, True, False])
    here = bench(loading=lambda: next(looks))
    assert here.written(DiskWrite(1, [0], [0])).written == {1: True}
    assert next(looks, "all") == "all"


def test_a_write_that_fails_is_reported(bench, monkeypatch):
    here = bench()
    monkeypatch.setattr(here.file, "write", lambda *_: False)
    assert here.written(DiskWrite(7, [0], [0])).written == {7: False}
    assert here.reported == [{"kind": "tier_failed", "why": "store"}]


# -- between the two ------------------------------------------------------------------------------


def test_connector_carries_writes_to_the_worker_and_news_back(tmp_path, scene):
    device = [torch.ones((10, 64), dtype=torch.int8)]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(device[0], 64)], [])
    size = TierSize(HOST, TOKENS, str(tmp_path), DISK)
    worker = HostTierWorker(caches, size, LinkPace(), StatsSender(""))
    scheduler, there = (object.__new__(CpuHostTierConnector) for _ in range(2))
    scheduler.connector_scheduler = SimpleNamespace(
        manager=scene.manager, _jobs={}, update_connector_output=lambda _: None,
        _current_batch_load_jobs={},
        build_connector_meta=lambda _: OffloadingConnectorMetadata({}, {}),
    )  # fmt: skip
    there.connector_worker = SimpleNamespace(
        worker=worker, build_connector_worker_meta=lambda: None,
        start_kv_transfers=lambda _: None,
    )  # fmt: skip

    def step():
        there.bind_connector_metadata(scheduler.build_connector_meta(None))
        worker.disk._thread.submit(lambda: None).result(20.0)
        lost, back = there.get_block_ids_with_load_errors(), there.build_connector_worker_meta()
        scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=back))
        return lost, back

    try:
        assert step() == (set(), None), "nothing to write, nothing to tell"
        scene.store(*range(6))
        assert step()[1].news.written == {1: True}
        scene.store(*range(10, 16))
        (first, *_), from_disk = scene.load(0, 1)
        assert first >= HOST and from_disk == 2
        worker.disk._file._sums[:] = -2  # rot, wherever it is
        worker.disk.copy(np.array([first]), np.array([7]))
        assert step()[0] == {7}
        assert scene.found(0, 1) == [MISS, HIT]
    finally:
        worker.shutdown()
