"""The lines that run only on CUDA, on an emulated one: a GPU's rules over host memory.

Shown: each tensor lies where the results of computing with it lie, copies beside the host are from
and to pinned memory, and results are the model's. Not shown: speed, and the order of streams.
"""

from __future__ import annotations

import pytest
import torch

from kappa.plans.clo import CloConfig, SparseSettings
from kappa.plans.load_plan import layout
from kappa_engine.block_pool import BlockType
from kappa_engine.cpu_attention import CpuAttention
from kappa_engine.kv_cache import Arena, ArenaSize, ArenaTooLarge
from kappa_engine.peaks import elapsed_s, machine_peaks
from kappa_engine.profile import ProfileSettings, profile
from kappa_engine.sparse.gather_kernel import Gather, gather_rows, pairs
from kappa_engine.step import prompt_row
from kappa_engine.transfer import CudaMover, TransferFailed, mover_for
from tests.engine.emulated_cuda import DEVICE, EmulatedCuda, OnDevice
from tests.engine.engines import (
    engine,
    even_rates,
    expected,
    finish,
    generate,
    generate_in_host,
    loaded_bytes,
    submit,
)
from tests.engine.rig import prompt, rig
from tests.engine.test_kv_cache import SHAPE


@pytest.fixture
def cuda(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the tests of each module run on it")
    return EmulatedCuda(monkeypatch)


def test_the_emulation_refuses_what_a_gpu_refuses(cuda) -> None:
    there, here = torch.ones(4, device="cuda"), torch.ones(4)
    assert there.is_cuda and (there + 1).device == DEVICE and not there.cpu().is_cuda
    with pytest.raises(RuntimeError, match="on cuda:0 and on cpu"):
        there + here
    with pytest.raises(RuntimeError, match="indexed by one on cuda"):
        here[torch.zeros(1, dtype=torch.int64, device="cuda")]
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="not pinned"):
        there.copy_(here, non_blocking=True)
    assert there.copy_(2 * here).tolist() == [2.0] * 4
    assert there.copy_(here.pin_memory(), non_blocking=True).tolist() == [1.0] * 4


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_plans_load_recompute_and_project_to_the_models_logits(cuda, family) -> None:
    with rig(family, device="cuda") as r:
        tokens, cached = prompt(29), 24
        pages = r.stored(tokens, cached)
        for plan in (layout(cached), layout(cached, recompute=7, activations=6)):
            got = r.forward.compute([prompt_row(tokens, pages, plan)])
            assert got.device == DEVICE and r.agrees(got.cpu(), r.expected(tokens)[-1:])
        r.mover.drain()
        assert r.mover.counters["h2d"].busy_s > 0
    assert not cuda.registered, "what was pinned is given back"


def test_a_context_in_host_memory_is_attended_to_by_the_cpu(cuda, monkeypatch) -> None:
    seen: list[bool] = []
    attend = CpuAttention.attend

    def noted(self, layer, blocks, q):
        seen.append(isinstance(q, OnDevice))
        return attend(self, layer, blocks, q)

    monkeypatch.setattr(CpuAttention, "attend", noted)
    with engine(cpu_threads=1, device="cuda", planner="cpu") as made:
        generate_in_host(made, prompt(48, 1).tolist(), count=1)
        long = [*prompt(48, 1).tolist(), 7, 8, 9]
        request = submit(made, long, 5)
        finish(made)
    assert request.tokens[len(long) :] == expected(long, 5)
    assert seen and not any(seen)


def test_an_engine_offloads_loads_and_answers_as_the_model(cuda) -> None:
    long = prompt(60, 3).tolist()
    with engine(device="cuda", budget_tokens=32) as made:
        generate_in_host(made, long, count=1)
        again = submit(made, [*long, 5, 6], 6)
        finish(made)
    assert again.tokens[len(long) + 2 :] == expected([*long, 5, 6], 6)
    assert again.account.loaded_tokens == 60


@pytest.mark.parametrize(
    ("planner", "share", "stay"),
    [("host-kvpr", 1.0, 0), ("host-hybrid", 0.5, 0), ("host-hybrid", 0.5, 6)],
)
def test_contexts_leave_the_device_and_cross_at_every_step(cuda, planner, share, stay) -> None:
    options = {"planner": planner, "act_share": share, "keep_kv": planner == "host-kvpr"}
    options["act_device_blocks"] = stay
    prompts = prompt(41).tolist(), prompt(66, 6).tolist()
    with engine("opt", device="cuda", rates=even_rates(), budget_tokens=24, **options) as made:
        answers = generate(made, *prompts, count=8)
        assert answers == [expected(one, 8, "opt") for one in prompts]
        assert loaded_bytes(made) > 0


