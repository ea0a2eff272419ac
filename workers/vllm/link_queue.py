"""In which order a link serves its transfers, and how long each takes. Pure.

The order is `scheduler.link_order`'s, in pieces, so that what is urgent waits for one at most.
`workers.vllm.link` is the thread that serves such a queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from scheduler.link_order import FIFO, FULL, HALF, LOADS_FIRST, LinkOrder

LOAD, STORE = "load", "store"
# A transfer gives way only between pieces of about so many seconds (of one block at least).
PIECE_S = 0.02


@dataclass(frozen=True, slots=True)
class LinkPace:
    """How long a paced link takes, in real (dilated) seconds per token; zero means unpaced.

    dilation: real seconds per second of the node that it is paced as.
    """

    token_s: float = 0.0
    store_token_s: float = 0.0
    fixed_s: float = 0.0
    dilation: float = 1.0

    def load_s(self, tokens: int) -> float:
        """Real seconds that a load of `tokens` lasts on this link."""
        return self.fixed_s + tokens * self.token_s if self.token_s else 0.0

    def store_s(self, tokens: int) -> float:
        """Real seconds that a store of `tokens` lasts on this link."""
        return self.fixed_s + tokens * self.store_token_s if self.store_token_s else 0.0


@dataclass(frozen=True, slots=True)
class LinkRules:
    """How the host tier shares its link (`kappa_link` of the connector's extra configuration).

    duplex: "full", a server per direction, or "half", one for both. order: "loads_first" or
    "fifo"; first come first served is vLLM's own order, and drops nothing. store_backlog_s: new
    stores are dropped while so many seconds of them are queued. late_wait_s: by how much one call
    may hold the engine up for stores whose blocks it wants to reuse; those beyond are dropped.
    Seconds are the node's own: a paced node's are dilated.
    """

    duplex: str = FULL
    order: str = LOADS_FIRST
    store_backlog_s: float = 10.0
    late_wait_s: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what is not a rule."""
        for name, known in (("duplex", (FULL, HALF)), ("order", (LOADS_FIRST, FIFO))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"kappa_link.{name} is {getattr(self, name)!r}: choose {' or '.join(known)}"
                )
        for name in ("store_backlog_s", "late_wait_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"kappa_link.{name} is {value}: give seconds, a finite number, at least 0"
                )

    def dilated(self, dilation: float) -> LinkRules:
        """The same in real seconds."""
        return replace(
            self,
            store_backlog_s=self.store_backlog_s * dilation,
            late_wait_s=self.late_wait_s * dilation,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> LinkRules:
        """Read the extra configuration; an unknown key is an error."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ValueError(f"kappa_link has no {', '.join(unknown)}: it takes {', '.join(known)}")
        return cls(**data)  # type: ignore[arg-type]


class Transfer:
    """One job: blocks `src_ids` to `dst_ids`; with `layers`, all of them layer by layer. done:
    blocks (or layers) handed out so far, landed: that have arrived; took_s: its share of the link's
    time so far. dropped: give it up after the piece under way."""

    __slots__ = (
        "copy_s", "direction", "done", "dropped", "dst_ids", "job_id", "landed", "layers",
        "queued_s", "src_ids", "submitted_s", "took_s",
    )  # fmt: skip

    def __init__(
        self,
        job_id: int,
        direction: str,
        src_ids: np.ndarray,
        dst_ids: np.ndarray,
        now_s: float,
        layers: int = 0,
    ) -> None:
        self.job_id, self.direction, self.submitted_s = job_id, direction, now_s
        self.src_ids, self.dst_ids = src_ids, dst_ids
        self.done = self.landed = 0
        self.layers = layers
        self.took_s = self.copy_s = self.queued_s = 0.0
        self.dropped = False

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return len(self.src_ids)

    @property
    def units(self) -> int:
        """What it is handed out in: layers, if it goes by them, or else blocks."""
        return self.layers or self.blocks


class Piece(NamedTuple):
    """Units `start` to `stop` of a transfer, and what the link should take for them."""

    transfer: Transfer
    start: int
    stop: int
    seconds: float

    @property
    def last(self) -> bool:
        """Whether the transfer is complete with it."""
        return self.stop == self.transfer.units


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
                seconds = self._left_s(transfer)
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
        start, stop = transfer.done, transfer.units
        if transfer.layers:
            # A layer is waited for on its own, so it travels on its own.
            return Piece(transfer, start, start + 1, self._span_s(transfer, start, start + 1))
        block_s = self._seconds(transfer.direction, 2) - self._seconds(transfer.direction, 1)
        if self._in_pieces and block_s > 0:
            stop = min(stop, start + max(int(PIECE_S / block_s + 1e-6), 1))
        return Piece(transfer, start, stop, self._span_s(transfer, start, stop))

    def _left_s(self, transfer: Transfer) -> float:
        return self._span_s(transfer, transfer.done, transfer.units)

    def _span_s(self, transfer: Transfer, start: int, stop: int) -> float:
        if transfer.layers:
            whole_s = self._seconds(transfer.direction, transfer.blocks)
            return whole_s * (stop - start) / transfer.layers
        before_s = self._seconds(transfer.direction, start) if start else 0.0
        return self._seconds(transfer.direction, stop) - before_s
