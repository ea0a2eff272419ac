"""The path between host memory and device: a queue of transfers, and the thread that serves it. A
full-duplex link is two of them; a half-duplex link serves loads and stores alike. Transfers are
copied in pieces, in the order of `kappa_scheduler.link_order`: an urgent transfer waits for one
piece at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import structlog
import torch
from vllm.v1.kv_offload.base import TransferResult

from kappa_scheduler.link_order import LOADS_FIRST, LinkOrder
from kappa_workers.paced.rows import copy_rows
from kappa_workers.vllm.load_sources import LOAD, averaged_s
from kappa_workers.vllm.options import LinkRules

log = structlog.get_logger(__name__)

# A transfer gives way only between pieces; seconds of one, which is at least a block.
PIECE_S = 0.02
_POLL_S = 0.2
# A layer that is waited for longer never comes; less than vLLM waits for a step.
_STUCK_S = 120.0


def exposed_s(landed_s: Sequence[float], start_s: float, compute_s: float) -> float:
    """Seconds of a load that its step does not hide: its layers, of `compute_s` together, are
    computed one after the other, each once it has landed (paper 001, Eq. 4)."""
    end_s, layer_s = start_s, compute_s / max(len(landed_s), 1)
    for landed in landed_s:
        end_s = max(end_s, landed) + layer_s
    return end_s - start_s - compute_s if landed_s else 0.0


@dataclass(slots=True, eq=False)
class Transfer:
    """One job: blocks `src_ids` to `dst_ids`, in pieces of blocks, or layer by layer."""

    job_id: int
    direction: str
    src_ids: np.ndarray
    dst_ids: np.ndarray
    submitted_s: float
    # Blocks (or layers) handed out so far.
    done: int = 0
    # Its share of the link's time so far.
    took_s: float = 0.0
    # Whether it is given up after the piece under way.
    dropped: bool = False
    # Layers that it is copied by, one by one; 0: by blocks.
    layers: int = 0
    # When each layer was there (monotonic).
    landed_s: list[float] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return len(self.src_ids)

    @property
    def units(self) -> int:
        """How many layers, or else blocks, it has."""
        return self.layers or self.blocks


class Piece(NamedTuple):
    """Blocks (or layers) `start` to `stop` of a transfer, and what the link should take for it."""

    transfer: Transfer
    start: int
    stop: int
    seconds: float

    @property
    def last(self) -> bool:
        return self.stop == self.transfer.units


class LinkQueue:
    """Transfers that wait for one link. It picks the next piece by `order`: "loads_first", or
    "fifo" for whole transfers. seconds: of a number of blocks, by direction, from a transfer's
    start. Pure."""

    def __init__(self, order: str, seconds: Callable[[str, int], float]) -> None:
        self._in_pieces, self._seconds = order == LOADS_FIRST, seconds
        self.order = LinkOrder[Transfer](order, lambda store: self._piece(store).seconds)

    def add(self, transfer: Transfer) -> None:
        """Queue a transfer behind those of its direction, or with "fifo" behind all."""
        self.order.add(transfer, load=transfer.direction == LOAD)

    def next(self) -> Piece | None:
        queue = self.order.next_queue()
        if queue is None:
            return None
        piece = self._piece(queue[0])
        piece.transfer.done = piece.stop
        if piece.last:
            queue.popleft()
        return piece

    def served(self, piece: Piece, seconds: float) -> None:
        self.order.served(seconds, load=piece.transfer.direction == LOAD)

    def hurry(self, job_ids: set[int], budget_s: float, serving: Transfer | None) -> list[Transfer]:
        """Put these stores before everything else, as many as take `budget_s` together; the others
        are returned and forgotten, save `serving`, which is only marked."""
        dropped: list[Transfer] = []
        for queue in (self.order.urgent, self.order.stores):
            for transfer in [t for t in queue if t.job_id in job_ids]:
                seconds = self._span_s(transfer, transfer.done, transfer.units)
                fits = seconds <= budget_s
                if fits:
                    budget_s -= seconds
                if fits and queue is self.order.urgent:
                    continue
                queue.remove(transfer)
                if fits:
                    self.order.urgent.append(transfer)
                elif transfer is serving:
                    transfer.dropped = True
                else:
                    dropped.append(transfer)
        return dropped

    def forget(self, transfer: Transfer) -> None:
        for queue in (self.order.urgent, self.order.loads, self.order.stores):
            if transfer in queue:
                queue.remove(transfer)

    def _piece(self, transfer: Transfer) -> Piece:
        start, stop = transfer.done, transfer.units
        if transfer.layers:
            return Piece(transfer, start, start + 1, self._span_s(transfer, start, start + 1))
        block_s = self._seconds(transfer.direction, 2) - self._seconds(transfer.direction, 1)
        if self._in_pieces and block_s > 0:
            stop = min(stop, start + max(int(PIECE_S / block_s + 1e-6), 1))
        return Piece(transfer, start, stop, self._span_s(transfer, start, stop))

    def _span_s(self, transfer: Transfer, start: int, stop: int) -> float:
        if transfer.layers:  # all last alike
            whole_s = self._seconds(transfer.direction, transfer.blocks)
            return whole_s * (stop - start) / transfer.layers
        before_s = self._seconds(transfer.direction, start) if start else 0.0
        return self._seconds(transfer.direction, stop) - before_s


class Route:
    """Where a direction's blocks come from and go to: int8 tensors of shape (blocks, bytes of one
    block), pairwise, in host memory.

    Raises:
        TypeError: they lie elsewhere.
    """

    def __init__(self, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor]) -> None:
        self.src, self.dst = ([tensor.numpy() for tensor in side] for side in (src, dst))

    def disk_blocks(self, _src_ids: np.ndarray) -> int:
        """How many of these blocks are read from a disk."""
        return 0

    def copy(self, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
        """Raises:
        IndexError: there is no such block.
        """
        copy_rows(self.dst, dst_ids, self.src, src_ids)

    def copy_layer(self, number: int, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
        """The blocks' part in one pair of tensors; raises as `copy`."""
        copy_rows([self.dst[number]], dst_ids, [self.src[number]], src_ids)


