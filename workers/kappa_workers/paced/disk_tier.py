"""A disk behind host memory: the blocks on it, writes to it, and loads from both.

Once half of host memory is in use its blocks are written, the least recently used first, one lot at
a time, so that eviction finds them written; a block that is evicted before its turn is lost, and
counted. Loads go from disk straight to the device, and are then stored in host memory like computed
blocks. A row that cannot be read is forgotten, and its block computed."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kappa_workers.paced.disk_file import DiskFile
from kappa_workers.paced.link import Route
from kappa_workers.vllm.host_tier_manager import HostTierManager

# Of host memory, what may be in use before anything is written; blocks that are written at a time.
_UNWRITTEN_SHARE = 0.5
_LOT = 64
# A lot waits at most so long for loads, which read the same disk.
_GIVE_WAY_S, _POLL_S = 0.2, 0.002
_NOBODY = ReqContext(req_id="")


class DiskWrite(NamedTuple):
    """Blocks of host memory that are to be written to rows of the file; number: names it."""

    number: int
    host_ids: list[int]
    rows: list[int]


@dataclass(slots=True)
class DiskNews:
    """What a worker's disk did since the last news."""

    # Writes by number, and whether all their rows are there.
    written: dict[int, bool] = field(default_factory=dict)
    # Rows that could not be read.
    lost: set[int] = field(default_factory=set)


