"""The bandwidth of an engine's host tier by size of transfer, through the copies that serve.

Transfers of scattered blocks of all layers, submitted to vLLM's offloading worker (ours or its own)
as its connector submits them, and timed by it: on a GPU by events of the device. Loaded blocks are
then stored where they came from; the device's blocks hold anything afterwards. Private names of
vLLM: tests/workers/vllm/test_measured_engine.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kappa.plans.measured import fit_line
from kappa_engine.peaks import finish, repeating

_SIZES = (1, 2, 4, 8, 16, 64, 256)
# So often each size, after a first; beside compute fewer. What else runs on the machine only adds:
# the lower quartile counts. A size that would take more than is left is left out.
_REPEATS, _BESIDE = 12, 6
# In service a load finds the engine's threads and processors at rest. Where one load comes right
# behind another, its first 16 blocks take a third less. Rests take this share of the time at most.
_REST_S, _REST_SHARE = 0.02, 0.3
# Host memory that was never written reads as one page of zeros, out of the processor's cache: this
# many blocks are written first, in lots, within this share of the time, and only they are timed.
_WRITTEN, _LOT, _WRITING_SHARE = 1024, 64, 0.3
_POLL_S = 1e-4
_TRANSFER_TIMEOUT_S = 10.0
_BUSY_SIDE = {"cpu": 256, "cuda": 4096}


class TierRoom(NamedTuple):
    """Blocks on the device (block 0 is vLLM's own) and in host memory; groups of layers."""

    device_blocks: int
    host_blocks: int
    groups: int = 1

    @property
    def most(self) -> int:
        """Blocks of one transfer."""
        return min(self.device_blocks - 1, self.host_blocks)


class LinkTimer:
    """Times transfers of an engine that does not serve yet; `busy`: what runs beside them."""

    def __init__(self, tier: OffloadingWorker, room: TierRoom, busy: Callable[[], Any]) -> None:
        self._tier, self._room, self._busy = tier, room, busy
        self._order = np.random.default_rng(0)
        self._hosts = self._order.permutation(room.host_blocks)[:_WRITTEN]
        self._job = 0

    def measure(self, budget_s: float) -> dict[str, Any]:
        """Rows by size for each direction, and the lines through them.

        Returns:
            {"h2d", "d2h": [{"blocks", "bytes", "seconds", "bytes_per_s", "beside_bytes_per_s",
            "spread"}]; "h2d_bytes_per_s", "d2h_bytes_per_s": of a transfer's every further byte;
            "load_fixed_s", "store_fixed_s": of each transfer besides; "load_line_error",
            "store_line_error": the most by which a row's seconds differ from those, relative}.

        Raises:
            RuntimeError: a transfer failed or did not end.
            ValueError: too few blocks for a line.
        """
        end_s, block_s = time.perf_counter() + budget_s, 0.0
        rows: dict[str, list[dict[str, float]]] = {"h2d": [], "d2h": []}
        self._write(time.perf_counter() + _WRITING_SHARE * budget_s)
        most = min(self._room.most, len(self._hosts))
        sizes = sorted({size for size in (*_SIZES, min(most, _SIZES[-1])) if size <= most})
        rest_s = min(_REST_S, _REST_SHARE * budget_s / (_REPEATS * len(sizes)))
        for blocks in sizes:
            expected_s = 2 * (_REPEATS + 2 * _BESIDE) * block_s * blocks + _REPEATS * rest_s
            if time.perf_counter() + expected_s > end_s:
                continue
            self._pair(blocks)
            alone = [self._pair(blocks, rest_s) for _ in range(_REPEATS)]
            with repeating(self._busy):
                beside = [self._pair(blocks) for _ in range(_BESIDE)]
            for index, way in enumerate(rows):
                seconds = [pair[index][0] for pair in alone]
                rows[way].append(
                    _row(blocks, alone[0][index][1], seconds, [pair[index][0] for pair in beside])
                )
            block_s = max(rows[way][-1]["seconds"] for way in rows) / blocks
        return {**rows, **_line(rows["h2d"], "h2d", "load"), **_line(rows["d2h"], "d2h", "store")}

    def _write(self, end_s: float) -> None:
        """Write host blocks with what they hold; those for which there is no time are not timed."""
        lot = min(_LOT, self._room.most)
        for start in range(0, len(self._hosts), lot):
            if start and time.perf_counter() > end_s:
                self._hosts = self._hosts[:start]
                return
            self._moved(self._hosts[start : start + lot])

    def _pair(self, blocks: int, rest_s: float = 0.0) -> list[tuple[float, int]]:
        time.sleep(rest_s)
        return self._moved(self._order.permutation(self._hosts)[:blocks])

    def _moved(self, hosts: NDArray[np.int64]) -> list[tuple[float, int]]:
        """(seconds, bytes) of a load of these blocks, and of the store that takes them back."""
        blocks = len(hosts)
        device = 1 + self._order.permutation(self._room.device_blocks - 1)[:blocks]
        host = CPULoadStoreSpec(hosts.tolist())
        others = [0] * (self._room.groups - 1)
        here = GPULoadStoreSpec(device.tolist(), [blocks, *others], [0, *others])
        loaded = self._run(lambda job: self._tier.submit_load(job, host, here))
        return [loaded, self._run(lambda job: self._tier.submit_store(job, here, host))]

    def _run(self, submit: Callable[[int], bool]) -> tuple[float, int]:
        # Below zero: no job of an engine, and nothing that is reported.
        self._job -= 1
        end_s = time.perf_counter() + _TRANSFER_TIMEOUT_S
        if not submit(self._job):
            raise RuntimeError("the host tier refused a transfer")
        while time.perf_counter() < end_s:
            for result in self._tier.get_finished():
                if result.job_id != self._job:
                    continue
                if not result.success or not result.transfer_time or not result.transfer_size:
                    raise RuntimeError("a transfer of the host tier failed")
                return result.transfer_time, result.transfer_size
            time.sleep(_POLL_S)
        raise RuntimeError(f"a transfer of the host tier took over {_TRANSFER_TIMEOUT_S:g} s")


def beside_work(device: torch.device) -> Callable[[], Any]:
    """A product of matrices such as an engine computes beside its transfers."""
    side = _BUSY_SIDE["cuda" if device.type == "cuda" else "cpu"]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    square = torch.ones(side, side, dtype=dtype, device=device)

    def multiply() -> None:
        torch.mm(square, square)
        finish(device)

    return multiply


def _row(blocks: int, size: int, alone: list[float], beside: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(alone, n=4)
    seconds = quartiles[0]
    return {
        "blocks": blocks,
        "bytes": size,
        "seconds": seconds,
        "bytes_per_s": size / seconds,
        "beside_bytes_per_s": size / statistics.quantiles(beside, n=4)[0],
        "spread": (quartiles[2] - quartiles[0]) / quartiles[1],
    }


def _line(rows: list[dict[str, float]], way: str, kind: str) -> dict[str, float]:
    sizes, seconds = [row["bytes"] for row in rows], [row["seconds"] for row in rows]
    line = fit_line(kind, sizes, seconds, relative=True)
    error = max(abs(line.seconds(n) / s - 1) for n, s in zip(sizes, seconds, strict=True))
    return {
        f"{way}_bytes_per_s": 1 / line.per_token_s,
        f"{kind}_fixed_s": line.fixed_s,
        f"{kind}_line_error": error,
    }