class Link:
    """A serial server in a thread: the whole of a half-duplex link, or one direction of a full one.

    routes: by direction, those that it serves. pace_s: the least seconds of a number of blocks, by
    direction; 0 on an unpaced link. report: gets a message for every transfer that ended or was
    dropped. sleep: waits for a paced piece to end."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        rules: LinkRules,
        pace_s: Callable[[str, int], float],
        report: Callable[[dict[str, object]], None],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._routes, self._pace_s, self._report, self._sleep = routes, pace_s, report, sleep
        self._loads_first, self._late_wait_s = rules.order == LOADS_FIRST, rules.late_wait_s
        self.block_s = dict.fromkeys(routes, 0.0)
        """Measured seconds per block, by direction; 0 before the first."""
        self._queue = LinkQueue(rules.order, self._expected_s)
        self._serving: Transfer | None = None
        self._done: list[TransferResult] = []
        self._dropped: set[int] = set()
        self._lost: set[int] = set()
        self._unfinished: dict[int, str] = {}
        self._layered: list[Transfer] = []
        self._changed = threading.Condition()
        self._closed = False
        self._free_at_s = 0.0
        name = f"kappa-link-{'-'.join(routes)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        direction: str,
        job_id: int,
        src_ids: np.ndarray,
        dst_ids: np.ndarray,
        by_layer: bool = False,
    ) -> bool:
        """Queue one transfer of blocks `src_ids` to `dst_ids` (equal lengths)."""
        if len(src_ids) != len(dst_ids):
            raise ValueError(
                f"{direction} job {job_id}: {len(src_ids)} source blocks, {len(dst_ids)} targets"
            )
        with self._changed:
            self._unfinished[job_id] = direction
            # Indices of tensors are 64 bits wide; vLLM's ids are 32 from 0.31 on.
            ids = src_ids.astype(np.int64, copy=False), dst_ids.astype(np.int64, copy=False)
            transfer = Transfer(job_id, direction, *ids, time.monotonic())
            if by_layer:
                transfer.layers = len(self._routes[direction].src)
                self._layered.append(transfer)
            self._queue.add(transfer)
            self._changed.notify_all()
        return True

    def take_finished(self) -> list[TransferResult]:
        """Return and forget the transfers that ended since the last call, dropped ones too."""
        with self._changed:
            finished, self._done = self._done, []
        return finished

    def take_dropped(self) -> set[int]:
        """Return and forget the stores that were given up: nothing of theirs may be used."""
        with self._changed:
            dropped, self._dropped = self._dropped, set()
        return dropped

    def take_lost(self) -> set[int]:
        """Return and forget the device's blocks that failed to load: they hold nothing."""
        with self._changed:
            lost, self._lost = self._lost, set()
        return lost

    def has_unfinished(self, direction: str = "") -> bool:
        """Whether a transfer (in this direction) is queued or running."""
        with self._changed:
            return direction in self._unfinished.values() if direction else bool(self._unfinished)

    def wait_change(self, timeout_s: float) -> None:
        """Wait until a transfer ends, at most `timeout_s`; returns at once if one has ended."""
        with self._changed:
            if not self._done and self._unfinished:
                self._changed.wait(timeout_s)

    def wait(self, job_ids: set[int]) -> None:
        """Block until none of `job_ids` is unfinished here (vLLM asks before it reuses blocks).
        Loads first: stores among them go before everything else, and those for which there is no
        time are dropped, so this lasts late_wait_s and one piece at most. A load is waited for."""
        with self._changed:
            if self._loads_first:
                for late in self._queue.hurry(job_ids, self._late_wait_s, self._serving):
                    self._drop(late, "late")
            self._changed.notify_all()
            while not self._unfinished.keys().isdisjoint(job_ids) and not self._closed:
                self._changed.wait(_POLL_S)

    def wait_layer(self, layer: int) -> None:
        """Block until this layer, and all before it, of every transfer by layers is there or will
        not come.

        Raises:
            TimeoutError: nothing moves; no memory may hold an engine up for ever.
        """

        def there() -> bool:
            moving = (t for t in self._layered if t.job_id in self._unfinished)
            return self._closed or all(len(t.landed_s) > layer for t in moving)

        with self._changed:
            if not self._changed.wait_for(there, _STUCK_S):
                raise TimeoutError(f"no layer came from the host tier for {_STUCK_S:.0f} s")

    def take_layered(self) -> list[list[float]]:
        """When the layers of each transfer by layers were there; forgets those that ended."""
        with self._changed:
            ended = [t for t in self._layered if t.job_id not in self._unfinished]
            self._layered = [t for t in self._layered if t.job_id in self._unfinished]
        return [transfer.landed_s for transfer in ended]

    def close(self) -> None:
        """Stop the thread; queued transfers are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def _expected_s(self, direction: str, blocks: int) -> float:
        return self._pace_s(direction, blocks) or blocks * self.block_s.get(direction, 0.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (piece := self._queue.next()) is None and not self._closed:
                    self._changed.wait()
                if piece is None or self._closed:
                    return
                self._serving = piece.transfer
            self._serve(piece)

    def _serve(self, piece: Piece) -> None:
        transfer = piece.transfer
        # A paced link is busy from the moment the job could start, not from when this thread
        # woke up, so that scheduling noise does not add up over a queue of jobs.
        start_s = max(transfer.submitted_s, self._free_at_s)
        copied = self._copy(piece)
        pace_s = piece.seconds if self._pace_s(transfer.direction, piece.stop) else 0.0
        remaining_s = start_s + pace_s - time.monotonic()
        if remaining_s > 0:
            self._sleep(remaining_s)
        end_s = time.monotonic()
        self._free_at_s = start_s + pace_s if remaining_s > 0 else end_s
        transfer.took_s += end_s - start_s
        with self._changed:
            self._serving = None
            self._queue.served(piece, end_s - start_s)
            if not copied:
                self._queue.forget(transfer)
                self._fail(transfer)
            else:
                if transfer.layers:
                    transfer.landed_s.append(self._free_at_s)
                if piece.last:
                    self._finish(transfer)
                elif transfer.dropped:
                    self._drop(transfer, "late")
            self._changed.notify_all()

    def _copy(self, piece: Piece) -> bool:
        transfer, route = piece.transfer, self._routes[piece.transfer.direction]
        start_s = time.monotonic()
        try:
            if transfer.layers:
                route.copy_layer(piece.start, transfer.src_ids, transfer.dst_ids)
            else:
                span = slice(piece.start, piece.stop)
                route.copy(transfer.src_ids[span], transfer.dst_ids[span])
        except (IndexError, RuntimeError):
            # A dead thread would leave the engine waiting for ever.
            log.exception("transfer_failed", direction=transfer.direction, job_id=transfer.job_id)
            return False
        seconds = time.monotonic() - start_s
        blocks = transfer.blocks * (piece.stop - piece.start) / max(transfer.units, 1)
        known_s, latest_s = self.block_s[transfer.direction], seconds / max(blocks, 1e-9)
        self.block_s[transfer.direction] = averaged_s(known_s, latest_s)
        return True

    def _fail(self, transfer: Transfer) -> None:
        if transfer.direction == LOAD:
            # vLLM knows success only, and computes the blocks that are named as lost.
            self._lost.update(transfer.dst_ids.tolist())
            self._end(TransferResult(transfer.job_id, True))
            failed = {"job": transfer.job_id, "blocks": transfer.blocks}
            self._report({"kind": "tier_failed", "why": "load", **failed})
        elif self._loads_first:
            self._drop(transfer, "failed")
        else:
            # In vLLM's own order its manager learns of no dropped store: vLLM fails loudly.
            self._end(TransferResult(transfer.job_id, False))

    def _drop(self, transfer: Transfer, why: str) -> None:
        # For vLLM a dropped store has ended like any other; the connector informs its manager.
        self._dropped.add(transfer.job_id)
        self._end(TransferResult(transfer.job_id, True))
        self._report({"kind": "store_dropped", "blocks": transfer.blocks, "why": why})

    def _finish(self, transfer: Transfer) -> None:
        direction, blocks = transfer.direction, transfer.blocks
        moved_bytes = blocks * sum(int(t.shape[1]) for t in self._routes[direction].src)
        self._end(TransferResult(transfer.job_id, True, moved_bytes, transfer.took_s))
        self._report({
            "kind": direction, "job": transfer.job_id, "blocks": blocks, "bytes": moved_bytes,
            "disk_blocks": self._routes[direction].disk_blocks(transfer.src_ids),
            "took_s": transfer.took_s,
        })  # fmt: skip

    def _end(self, result: TransferResult) -> None:
        self._unfinished.pop(result.job_id, None)
        self._done.append(result)
