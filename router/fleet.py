"""All workers as columns of one matrix, so that a request is priced on every one of them at once.

A row is one quantity (seconds per token, queued seconds, requests in flight), a column one worker.
Joining, reserving and releasing touch single cells; `price` is a handful of vector operations.
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

from kappa.report import Announcement
from kappa.slo import TPOT_IDLE_FACTOR, TTFT_FLOOR_S, TTFT_IDLE_FACTOR
from kappa.types import NodeProfile
from router.offers import Floats, Offers
from router.prefix_hash import UInt64s

# Rows: what a worker is …
_LOAD_TOKEN, _LOAD_FIXED, _TOKEN, _PAIR, _WEIGHTS, _CONTEXT, _STEP = range(7)
_BUDGET, _CAPACITY, _CRIT, _LINK_RATE, _FLOPS, _COST, _OVERHEAD, _SEEN, _NET = range(7, 16)
# … and what it has to do.
_LINK_OUT, _LINK_FREE, _GPU_OUT, _GPU_SINCE, _GPU_HEAD, _IN_FLIGHT, _WAITING = range(16, 23)
_QUEUED, _RESIDENT, _DECODING, _DECODE_CONTEXT, _GPU_USE, _USE_AT = range(23, 29)
_DILATION, _LOADS, _PREFILLS, _NET_FREE, _SPARE, _PROMISED, _HOST = range(29, 36)
_ROWS = 36

USE_WINDOW_S = 20.0
_MOST_USE = 0.95


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


@dataclass(frozen=True, slots=True, eq=False)
class Rooms:
    """Workers as targets of copies, as arrays; seconds are real ones.

    spare_tokens: room in the host tier beside what is promised; host_tokens: all of it; backlog_s:
    queued work on the busier of link and gpu; net_backlog_s: queued on the network card.
    """

    spare_tokens: Floats
    host_tokens: Floats
    backlog_s: Floats
    h2d_bytes_per_s: Floats
    load_token_s: Floats
    net_tokens_per_s: Floats
    net_backlog_s: Floats


def load_token_s(said: Announcement) -> float:
    """Real seconds to load one token, as announced."""
    return said.node.dilation * said.kv_bytes_per_token / said.node.h2d_bytes_per_s


class Fleet:
    """The matrix, and the requests reserved on it. `window_s`: how far back recent use looks."""

    def __init__(self, window_s: float = USE_WINDOW_S) -> None:
        self.window_s = window_s
        self.workers: list[str] = []
        self._nodes: dict[str, NodeProfile] = {}
        self._known: tuple[NodeProfile, ...] = ()
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._cells: Floats = np.zeros((_ROWS, 8))
        self._active: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self._place: list[int] = []
        self._names: list[str] = []
        self._flights: dict[str, Reservation] = {}
        self._queues: list[OrderedDict[str, float]] = []

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
            self._cells[_GPU_SINCE, slot] = self._cells[_USE_AT, slot] = now_s
        self._nodes[said.worker] = said.node
        self._activate()
        cells = self._cells
        cells[_BUDGET, slot] = said.max_batch_tokens
        cells[_CAPACITY, slot] = (said.device_blocks - 1) * said.block_tokens
        cells[_HOST, slot] = said.host_blocks * said.block_tokens
        cells[_CRIT, slot] = said.kappa_crit
        cells[_LINK_RATE, slot] = said.node.h2d_bytes_per_s
        cells[_FLOPS, slot] = said.node.flops_per_s
        cells[_COST, slot] = said.node.cost_per_hour
        cells[_LOAD_FIXED, slot] = said.node.load_fixed_s * said.node.dilation
        cells[_NET, slot] = said.net_bytes_per_s / (said.kv_bytes_per_token * said.node.dilation)
        cells[_DILATION, slot] = said.node.dilation
        cells[_SEEN, slot] = now_s
        self.calibrate(said, 1.0, 1.0, 0.0)

    def calibrate(
        self, said: Announcement, link_scale: float, compute_scale: float, overhead_s: float
    ) -> None:
        """The announced speeds, corrected; compute_scale is that of FLOPs, memory has none."""
        slot, step, cells = self._slots[said.worker], said.step, self._cells
        stretch, flops_stretch = step.dilation, step.dilation * compute_scale
        cells[_LOAD_TOKEN, slot] = load_token_s(said) * link_scale
        cells[_TOKEN, slot] = step.token_s * flops_stretch
        cells[_PAIR, slot] = step.pair_s * flops_stretch
        cells[_WEIGHTS, slot] = step.weights_s * stretch
        cells[_CONTEXT, slot] = step.context_token_s * stretch
        cells[_STEP, slot] = step.fixed_s * stretch
        cells[_OVERHEAD, slot] = overhead_s

    def seen(self, worker: str, now_s: float) -> None:
        """A worker gave a sign of life."""
        self._cells[_SEEN, self._slots[worker]] = now_s

    def spare(self, worker: str, tokens: float) -> None:
        """A worker's host tier has room for so many tokens that a peer holds too."""
        self._cells[_SPARE, self._slots[worker]] = tokens

    def promise(self, worker: str, tokens: float) -> None:
        """So many more tokens (or fewer) are to come into a worker's host tier."""
        slot = self._slots.get(worker)
        if slot is not None:
            promised = self._cells[_PROMISED, slot] + tokens
            self._cells[_PROMISED, slot] = max(promised, 0.0)

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
            self._cells = np.hstack([self._cells, np.zeros_like(self._cells)])
        self.workers.append("")
        self._queues.append(OrderedDict())
        return slot

    def _activate(self) -> None:
        self._active = np.array(sorted(self._slots.values()), dtype=np.intp)
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
            cells[_GPU_SINCE, slot], cells[_GPU_HEAD, slot] = now_s, gpu_s
        queue[request_id] = gpu_s
        cells[_LINK_OUT, slot] += link_s
        cells[_LINK_FREE, slot] = max(cells[_LINK_FREE, slot], now_s) + link_s
        if offers.fetch_s is not None and offers.fetch_tokens is not None:
            flight.fetch_tokens = float(offers.fetch_tokens[index])
            cells[_PROMISED, slot] += flight.fetch_tokens
            ends = np.array([slot, self._slots[offers.fetch_from]])
            self.transfer(ends, float(offers.fetch_s[index]), now_s)
        cells[_GPU_OUT, slot] += gpu_s
        cells[_IN_FLIGHT, slot] += 1
        cells[_WAITING, slot] += 1
        cells[_QUEUED, slot] += new
        cells[_RESIDENT, slot] += offers.prompt_tokens
        fade = math.exp((cells[_USE_AT, slot] - now_s) / self.window_s)
        cells[_USE_AT, slot] = now_s
        cells[_GPU_USE, slot] = cells[_GPU_USE, slot] * fade + gpu_s / self.window_s
        cells[_LOADS, slot] = cells[_LOADS, slot] * fade + (link_s > 0) / self.window_s
        cells[_PREFILLS, slot] = cells[_PREFILLS, slot] * fade + 1 / self.window_s

    def correct(self, request_id: str, host_tokens: int, new_tokens: int) -> None:
        """The engine admitted a request, with these tokens instead of the expected ones."""
        flight = self._flights.get(request_id)
        if flight is None or flight.prefilled or flight.new_tokens == new_tokens:
            return
        slot, cells = flight.slot, self._cells
        context = flight.context_tokens - new_tokens
        pairs = new_tokens * (context + 0.5 * new_tokens)
        gpu_s = float(new_tokens * cells[_TOKEN, slot] + pairs * cells[_PAIR, slot])
        link_s = float(host_tokens * cells[_LOAD_TOKEN, slot])
        cells[_GPU_OUT, slot] += gpu_s - flight.gpu_s
        cells[_LINK_OUT, slot] += link_s - flight.link_s
        cells[_LINK_FREE, slot] += link_s - flight.link_s
        cells[_QUEUED, slot] += new_tokens - flight.new_tokens
        queue = self._queues[slot]
        queue[request_id] = gpu_s
        if next(iter(queue)) == request_id:
            cells[_GPU_HEAD, slot] = gpu_s
        flight.link_s, flight.gpu_s, flight.new_tokens = link_s, gpu_s, new_tokens

    def prefilled(self, request_id: str, now_s: float) -> None:
        """A request's prompt is done: its link and gpu work are no longer ahead of anyone."""
        flight = self._flights.get(request_id)
        if flight is None or flight.prefilled:
            return
        self._done(request_id, flight, now_s)
        flight.prefilled = True
        self._cells[_DECODING, flight.slot] += 1
        self._cells[_DECODE_CONTEXT, flight.slot] += flight.context_tokens

    def release(self, request_id: str, now_s: float) -> None:
        """A request ended, however far it was."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        slot, cells = flight.slot, self._cells
        if flight.prefilled:
            cells[_DECODING, slot] -= 1
            cells[_DECODE_CONTEXT, slot] -= flight.context_tokens
        else:
            self._done(request_id, flight, now_s)
        cells[_IN_FLIGHT, slot] -= 1
        cells[_RESIDENT, slot] -= flight.context_tokens

    def _done(self, request_id: str, flight: Reservation, now_s: float) -> None:
        slot, cells, queue = flight.slot, self._cells, self._queues[flight.slot]
        first = next(iter(queue)) == request_id
        del queue[request_id]
        cells[_LINK_OUT, slot] -= flight.link_s
        cells[_GPU_OUT, slot] -= flight.gpu_s
        cells[_WAITING, slot] -= 1
        cells[_QUEUED, slot] -= flight.new_tokens
        cells[_PROMISED, slot] = max(cells[_PROMISED, slot] - flight.fetch_tokens, 0.0)
        if first:
            cells[_GPU_SINCE, slot] = now_s
            cells[_GPU_HEAD, slot] = next(iter(queue.values())) if queue else 0.0
        if not queue:
            # Sums of many small numbers drift; an empty queue is exactly empty.
            cells[_LINK_OUT, slot] = cells[_GPU_OUT, slot] = 0.0
            cells[_LINK_FREE, slot] = now_s

    # -- what is asked ------------------------------------------------------------------------

    def backlog_s(self, worker: str, now_s: float) -> tuple[float, float]:
        """Seconds of queued work on one worker's (link, gpu)."""
        column = self._cells[:, self._slots[worker]]
        link_s = min(max(column[_LINK_FREE] - now_s, 0.0), column[_LINK_OUT])
        done_s = min(max(now_s - column[_GPU_SINCE], 0.0), column[_GPU_HEAD])
        return max(float(link_s), 0.0), max(float(column[_GPU_OUT] - done_s), 0.0)

    def ready(
        self, now_s: float, stale_after_s: float, exclude: frozenset[str]
    ) -> NDArray[np.intp]:
        """Columns of the workers heard from lately and not excluded."""
        slots = self._active
        if math.isfinite(stale_after_s) and len(slots):
            fresh = now_s - self._cells[_SEEN, slots] <= stale_after_s
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
        cells = self._cells[:, slots]  # A copy: what was priced must not change afterwards.
        context = device_tokens + cached_tokens
        new = prompt_tokens - context
        steps = np.ceil(new / cells[_BUDGET])
        pairs = new * (context + 0.5 * new)
        work_s = new * cells[_TOKEN] + pairs * cells[_PAIR]
        decoding, decode_context = cells[_DECODING], cells[_DECODE_CONTEXT]
        beside_s = decoding * cells[_TOKEN] + decode_context * cells[_PAIR]
        read_s = cells[_WEIGHTS] + (prompt_tokens + decode_context) * cells[_CONTEXT]
        compute_s = np.maximum(work_s + steps * beside_s, steps * read_s) + steps * cells[_STEP]
        load_s = cached_tokens * cells[_LOAD_TOKEN] + (cached_tokens > 0) * cells[_LOAD_FIXED]
        link_s, gpu_s = _backlogs_s(cells, now_s)
        net_free_s, fetch_s = cells[_NET_FREE], None
        if fetch_tokens is not None:
            fetch_s = _over(fetch_tokens, cells[_NET])
            fetch_s[fetch_tokens > cells[_SPARE] - cells[_PROMISED]] = np.inf
            net_free_s = np.maximum(net_free_s, self._cells[_NET_FREE, self._slots[fetch_from]])
        net_s = np.maximum(net_free_s - now_s, 0.0)
        start_s = link_s if fetch_s is None else np.maximum(link_s, net_s + fetch_s)
        fade = np.exp((cells[_USE_AT] - now_s) / self.window_s)
        fixed_s, gpu_use = cells[_OVERHEAD], cells[_GPU_USE] * fade
        step_s = _reading_step_s(cells, prompt_tokens + cells[_RESIDENT])
        alone_s = _reading_step_s(cells, prompt_tokens)
        # A step of decoding is under way: half of it is waited for; a load is heard of one later.
        under_way_s = np.maximum(beside_s, cells[_WEIGHTS] + decode_context * cells[_CONTEXT])
        under_way_s = (under_way_s + cells[_STEP]) * (decoding > 0)
        idle_s = fixed_s + load_s + np.maximum(work_s, alone_s)
        weighing = _weighing_tokens(idle_s, alone_s, cells[_DILATION], output_tokens)
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
            new_tokens=new,
            load_s=load_s,
            load_token_s=cells[_LOAD_TOKEN],
            work_s=work_s,
            compute_s=compute_s,
            fixed_s=fixed_s,
            link_backlog_s=link_s,
            gpu_backlog_s=gpu_s,
            harm_s=decoding * np.maximum(compute_s - steps * read_s, 0.0),
            decode_s=weighing * (cells[_TOKEN] + prompt_tokens * cells[_CONTEXT]),
            gpu_use=gpu_use,
            loads_per_s=cells[_LOADS] * fade,
            prefills_per_s=cells[_PREFILLS] * fade,
            in_flight=cells[_IN_FLIGHT],
            waiting=cells[_WAITING],
            queued_tokens=cells[_QUEUED],
            resident_tokens=cells[_RESIDENT],
            capacity_tokens=cells[_CAPACITY],
            h2d_bytes_per_s=cells[_LINK_RATE],
            flops_per_s=cells[_FLOPS],
            cost_per_hour=cells[_COST],
            kappa_crit=cells[_CRIT],
            fetch_s=fetch_s,
            fetch_tokens=fetch_tokens,
            fetch_from=fetch_from,
            net_backlog_s=net_s,
            ttft_s=fixed_s
            + np.maximum(start_s + load_s, gpu_s)
            + compute_s
            + under_way_s * np.where(cached_tokens > 0, 1.5, 0.5),
            tpot_s=step_s / (1 - np.minimum(gpu_use, _MOST_USE)),
        )

    def idle_ttft_s(
        self, slots: NDArray[np.intp], prompt_tokens: int, held_tokens: float
    ) -> Floats:
        """TTFT on idle workers that hold `held_tokens` of the prompt in their host tiers."""
        cells = self._cells[:, slots]
        new = prompt_tokens - held_tokens
        steps = np.ceil(new / cells[_BUDGET])
        work_s = new * cells[_TOKEN] + new * (held_tokens + 0.5 * new) * cells[_PAIR]
        read_s = steps * (cells[_WEIGHTS] + prompt_tokens * cells[_CONTEXT])
        compute_s = np.maximum(work_s, read_s) + steps * cells[_STEP]
        load_s = held_tokens * cells[_LOAD_TOKEN] + (held_tokens > 0) * cells[_LOAD_FIXED]
        idle_s: Floats = cells[_OVERHEAD] + load_s + compute_s
        return idle_s

    def idle_tpot_s(self, slots: NDArray[np.intp], prompt_tokens: int) -> Floats:
        """Time per output token on idle workers."""
        cells = self._cells[:, slots]
        return _reading_step_s(cells, prompt_tokens)

    def rooms(self, slots: NDArray[np.intp], now_s: float) -> Rooms:
        """What is to be known of workers as targets of copies."""
        cells = self._cells[:, slots]
        link_s, gpu_s = _backlogs_s(cells, now_s)
        return Rooms(
            spare_tokens=cells[_SPARE] - cells[_PROMISED],
            host_tokens=cells[_HOST],
            backlog_s=np.maximum(link_s, gpu_s),
            h2d_bytes_per_s=cells[_LINK_RATE],
            load_token_s=cells[_LOAD_TOKEN],
            net_tokens_per_s=cells[_NET],
            net_backlog_s=np.maximum(cells[_NET_FREE] - now_s, 0.0),
        )

    def transfer(self, ends: NDArray[np.intp], seconds: float, now_s: float) -> None:
        """A transfer is queued on the network cards of two workers."""
        free_s = max(float(self._cells[_NET_FREE, ends].max()), now_s)
        self._cells[_NET_FREE, ends] = free_s + seconds

    def dilation(self, slots: NDArray[np.intp]) -> Floats:
        """Real seconds per emulated second of each worker."""
        dilations: Floats = self._cells[_DILATION, slots]
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


