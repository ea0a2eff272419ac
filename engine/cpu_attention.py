"""Attention on the CPU over KV that stays in host memory, exact: outputs with log-sum-exp.

Only queries and results cross the link (paper 002's overlap, with the weights on the device). The
kernel is torch's fused attention for CPUs, which also gives the log-sum-exp: every block is an
element of its batch, so that paged keys are read where they lie. Half precision, in which that
kernel is slow and its sums short, is widened to float32 in pieces that fit a cache. Pieces are
merged as `engine.attention` merges places.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from engine.arena import Arena
from engine.attention import Partial, combine
from engine.blocks import Ids, runs
from engine.config import ModelConfig
from engine.cpu_worker import CpuWorker, result
from engine.step import HostContext, OnCpu
from engine.transfer import LinkMover

# Of a run read in place, blocks per call: their results are merged while a cache has them.
_RUN_BLOCKS = 64
# Blocks that are widened, or gathered, before each call.
_PIECE_BLOCKS = 16
# Shorter runs are gathered: a call costs more than to copy so little.
_LEAST_RUN = 4

Runs = list[tuple[int, int]]  # first block, how many


class CpuResult:
    """What the CPU computes of a layer, under way."""

    def __init__(
        self,
        on_cpu: OnCpu,
        future: Future[tuple[Tensor, Tensor]],
        tokens: int,
        device: torch.device,
    ) -> None:
        self._on_cpu, self._future = on_cpu, future
        self._tokens, self._device = tokens, device

    def result(self) -> Partial:
        """Output (tokens, heads, d) and log-sum-exp (tokens, heads) of all of the step's tokens.

        Zero and -inf for those with nothing on the CPU. Waits for the CPU.

        Raises:
            TransferFailed: it failed, or did not end in time.
        """
        out, lse = (x.to(self._device, non_blocking=True) for x in result(self._future))
        rows = self._on_cpu.rows
        if len(rows) == self._tokens:
            # Each once: all of them, in some order.
            all_out, all_lse = torch.empty_like(out), torch.empty_like(lse)
        else:
            all_out = out.new_zeros((self._tokens, *out.shape[1:]))
            all_lse = lse.new_full((self._tokens, lse.shape[1]), -torch.inf)
        return all_out.index_copy_(0, rows, out), all_lse.index_copy_(0, rows, lse)


class CpuAttention:
    """Attends over the KV blocks of one arena's host memory.

    Args:
        arena: whose host blocks.
        config: of the model.
        threads: that attend at most.

    `stop` ends its thread.
    """

    def __init__(self, arena: Arena, config: ModelConfig, threads: int) -> None:
        self.worker = CpuWorker(threads)
        self._host, self._config = arena.kv_host, config
        self._bt, self._device = arena.block_tokens, arena.device
        self._wide = torch.promote_types(arena.dtype, torch.float32)
        self._scratch = torch.empty(
            (_PIECE_BLOCKS, *arena.kv_block_shape), dtype=self._wide, device="cpu"
        )
        # Where queries arrive and results leave, of every other layer; pinned for a GPU.
        self._queries: list[Tensor] = [torch.empty(0), torch.empty(0)]
        self._turn = 0

    def begin(self, layer: int, on_cpu: OnCpu, q: Tensor, mover: LinkMover) -> CpuResult:
        """Start to attend. q (tokens, heads, d): of the whole step, on the device."""
        mine = q.index_select(0, on_cpu.rows)
        self._turn = 1 - self._turn
        staged = self._staging(mine)
        staged.copy_(mine, non_blocking=True)
        ready = mover.mark()
        contexts = on_cpu.contexts

        def job() -> tuple[Tensor, Tensor]:
            ready.block()
            return self._attend(layer, contexts, staged)

        return CpuResult(on_cpu, self.worker.submit(job), len(q), self._device)

    def stop(self) -> None:
        """End the thread."""
        self.worker.stop()

    def _staging(self, like: Tensor) -> Tensor:
        buffer = self._queries[self._turn]
        if buffer.shape[1:] != like.shape[1:] or len(buffer) < len(like):
            buffer = torch.empty(
                like.shape, dtype=like.dtype, pin_memory=self._device.type == "cuda"
            )
            self._queries[self._turn] = buffer
        return buffer[: len(like)]

    # -- on the worker's thread -----------------------------------------------------------------

    def _attend(self, layer: int, contexts: list[HostContext], q: Tensor) -> tuple[Tensor, Tensor]:
        """Output (queries, heads, d), log-sum-exp (queries, heads), both wide."""
        heads, width = self._config.heads, self._config.head_dim
        pinned = self._device.type == "cuda"
        out = torch.empty((len(q), heads, width), dtype=self._wide, pin_memory=pinned)
        lse = torch.empty((len(q), heads), dtype=self._wide, pin_memory=pinned)
        for context in contexts:
            mine = slice(context.first, context.first + context.queries)
            found = self.attend(layer, context, q[mine])
            out[mine], lse[mine] = found
        return out, lse

    def attend(self, layer: int, context: HostContext, q: Tensor) -> tuple[Tensor, Tensor]:
        """One sequence's queries (n, heads, d), which all see all of the context: as `_attend`."""
        kv_heads, width = self._config.kv_heads, self._config.head_dim
        queries = len(q)
        # The heads of a group share their keys: as more queries of one head, no key is repeated.
        folded = q.to(self._wide).view(queries, kv_heads, -1, width).transpose(0, 1)
        folded = folded.reshape(1, kv_heads, -1, width)
        host = self._host[layer]
        parts = [self._piece(folded, blocks) for blocks in self._pieces(host, context.blocks)]
        merged, lse = combine(parts) if len(parts) > 1 else parts[0]
        shape = (kv_heads, queries, -1)
        merged = merged.view(*shape, width).transpose(0, 1).reshape(queries, -1, width)
        return merged, lse.view(shape).transpose(0, 1).reshape(queries, -1)

    def _pieces(self, host: Tensor, blocks: Ids) -> Iterator[Tensor]:
        """Blocks (n, 2, block_tokens, kv_heads, d), wide: long runs in place, the rest gathered."""
        found = [(source, n) for _, source, n in runs(range(len(blocks)), blocks.tolist())]
        direct = host.dtype == self._wide
        gathered: Runs = []
        for first, count in found:
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

    def _piece(self, q: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
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
