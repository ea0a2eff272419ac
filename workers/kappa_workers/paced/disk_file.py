"""Rows of bytes in a file on disk, read past the page cache (O_DIRECT, or else `direct` is False),
which makes a disk look like memory until memory runs out. The file has no name: whatever ends its
process frees its bytes. A row's checksum stays in memory; a row that was cut short is reported
instead of returned."""

from __future__ import annotations

import fcntl
import mmap
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from kappa_workers.paced.rows import Ids, Table, copy_rows

log = structlog.get_logger(__name__)

ALIGN = 4096
"""Rows are padded to this many bytes, which O_DIRECT asks for."""

_STAGE_BYTES = 8 << 20
# One call to the kernel; several at a time, since a disk serves many as quickly as one.
_CALL_BYTES, _CALLS = 512 << 10, 4
_TRIAL_BYTES, _TRIALS, _TRIAL_S = 64 << 20, 5, 1.0
_NO_SUM = -1


class DiskError(RuntimeError):
    """The file cannot be had; the message names the folder and the remedy."""


def row_bytes(width: int) -> int:
    """Bytes in the file of a row that is `width` bytes wide."""
    return -(-width // ALIGN) * ALIGN


class Stage:
    """Page-aligned memory that rows pass through, for one thread. columns: the blocks of tables
    `widths` bytes wide in those rows, side by side."""

    def __init__(self, size: int, widths: Sequence[int]) -> None:
        self.rows = max(_STAGE_BYTES // size, 1)
        self.bytes = memoryview(mmap.mmap(-1, self.rows * size))
        whole = np.frombuffer(self.bytes, dtype=np.int8).reshape(self.rows, size)
        self.columns = [whole[:, a:b] for a, b in pairwise(accumulate(widths, initial=0))]

    def parts(self, count: int) -> list[slice]:
        """`count` rows, cut into lots that fit the memory."""
        return [slice(at, min(at + self.rows, count)) for at in range(0, count, self.rows)]


class DiskFile:
    """`rows` rows, each of a block of tensors `widths` bytes wide, side by side; written by one
    thread and read by another, never the same row.

    Raises:
        DiskError: the folder has no room for it.
    """

    def __init__(self, folder: Path, rows: int, widths: Sequence[int]) -> None:
        self._width = sum(widths)
        self.row_bytes, self._fd = row_bytes(self._width), -1
        self._calls = ThreadPoolExecutor(_CALLS, "kappa-disk")
        try:
            self._fd, name = tempfile.mkstemp(prefix="kappa-kv-", dir=folder)
            os.unlink(name)
            os.posix_fallocate(self._fd, 0, rows * self.row_bytes)
        except OSError as error:
            self.close()
            raise DiskError(
                f"engine.disk_dir {folder}: {error.strerror} for {rows * self.row_bytes:,} bytes: "
                "name a folder that this user may write, with that much room, or lower "
                "engine.disk_bytes"
            ) from None
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.direct = True
        except OSError:
            self.direct = False
            log.warning("disk_through_page_cache", folder=str(folder))
        self._sums = np.full(rows, _NO_SUM, dtype=np.int64)
        self._reading, self._writing = (Stage(self.row_bytes, widths) for _ in range(2))

    def read(self, rows: Ids, dst: Sequence[Table], dst_ids: Ids) -> NDArray[np.bool_]:
        """Copy `rows` to blocks `dst_ids` of tables (none: only read); which came whole."""
        whole, stage = np.zeros(len(rows), dtype=np.bool_), self._reading
        for part in stage.parts(len(rows)):
            good = self._moved(os.preadv, stage, rows[part])
            good &= self._sums[rows[part]] == self._summed(stage, len(good))
            whole[part] = good
            if dst:
                copy_rows(dst, dst_ids[part][good], stage.columns, np.flatnonzero(good))
        return whole

    def write(self, src: Sequence[Table], src_ids: Ids, rows: Ids) -> bool:
        """Copy blocks `src_ids` of tables to `rows`; False: some are not there."""
        stage = self._writing
        for part in stage.parts(len(rows)):
            blocks = src_ids[part]
            copy_rows(stage.columns, np.arange(len(blocks)), src, blocks)
            sums = self._summed(stage, len(blocks))
            there = self._moved(os.pwritev, stage, rows[part])
            self._sums[rows[part]] = np.where(there, sums, _NO_SUM)
        return bool((self._sums[rows] != _NO_SUM).all())

    def close(self) -> None:
        """Free the file; safe to call twice."""
        self._calls.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _moved(self, move: Callable[..., int], stage: Stage, rows: Ids) -> NDArray[np.bool_]:
        """Read or write rows, neighbours in one call; which of them were."""
        size, done = self.row_bytes, np.zeros(len(rows), dtype=np.bool_)
        most = max(_CALL_BYTES // size, 1)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        cuts = sorted({0, len(rows), *breaks.tolist(), *range(0, len(rows), most)})

        def call(run: tuple[int, int]) -> None:
            start, stop = run
            try:
                data = [stage.bytes[start * size : stop * size]]
                moved = move(self._fd, data, int(rows[start]) * size)
            except OSError as error:
                log.warning("disk_failed", what=move.__name__, error=error.strerror)
                moved = 0
            done[start : start + moved // size] = True

        list(self._calls.map(call, pairwise(cuts)))
        return done

    def _summed(self, stage: Stage, count: int) -> NDArray[np.int64]:
        starts = range(0, count * self.row_bytes, self.row_bytes)
        sums = (zlib.crc32(stage.bytes[at : at + self._width]) for at in starts)
        return np.fromiter(sums, np.int64, count)


def measure_disk(folder: Path, block_bytes: int) -> dict[str, Any]:
    """`{"read": [{"bytes", "bytes_per_s"}], "direct", "bytes_per_s" (of the largest)}` of reads of
    neighbouring blocks here and now, through the tier's own path.

    Raises:
        DiskError: the folder cannot be used.
    """
    count, read = max(_TRIAL_BYTES // row_bytes(block_bytes), 1), []
    file = DiskFile(folder, count, [block_bytes])
    try:
        some = np.frombuffer(os.urandom(8 * block_bytes), dtype=np.int8).reshape(8, block_bytes)
        every = np.arange(count)
        if not file.write([some], every % 8, every):
            raise DiskError(f"engine.disk_dir {folder}: a write failed; the log says why")
        for size in sorted({1, min(8, count), min(64, count), count}):
            times: list[float] = []
            while len(times) < _TRIALS and sum(times) < _TRIAL_S:
                start_s = time.perf_counter()
                file.read(every[:size] + (len(times) * size) % (count - size + 1), [], every[:size])
                times.append(time.perf_counter() - start_s)
            size_bytes = size * block_bytes
            rate = size_bytes / statistics.median(times)
            read.append({"bytes": size_bytes, "bytes_per_s": rate})
    finally:
        file.close()
    return {"read": read, "direct": file.direct, "bytes_per_s": read[-1]["bytes_per_s"]}
