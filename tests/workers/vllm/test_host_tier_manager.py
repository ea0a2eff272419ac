"""The host tier's manager: what may be stored, and what may be looked up."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    get_offload_block_hash,
    make_offload_key,
)

from kappa_workers.paced.host_tier import PacedTierManager
from kappa_workers.vllm.connector import HostTierConnector
from kappa_workers.vllm.options import LinkPace

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 16
WHO = ReqContext(req_id="r")


def manager(backlog_s=1.0, **pace):
    """A manager of eight blocks, and what it reports."""
    reports = []
    made = PacedTierManager(
        LinkPace(**pace), num_blocks=8, enable_events=True, block_tokens=BLOCK_TOKENS,
        backlog_s=backlog_s, report=reports.append,
    )  # fmt: skip
    return made, reports


def keys(names):
    return [name.encode() for name in names]


def begun(tier, names):
    """The names of those that are to be stored."""
    return b"".join(tier.prepare_store(keys(names), WHO).keys_to_store).decode()


def done(tier, names):
    tier.complete_store(keys(names), WHO)


def test_a_store_that_was_given_up_is_never_found_nor_announced():
    tier, _ = manager()
    begun(tier, "ab")
    assert tier.lookup(b"a", WHO) == LookupResult.HIT_PENDING
    tier.stores_lost(keys("ab"), 0.0)
    done(tier, "ab")
    assert [tier.lookup(key, WHO) for key in keys("ab")] == [LookupResult.MISS] * 2
    assert list(tier.take_events()) == []
    # Its room is free again, and the next attempt counts.
    assert begun(tier, "acdefghi") == "acdefghi"
    done(tier, "acdefghi")
    assert tier.lookup(b"a", WHO) == LookupResult.HIT


def test_what_a_waiting_request_will_load_is_evicted_last():
    tier, _ = manager()
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


def test_stores_are_refused_while_too_many_seconds_are_queued():
    tier, reports = manager(1.0, store_token_s=0.02, fixed_s=0.1)  # 0.42 s for one block
    assert (begun(tier, "a"), begun(tier, "b"), begun(tier, "cd")) == ("a", "b", "")
    assert tier.lookup(b"c", WHO) == LookupResult.MISS
    assert reports == [
        {"kind": "store_dropped", "blocks": 2, "tokens": 2 * BLOCK_TOKENS, "why": "backlog"}
    ]
    done(tier, "a")
    assert begun(tier, "c") == "c"


def test_manager_begins_a_store_over_the_bound_when_none_waits():
    assert begun(manager(0.1, store_token_s=0.02)[0], "ab") == "ab"


def test_what_is_stored_already_is_no_backlog():
    tier, reports = manager(0.5, store_token_s=0.02)
    begun(tier, "a"), done(tier, "a"), begun(tier, "b")
    assert begun(tier, "a") == "" and reports == []


def test_without_a_pace_the_measured_copy_bounds_the_stores():
    tier, reports = manager(1.0)
    assert [begun(tier, name) for name in "abc"] == ["a", "b", "c"] and reports == []
    tier.reset_cache()
    tier.stores_lost([], 0.6)
    assert [begun(tier, name) for name in "abc"] == ["a", "", ""] and len(reports) == 2


def test_after_a_reset_nothing_counts_as_queued_or_lost():
    tier, _ = manager(0.5, store_token_s=0.02)
    begun(tier, "a")
    tier.stores_lost(keys("a"), 0.0)
    tier.reset_cache()
    assert begun(tier, "a") == "a"
    done(tier, "a")
    assert tier.lookup(b"a", WHO) == LookupResult.HIT
