"""The host tier's copy engine: bytes, order, waiting and pace, on real tensors."""

import threading
import time

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor

from kappa_scheduler.link_order import FULL, HALF
from kappa_workers.paced.host_tier import HostTierWorker, TierSize
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.load_sources import LOAD_SOURCES
from kappa_workers.vllm.options import LinkPace, LinkRules
from tests.workers.vllm.emulated_cuda import on_gpu, on_host

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK_TOKENS = 24, 16
WIDTHS = (64, 192)


class Copies:
    """A worker's copy engine between a device cache and host memory."""

    def __init__(self, endpoint, pace, host_blocks, rules):
        generator = torch.Generator().manual_seed(3)
        self.device = [
            torch.randint(-128, 128, (BLOCKS, width), dtype=torch.int8, generator=generator)
            for width in WIDTHS
        ]
        tensors = [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.device]
        caches = CanonicalKVCaches(tensors=tensors, group_data_refs=[])
        size = TierSize(host_blocks, BLOCK_TOKENS)
        self.worker = HostTierWorker(caches, size, pace, StatsSender(endpoint), rules)

    def store(self, job, device_ids, host_ids):
        assert self.worker.submit_store(job, on_gpu(device_ids), on_host(host_ids))

    def load(self, job, host_ids, device_ids):
        assert self.worker.submit_load(job, on_host(host_ids), on_gpu(device_ids))

    def finished(self, *jobs):
        """Wait for jobs; what has finished, by job."""
        self.worker.wait(set(jobs))
        return {done.job_id: done for done in self.worker.get_finished()}


@pytest.fixture
def tier(stats):
    made = []

    def make(pace=LinkPace(), host_blocks=40, rules=LinkRules()):
        made.append(Copies(stats[0], pace, host_blocks, rules))
        return made[-1]

    yield make
    for one in made:
        one.worker.shutdown()
        assert one.worker not in LOAD_SOURCES


def test_blocks_come_back_byte_for_byte_wherever_they_are_put(tier):
    copies, rng = tier(), np.random.default_rng(5)
    before = [tensor.clone() for tensor in copies.device]
    stored, kept = rng.permutation(BLOCKS)[:10], rng.permutation(40)[:10]
    copies.store(1, stored, kept)
    copies.finished(1)
    for tensor in copies.device:
        tensor.zero_()
    # Half of them, in another order, to other places.
    order, places = rng.permutation(10)[:5], rng.permutation(BLOCKS)[:5]
    copies.load(2, kept[order], places)
    copies.finished(2)
    for tensor, old in zip(copies.device, before, strict=True):
        assert torch.equal(tensor[places], old[stored[order]])
        assert not tensor[np.setdiff1d(np.arange(BLOCKS), places)].any()


def test_a_transfer_is_reported_once_with_its_bytes_and_tokens(tier, stats):
    copies = tier()
    copies.store(7, [0, 1, 2], [5, 6, 7])
    (done,) = copies.finished(7).values()
    assert (done.job_id, done.success, done.transfer_size) == (7, True, 3 * sum(WIDTHS))
    assert done.transfer_time >= 0 and copies.worker.get_finished() == []
    report, waited = sorted((stats[1](), stats[1]()), key=lambda message: message["kind"])
    assert (report["kind"], waited["kind"]) == ("store", "wait")
    assert (report["tokens"], report["bytes"]) == (3 * BLOCK_TOKENS, 3 * sum(WIDTHS))
    assert report["took_s"] >= 0 and waited["took_s"] >= 0


def test_loads_end_in_the_order_they_were_asked_for(tier):
    copies = tier()
    for job in range(20):
        copies.load(job, [job], [job])
    assert list(copies.finished(*range(20))) == list(range(20))


def test_the_seconds_of_a_requests_loads_are_taken_once(tier):
    copies = tier()
    for job, request in ((2, "a"), (3, "a"), (4, "b")):
        copies.worker.loading(job, request)
        copies.load(job, [0, 1], [4, 5])
    took = {job: done.transfer_time for job, done in copies.finished(2, 3, 4).items()}
    take = copies.worker.take_load_s
    assert take("a") == pytest.approx(took[2] + took[3])
    assert take("b") == pytest.approx(took[4])
    assert take("a") == take("unknown") == 0.0


