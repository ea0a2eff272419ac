"""The host tier on GPUs: vLLM's own worker over an emulated CUDA, under our manager and reports."""

import mmap
import os
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    LookupResult,
    ReqContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kappa_workers.paced.host_tier import HostTierSpec, HostTierWorker, TierSize
from kappa_workers.paced.link import Route
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.gpu_host_tier import NativeTierSpec
from kappa_workers.vllm.host_tier_manager import HostTierManager
from kappa_workers.vllm.load_sources import LOAD_SOURCES
from kappa_workers.vllm.options import LINK_KEY, PEERS_KEY, STATS_KEY, LinkPace
from kappa_workers.vllm.peer_server import mapped_rows
from tests.workers.vllm.emulated_cuda import Cuda, on_device, on_gpu, on_host

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK_TOKENS, PAGE = 24, 16, 1 << 20
LAYERS = 2
BLOCK_BYTES = LAYERS * PAGE
# A block takes a second of the emulated link, each way.
BYTES_PER_S = BLOCK_BYTES
WHO = ReqContext(req_id="r")
# Its memory has this name in /dev/shm, where other processes' tests have theirs.
ENGINE = f"kappa-test-{os.getpid()}"


class Clock:
    """The emulated device's."""

    def __init__(self):
        self.s = 100.0

    def now_s(self):
        return self.s

    def sleep(self, seconds):
        self.s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cuda(monkeypatch, clock):
    made = Cuda(BYTES_PER_S, clock.now_s, clock.sleep)
    made.install(monkeypatch.setattr)
    return made


def config(rank=0, groups=(BLOCK_TOKENS,), ranks=1, **extra):
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(tokens, ("layer",)) for tokens in groups),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": ranks * 8 * BLOCK_BYTES, **extra},
        engine_id=f"{ENGINE}-{id(extra):x}",
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
        parallel=OffloadingParallelConfig(rank, ranks, ranks, 1, 1, 1, 0, 1, None, True),
    )


def caches(groups=1):
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8, generator=generator)
        for _ in range(LAYERS)
    ]
    refs = [CanonicalKVCacheRef(i, PAGE) for i in range(LAYERS)]
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, PAGE) for t in tensors], [refs] * groups)


@pytest.fixture
def tier(cuda, stats):
    """A function that makes a worker, and the device's tensors."""
    made = []

    def make(groups=(BLOCK_TOKENS,), rank=0, ranks=1, **extra):
        spec = NativeTierSpec(config(rank, groups, ranks, **{STATS_KEY: stats[0]}, **extra))
        memory = caches(len(groups))
        made.append(spec.get_worker(on_device(memory)))
        assert spec.get_worker(on_device(memory)) is made[-1]
        return made[-1], [t.tensor for t in memory.tensors]

    yield make
    for worker in made:
        worker.shutdown()
        assert worker not in LOAD_SOURCES
    assert not list(Path("/dev/shm").glob(f"vllm_offload_{ENGINE}-*"))


def test_peers_read_and_write_what_vllms_worker_stores(tier, cuda, tmp_path):
    layout = tmp_path / "peers" / "layout"
    worker, device = tier(**{PEERS_KEY: {"layout": str(layout)}})
    worker.submit_store(1, on_gpu([5, 2]), on_host([7, 0]))
    worker.wait({1})
    rows = mapped_rows(layout)
    assert rows.widths == [BLOCK_BYTES] and not layout.exists()
    (row,) = rows.of(7)
    assert bytes(row) == b"".join(tensor[5].numpy().tobytes() for tensor in device)
    (other,) = rows.of(0)
    other[:] = bytes(row)
    worker.submit_load(2, on_host([0]), on_gpu([20]))
    worker.wait({2})
    assert all(torch.equal(tensor[20], tensor[5]) for tensor in device)


def test_blocks_come_back_byte_for_byte_through_vllms_own_worker(tier, cuda):
    worker, device = tier()
    before = [tensor.clone() for tensor in device]
    assert worker.submit_store(1, on_gpu([5, 2, 9]), on_host([7, 0, 3]))
    worker.wait({1})
    assert [done.job_id for done in worker.get_finished()] == [1]
    for tensor in device:
        tensor.zero_()
    assert worker.submit_load(2, on_host([3, 7]), on_gpu([20, 1]))
    worker.wait({2})
    assert [done.success for done in worker.get_finished()] == [True]
    for tensor, old in zip(device, before, strict=True):
        assert torch.equal(tensor[[20, 1]], old[[9, 5]]) and not tensor[[0, 2, 9]].any()
    # Sources of loads may be read in any order: they do not change meanwhile. Those of stores may.
    assert cuda.copied == [(3 * BLOCK_BYTES, False), (2 * BLOCK_BYTES, True)]


