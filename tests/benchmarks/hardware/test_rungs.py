"""Rungs over a tiny model: what they compare, what a wrong host tier looks like, what CUDA adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kappa.model import kv_bytes_per_token
from kappa_benchmarks.hardware import device as devices
from kappa_benchmarks.hardware import rungs
from kappa_benchmarks.hardware.device import CPU_SIZES, GPU_SIZES, Device, write_model
from kappa_benchmarks.hardware.engines import Answer, Bench, Missing, TorchServed, vllm_arguments
from kappa_benchmarks.hardware.rungs import RUNGS, Rung, compare, gaps_s, prompt
from kappa_benchmarks.offload.cells import SETTINGS, PrefixCell, arena_size, model
from kappa_benchmarks.offload.rig import MeteredCudaMover
from kappa_deploy.app.machine import GpuFacts, Machine
from tests.benchmarks.hardware.fake_cuda import FakeCuda
from tests.engine.emulated_cuda import EmulatedCuda

TINY = replace(
    CPU_SIZES, model="llama-tiny", copy_bytes=(1 << 12, 1 << 14), cached=(32, 64, 96),
    new=(8, 24), repeats=1, burst=2,
)  # fmt: skip


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CPU_SIZES", TINY)
    # Token ids of a model with a vocabulary of 96.
    monkeypatch.setattr(rungs, "_VOCABULARY", 96)
    return Bench(Device("cpu"), write_model(tmp_path / "model", TINY))


def answer(*logprobs, tokens=None, cached=0):
    picked = tokens or [max(each, key=each.get) for each in logprobs]
    return Answer(0.0, cached, picked, [], list(logprobs))


# -- comparing ------------------------------------------------------------------------------------


def test_compare_holds_host_loads_against_noise_and_a_control():
    fresh = answer({1: -0.50, 2: -1.00})
    device = answer({1: -0.51, 2: -1.00})
    other = answer({2: -0.20, 3: -3.00})
    host = answer({1: -0.51, 2: -1.005}, cached=16)
    found = compare(fresh, device, host, other)
    assert found["verdict"] == "equal" and found["noise"] == pytest.approx(0.01)
    assert found["moved"] == pytest.approx(0.005)
    # Token 3 is at most as likely there as the least that is listed, 2; token 1 likewise.
    assert found["control"] == pytest.approx(2.5)
    wrong = answer({1: -0.51, 2: -1.02}, cached=16)
    assert compare(fresh, device, wrong, other)["verdict"] == "different"
    assert compare(fresh, device, answer({1: -0.51}), other)["verdict"] == "nothing was loaded"
    assert "nothing shown" in compare(fresh, device, host, fresh)["verdict"]


def test_answers_are_compared_up_to_the_first_token_that_differs():
    same, apart = {1: -0.1, 2: -3.0}, {1: -3.0, 2: -0.1}
    fresh = answer(same, same, same)
    # Behind another token everything is another.
    host = answer(same, {1: -0.7, 2: -0.69}, apart, cached=16)
    assert compare(fresh, fresh, host, answer(apart))["moved"] == pytest.approx(2.31)


def test_a_prompt_comes_back_from_host_memory_as_it_was(bench):
    (row,) = rungs.roundtrip(bench, "torch")
    assert row["verdict"] == "equal" and row["all_stored"] and row["load_s"] > 0
    # 72 tokens; the last block is computed, in part or whole.
    assert row["tokens"] == 72 and row["cached_tokens"] == 64


def test_host_tier_that_returns_wrong_kv_is_seen(bench, monkeypatch):
    class Spoilt(TorchServed):
        def evict(self):
            complete = super().evict()
            self.forward.arena.kv_host.mul_(-1.0)
            return complete

    monkeypatch.setattr("kappa_benchmarks.hardware.engines.TorchServed", Spoilt)
    (row,) = rungs.roundtrip(bench, "torch")
    assert row["verdict"] == "different" and row["moved"] > 10 * row["noise"]


# -- the grid, the burst --------------------------------------------------------------------------


def test_grid_has_every_cell_from_host_and_device(bench):
    about, *cells = rungs.ttft(bench, "torch")
    assert about["kind"] == "engine" and about["serial_share"] == pytest.approx(1 / 3)
    assert [(c["cached"], c["new"]) for c in cells] == [
        (32, 8), (32, 24), (64, 8), (64, 24), (96, 8), (96, 24),
    ]  # fmt: skip
    for cell in cells:
        assert cell["verdict"] == "equal" and cell["found"] == cell["cached"]
        assert cell["load_s"] > 0 and cell["compute_s"] > 0


def test_a_prefix_that_was_not_found_is_told(bench, monkeypatch):
    monkeypatch.setattr(rungs, "_MOST_BLOCK_TOKENS", 0)
    with bench.opened("torch") as served:
        # Nothing was asked before: there is nothing to find.
        cell = rungs._cell(served, prompt(32, 5), [prompt(8, 1), prompt(8, 2)])
    assert cell["verdict"] == "found 0 of 32 tokens"


def test_a_burst_is_loaded_just_in_time_in_order_and_not_at_all(bench):
    rows = list(rungs.just_in_time(bench, "torch"))
    assert [row["loads"] for row in rows] == ["just in time", "none", "in order"]
    loaded, computed, _ = rows
    assert loaded["load_s"] > 0 and computed["load_s"] == 0
    assert all(row["ttft_most_s"] >= row["ttft_s"] > 0 and row["step_s"] > 0 for row in rows)


def test_gaps_are_those_that_touch_the_time():
    one = Answer(0.0, times_s=[1.0, 2.0, 4.0, 7.0, 11.0])
    assert gaps_s(one) == [1, 2, 3, 4]
    assert gaps_s(one, 3.0, 6.0) == [2, 3]


def test_no_prompt_is_the_beginning_of_another():
    assert prompt(40, 1)[:20] != prompt(20, 1) and prompt(20, 1) == prompt(20, 1)


# -- rungs as such --------------------------------------------------------------------------------


def test_what_one_arm_lacks_or_fails_at_does_not_end_the_rung():
    def action(_, arm):
        if arm == "absent":
            raise Missing("not here")
        yield {"kind": "found"}
        if arm == "broken":
            raise OSError("no memory")

    found = Rung(1, "", action, ("absent", "broken", "good")).rows(None)
    rows = [row for row in found if row["kind"] != "note"]
    assert rows == [
        {"kind": "skipped", "arm": "absent", "why": "not here"},
        {"kind": "found", "arm": "broken"},
        {"kind": "failed", "arm": "broken", "why": "OSError: no memory"},
        {"kind": "found", "arm": "good"},
    ]


def test_the_ladder_ends_within_ten_minutes():
    assert sum(rung.bound_s for rung in RUNGS.values()) < 600


def test_graphs_are_skipped_without_a_gpu(bench):
    with pytest.raises(Missing, match="need a GPU"):
        list(rungs.graphs(bench, "graphs"))


def test_steps_of_the_whole_batch_are_those_that_count():
    class Served:
        def play(self, prompts, tokens):
            answers = [Answer(0.0, times_s=[1.0, 1.5, 2.5]) for _ in prompts]
            steps = [(16, 9.0), (2, 0.25), (2, 0.75), (2, 0.5), (1, 7.0)]
            return rungs.Played(answers, steps=steps)

    found = rungs._decode(Served(), [[1], [2]])
    assert found == {"steps": 3, "step_s": 0.5, "between_tokens_s": 0.75}


# -- the seam -------------------------------------------------------------------------------------


def test_copies_are_measured_by_size_layout_and_way(bench):
    copies = list(rungs.rates(bench, "pageable"))
    # Blocks of this model are 4 KiB in each layer: both sizes can be cut.
    ways = {(c["layout"], c["way"]) for c in copies}
    assert len(copies) == 2 * 2 * 4 and len(ways) == 8
    assert all(c["bytes_per_s"] == pytest.approx(c["bytes"] / c["seconds"]) for c in copies)
    with pytest.raises(Missing, match="a GPU driver's"):
        list(rungs.rates(bench, "pinned"))


def test_engine_measurement_is_drawn_as_its_host_tier():
    row = {"blocks": 4, "bytes": 4096, "seconds": 2e-6, "bytes_per_s": 2e9, "spread": 0.1,
           "beside_bytes_per_s": 1e9}  # fmt: skip
    found = {"hbm_bytes_per_s": 5e9, "gemm": [{"tokens": 16, "flops_per_s": 1e9}],
             "unmeasured": [], "step": {"r2": 0.99}, "load_fixed_s": 1e-6,
             "h2d": [{**row, "bytes": 1024}, row], "d2h": [row]}  # fmt: skip
    memory, product, about, *copies = rungs._of_engine(found)
    assert (memory["bytes_per_s"], product["tokens"], about["step"]["r2"]) == (5e9, 16, 0.99)
    assert [(c["way"], c["bytes"], c["bytes_per_s"], c["largest"]) for c in copies] == [
        ("to the device, vLLM", 1024, 2e9, False),
        ("to the device, vLLM", 4096, 2e9, True),
        ("to the device, computing, vLLM", 1024, 1e9, False),
        ("to the device, computing, vLLM", 4096, 1e9, True),
        ("to the host, vLLM", 4096, 2e9, True),
        ("to the host, computing, vLLM", 4096, 1e9, True),
    ]
    # Without a host tier that was measured there are only the machine's copies: not told as its.
    del found["load_fixed_s"]
    assert [r["kind"] for r in rungs._of_engine(found)] == ["memory", "product", "engine"]


def test_on_cuda_copies_are_pinned_and_the_device_is_waited_for(bench, monkeypatch):
    cuda = EmulatedCuda(monkeypatch)
    monkeypatch.setattr(devices, "GPU_SIZES", TINY)
    copies = list(rungs.rates(Bench(Device("cuda"), bench.model), "pinned"))
    assert copies and all(c["way"].endswith(", pinned") for c in copies)
    assert cuda.finished > 0


def test_a_gpu_is_named_and_without_one_the_ladder_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wanted in (None, "cuda"):
        with pytest.raises(ValueError, match=r"KAPPA_EXTRA=gpu .*--device cpu"):
            Device.find(wanted)
    with pytest.raises(ValueError, match="'tpu': give cuda or cpu"):
        Device.find("tpu")
    assert Device.find("cpu").label == devices.CPU_LABEL
    FakeCuda(monkeypatch)
    machine = Machine("here", {}, gpus=(GpuFacts("H100"),))
    monkeypatch.setattr(devices, "read_machine", lambda: machine)
    assert Device.find(None).label == "H100" and Device.find(None).sizes is GPU_SIZES


def test_a_cuda_stream_that_stands_still_for_a_copy_is_timed(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    mover = MeteredCudaMover(torch.device("cpu"))
    target, source = torch.zeros(8), torch.ones(8)
    copied = mover.h2d([(target, source)])
    mover.wait(copied)
    mover.drain()
    # Two events around a wait: one tick of the fake's clock, in milliseconds.
    assert mover.stalled_s == pytest.approx(1e-3) and mover.stalled_s == pytest.approx(1e-3)
    mover.wait(copied)
    assert mover.stalled_s == pytest.approx(2e-3)
    assert torch.equal(target, source) and mover.counters["h2d"].copied_bytes == 32
    assert mover.counters["h2d"].busy_s == pytest.approx(1e-3)
    assert len(cuda.current.waited) == 2


def test_the_settings_for_a_gpu_are_whole():
    gpu = SETTINGS["gpu"]
    assert len(gpu.groups) == len(SETTINGS["smallest"].groups) == len(rungs._PAPERS)
    for group in gpu.groups:
        config = model(group.model, gpu.dtype)
        assert config.shape.kv_dtype_bytes == 2
        dense = [cell for cell in group.cells if cell.system != "decode-sparse"]
        assert arena_size(replace(gpu), replace(group, cells=tuple(dense))).kv_device > 0
        for cell in group.cells:
            longest = cell.cached + cell.new if isinstance(cell, PrefixCell) else 0
            assert longest <= config.max_tokens


def test_vllm_is_asked_for_what_a_replica_asks(bench):
    arguments, plan = vllm_arguments(bench.device, bench.model, "stock", "/tmp/x", True)
    assert arguments["enforce_eager"] and arguments["num_gpu_blocks_override"] == 264
    assert "scheduler_cls" not in arguments and plan.tier == "own"
    # 3 layers, 2 KV heads of 16, keys and values, four bytes.
    assert kv_bytes_per_token(plan.served) == 3 * 2 * 16 * 2 * 4
    fair, _ = vllm_arguments(bench.device, bench.model, "fair", "/tmp/x", None)
    assert fair["scheduler_cls"].endswith("FairScheduler")
