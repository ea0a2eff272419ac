"""The path between host memory and device: the thread that serves its queue of transfers.

A real copy, and on a paced node as many seconds as the named node's link would take. A full-duplex
link is two of them, one per direction; a half-duplex one serves loads and stores alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import structlog
import torch
from vllm.v1.kv_offload.base import TransferResult

from scheduler.link_order import LOADS_FIRST
from workers.vllm.link_queue import STORE, LinkQueue, LinkRules, Piece, Transfer

log = structlog.get_logger(__name__)

_POLL_S = 0.2
_RATE_WEIGHT = 0.2


class Route(NamedTuple):
    """Where a direction's blocks come from and go to: int8 tensors of shape (blocks, bytes of one
    block), pairwise."""

    src: Sequence[torch.Tensor]
    dst: Sequence[torch.Tensor]


class Link:
    """A serial server in a thread: the whole of a half-duplex link, or one direction of a full one.

    Args:
        routes: by direction; a link serves those that it has a route for.
        rules: its order, and how long a caller of `wait` is held up for late stores.
        pace_s: the least seconds that so many blocks last, by direction; 0 on an unpaced link.
        report: gets a message for every transfer that ended, and for every one that was dropped.
        sleep: waits for a paced piece to end.
    """

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
        self._unfinished: dict[int, str] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._free_at_s = 0.0
        name = f"kappa-link-{'-'.join(routes)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, direction: str, job_id: int, src_ids: np.ndarray, dst_ids: np.ndarray) -> bool:
        """Queue one transfer of blocks `src_ids` to `dst_ids` (equal lengths)."""
        if len(src_ids) != len(dst_ids):
            raise ValueError(
                f"{direction} job {job_id}: {len(src_ids)} source blocks, {len(dst_ids)} targets"
            )
        with self._changed:
            self._unfinished[job_id] = direction
            self._queue.add(Transfer(job_id, direction, src_ids, dst_ids, time.monotonic()))
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

    def has_unfinished(self, direction: str) -> bool:
        """Whether a transfer in this direction is queued or running."""
        with self._changed:
            return direction in self._unfinished.values()

    def wait_change(self, timeout_s: float) -> None:
        """Wait until a transfer ends, at most `timeout_s`; returns at once if one has ended."""
        with self._changed:
            if not self._done and self._unfinished:
                self._changed.wait(timeout_s)

    def wait(self, job_ids: set[int]) -> None:
        """Block until none of `job_ids` is unfinished here (vLLM asks before it reuses blocks).

        Loads first: stores among them go before everything else, and those for which there is no
        time are dropped, so this lasts late_wait_s and one piece at most. A load is waited for.
        """
        with self._changed:
            if self._loads_first:
                for late in self._queue.hurry(job_ids, self._late_wait_s, self._serving):
                    self._drop(late, "late")
            self._changed.notify_all()
            while not self._unfinished.keys().isdisjoint(job_ids) and not self._closed:
                self._changed.wait(_POLL_S)

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
                    self._changed.wait(_POLL_S)
                if piece is None or self._closed:
                    return
                self._serving = piece.transfer
            self._serve(piece)

    def _serve(self, piece: Piece) -> None:
        transfer = piece.transfer
        # A paced link is busy from the moment the job could start, not from when this thread
        # woke up, so that scheduling noise does not add up over a queue of jobs.
        start_s = max(transfer.submitted_s, self._free_at_s)
        if piece.start == 0:
            transfer.queued_s = start_s - transfer.submitted_s
        copied = self._copy(piece)
        pace_s = piece.seconds if self._pace_s(transfer.direction, piece.stop) else 0.0
        remaining_s = start_s + pace_s - time.monotonic()
        if remaining_s > 0:
            self._sleep(remaining_s)
        end_s = time.monotonic()
        self._free_at_s = start_s + pace_s if pace_s and remaining_s > 0 else end_s
        transfer.took_s += end_s - start_s
        with self._changed:
            self._serving = None
            self._queue.served(piece, end_s - start_s)
            if not copied:
                self._give_up(transfer)
            elif transfer.dropped and not piece.last:
                self._drop(transfer, "late")
            elif piece.last:
                self._finish(transfer)
            self._changed.notify_all()

    def _copy(self, piece: Piece) -> bool:
        transfer, route = piece.transfer, self._routes[piece.transfer.direction]
        src_ids = torch.from_numpy(transfer.src_ids[piece.start : piece.stop])
        dst_ids = torch.from_numpy(transfer.dst_ids[piece.start : piece.stop])
        start_s = time.monotonic()
        try:
            for src, dst in zip(route.src, route.dst, strict=True):
                dst.index_copy_(0, dst_ids, src.index_select(0, src_ids))
        except (IndexError, RuntimeError):
            # A dead thread would leave the engine waiting for ever.
            log.exception("transfer_failed", direction=transfer.direction, job_id=transfer.job_id)
            return False
        seconds = time.monotonic() - start_s
        transfer.copy_s += seconds
        block_s = seconds / max(len(src_ids), 1)
        known_s = self.block_s[transfer.direction] or block_s
        self.block_s[transfer.direction] = known_s + _RATE_WEIGHT * (block_s - known_s)
        return True

    def _give_up(self, transfer: Transfer) -> None:
        self._queue.forget(transfer)
        if transfer.direction == STORE and self._loads_first:
            self._drop(transfer, "failed")
        else:
            # vLLM fails loudly on this. With its own order nothing may be dropped: nobody listens.
            self._end(TransferResult(transfer.job_id, False))

    def _drop(self, transfer: Transfer, why: str) -> None:
        # For vLLM a dropped store has ended like any other; the connector informs its manager.
        self._dropped.add(transfer.job_id)
        self._end(TransferResult(transfer.job_id, True))
        self._report({"kind": "store_dropped", "blocks": transfer.blocks, "why": why})

    def _finish(self, transfer: Transfer) -> None:
        block_bytes = sum(int(t.shape[1]) for t in self._routes[transfer.direction].src)
        moved_bytes = transfer.blocks * block_bytes
        self._end(TransferResult(transfer.job_id, True, moved_bytes, transfer.took_s))
        self._report(
            {
                "kind": transfer.direction,
                "job": transfer.job_id,
                "blocks": transfer.blocks,
                "bytes": moved_bytes,
                "queued_s": transfer.queued_s,
                "took_s": transfer.took_s,
                "copy_s": transfer.copy_s,
                "pace_s": self._pace_s(transfer.direction, transfer.blocks),
            }
        )

    def _end(self, result: TransferResult) -> None:
        self._unfinished.pop(result.job_id, None)
        self._done.append(result)