class DiskTierManager(HostTierManager):
    """Host memory with a disk behind it. In a load's specification a block's id is its place in
    host memory, or the number of those places plus its row."""

    def __init__(self, disk_blocks: int, **options: Any) -> None:
        super().__init__(**options)
        self._host_blocks, self._used = int(options["num_blocks"]), 0
        # On disk; and in host memory and not on disk; the least recently used first.
        self._rows: OrderedDict[OffloadKey, int] = OrderedDict()
        self._dirty: OrderedDict[OffloadKey, None] = OrderedDict()
        self._free = list(range(disk_blocks - 1, -1, -1))
        self._writing: tuple[DiskWrite, list[OffloadKey]] | None = None
        self._writes = self._loaded = 0
        # Being loaded from disk; loaded from there, and not stored in host memory since.
        self._reading: Counter[OffloadKey] = Counter()
        self._wanted: set[OffloadKey] = set()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = super().lookup(key, req_context)
        return LookupResult.HIT if found is LookupResult.MISS and key in self._rows else found

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().touch(keys, req_context)
        for key in reversed(list(keys)):
            if key in self._rows:
                self._rows.move_to_end(key)
            if key in self._dirty:
                self._dirty.move_to_end(key)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        in_host = [key for key in keys if self._in_host(key)]
        places = dict(zip(in_host, self._pinned(in_host), strict=True))
        on_disk = [key for key in keys if key not in places]
        self._reading.update(on_disk)
        self._loaded = len(on_disk)
        places |= {key: self._host_blocks + self._rows[key] for key in on_disk}
        return CPULoadStoreSpec([places[key] for key in keys])

    def take_loaded(self) -> int:
        """Blocks of the last load that come from disk; forgets them."""
        loaded, self._loaded = self._loaded, 0
        return loaded

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        from_disk = {key for key in keys if self._reading[key]}
        self._reading -= Counter(from_disk)
        self._wanted |= from_disk & self._rows.keys()
        super().complete_load([key for key in keys if key not in from_disk], req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As `HostTierManager`'s; blocks on disk are stored only once they were loaded."""
        keys = [key for key in keys if key not in self._rows or key in self._wanted]
        self._wanted.difference_update(keys)
        output = super().prepare_store(keys, req_context)
        evicted = [] if output is None else output.evicted_keys
        self._used -= len(evicted)
        lost = [self._dirty.pop(key) for key in evicted if key in self._dirty]
        if lost:
            self._report({"kind": "store_dropped", "blocks": len(lost), "why": "disk"})
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        stored = [key for key in keys if self._in_host(key)]
        self._used += len(stored)
        self._dirty.update(dict.fromkeys(key for key in stored if key not in self._rows))

    def take_work(self) -> DiskWrite | None:
        """The next lot, if one is due and none is being written."""
        if self._writing is not None or not self._due:
            return None
        count = min(self._due, _LOT)
        idle = (key for key in self._rows if not self._reading[key])
        self._forget([key for _, key in zip(range(count - len(self._free)), idle, strict=False)])
        rows = [self._free.pop() for _ in range(min(count, len(self._free)))]
        keys = [self._dirty.popitem(last=False)[0] for _ in rows]
        if not keys:
            return None
        self._writes += 1
        self._writing = DiskWrite(self._writes, self._pinned(keys), rows), keys
        return self._writing[0]

    def take_news(self, news: DiskNews) -> None:
        """A lot was written, or could not be (one from before a reset does not matter); rows that
        could not be read hold nothing any more."""
        if self._writing is not None and self._writing[0].number in news.written:
            (write, keys), self._writing = self._writing, None
            super().complete_load(keys, _NOBODY)
            if news.written[write.number]:
                self._rows.update(zip(keys, write.rows, strict=True))
                self._announce(keys, removed=False)
            else:
                self._free += write.rows
        self._forget([key for key, row in self._rows.items() if row in news.lost])

    def has_pending_work(self) -> bool:
        return bool(super().has_pending_work() or self._writing is not None or self._due)

    def reset_cache(self) -> None:
        self._free += [*self._rows.values(), *(self._writing[0].rows if self._writing else ())]
        self._writing, self._used = None, 0
        for kept in (self._rows, self._dirty, self._reading, self._wanted):
            kept.clear()
        super().reset_cache()

    @property
    def _due(self) -> int:
        """Blocks that should be on disk and are not."""
        return len(self._dirty) if self._used > _UNWRITTEN_SHARE * self._host_blocks else 0

    def _in_host(self, key: OffloadKey) -> bool:
        return super().lookup(key, _NOBODY) is LookupResult.HIT

    def _pinned(self, keys: list[OffloadKey]) -> list[int]:
        """Places in host memory, kept until `complete_load`."""
        spec = super().prepare_load(keys, _NOBODY)
        assert isinstance(spec, CPULoadStoreSpec)
        return [int(place) for place in spec.block_ids]

    def _forget(self, keys: list[OffloadKey]) -> None:
        self._free += [self._rows.pop(key) for key in keys]
        self._wanted.difference_update(keys)
        self._announce(keys, removed=True)

    def _announce(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self.events is not None:
            # vLLM keeps what it knows of a block until the removal that is said to be expected.
            event = OffloadingEvent(keys, Medium.STORAGE, removed, removal_expected=not removed)
            self.events.append(event)


class DiskRoute(Route):
    """Loads of a worker from host memory and from its disk; ids after those of host memory are rows
    of the disk. A thread of its own writes lots behind, and gives way while `loading` says so."""

    def __init__(
        self, host: Sequence[torch.Tensor], device: Sequence[torch.Tensor], file: DiskFile,
        loading: Callable[[], bool], report: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        super().__init__(host, device)
        self._file, self._loading, self._report = file, loading, report
        self._host_blocks, self._lock = len(host[0]), threading.Lock()
        self._news, self._lost = DiskNews(), set[int]()
        self._thread = ThreadPoolExecutor(1, "kappa-write-behind")
        self.writes = 0
        """Lots that wait or are being written."""

    def disk_blocks(self, src_ids: np.ndarray) -> int:
        return int((src_ids >= self._host_blocks).sum())

    def copy(self, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
        rows = src_ids >= self._host_blocks
        super().copy(src_ids[~rows], dst_ids[~rows])
        wanted, places = src_ids[rows] - self._host_blocks, dst_ids[rows]
        whole = self._file.read(wanted, self.dst, places)
        if not whole.all():
            with self._lock:
                self._lost.update(places[~whole].tolist())
                self._news.lost.update(wanted[~whole].tolist())
            self._report({"kind": "tier_failed", "why": "load"})

    def submit(self, write: DiskWrite) -> None:
        """Write a lot when loads leave time for it."""
        with self._lock:
            self.writes += 1
        self._thread.submit(self._write, write)

    def take_news(self) -> DiskNews:
        """Return and forget the news for the manager."""
        with self._lock:
            news, self._news = self._news, DiskNews()
        return news

    def take_lost(self) -> set[int]:
        """Return and forget the device's blocks that failed to load."""
        with self._lock:
            lost, self._lost = self._lost, set()
        return lost

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._file.close()

    def _write(self, write: DiskWrite) -> None:
        until_s = time.monotonic() + _GIVE_WAY_S
        while self._loading() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        done = False
        try:
            done = self._file.write(self.src, np.array(write.host_ids), np.array(write.rows))
        finally:
            with self._lock:
                self._news.written[write.number] = done
                self.writes -= 1
            if not done:
                self._report({"kind": "tier_failed", "why": "store"})
