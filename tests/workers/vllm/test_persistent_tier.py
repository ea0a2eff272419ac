"""A host tier found again: vLLM's manager and real copies, before and after an engine's end."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus

from router.index.kv_events import BlocksStored, decode_batch
from workers.stats_channel import StatsSender
from workers.vllm.host_tier import HostTierWorker, TierSize
from workers.vllm.host_tier_manager import PersistentTierManager
from workers.vllm.options import LinkPace
from workers.vllm.persistent_tier import PersistentTier, StoredBlock, announcement, record_stores

pytestmark = pytest.mark.vllm

DEVICE_BLOCKS, HOST_BLOCKS, TOKENS, WIDTH = 16, 6, 4, 64
CONTEXT = ReqContext(req_id="r")


def key_of(n):
    return make_offload_key(bytes([n]) * 32, 0)


def on_device(*ids):
    return GPULoadStoreSpec(list(ids), group_sizes=(len(ids),), block_indices=(0,))


class Life:
    """One engine's life over a folder."""

    def __init__(self, folder, seed="s", width=WIDTH):
        torch.manual_seed(7)
        self.device = torch.randint(-128, 128, (DEVICE_BLOCKS, width), dtype=torch.int8)
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(self.device, width)], group_data_refs=[]
        )
        size = TierSize(HOST_BLOCKS, TOKENS, folder)
        self.worker = HostTierWorker(caches, size, LinkPace(), StatsSender(""))
        self.tier = PersistentTier(folder, HOST_BLOCKS, TOKENS, seed)
        self.manager = PersistentTierManager(
            self.tier, num_blocks=HOST_BLOCKS, enable_events=True, pace=LinkPace(),
            block_tokens=TOKENS, backlog_s=10.0, report=lambda _: None,
        )  # fmt: skip

    def store(self, *numbers, success=True, complete=True):
        """Copy device block n as key n; a chain in the order given."""
        keys = [key_of(n) for n in numbers]
        for n, parent in zip(numbers, (None, *numbers), strict=False):
            before = None if parent is None else bytes([parent]) * 32
            salt = "alice" if parent is None else ""
            self.tier.storing(StoredBlock(bytes(key_of(n)), before, (n,) * TOKENS, salt))
        output = self.manager.prepare_store(keys, CONTEXT)
        ids = [bytes(key)[0] for key in output.keys_to_store]
        slots = BlockIDsLoadStoreSpec(output.store_spec.block_ids)
        self.worker.submit_store(1, on_device(*ids), slots)
        self.worker.wait({1})
        if complete:
            self.manager.complete_store(output.keys_to_store, CONTEXT, success)

    def load(self, number, into=9):
        spec = self.manager.prepare_load([key_of(number)], CONTEXT)
        self.worker.submit_load(2, BlockIDsLoadStoreSpec(spec.block_ids), on_device(into))
        self.worker.wait({2})
        self.manager.complete_load([key_of(number)], CONTEXT)
        return self.device[into].clone()

    def held(self):
        return {
            n for n in range(DEVICE_BLOCKS)
            if self.manager.lookup(key_of(n), CONTEXT) == LookupResult.HIT
        }  # fmt: skip

    def assert_holds(self, numbers, before):
        """These are found, with the bytes of an earlier life's device blocks."""
        assert self.held() == set(numbers)
        self.device.zero_()
        for n in numbers:
            assert torch.equal(self.load(n), before[n]), n

    def end(self):
        self.worker.shutdown()
        self.manager.shutdown()


@pytest.fixture
def life(tmp_path):
    lives = []

    def begin(**options):
        while lives:
            lives.pop().end()
        lives.append(Life(tmp_path, **options))
        return lives[-1]

    yield begin
    while lives:
        lives.pop().end()