def test_a_paced_load_lasts_at_least_its_pace(tier, stats):
    copies = tier(LinkPace(token_s=1e-3, store_token_s=5e-4, fixed_s=0.01))
    copies.load(1, [0, 1, 2], [3, 4, 5])
    copies.load(2, [3], [6])
    copies.finished(1, 2)
    copies.store(3, [0], [0])
    messages = [stats[1]() for _ in range(4)]
    loads = [m for m in messages if m["kind"] == "load"]
    (store,) = (m for m in messages if m["kind"] == "store")
    paces_s = 0.01 + 48e-3, 0.01 + 16e-3, 0.01 + 16 * 5e-4
    for message, pace_s in zip((*loads, store), paces_s, strict=True):
        assert message["took_s"] >= pace_s * (1 - 1e-9)


def test_wait_for_load_ends_with_the_load_or_at_once_without_one(tier):
    copies = tier(LinkPace(token_s=1e-3))
    assert copies.finished(99) == {} and copies.worker.wait_for_load(60.0) is False
    link, waits = copies.worker._loads, threading.Event()
    wait_change = link.wait_change
    link._sleep = lambda _: waits.wait(60)
    link.wait_change = lambda timeout_s: waits.set() or wait_change(timeout_s)
    copies.load(1, [0], [0])
    assert copies.worker.wait_for_load(60.0) is True
    assert [done.job_id for done in copies.worker.get_finished()] == [1]


def test_wait_for_load_says_no_load_when_only_a_store_runs(tier):
    copies = tier(LinkPace(token_s=1e-3, store_token_s=1e-3))
    copies.store(1, [0], [0])
    assert copies.worker.wait_for_load(60.0) is False


def test_a_load_that_cannot_be_made_is_reported_with_its_blocks(tier, stats):
    copies = tier(host_blocks=4)
    copies.load(1, [400], [0])
    copies.load(2, [1], [1])
    assert set(copies.finished(1, 2)) == {1, 2}
    assert copies.worker.take_lost() == {0}
    failed = next(m for m in iter(stats[1], None) if m["kind"] == "tier_failed")
    assert failed["why"] == "load"


def test_load_by_layers_charges_its_wait_to_the_request(tier):
    copies = tier(LinkPace(token_s=1e-5))
    before = [tensor.clone() for tensor in copies.device]
    copies.store(1, [0, 1], [5, 6])
    copies.finished(1)
    copies.worker.begin_step({2: "a"})
    copies.load(2, [5, 6], [8, 9])
    copies.worker.wait_for_layer(len(WIDTHS))
    assert [done.job_id for done in copies.worker.get_finished()] == [2]
    for tensor, old in zip(copies.device, before, strict=True):
        assert torch.equal(tensor[8:10], old[:2])
    # Of a step that began long ago, and computes for a second in all.
    held_s, beyond_s = copies.worker.take_waits(time.monotonic() - 1000.0, 1.0)
    assert held_s > 0 and 990.0 < beyond_s < 1000.0
    assert copies.worker.take_load_s("a") == beyond_s
    assert copies.worker.take_waits(0.0, 1.0) == (0.0, 0.0)


@pytest.mark.parametrize(("duplex", "links"), [(FULL, 2), (HALF, 1)])
def test_a_half_duplex_link_is_one_server(tier, duplex, links):
    assert len(tier(rules=LinkRules(duplex=duplex)).worker.links) == links


def test_what_was_not_dropped_comes_back_as_it_was_stored(tier):
    """On a busy shared link; half of the stores are overwritten as soon as `wait` allows."""
    pace = LinkPace(token_s=2e-5, store_token_s=5e-4, fixed_s=2e-4)
    copies = tier(pace, host_blocks=200, rules=LinkRules(duplex=HALF, late_wait_s=0.0))
    rng, stored, results, dropped = np.random.default_rng(11), {}, {}, set()
    for job in range(16):
        source = rng.permutation(20)[: rng.integers(4, 10)]
        kept = list(range(10 * job, 10 * job + len(source)))
        copies.load(1000 + job, [199], [23])
        stored[job] = (kept, [tensor[source].clone() for tensor in copies.device])
        copies.store(job, source, kept)
        if job % 2:
            results |= copies.finished(job)
        while job not in results:
            results |= copies.finished()
        dropped |= copies.worker.take_dropped()
        for tensor in copies.device:
            tensor[source] = torch.randint(-128, 128, tensor[source].shape, dtype=torch.int8)
    assert all(results[job].success for job in stored)
    assert dropped and dropped <= {job for job in stored if job % 2}
    for job in set(stored) - dropped:
        kept, before = stored[job]
        places = list(range(len(kept)))
        copies.load(3000 + job, kept, places)
        copies.finished(3000 + job)
        for tensor, old in zip(copies.device, before, strict=True):
            assert torch.equal(tensor[places], old), job