def test_load_report_has_the_seconds_between_device_events(tier, stats, clock):
    worker, _ = tier()
    worker.loading(4, "a")
    worker.loading(5, "a")
    # Of two loads the second waits on the device for two seconds, which are not its own.
    worker.submit_load(4, on_host([0, 1]), on_gpu([2, 3]))
    worker.submit_load(5, on_host([0, 1, 2]), on_gpu([4, 5, 6]))
    assert worker.get_finished() == []
    clock.sleep(2.5)
    assert [done.job_id for done in worker.get_finished()] == [4]
    clock.sleep(2.5)
    assert [done.job_id for done in worker.get_finished()] == [5]
    first, second = stats[1](), stats[1]()
    assert (first["kind"], first["blocks"], first["tokens"]) == ("load", 2, 2 * BLOCK_TOKENS)
    assert (first["bytes"], second["bytes"]) == (2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert (first["took_s"], second["took_s"]) == pytest.approx((2.0, 3.0))
    assert worker.take_load_s("a") == pytest.approx(5.0) and worker.take_load_s("a") == 0.0


def test_messages_are_those_of_our_own_link(tier, stats):
    worker, _ = tier()
    worker.submit_store(1, on_gpu([0]), on_host([0]))
    worker.wait({1})
    worker.get_finished()
    waited, stored = stats[1](), stats[1]()
    assert waited["kind"] == "wait" and waited["took_s"] >= 0.0
    own = HostTierWorker(caches(), TierSize(4, BLOCK_TOKENS), LinkPace(), StatsSender(stats[0]))
    own.submit_store(1, on_gpu([0]), on_host([0]))
    own.wait({1})
    own.shutdown()
    ours = min((stats[1](), stats[1]()), key=lambda message: message["kind"] == "wait")
    assert stored.keys() == ours.keys()
    same = ("kind", "blocks", "tokens", "bytes")
    assert [stored[name] for name in same] == [ours[name] for name in same]


def test_of_tensor_parallel_ranks_the_first_alone_reports(cuda, stats, tier):
    second, _ = tier(rank=1, ranks=2)
    second.loading(1, "a")
    second.submit_load(1, on_host([0]), on_gpu([0]))
    second.wait({1})
    assert len(second.get_finished()) == 1
    first, _ = tier(ranks=2)
    first.submit_store(2, on_gpu([0, 1]), on_host([0, 1]))
    first.wait({2})
    first.get_finished()
    assert stats[1]()["kind"] == "wait"
    store = stats[1]()
    assert (store["blocks"], store["bytes"]) == (2, 2 * 2 * BLOCK_BYTES), "of both ranks"
    assert store["took_s"] == pytest.approx(2.0)
    # The seconds of its own load it knows all the same: its steps are its own, too.
    assert second.take_load_s("a") == pytest.approx(1.0)


def test_layers_with_a_window_hold_the_same_tokens_once(tier, stats):
    worker, _ = tier(groups=(BLOCK_TOKENS, BLOCK_TOKENS))
    worker.submit_load(1, on_host(range(6)), on_gpu(range(6), (4, 2)))
    worker.wait({1})
    worker.get_finished()
    assert stats[1]()["kind"] == "wait"
    message = stats[1]()
    assert (message["blocks"], message["tokens"]) == (6, 4 * BLOCK_TOKENS)


def test_wait_for_load_tells_whether_a_load_is_under_way(tier):
    worker, _ = tier()
    assert worker.wait_for_load(60.0) is False
    worker.submit_store(1, on_gpu([0]), on_host([0]))
    assert worker.wait_for_load(60.0) is False
    worker.submit_load(2, on_host([0]), on_gpu([0]))
    assert worker.wait_for_load(60.0) is True
    worker.wait({1, 2})
    worker.get_finished()
    assert worker.wait_for_load(60.0) is False


def test_manager_refuses_stores_beyond_the_measured_backlog(tier, stats):
    """A block takes a second: three seconds of stores may wait, a fourth block may not."""
    worker, _ = tier()
    rules = {"store_backlog_s": 3.0}
    spec = NativeTierSpec(config(**{STATS_KEY: stats[0], LINK_KEY: rules}))
    manager = spec.get_manager()
    assert type(manager) is HostTierManager and worker.store_block_s == 0.0
    worker.submit_store(1, on_gpu([0]), on_host([0]))
    worker.wait({1})
    worker.get_finished()
    assert [stats[1]()["kind"] for _ in range(2)] == ["wait", "store"]
    assert worker.store_block_s == pytest.approx(1.0)
    assert worker.take_dropped() == set()
    manager.stores_lost(worker.take_dropped(), worker.store_block_s)
    assert manager.prepare_store([b"a", b"b", b"c"], WHO).keys_to_store == [b"a", b"b", b"c"]
    assert manager.prepare_store([b"d"], WHO).keys_to_store == []
    dropped = stats[1]()
    assert (dropped["kind"], dropped["why"], dropped["blocks"]) == ("store_dropped", "backlog", 1)
    manager.complete_store([b"a", b"b", b"c"], WHO)
    assert manager.lookup(b"a", WHO) == LookupResult.HIT
    assert manager.prepare_store([b"d"], WHO).keys_to_store == [b"d"]


def test_with_vllms_own_order_nothing_is_refused():
    spec = NativeTierSpec(config(**{LINK_KEY: {"order": "fifo"}}))
    assert type(spec.get_manager()) is CPUOffloadingManager


def test_the_mapped_region_is_no_larger_than_asked_for(cuda, monkeypatch):
    """vLLM takes as much of /dev/shm as was checked before the start."""
    sizes = []
    region = gpu_worker.SharedOffloadRegion

    def measured(*args, **kwargs):
        made = region(*args, **kwargs)
        sizes.append(made.total_size_bytes)
        return made

    monkeypatch.setattr("vllm.v1.kv_offload.cpu.spec.SharedOffloadRegion", measured)
    asked = 5 * BLOCK_BYTES + BLOCK_BYTES // 2
    spec = NativeTierSpec(config(cpu_bytes_to_use=asked))
    spec.get_worker(on_device(caches())).shutdown()
    assert sizes == [5 * BLOCK_BYTES] and BLOCK_BYTES % mmap.PAGESIZE == 0


def test_ranks_on_any_two_gpus_have_places_of_their_own(cuda, monkeypatch):
    """On GPUs 0 and 2 vLLM's own way, the number modulo two ranks, gives both the first."""
    places, region = [], gpu_worker.SharedOffloadRegion

    def placed(*args, **kwargs):
        places.append(kwargs["rank"])
        return region(*args, **kwargs)

    monkeypatch.setattr("vllm.v1.kv_offload.cpu.spec.SharedOffloadRegion", placed)
    for rank, cuda.number in ((0, 0), (1, 2)):
        spec = NativeTierSpec(config(rank, ranks=2))
        spec.get_worker(on_device(caches())).shutdown()
        assert torch.accelerator.current_device_index() == cuda.number
    assert places == [0, 1]


def test_on_a_machine_without_a_gpu_vllm_refuses():
    with pytest.raises(Exception, match="only supported on CUDA"):
        NativeTierSpec(config()).get_worker(caches())


def test_blocks_of_several_to_a_chunk_are_refused_by_both():
    for kind in (NativeTierSpec, HostTierSpec):
        spec = kind(config())
        spec.blocks_per_chunk = 2
        with pytest.raises(ValueError, match="blocks_per_chunk is 2"):
            spec.get_worker(caches())


# -- why `own` is refused on GPUs -----------------------------------------------------------------


def test_route_refuses_tensors_outside_the_processors_memory():
    """Before any load or store comes to fail; torch's meta device stands for a GPU."""
    gpu = [torch.empty((BLOCKS, 64), dtype=torch.int8, device="meta")]
    host = [torch.zeros((BLOCKS, 64), dtype=torch.int8)]
    for pair in ((gpu, host), (host, gpu)):
        with pytest.raises(TypeError, match="can't convert meta device type tensor to numpy"):
            Route(*pair)