def _backlogs_s(cells: Floats, now_s: float) -> tuple[Floats, Floats]:
    """Seconds queued on link and gpu."""
    link_s = np.minimum(np.maximum(cells[_LINK_FREE] - now_s, 0.0), cells[_LINK_OUT])
    done_s = np.minimum(np.maximum(now_s - cells[_GPU_SINCE], 0.0), cells[_GPU_HEAD])
    return link_s, np.maximum(cells[_GPU_OUT] - done_s, 0.0)


def _reading_step_s(cells: Floats, context_tokens: Floats | int) -> Floats:
    """A step that waits for memory: the weights and so many tokens' KV are read."""
    step_s: Floats = cells[_WEIGHTS] + context_tokens * cells[_CONTEXT] + cells[_STEP]
    return step_s


def _over(tokens: Floats, tokens_per_s: Floats) -> Floats:
    """Seconds for `tokens`; for ever where there is no network, none where there are no tokens."""
    seconds = np.where(tokens > 0, np.inf, 0.0)
    np.divide(tokens, tokens_per_s, out=seconds, where=(tokens > 0) & (tokens_per_s > 0))
    return seconds


def _weighing_tokens(
    idle_ttft_s: Floats, idle_tpot_s: Floats, dilation: Floats, output_tokens: int
) -> float:
    """Delayed tokens that weigh as much as one first token delayed as long.

    By the service objective, TTFT over TPOT (`kappa.slo`), of the best and the middle worker; but
    never more than there will be.
    """
    ttft_s = max(TTFT_FLOOR_S * float(dilation.max()), TTFT_IDLE_FACTOR * float(idle_ttft_s.min()))
    tpot_s = TPOT_IDLE_FACTOR * float(np.sort(idle_tpot_s)[len(idle_tpot_s) // 2])
    return min(ttft_s / tpot_s, float(output_tokens)) if tpot_s > 0 else float(output_tokens)
