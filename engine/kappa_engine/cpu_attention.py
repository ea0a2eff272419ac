"""Attention on the CPU over KV that stays in host memory, exact: outputs with log-sum-exp.

Only queries and results cross the link (paper 002's overlap, with the weights on the device). The
kernel is torch's fused attention for CPUs, which also gives the log-sum-exp: every block is an
element of its batch, so that paged keys are read where they lie. Half precision, in which that
kernel is slow and its sums short, is widened to float32 in pieces that fit a cache. Pieces are
merged as `kappa_engine.attention` merges places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kappa_engine.attention import Elsewhere, Partial, combine
from kappa_engine.block_pool import Ids, runs
from kappa_engine.config import ModelConfig
from kappa_engine.kv_cache import Arena
from kappa_engine.step import OnCpu
from kappa_engine.transfer import WAIT_S, LinkMover, TransferFailed

# Of a run read in place, blocks per call: their results are merged while a cache has them.
_RUN_BLOCKS = 64
# Blocks that are widened, or gathered, before each call.
_PIECE_BLOCKS = 16
# Shorter runs are gathered: a call costs more than to copy so little.
_LEAST_RUN = 4
# Two workers that start at once would put back each other's number of threads.
_setting = threading.Lock()

T = TypeVar("T")


class CpuWorker:
    """Computes jobs in order on one thread, with `threads` of torch's beneath it.

    torch keeps its number of threads per calling thread, so this bound holds here alone. Waits are
    bounded; the error of a job is raised where its result is waited for.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # Jobs that wait or are under way.
        self._open: set[Future[Any]] = set()
        self._pool = ThreadPoolExecutor(1, "kappa-cpu")

        def bound() -> None:
            # A thread takes the process' number when it first asks: that must not come later.
            torch.get_num_threads()
            torch.set_num_threads(threads)

        with _setting:
            before = torch.get_num_threads()
            self._pool.submit(bound).result(WAIT_S)
            # This has changed the process' number, with which threads begin: put it back.
            torch.set_num_threads(before)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Compute `job` behind those before it, without gradients; `RuntimeError` if stopped."""
        future = self._pool.submit(torch.no_grad()(job))
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def settle(self, timeout_s: float = WAIT_S) -> None:
        """Wait until no job is under way; `TransferFailed` if that takes longer."""
        if wait(tuple(self._open), timeout_s).not_done:
            raise TransferFailed(f"the CPU still computes after {timeout_s:g} s")

    def stop(self) -> None:
        """Drop jobs that have not begun, and end the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.settle()


def result(future: Future[T], timeout_s: float = WAIT_S) -> T:
    """The result of a job; `TransferFailed` if it failed, or did not end in time."""
    try:
        return future.result(timeout_s)
    except NotInTime:
        raise TransferFailed(f"the CPU's share did not end within {timeout_s:g} s") from None
    except Exception as error:
        raise TransferFailed(f"the CPU's share failed: {error}") from error


