"""The CPU attends to part of a context in host memory: exact at every share."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kappa_engine.cpu_attention import CpuWorker, result
from kappa_engine.step import NoSuchBlock, Source, StepRow, TokenSpan, joined, prompt_row
from kappa_engine.transfer import TransferFailed
from tests.engine import hf
from tests.engine.books import no_thread_left
from tests.engine.rig import BLOCK, DEVICES, prompt, rig

# Ragged; one within its first block, one that ends with one.
LENGTHS = [19, 3, 12, 25]
SHARES = [0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_step_is_exact_at_any_share(family, share, device) -> None:
    for dtype in (torch.float64, torch.float32):
        with rig(family, dtype, device=device, cpu_threads=1) as r:
            rows, want = [], []
            for length in LENGTHS:
                ids, full = prompt(length + 1), length // BLOCK * BLOCK
                pages = r.stored(ids[:full], full)
                cut = int(share * full) // BLOCK * BLOCK
                spans = [
                    TokenSpan(Source.KV_CPU, 0, cut),
                    TokenSpan(Source.KV_HOST, cut, full),
                    TokenSpan(Source.NEW, full, length + 1),
                ]
                rows.append(StepRow(ids[full:], joined(spans), pages))
                want.append(r.expected(ids)[-1])
            assert r.agrees(r.forward.compute(rows), torch.stack(want))


def test_cpu_attention_moves_no_kv_over_the_link() -> None:
    with rig("llama", cpu_threads=1) as r:
        ids = prompt(25)
        pages, moved = r.stored(ids[:24], 24), []
        for source in (Source.KV_HOST, Source.KV_CPU):
            before = r.mover.counters["h2d"].copied_bytes
            spans = TokenSpan(source, 0, 24), TokenSpan(Source.NEW, 24, 25)
            r.forward.compute([StepRow(ids[24:], spans, pages)])
            r.mover.drain()
            moved.append(r.mover.counters["h2d"].copied_bytes - before)
    layers, width = r.forward.config.layers, 2 * r.forward.config.kv_width
    assert moved == [layers * 24 * width * r.dtype.itemsize, 0]


@pytest.mark.parametrize("blocks", [1, 2, 6])
def test_several_queries_all_see_what_the_cpu_attends_to(blocks: int) -> None:
    with rig("llama", cpu_threads=2, blocks=200) as r:
        ids, cut = prompt(31), blocks * BLOCK
        pages = r.stored(ids[:24], 24)
        for new in (1, 7):
            length = 24 + new
            spans = joined(
                [
                    TokenSpan(Source.KV_CPU, 0, cut),
                    TokenSpan(Source.KV_HOST, cut, 24),
                    TokenSpan(Source.NEW, 24, length),
                ]
            )
            row = StepRow(ids[24:length], spans, pages, wanted="all")
            got = r.forward.compute([prompt_row(prompt(9), r.pages(9)), row])
            assert r.agrees(got[1:], r.expected(ids[:length])[24:])
            assert r.agrees(got[:1], r.expected(prompt(9))[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_it_is_summed(dtype) -> None:
    """As near to the exact output as rounding of keys and values alone allows."""
    with rig("qwen2", torch.float32, cpu_threads=1) as r:
        made = r.forward
        made.arena.kv_host.normal_()
        exact = made.arena.kv_host[1].to(dtype).double()
        made.cpu._host = made.arena.kv_host.to(dtype)
        q = torch.randn(2, made.config.heads, made.config.head_dim)
        blocks = np.array([3, 4, 5, 9, 70, 71, 72, 73, 74, 75, 76, 77])
        out, lse = made.cpu.attend(1, blocks, q)
        keys, values = exact[blocks].permute(1, 3, 0, 2, 4).flatten(2, 3)
        group = made.config.heads // made.config.kv_heads
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = torch.einsum("qhd,hkd->qhk", q.double(), keys) * made.config.head_dim**-0.5
        want = torch.einsum("qhk,hkd->qhd", scores.softmax(-1), values)
        assert float((out.double() - want).abs().max()) < 2e-6
        assert float((lse.double() - scores.logsumexp(-1)).abs().max()) < 2e-6


def test_what_cannot_be_attended_to_on_the_cpu_is_refused() -> None:
    def row(*spans: tuple[Source, int]) -> StepRow:
        ends = np.cumsum([0, *(count for _, count in spans)]).tolist()
        made = [TokenSpan(s, a, b) for (s, _), a, b in zip(spans, ends[:-1], ends[1:], strict=True)]
        return StepRow(ids[: sum(n for s, n in spans if s is Source.NEW)], tuple(made), pages)

    with rig("llama", cpu_threads=1) as r:
        ids = prompt(24)
        pages = r.stored(ids[:16], 16)
        cpu, new, host = Source.KV_CPU, Source.NEW, Source.KV_HOST
        with pytest.raises(NoSuchBlock, match="one before it is computed"):
            r.forward.compute([row((new, 4), (cpu, 12), (new, 1))])
        with pytest.raises(NoSuchBlock, match="whole blocks"):
            r.forward.compute([row((cpu, 5), (host, 11), (new, 1))])
        with pytest.raises(NoSuchBlock, match="host kv"):
            r.forward.compute([row((cpu, 20), (new, 1))])
        # The pass that failed leaves nothing behind.
        got = r.forward.compute([prompt_row(ids, r.pages(24))])
        assert r.agrees(got, r.expected(ids)[-1:])


def test_cpu_worker_keeps_its_own_threads_and_reports_failures() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        raise OSError("no such core")

    with no_thread_left():
        worker = CpuWorker(3)
        assert result(worker.submit(torch.get_num_threads)) == 3
        assert torch.get_num_threads() == before
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join(10)
        assert found == [before]
        with pytest.raises(TransferFailed, match="no such core"):
            result(worker.submit(fail))
        gate = threading.Event()
        slow = worker.submit(lambda: gate.wait(20))
        with pytest.raises(TransferFailed, match="did not end within"):
            result(slow, 0.01)
        for _ in range(2):
            with pytest.raises(TransferFailed, match="still computes"):
                worker.settle(0.01)
        behind = worker.submit(fail)
        threading.Timer(0.2, gate.set).start()
        worker.stop()
        # What runs still reads memory that is freed next: it is waited for.
        assert slow.done() and behind.cancelled()
    with pytest.raises(RuntimeError):
        worker.submit(fail)


def test_a_failure_on_the_cpu_fails_the_pass_and_no_other() -> None:
    with rig("llama", cpu_threads=1) as r:
        pages = r.stored(prompt(17)[:16], 16)
        spans = TokenSpan(Source.KV_CPU, 0, 16), TokenSpan(Source.NEW, 16, 17)
        attend = r.forward.cpu.attend

        def broken(*args):
            raise MemoryError("none left")

        r.forward.cpu.attend = broken
        with pytest.raises(TransferFailed, match="none left"):
            r.forward.compute([StepRow(prompt(17)[16:], spans, pages)])
        r.forward.cpu.attend = attend
        ids = prompt(20)
        got = r.forward.compute([prompt_row(ids, r.pages(20))])
        assert r.agrees(got, r.expected(ids)[-1:])