@pytest.mark.parametrize("retriever", ["hash", "oracle"])
def test_sparse_decoding_gathers_rows_by_the_kernel(cuda, retriever) -> None:
    asked = [*prompt(48, 1).tolist(), *prompt(13, 2).tolist()]
    whole = CloConfig(share=1.0, sink_tokens=4, recent_tokens=8, code_bits=64)
    settings = SparseSettings(whole, slots=2, max_tokens=160, chunk_tokens=8, retriever=retriever)
    with engine(sparse=settings, device="cuda") as made:
        generate_in_host(made, asked[:48], count=1)
        request = submit(made, asked, 9, approx=True, planner="sparse")
        finish(made)
    assert request.tokens[len(asked) :] == expected(asked, 9)
    assert request.account.approximate_tokens == 9


@pytest.mark.parametrize(
    ("cannot", "why"),
    [
        ({"refused": 2}, r"cannot pin .* \(CUDA error 2\).*ulimit -l"),
        ({"free_bytes": 1000}, r"device blocks need .*\(1000 bytes\) are free.*fewer"),
    ],
)
def test_arena_is_refused_unpinned_or_on_too_small_a_device(cuda, cannot, why) -> None:
    vars(cuda).update(cannot)
    with pytest.raises(ArenaTooLarge, match=why):
        Arena(SHAPE, ArenaSize(4, 4), dtype=torch.float32, device="cuda")
    assert not cuda.registered


def copies(mover: CudaMover, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(8, device="cuda"), torch.ones(8).pin_memory()) for _ in range(count)]


def test_failed_copy_fails_the_copies_ordered_behind_it(cuda) -> None:
    mover = mover_for("cuda")
    assert isinstance(mover, CudaMover)
    failed = mover.h2d([(torch.zeros(8, device="cuda"), torch.ones(8))])
    with pytest.raises(TransferFailed, match="not pinned"):
        failed.block()
    with pytest.raises(TransferFailed, match="not pinned"):
        mover.wait(failed)
    behind = mover.h2d(copies(mover, 1), after=failed)
    with pytest.raises(TransferFailed, match="what it was to come after failed"):
        behind.block()
    good = mover.h2d(copies(mover, 1), after=mover.mark())
    mover.wait(good)
    good.block()
    assert mover.counters["h2d"].copied_bytes == 32
    mover.stop()


def test_a_copy_that_does_not_end_is_given_up_in_time(cuda, monkeypatch) -> None:
    mover = mover_for("cuda")
    event = mover.h2d(copies(mover, 1))
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: False)
    with pytest.raises(TransferFailed, match=r"did not end within 0\.01 s"):
        event.block(0.01)
    with pytest.raises(TransferFailed):
        mover.drain(0.01)


def test_ended_copies_are_timed_before_too_many_are_not(cuda) -> None:
    mover = mover_for("cuda")
    for _ in range(256):
        mover.h2d(copies(mover, 1))
    assert mover.counters["h2d"].busy_s > 0, "without being asked"


@pytest.mark.parametrize("type", ["kv", "act"])
def test_measuring_ends_with_what_the_device_was_given(cuda, type: BlockType) -> None:
    with rig("llama", torch.float32, device="cuda", blocks=32) as r:
        settings = ProfileSettings((16, 32, 64), (1, 16), (0, 32), (1, 4), (0, 64), 1)
        found = profile(r.forward, settings)
    assert found["device"] == "Fake GPU" and found["h2d_bytes_per_s"] > 0
    before = cuda.finished
    assert elapsed_s(lambda: None, DEVICE) >= 0 and cuda.finished == before + 2


def test_peaks_of_a_gpu_are_of_pinned_copies_by_its_name(cuda) -> None:
    found = machine_peaks(
        {"sizes_bytes": [64, 256], "hidden": 8, "intermediate": 8, "dtype": "float32"}
    )
    assert found["device"] == "Fake GPU" and found["h2d_bytes_per_s"] > 0 and cuda.finished > 0


def test_kernel_copies_rows_and_leaves_places_without_one(cuda) -> None:
    source = torch.arange(60.0).view(10, 6)
    rows = torch.randint(-5, 10, (2, 3, 18), generator=torch.Generator().manual_seed(0))
    rows[0, 1] = -1
    # Rows of a view with strides, six elements in programs of eight.
    target = torch.full((2, 3, 20, 6), -1.0, device="cuda")[:, :, 1:19]
    counted = torch.zeros(1, dtype=torch.int64, device="cuda")
    there = rows.to("cuda")
    event = mover_for("cuda").h2d(pairs([Gather(target, source, there, counted)]))
    event.block()
    expected_rows = torch.where((rows >= 0)[..., None], source[rows], -1.0)
    copied = int((rows >= 0).sum())
    assert torch.equal(target.cpu(), expected_rows) and counted.tolist() == [copied]
    gather_rows(target[:, :, :0], source, there[:, :, :0], counted)
    assert counted.tolist() == [copied], "no rows, no programs"