def test_a_successor_finds_the_blocks_their_bytes_tokens_parents_and_salt(life):
    first = life()
    first.store(1, 2, 3)
    second = life()
    second.assert_holds({1, 2, 3}, first.device.clone())
    batches = announcement(second.tier.found, TOKENS, "CPU", lambda key: key[:-4], lambda p: p)
    events = [event for batch in batches for event in decode_batch(batch, "w")]
    stored = [e for e in events if isinstance(e, BlocksStored) and e.tier == "host"]
    assert [list(e.token_ids) for e in stored] == [[n] * TOKENS for n in (1, 2, 3)]
    assert [e.parent_engine_hash for e in stored] == [None, bytes([1]) * 32, bytes([2]) * 32]
    salted = [e for e in events if isinstance(e, BlocksStored) and e.tier == "device"]
    assert salted[0].salt


def test_what_was_evicted_overwritten_or_failed_is_not_found(life):
    first = life()
    first.store(1, 2, 3, 4)
    first.store(5, 6, 7)  # one of the first four has to go
    first.store(8, success=False)
    held, before = first.held(), first.device.clone()
    assert len(held) <= HOST_BLOCKS and 8 not in held and 7 in held
    second = life()
    assert held <= second.held() <= held | {1, 2, 3, 4}
    second.assert_holds(second.held(), before)


def test_a_store_that_the_engines_end_cut_short_is_not_found(life):
    first = life()
    first.store(1)
    first.store(2, complete=False)
    assert life().held() == {1}


def test_found_blocks_are_evicted_like_any_others_the_oldest_first(life):
    life().store(1, 2, 3, 4, 5, 6)
    second = life()
    second.store(10, 11)
    assert second.held() == {3, 4, 5, 6, 10, 11}
    second.store(12)
    assert life().held() == {4, 5, 6, 10, 11, 12}


def test_a_reset_leaves_nothing(life):
    first = life()
    first.store(1, 2)
    first.manager.reset_cache()
    assert life().held() == set()


@pytest.mark.parametrize("other", [{"seed": "another"}, {"width": WIDTH // 2}])
def test_blocks_of_another_hash_seed_or_width_are_not_found(life, other):
    life().store(1)
    assert life(**other).held() == set()


def test_stores_are_recorded_with_their_requests_and_special_ones_are_not():
    storing, tracked = [], []
    tracker = SimpleNamespace(record_store=lambda *args: tracked.append(args))
    record_stores(tracker, SimpleNamespace(storing=storing.append))
    plain = {
        "lora_request": None, "mm_features": [], "cache_salt": "alice",
        "all_token_ids": list(range(12)), "block_hashes": [b"a", b"b", b"c"],
    }  # fmt: skip

    def record(chunk, key, window=None, **special):
        group = SimpleNamespace(sliding_window_size_in_chunks=window, tokens_per_chunk=TOKENS)
        request = SimpleNamespace(**plain | special)
        tracker.record_store(request, group, chunk, OffloadKey(key))

    record(0, b"k0")
    record(2, b"k2")
    record(0, b"no", lora_request="adapter")
    record(0, b"no", mm_features=["image"])
    record(0, b"no", window=3)
    assert storing == [
        StoredBlock(b"k0", None, (0, 1, 2, 3), "alice"), StoredBlock(b"k2", b"b", (8, 9, 10, 11)),
    ]  # fmt: skip
    assert len(tracked) == 5


def test_vllm_has_the_names_that_a_warm_restart_needs():
    """Private names of vLLM in persistent_tier.py, host_tier_manager.py and connector.py."""
    tracker = inspect.signature(OffloadingEventsTracker.record_store)
    assert list(tracker.parameters) == ["self", "req", "group_config", "chunk_idx", "offload_key"]
    manager = CPUOffloadingManager(4)
    for name in ("_policy", "_free_list", "_num_allocated_blocks", "_num_evictable_cache_blocks"):
        assert hasattr(manager, name), name
    assert "_events_tracker" in inspect.getsource(OffloadingConnectorScheduler)
    assert isinstance(get_none_hash_seed(), str)
    assert BlockStatus(3).block_id == 3 and not BlockStatus(3).is_ready