class CpuAttention:
    """Attends to the KV blocks of one arena's host memory, with `threads` at most.

    `worker.stop` ends its thread.
    """

    def __init__(self, arena: Arena, config: ModelConfig, threads: int) -> None:
        self.worker = CpuWorker(threads)
        self._host, self._config, self._device = arena.kv_host, config, arena.device
        self._wide = torch.promote_types(arena.dtype, torch.float32)
        self._scratch = torch.empty(
            (_PIECE_BLOCKS, *arena.kv_block_shape), dtype=self._wide, device="cpu"
        )
        # Buffers of queries, used by layers in turn; pinned for a GPU.
        self._pinned = arena.device.type == "cuda"
        self._queries: list[Tensor] = [torch.empty(0), torch.empty(0)]
        self._turn = 0

    def begin(self, layer: int, on_cpu: OnCpu, q: Tensor, mover: LinkMover) -> Elsewhere:
        """Start to attend. q (tokens, heads, d): queries of the whole step, on the device.

        The function that it returns waits for the CPU, and raises `TransferFailed` if that failed
        or did not end in time.
        """
        mine = q.index_select(0, on_cpu.rows)
        self._turn = 1 - self._turn
        buffer = self._queries[self._turn]
        if buffer.shape[1:] != mine.shape[1:] or len(buffer) < len(mine):
            buffer = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=self._pinned)
            self._queries[self._turn] = buffer
        staged = buffer[: len(mine)]
        staged.copy_(mine, non_blocking=True)
        ready, contexts, tokens = mover.mark(), on_cpu.contexts, len(q)

        def job() -> Partial:
            """Output (queries, heads, d), log-sum-exp (queries, heads), both wide."""
            ready.block()
            heads, width = self._config.heads, self._config.head_dim
            shape = (len(staged), heads)
            out = torch.empty((*shape, width), dtype=self._wide, pin_memory=self._pinned)
            lse = torch.empty(shape, dtype=self._wide, pin_memory=self._pinned)
            for context in contexts:
                part = slice(context.first, context.first + context.queries)
                out[part], lse[part] = self.attend(layer, context.blocks, staged[part])
            return out, lse

        future = self.worker.submit(job)

        def arrived() -> Partial:
            out, lse = (x.to(self._device, non_blocking=True) for x in result(future))
            all_out = out.new_zeros((tokens, *out.shape[1:]))
            all_lse = lse.new_full((tokens, lse.shape[1]), -torch.inf)
            rows = on_cpu.rows
            return all_out.index_copy_(0, rows, out), all_lse.index_copy_(0, rows, lse)

        return arrived

    def product(self, x: Tensor, rows: Tensor) -> Future[Tensor]:
        """Start to multiply x (n, width), on the device, by a weight's rows in host memory; the
        result (n, rows) is in host memory, too."""
        host = x.to(rows.device)
        return self.worker.submit(lambda: F.linear(host, rows))

    # -- on the worker's thread -----------------------------------------------------------------

    def attend(self, layer: int, blocks: Ids, q: Tensor) -> Partial:
        """Attend from one sequence's queries (n, heads, d) to all of these blocks."""
        kv_heads, width, queries = self._config.kv_heads, self._config.head_dim, len(q)
        # The heads of a group share their keys: as more queries of one head, no key is repeated.
        folded = q.to(self._wide).view(queries, kv_heads, -1, width).transpose(0, 1)
        folded = folded.reshape(1, kv_heads, -1, width)
        parts = [self._piece(folded, part) for part in self._pieces(self._host[layer], blocks)]
        merged, lse = combine(parts) if len(parts) > 1 else parts[0]
        shape = (kv_heads, queries, -1)
        merged = merged.view(*shape, width).transpose(0, 1).reshape(queries, -1, width)
        return merged, lse.view(shape).transpose(0, 1).reshape(queries, -1)

    def _pieces(self, host: Tensor, blocks: Ids) -> Iterator[Tensor]:
        """Blocks (n, 2, block_tokens, kv_heads, d), wide: long runs in place, the rest gathered."""
        direct = host.dtype == self._wide
        gathered: list[tuple[int, int]] = []
        for _, first, count in runs(range(len(blocks)), blocks.tolist()):
            if direct and count >= _LEAST_RUN:
                for at in range(first, first + count, _RUN_BLOCKS):
                    yield host[at : min(at + _RUN_BLOCKS, first + count)]
            else:
                gathered.append((first, count))
        held = 0
        for first, count in gathered:
            while count:
                n = min(count, _PIECE_BLOCKS - held)
                self._scratch[held : held + n].copy_(host[first : first + n])
                held, first, count = held + n, first + n, count - n
                if held == _PIECE_BLOCKS:
                    yield self._scratch
                    held = 0
        if held:
            yield self._scratch[:held]

    def _piece(self, q: Tensor, blocks: Tensor) -> Partial:
        """Output (kv_heads, queries, d) and log-sum-exp (kv_heads, queries) over some blocks."""
        # (n, 2, block_tokens, kv_heads, d): heads before tokens, by strides alone.
        k, v = blocks.permute(1, 0, 3, 2, 4)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.expand(len(blocks), -1, -1, -1), k, v, 0.0, False, scale=self._config.head_dim**-0.5
        )
        if len(blocks) == 1:
            return out[0], lse[0]
        weights = torch.softmax(lse, dim=0)
        return (weights[..., None] * out).sum(dim=0), torch.logsumexp(lse, dim=0)
