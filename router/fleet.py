"""All workers as columns of one matrix, so that a request is priced on every one of them at once.

A row is one quantity (seconds per token, queued seconds, requests in flight), a column one worker.
Joining, reserving and releasing touch single cells; `price` is one compiled loop.
The queues are arithmetic, not a forecast step by step (`router.shadow` is, for small pools): the
work reserved and not yet done, less what the engine must have done since it last finished some.
Pure: each call takes the time. Seconds are real ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kappa.hardware import NodeProfile
from kappa.protocol import Announcement
from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from router import pricing
from router import pricing as at  # the rows: at.GPU_OUT
from router.index.prefix_hash import UInt64s
from router.offers import Floats, Offers

USE_WINDOW_S = 20.0
_FIRST_COLUMNS = 8


@dataclass(slots=True)
class Reservation:
    """What one request put on its worker, and takes away again."""

    slot: int
    link_s: float
    gpu_s: float
    new_tokens: int
    context_tokens: int
    fetch_tokens: float = 0.0
    prefilled: bool = False


def load_token_s(said: Announcement) -> float:
    """Real seconds to load one token, as announced."""
    return said.node.dilation * said.kv_bytes_per_token / said.node.h2d_bytes_per_s


class Fleet:
    """The matrix, and the requests reserved on it.

    window_s: how far back recent use looks. first: at which share of all workers the order begins
    in which they are offered, and so who wins a tie; routers that share workers take different ones
    lest all send their next request to the same idle worker.
    """

    def __init__(self, window_s: float = USE_WINDOW_S, first: float = 0.0) -> None:
        if not 0 <= first < 1:
            raise ValueError(f"first is {first}; give a share of the workers, from 0 to below 1")
        self.window_s, self._first = window_s, first
        self.workers: list[str] = []
        self._nodes: dict[str, NodeProfile] = {}
        self._known: tuple[NodeProfile, ...] = ()
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._cells: Floats = np.zeros((at.ROWS, _FIRST_COLUMNS))
        self._active: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self._place: list[int] = []
        self._names: list[str] = []
        self._flights: dict[str, Reservation] = {}
        self._queues: list[OrderedDict[str, float]] = []
        # Compiled now rather than while the first request waits.
        self.price(
            self._active, 0.0, prompt_tokens=1, device_tokens=_NOTHING, cached_tokens=_NOTHING,
            output_tokens=1,
        )  # fmt: skip
        self.idle_ttft_s(self._active, 1, 0.0)
        self.idle_tpot_s(self._active, 1)
        pricing.backlogs_s(self._cells, 0, 0.0)

    # -- workers ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, worker: str) -> int:
        """The column of a worker; KeyError if it has none."""
        return self._slots[worker]

    def profiles(self, slots: NDArray[np.intp]) -> tuple[NodeProfile, ...]:
        """What the workers in some columns announced."""
        if len(slots) == len(self._active):
            return self._known
        return tuple(self._nodes[self.workers[slot]] for slot in slots)

    def join(self, said: Announcement, now_s: float) -> None:
        """A worker gets a column, which it keeps for life; again: only what it is changes."""
        slot = self._slots.get(said.worker)
        if slot is None:
            slot = self._free.pop() if self._free else self._grow()
            self._slots[said.worker] = slot
            self.workers[slot] = said.worker
            self._cells[:, slot] = 0.0
            self._cells[at.GPU_SINCE, slot] = self._cells[at.USE_AT, slot] = now_s
        self._nodes[said.worker] = said.node
        self._activate()
        cells = self._cells
        cells[at.BUDGET, slot] = said.max_batch_tokens
        cells[at.CAPACITY, slot] = (said.device_blocks - 1) * said.block_tokens
        cells[at.CRIT, slot] = said.kappa_crit
        cells[at.LINK_RATE, slot] = said.node.h2d_bytes_per_s
        cells[at.FLOPS, slot] = said.node.flops_per_s
        cells[at.COST, slot] = said.node.cost_per_hour
        cells[at.LOAD_FIXED, slot] = said.node.load_fixed_s * said.node.dilation
        cells[at.NET, slot] = said.net_bytes_per_s / (said.kv_bytes_per_token * said.node.dilation)
        cells[at.DILATION, slot] = said.node.dilation
        cells[at.SEEN, slot] = now_s
        self.calibrate(said, 1.0, 1.0, 0.0)

    def calibrate(
        self, said: Announcement, link_scale: float, compute_scale: float, overhead_s: float
    ) -> None:
        """The announced speeds, corrected; compute_scale is that of FLOPs, memory has none."""
        slot, step, cells = self._slots[said.worker], said.step, self._cells
        stretch, flops_stretch = step.dilation, step.dilation * compute_scale
        cells[at.LOAD_TOKEN, slot] = load_token_s(said) * link_scale
        cells[at.TOKEN, slot] = step.token_s * flops_stretch
        cells[at.PAIR, slot] = step.pair_s * flops_stretch
        cells[at.WEIGHTS, slot] = step.weights_s * stretch
        cells[at.CONTEXT, slot] = step.context_token_s * stretch
        cells[at.STEP, slot] = step.fixed_s * stretch
        cells[at.OVERHEAD, slot] = overhead_s

    def seen(self, worker: str, now_s: float) -> None:
        """A worker gave a sign of life."""
        self._cells[at.SEEN, self._slots[worker]] = now_s

    def spare(self, worker: str, tokens: float) -> None:
        """A worker's host tier has room for so many tokens that a peer holds too."""
        self._cells[at.SPARE, self._slots[worker]] = tokens

    def promise(self, worker: str, tokens: float) -> None:
        """So many more tokens (or fewer) are to come into a worker's host tier."""
        slot = self._slots.get(worker)
        if slot is not None:
            promised = self._cells[at.PROMISED, slot] + tokens
            self._cells[at.PROMISED, slot] = max(promised, 0.0)

    def leave(self, worker: str) -> None:
        """A worker is gone, with all that was reserved there."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        for request_id in [r for r, f in self._flights.items() if f.slot == slot]:
            del self._flights[request_id]
        self._queues[slot].clear()
        self.workers[slot] = ""
        del self._nodes[worker]
        self._free.append(slot)
        self._activate()

    def _grow(self) -> int:
        slot = len(self.workers)
        if slot == self._cells.shape[1]:
            # Not twice as many: rows whole memory pages apart would share a few cache lines.
            more = self._cells.shape[1] + _FIRST_COLUMNS
            self._cells = np.hstack([self._cells, np.zeros((at.ROWS, more))])
        self.workers.append("")
        self._queues.append(OrderedDict())
        return slot

    def _activate(self) -> None:
        slots = np.array(sorted(self._slots.values()), dtype=np.intp)
        self._active = np.roll(slots, -int(self._first * len(slots)))
        self._names = [self.workers[slot] for slot in self._active]
        self._known = tuple(self._nodes[name] for name in self._names)
        self._place = [-1] * len(self.workers)
        for place, slot in enumerate(self._active.tolist()):
            self._place[slot] = place

    # -- requests -----------------------------------------------------------------------------

    def reserve(self, request_id: str, offers: Offers, index: int) -> None:
        """Put a request on the worker of `offers` that was chosen."""
        slot, cells = int(offers.slots[index]), self._cells
        now_s, link_s = offers.now_s, float(offers.load_s[index])
        gpu_s, new = float(offers.work_s[index]), int(offers.new_tokens[index])
        flight = Reservation(slot, link_s, gpu_s, new, offers.prompt_tokens)
        self._flights[request_id] = flight
        queue = self._queues[slot]
        if not queue:
            cells[at.GPU_SINCE, slot], cells[at.GPU_HEAD, slot] = now_s, gpu_s
        queue[request_id] = gpu_s
        cells[at.LINK_OUT, slot] += link_s
        cells[at.LINK_FREE, slot] = max(cells[at.LINK_FREE, slot], now_s) + link_s
        if offers.fetch_s is not None and offers.fetch_tokens is not None:
            flight.fetch_tokens = float(offers.fetch_tokens[index])
            cells[at.PROMISED, slot] += flight.fetch_tokens
            ends = np.array([slot, self._slots[offers.fetch_from]])
            self.transfer(ends, float(offers.fetch_s[index]), now_s)
        cells[at.GPU_OUT, slot] += gpu_s
        cells[at.IN_FLIGHT, slot] += 1
        cells[at.WAITING, slot] += 1
        cells[at.QUEUED, slot] += new
        cells[at.RESIDENT, slot] += offers.prompt_tokens
        fade = math.exp(min(cells[at.USE_AT, slot] - now_s, 0.0) / self.window_s)
        cells[at.USE_AT, slot] = now_s
        cells[at.GPU_USE, slot] = cells[at.GPU_USE, slot] * fade + gpu_s / self.window_s
        cells[at.LOADS, slot] = cells[at.LOADS, slot] * fade + (link_s > 0) / self.window_s
        cells[at.PREFILLS, slot] = cells[at.PREFILLS, slot] * fade + 1 / self.window_s

    def holds(self, request_id: str, worker: str) -> bool:
        """Whether a request is reserved on that worker."""
        flight = self._flights.get(request_id)
        return flight is not None and flight.slot == self._slots.get(worker)

    def correct(self, request_id: str, host_tokens: int, new_tokens: int) -> None:
        """The engine admitted a request, with these tokens instead of the expected ones."""
        flight = self._flights.get(request_id)
        if flight is None or flight.prefilled or flight.new_tokens == new_tokens:
            return
        slot, cells = flight.slot, self._cells
        context = flight.context_tokens - new_tokens
        pairs = new_tokens * (context + 0.5 * new_tokens)
        gpu_s = float(new_tokens * cells[at.TOKEN, slot] + pairs * cells[at.PAIR, slot])
        link_s = float(host_tokens * cells[at.LOAD_TOKEN, slot])
        cells[at.GPU_OUT, slot] += gpu_s - flight.gpu_s
        cells[at.LINK_OUT, slot] += link_s - flight.link_s
        cells[at.LINK_FREE, slot] += link_s - flight.link_s
        cells[at.QUEUED, slot] += new_tokens - flight.new_tokens
        queue = self._queues[slot]
        queue[request_id] = gpu_s
        if next(iter(queue)) == request_id:
            cells[at.GPU_HEAD, slot] = gpu_s
        flight.link_s, flight.gpu_s, flight.new_tokens = link_s, gpu_s, new_tokens

    def prefilled(self, request_id: str, now_s: float) -> None:
        """A request's prompt is done: its link and gpu work are no longer ahead of anyone."""
        flight = self._flights.get(request_id)
        if flight is None or flight.prefilled:
            return
        self._done(request_id, flight, now_s)
        flight.prefilled = True
        self._cells[at.DECODING, flight.slot] += 1
        self._cells[at.DECODE_CONTEXT, flight.slot] += flight.context_tokens

    def release(self, request_id: str, now_s: float) -> None:
        """A request ended, however far it was."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        slot, cells = flight.slot, self._cells
        if flight.prefilled:
            cells[at.DECODING, slot] -= 1
            cells[at.DECODE_CONTEXT, slot] -= flight.context_tokens
        else:
            self._done(request_id, flight, now_s)
        cells[at.IN_FLIGHT, slot] -= 1
        cells[at.RESIDENT, slot] -= flight.context_tokens

    def _done(self, request_id: str, flight: Reservation, now_s: float) -> None:
        slot, cells, queue = flight.slot, self._cells, self._queues[flight.slot]
        first = next(iter(queue)) == request_id
        del queue[request_id]
        cells[at.LINK_OUT, slot] -= flight.link_s
        cells[at.GPU_OUT, slot] -= flight.gpu_s
        cells[at.WAITING, slot] -= 1
        cells[at.QUEUED, slot] -= flight.new_tokens
        cells[at.PROMISED, slot] = max(cells[at.PROMISED, slot] - flight.fetch_tokens, 0.0)
        if first:
            cells[at.GPU_SINCE, slot] = now_s
            cells[at.GPU_HEAD, slot] = next(iter(queue.values())) if queue else 0.0
        if not queue:
            # Sums of many small numbers drift; an empty queue is exactly empty.
            cells[at.LINK_OUT, slot] = cells[at.GPU_OUT, slot] = 0.0
            cells[at.LINK_FREE, slot] = now_s

    # -- what is asked ------------------------------------------------------------------------

    def backlog_s(self, worker: str, now_s: float) -> tuple[float, float]:
        """Seconds of queued work on one worker's (link, gpu)."""
        return pricing.backlogs_s(self._cells, self._slots[worker], now_s)

    def ready(
        self, now_s: float, stale_after_s: float, exclude: frozenset[str]
    ) -> NDArray[np.intp]:
        """Columns of the workers heard from lately and not excluded."""
        slots = self._active
        if math.isfinite(stale_after_s) and len(slots):
            fresh = now_s - self._cells[at.SEEN, slots] <= stale_after_s
            if not fresh.all():
                slots = slots[fresh]
        if exclude:
            out = [self._slots[w] for w in exclude if w in self._slots]
            if out:
                slots = slots[~np.isin(slots, out)]
        return slots

    def price(
        self,
        slots: NDArray[np.intp],
        now_s: float,
        *,
        prompt_tokens: int,
        device_tokens: Floats,
        cached_tokens: Floats,
        output_tokens: int,
        block_tokens: int = 1,
        prefix_hashes: UInt64s | None = None,
        session: str = "",
        fetch_tokens: Floats | None = None,
        fetch_from: str = "",
    ) -> Offers:
        """A request on each of `slots`, as arrays over them.

        device_tokens, cached_tokens: leading tokens in each tier; fetch_tokens: how many of the
        cached ones have to come from the worker `fetch_from` first. A transfer occupies the network
        cards of both ends, and takes for ever where the host tier has no spare room for it beside
        what was promised to others.
        """
        fetched, source = _NOTHING, -1
        if fetch_tokens is not None:
            fetched, source = fetch_tokens, self._slots[fetch_from]
        priced = pricing.price(
            self._cells, slots, now_s, self.window_s, float(prompt_tokens), float(output_tokens),
            device_tokens, cached_tokens, fetched, source, _SLO,
        )  # fmt: skip
        rows = list(priced)
        return Offers(
            now_s=now_s,
            workers=self._names if len(slots) == len(self._names) else self._named(slots),
            slots=slots,
            prompt_tokens=prompt_tokens,
            block_tokens=block_tokens,
            prefix_hashes=prefix_hashes if prefix_hashes is not None else _NO_HASHES,
            session=session,
            expected_output_tokens=output_tokens,
            device_tokens=device_tokens,
            cached_tokens=cached_tokens,
            new_tokens=rows[at.OUT_NEW],
            load_s=rows[at.OUT_LOAD],
            load_token_s=rows[at.OUT_LOAD_TOKEN],
            work_s=rows[at.OUT_WORK],
            compute_s=rows[at.OUT_COMPUTE],
            fixed_s=rows[at.OUT_FIXED],
            link_backlog_s=rows[at.OUT_LINK_BACKLOG],
            gpu_backlog_s=rows[at.OUT_GPU_BACKLOG],
            harm_s=rows[at.OUT_HARM],
            decode_s=rows[at.OUT_DECODE],
            own_late_s=rows[at.OUT_OWN_LATE],
            gpu_use=rows[at.OUT_GPU_USE],
            loads_per_s=rows[at.OUT_LOADS],
            prefills_per_s=rows[at.OUT_PREFILLS],
            in_flight=rows[at.OUT_IN_FLIGHT],
            waiting=rows[at.OUT_WAITING],
            queued_tokens=rows[at.OUT_QUEUED],
            resident_tokens=rows[at.OUT_RESIDENT],
            capacity_tokens=rows[at.OUT_CAPACITY],
            h2d_bytes_per_s=rows[at.OUT_LINK_RATE],
            flops_per_s=rows[at.OUT_FLOPS],
            cost_per_hour=rows[at.OUT_COST],
            kappa_crit=rows[at.OUT_CRIT],
            fetch_s=rows[at.OUT_FETCH] if fetch_tokens is not None else None,
            fetch_tokens=fetch_tokens,
            fetch_from=fetch_from,
            net_backlog_s=rows[at.OUT_NET_BACKLOG],
            ttft_s=rows[at.OUT_TTFT],
            tpot_s=rows[at.OUT_TPOT],
        )

    def idle_ttft_s(
        self, slots: NDArray[np.intp], prompt_tokens: int, held_tokens: float
    ) -> Floats:
        """TTFT on idle workers that hold `held_tokens` of the prompt in their host tiers."""
        return pricing.idle_ttft_s(self._cells, slots, float(prompt_tokens), float(held_tokens))

    def idle_tpot_s(self, slots: NDArray[np.intp], prompt_tokens: int) -> Floats:
        """Time per output token on idle workers."""
        return pricing.idle_tpot_s(self._cells, slots, float(prompt_tokens))

    def transfer(self, ends: NDArray[np.intp], seconds: float, now_s: float) -> None:
        """A transfer is queued on the network cards of two workers."""
        free_s = max(float(self._cells[at.NET_FREE, ends].max()), now_s)
        self._cells[at.NET_FREE, ends] = free_s + seconds

    def dilation(self, slots: NDArray[np.intp]) -> Floats:
        """Real seconds per emulated second of each worker."""
        dilations: Floats = self._cells[at.DILATION, slots]
        return dilations

    def place(self, worker: str, slots: NDArray[np.intp]) -> int:
        """Position of a worker among `slots`, or -1."""
        slot = self._slots.get(worker)
        if slot is None:
            return -1
        if len(slots) == len(self._active):
            return self._place[slot]
        found = np.flatnonzero(slots == slot)
        return int(found[0]) if len(found) else -1

    def _named(self, slots: NDArray[np.intp]) -> list[str]:
        return [self.workers[slot] for slot in slots]


_NO_HASHES: UInt64s = np.empty(0, dtype=np.uint64)
_NOTHING: Floats = np.empty(0)
_SLO = (TTFT_FLOOR_S, TTFT_IDLE_FACTOR, TPOT_IDLE_FACTOR)
