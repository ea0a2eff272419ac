"""An engine measures its own steps and copies: which, for how long, and the result."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from kappa.cost import StepModel
from kappa_workers.vllm import measured_link
from kappa_workers.vllm.measured_engine import (
    StepLimits,
    StepTimer,
    measure_engine,
    step_sizes,
    without_connector,
)
from kappa_workers.vllm.measured_link import LinkTimer, TierRoom, beside_work
from tests.engine.emulated_cuda import EmulatedCuda

pytestmark = pytest.mark.vllm

LAW = StepModel(token_s=1e-4, pair_s=2e-8, weights_s=5e-3, context_token_s=4e-7, fixed_s=1e-3)
LIMITS = StepLimits(
    context_tokens=2048, batch_tokens=512, sequences=16, block_tokens=16, blocks=33, groups=2
)


class Worker:
    """Runs a batch in the seconds of `LAW`, by its own clock; keeps requests as vLLM does."""

    def __init__(self, law=LAW, slow=1.0):
        self.law, self.slow, self.now_s = law, slow, 0.0
        self.requests, self.steps, self.pending = {}, [], False
        self.connector = ""

    def set_disabled(self, disabled):
        self.connector = "off" if disabled else "on"

    def clock(self):
        return self.now_s

    def execute(self, output):
        assert not self.pending and kv_transfer_state._KV_CONNECTOR_AGENT is None
        assert self.connector != "on"
        for name in output.finished_req_ids:
            del self.requests[name]
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests
            self.requests[new.req_id] = len(new.prompt_token_ids), new.block_ids
        chunks = [(n.req_id, n.num_computed_tokens) for n in output.scheduled_new_reqs]
        going = output.scheduled_cached_reqs
        chunks += zip(going.req_ids, going.num_computed_tokens, strict=True)
        assert {name for name, _ in chunks} == set(output.num_scheduled_tokens)
        assert len(self.requests) <= LIMITS.sequences
        work = []
        for name, context in chunks:
            tokens = output.num_scheduled_tokens[name]
            prompt, blocks = self.requests[name]
            assert context + tokens < LIMITS.context_tokens
            # A chunk ends the prompt, or is a token behind it; its blocks are there.
            assert context + tokens >= prompt and (tokens == 1 or context + tokens == prompt)
            assert len(blocks) == LIMITS.groups
            for ids in blocks:
                assert len(ids) * LIMITS.block_tokens >= context + tokens
                assert min(ids) >= 1 and max(ids) < LIMITS.blocks
            work.append((tokens, context))
        assert sum(n for n, _ in work) == output.total_num_scheduled_tokens <= LIMITS.batch_tokens
        if work:
            self.steps.append(work)
            self.now_s += self.slow * self.law.step_s(work)
            self.pending = True
            return None
        return SimpleNamespace()

    def sample(self, grammar):
        assert self.pending and grammar is None
        self.pending = False
        return SimpleNamespace()

    def timer(self):
        return StepTimer(self.execute, self.sample, LIMITS, clock=self.clock)


def test_step_timer_finds_the_law_from_steps_within_the_limits():
    worker = Worker()
    prior = StepModel(3e-4, 2e-8, 5e-3, 4e-7)
    found = worker.timer().measure(prior, 1e9)
    law = {name: found[name] for name in LAW.to_dict()}
    assert law == pytest.approx(LAW.to_dict(), rel=0.01)
    assert found["r2"] > 0.999 and found["error"] < 0.01 < found["prior_error"]
    assert found["steps"] == len(step_sizes(LIMITS, prior)) == 30
    # Prefills up to the budget, decodes up to all sequences, both behind a long context.
    assert {(512, 0), (512, 1022)} <= {work[0] for work in worker.steps if len(work) == 1}
    assert any(len(work) == 16 and work[0][1] >= 1022 for work in worker.steps)
    assert worker.requests == {} and not worker.pending


def test_what_takes_longer_than_is_left_is_not_run():
    quick, slow = Worker(), Worker(slow=50.0)
    most = max(sum(n for n, _ in work) for work in _run(quick, 4.0))
    least = max(sum(n for n, _ in work) for work in _run(slow, 4.0))
    assert quick.now_s < 4.0 and slow.now_s < 4.0
    assert most == 512 > least
    assert slow.requests == {}


def _run(worker, budget_s):
    assert worker.timer().samples(LAW, budget_s)
    return worker.steps


def test_the_least_of_a_steps_seconds_counts_and_never_its_first():
    worker = Worker(StepModel(1e-4, 0.0, 0.0, 0.0))
    execute, seen = worker.execute, []

    def disturbed(output):
        for new in output.scheduled_new_reqs[:1]:
            key = output.total_num_scheduled_tokens, new.num_computed_tokens
            seen.append(key)
            # The first time is too quick to be true; of the others every second is held up.
            worker.now_s += -1e-5 if seen.count(key) == 1 else seen.count(key) % 2
        return execute(output)

    timer = StepTimer(disturbed, worker.sample, LIMITS, clock=worker.clock)
    samples = timer.samples(worker.law, 1e9)
    assert [s for w, s in samples if w.tokens == 512] == pytest.approx([512e-4] * 3)
    assert seen.count((512, 0)) == 9


def test_all_ranks_run_the_steps_that_the_first_has_time_for():
    first, other = Worker(), Worker(slow=50.0)
    said = []
    timer = StepTimer(
        first.execute, first.sample, LIMITS, lambda b: said.append(b) or b, first.clock
    )
    timer.samples(LAW, 4.0)
    heard = iter(said)
    StepTimer(other.execute, other.sample, LIMITS, lambda _: next(heard), other.clock).samples(
        LAW, 4.0
    )
    assert other.steps == first.steps and next(heard, None) is None


def test_step_timer_waits_for_the_tokens_and_the_gpu(monkeypatch):
    ended, worker = [], Worker()

    class Later:
        def get_output(self):
            ended.append("tokens")

    def sample(grammar):
        worker.sample(grammar)
        return Later()

    def finished(device=None):
        ended.append("device")
        worker.now_s += 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", finished)
    timer = StepTimer(worker.execute, sample, LIMITS, clock=worker.clock)
    samples = timer.samples(LAW, 100.0)
    assert ended[:2] == ["tokens", "device"] and len(ended) == 2 * len(worker.steps)
    assert samples and all(seconds > 1.0 for _, seconds in samples)


def test_what_computes_beside_transfers_on_a_gpu_is_waited_for(monkeypatch):
    cuda = EmulatedCuda(monkeypatch)
    monkeypatch.setitem(measured_link._BUSY_SIDE, "cuda", 8)
    multiply = beside_work(torch.device("cuda"))
    multiply()
    assert cuda.finished == 1


def test_no_connector_takes_part_and_it_is_back_whatever_happens(monkeypatch):
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", "ours")
    with pytest.raises(ZeroDivisionError), without_connector(SimpleNamespace()):
        assert not kv_transfer_state.has_kv_transfer_group()
        raise ZeroDivisionError
    assert kv_transfer_state._KV_CONNECTOR_AGENT == "ours"


def test_requests_of_a_step_that_fails_leave_all_the_same():
    worker = Worker()

    def fails_later(_):
        worker.pending = False
        if len(worker.steps) > 5:
            raise RuntimeError("no more")
        return SimpleNamespace()

    timer = StepTimer(worker.execute, fails_later, LIMITS, clock=worker.clock)
    with pytest.raises(RuntimeError, match="no more"):
        timer.samples(LAW, 1e9)
    assert len(worker.steps) == 6 and worker.requests == {}


class Tier:
    """Transfers of 100 bytes a block that take 1 ms and 2 µs a byte in, 3 µs out."""

    def __init__(self, fail_at=0):
        self.host, self.device = list(range(100)), [None] * 80
        self.fail_at, self.jobs, self.done = fail_at, [], []
        self.unwritten, self.loads_unwritten = set(self.host), []

    def _end(self, job, ids, byte_s):
        self.jobs.append((job, len(ids)))
        size = 100 * len(ids)
        good = len(self.jobs) != self.fail_at
        self.done = [
            TransferResult(7, True, 1, 9.0),
            TransferResult(job, good, size, 1e-3 + byte_s * size),
        ]
        return True

    def submit_load(self, job, source, target):
        assert sum(target.group_sizes) == len(source.block_ids) and 0 not in target.block_ids
        for here, there in zip(target.block_ids, source.block_ids, strict=True):
            self.device[here] = self.host[there]
        self.loads_unwritten.append(not self.unwritten.isdisjoint(source.block_ids))
        return self._end(job, source.block_ids, 2e-6)

    def submit_store(self, job, source, target):
        for here, there in zip(source.block_ids, target.block_ids, strict=True):
            self.host[there] = self.device[here]
        self.unwritten.difference_update(target.block_ids)
        return self._end(job, source.block_ids, 3e-6)

    def get_finished(self):
        done, self.done = self.done, []
        return done


def test_link_timer_finds_a_line_each_way_and_restores_the_tier():
    tier = Tier()
    found = LinkTimer(tier, TierRoom(80, 100, 2), lambda: None).measure(60.0)
    assert [row["blocks"] for row in found["h2d"]] == [1, 2, 4, 8, 16, 64, 79]
    assert found["h2d"][3] == pytest.approx({
        "blocks": 8, "bytes": 800, "seconds": 2.6e-3, "bytes_per_s": 800 / 2.6e-3,
        "beside_bytes_per_s": 800 / 2.6e-3, "spread": 0.0,
    })  # fmt: skip
    assert found["h2d_bytes_per_s"] == pytest.approx(5e5)
    assert found["d2h_bytes_per_s"] == pytest.approx(1e6 / 3)
    assert found["load_fixed_s"] == pytest.approx(found["store_fixed_s"]) == pytest.approx(1e-3)
    assert found["load_line_error"] == pytest.approx(0.0, abs=1e-9)
    assert tier.host == list(range(100)) and tier.device[0] is None
    # Lots of 64 and 36 blocks are written before any is timed.
    assert tier.loads_unwritten[:2] == [True, True] and not any(tier.loads_unwritten[2:])
    # No job is an engine's: those count from zero up.
    assert max(job for job, _ in tier.jobs) < 0


def test_link_timer_rests_before_a_load_but_not_beside_compute(monkeypatch):
    class Tiring(Tier):
        """Takes another 1 ms for what comes to a tier at rest."""

        rested_s = 0.0

        def _end(self, job, ids, byte_s):
            super()._end(job, ids, byte_s)
            taken = self.done[1].transfer_time + 1e-3 * (self.rested_s > 0)
            self.done[1] = replace(self.done[1], transfer_time=taken)
            self.rested_s = 0.0
            return True

    tier = Tiring()

    def rest(seconds):
        tier.rested_s += seconds

    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=rest)
    monkeypatch.setattr(measured_link, "time", clock)
    found = LinkTimer(tier, TierRoom(80, 100), lambda: None).measure(60.0)
    assert found["load_fixed_s"] == pytest.approx(2e-3)
    assert found["store_fixed_s"] == pytest.approx(1e-3), "right behind the load"
    row = found["h2d"][3]
    assert row["beside_bytes_per_s"] == pytest.approx(800 / 2.6e-3)


def test_blocks_that_there_is_no_time_to_write_are_not_timed():
    tier = Tier()
    timer = LinkTimer(tier, TierRoom(80, 100), lambda: None)
    timer._write(0.0)
    assert len(tier.unwritten) == 36
    for _ in range(20):
        timer._pair(64)
    assert len(tier.unwritten) == 36


def test_measure_engine_names_what_failed_and_measures_the_rest(monkeypatch):
    worker = Worker()

    def execute(output):  # a twentieth of the law's seconds, for real
        start_s = worker.now_s
        result = worker.execute(output)
        time.sleep((worker.now_s - start_s) / 20)
        return result

    caches = [torch.full((4, 8), float("nan")), [torch.ones(3)]]
    engine = SimpleNamespace(
        model_runner=SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_groups=[0, 1]),
            kv_connector=worker,
            kv_caches=caches,
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=33, block_size=16),
        model_config=SimpleNamespace(max_model_len=2048),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=16),
        parallel_config=SimpleNamespace(world_size=1, pipeline_parallel_size=1),
        device="cpu",
    )
    for tier, blocks, why in ((Tier(5), 100, "transfer of the host tier failed"),
                              (Tier(), 2, "three different sizes")):  # fmt: skip
        made = SimpleNamespace(
            connector_worker=SimpleNamespace(worker=tier, spec=SimpleNamespace(host_blocks=blocks))
        )
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
        found = measure_engine(engine, execute, worker.sample, LAW.to_dict(), 30.0)
        assert why in found["unmeasured"][0] and "h2d" not in found
        assert len(found["unmeasured"]) == 1 and found["step"]["steps"] > 5
        assert worker.connector == "on" and kv_transfer_state._KV_CONNECTOR_AGENT is made
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    staged = SimpleNamespace(world_size=2, pipeline_parallel_size=2)
    halves = SimpleNamespace(**{**vars(engine), "parallel_config": staged})
    found = measure_engine(halves, execute, worker.sample, LAW.to_dict(), 30.0)
    assert found == {"unmeasured": ["a step: its stages run on several devices in turn"]}
    broken = measure_engine(engine, lambda _: 1 / 0, worker.sample, LAW.to_dict(), 30.0)
    assert list(broken) == ["unmeasured"]
    assert "a step: ZeroDivisionError" in broken["unmeasured"][0]
    assert not caches[0].any() and not caches[1][0].any()


def test_vllm_names_what_the_measurements_go_through():
    assert "spec" in OffloadingConnectorWorker.__init__.__code__.co_names
    assert "worker" in OffloadingConnectorWorker._init_worker.__code__.co_names
    assert callable(ActiveKVConnector.set_disabled)
    assert callable(GroupCoordinator.broadcast_object)
    assert "num_blocks" in CPUOffloadingSpec.__init__.__code__.co_names
    beside_work(torch.device("cpu"))()
