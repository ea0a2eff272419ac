"""In which order a host link serves its transfers, and how long each takes. Pure.

The order is `scheduler.link_order`'s, in pieces, so that what is urgent waits for one at most.
`workers.vllm.link` is the thread that serves such a queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from scheduler.link_order import LOADS_FIRST, LinkOrder

LOAD, STORE = "load", "store"
# A transfer gives way only between pieces of about so many seconds (of one block at least).
PIECE_S = 0.02

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class LinkPace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a paced link takes, in real (dilated) seconds per token; zero means unpaced.

    dilation: real seconds per second of the node that it is paced as.
    """

    token_s: Seconds = 0.0
    store_token_s: Seconds = 0.0
    fixed_s: Seconds = 0.0
    dilation: Seconds = 1.0

    def load_s(self, tokens: int) -> float:
        """Real seconds that a load of `tokens` lasts on this link."""
        return self.fixed_s + tokens * self.token_s if self.token_s else 0.0

    def store_s(self, tokens: int) -> float:
        """Real seconds that a store of `tokens` lasts on this link."""
        return self.fixed_s + tokens * self.store_token_s if self.store_token_s else 0.0


class LinkRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the host tier shares its link.

    duplex: "full", a server per direction, or "half", one for both. order: "loads_first" or
    "fifo"; first come first served is vLLM's own order, and drops nothing. store_backlog_s: new
    stores are dropped while so many seconds of them are queued. late_wait_s: by how much one call
    may hold the engine up for stores whose blocks it wants to reuse; those beyond are dropped.
    Seconds are the node's own: a paced node's are dilated.
    """

    duplex: Literal["full", "half"] = "full"
    order: Literal["loads_first", "fifo"] = "loads_first"
    store_backlog_s: Seconds = 10.0
    late_wait_s: Seconds = 0.01

    def dilated(self, dilation: float) -> LinkRules:
        """The same in real seconds."""
        return msgspec.structs.replace(
            self,
            store_backlog_s=self.store_backlog_s * dilation,
            late_wait_s=self.late_wait_s * dilation,
        )


class Transfer:
    """One job: blocks `src_ids` to `dst_ids`. done: blocks handed out so far; took_s: its share of
    the link's time so far. dropped: give it up after the piece under way."""

    __slots__ = (
        "copy_s", "direction", "done", "dropped", "dst_ids", "job_id", "queued_s", "src_ids",
        "submitted_s", "took_s",
    )  # fmt: skip

    def __init__(
        self, job_id: int, direction: str, src_ids: np.ndarray, dst_ids: np.ndarray, now_s: float
    ) -> None:
        self.job_id, self.direction, self.submitted_s = job_id, direction, now_s
        self.src_ids, self.dst_ids = src_ids, dst_ids
        self.done = 0
        self.took_s = self.copy_s = self.queued_s = 0.0
        self.dropped = False

    @property
    def blocks(self) -> int:
        return len(self.src_ids)


class Piece(NamedTuple):
    """Blocks `start` to `stop` of a transfer, and what the link should take for them."""

    transfer: Transfer
    start: int
    stop: int
    seconds: float

    @property
    def last(self) -> bool:
        """Whether the transfer is complete with it."""
        return self.stop == self.transfer.blocks


class LinkQueue:
    """Transfers that wait for one link, and which piece of which goes next.

    Args:
        order: "loads_first" or "fifo".
        seconds: what so many blocks take, by direction, from the start of a transfer.
    """

    def __init__(self, order: str, seconds: Callable[[str, int], float]) -> None:
        self._in_pieces, self._seconds = order == LOADS_FIRST, seconds
        self.order = LinkOrder[Transfer](order, lambda store: self._piece(store).seconds)

    def add(self, transfer: Transfer) -> None:
        """Queue a transfer behind those of its direction, or with "fifo" behind all."""
        self.order.add(transfer, load=transfer.direction == LOAD)

    def next(self) -> Piece | None:
        """Hand out the next piece; None if nothing waits."""
        queue = self.order.next_queue()
        if queue is None:
            return None
        transfer = queue[0]
        piece = self._piece(transfer)
        transfer.done = piece.stop
        if piece.last:
            queue.popleft()
        return piece

    def served(self, piece: Piece, seconds: float) -> None:
        """A piece took `seconds` of the link's time."""
        self.order.served(seconds, load=piece.transfer.direction == LOAD)

    def hurry(self, job_ids: set[int], budget_s: float, serving: Transfer | None) -> list[Transfer]:
        """Put these stores before everything else, as many as take `budget_s` together.

        Returns those that do not fit: they are forgotten, save `serving`, which is only marked.
        """
        dropped: list[Transfer] = []
        for queue in (self.order.urgent, self.order.stores):
            for transfer in [t for t in queue if t.job_id in job_ids]:
                seconds = self._span_s(transfer, transfer.done, transfer.blocks)
                if seconds <= budget_s:
                    budget_s -= seconds
                    if queue is self.order.stores:
                        queue.remove(transfer)
                        self.order.urgent.append(transfer)
                    continue
                queue.remove(transfer)
                if transfer is serving:
                    transfer.dropped = True
                else:
                    dropped.append(transfer)
        return dropped

    def forget(self, transfer: Transfer) -> None:
        """Hand out no more of this transfer."""
        for queue in (self.order.urgent, self.order.loads, self.order.stores):
            if transfer in queue:
                queue.remove(transfer)

    def _piece(self, transfer: Transfer) -> Piece:
        start, stop = transfer.done, transfer.blocks
        block_s = self._seconds(transfer.direction, 2) - self._seconds(transfer.direction, 1)
        if self._in_pieces and block_s > 0:
            stop = min(stop, start + max(int(PIECE_S / block_s + 1e-6), 1))
        return Piece(transfer, start, stop, self._span_s(transfer, start, stop))

    def _span_s(self, transfer: Transfer, start: int, stop: int) -> float:
        before_s = self._seconds(transfer.direction, start) if start else 0.0
        return self._seconds(transfer.direction, stop) - before_s
