"""All workers as records of one array, so that a request is priced on every one of them at once.

Joining, reserving and releasing touch one record; `estimate` is one compiled loop over all of them
(`kappa_router.ttft`). Pure: each call takes the time. Seconds are real ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kappa.cost import STEP_SECONDS
from kappa.hardware import NodeProfile
from kappa.protocol import Announcement, Arrival
from kappa.slo import OBJECTIVE, ServiceObjective
from kappa_router import reservations, ttft
from kappa_router.decision import (
    ESTIMATE,
    Estimates,
    Floats,
    Held,
    PricedPrompt,
    PricedWorker,
    Slots,
)
from kappa_router.engine_fit import EngineSpeed

USE_WINDOW_S = 20.0
_MORE_RECORDS = 8


@dataclass(slots=True, eq=False)
class Flight:
    """A request in flight, from its reservation until it ends; seconds are real ones."""

    request_id: str
    worker: str
    slot: int
    # What it put on its worker and takes away again, `fetch_tokens` among it.
    link_s: float
    gpu_s: float
    new_tokens: int
    prompt_tokens: int
    fetch_tokens: float = 0.0
    # Its prompt is done, as its worker or its stream reported.
    prefilled: bool = False
    # This router sent it; else another decider did, and a worker reported it.
    own: bool = False
    # Of the router's own requests: the client's bound on generated tokens (0: none), the
    # prediction, whether the prompt was known, when it was sent.
    max_tokens: int = 0
    chosen: PricedWorker | None = None
    informed: bool = False
    sent_s: float = 0.0
    # Predicted seconds per token without prompts in between; 0: outcomes are not compared.
    tpot_s: float = 0.0
    # The most seconds per token with prompts in between.
    bounded_s: float = math.inf
    first_token_s: float | None = None
    # Tokens that went to the client.
    output_tokens: int = 0
    # Tokens loaded, as far as is known, and those of them that came from disk.
    host_tokens: int = 0
    disk_tokens: int = 0
    # Requests that decoded there when it was sent, and their context.
    beside: tuple[float, float] = (0.0, 0.0)
    # When its first token came, and the worker's decoding up to then (`Calibration`).
    decoded: tuple[float, Floats] | None = None

    def told(self) -> Arrival:
        """It as another router is to know it."""
        device_tokens = max(self.prompt_tokens - self.host_tokens - self.new_tokens, 0)
        tokens = device_tokens, self.host_tokens, self.new_tokens, self.max_tokens
        return Arrival(self.request_id, *tokens, self.prefilled, self.disk_tokens)


class Certainty(NamedTuple):
    """The certainty of a worker's learnt constants, as standard deviations."""

    # Of the logarithms of the seconds of a prompt, and of a load, of 2,048 tokens.
    compute_sd: float = 0.0
    link_sd: float = 0.0
    # Of the overhead, in seconds.
    overhead_sd_s: float = 0.0
    # Of the logarithm of a TTFT about a prediction with the right constants.
    ttft_sd: float = 0.0


SURE = Certainty()


class Fleet:
    """The records, and the requests reserved on them.

    first: at which share of all workers the order begins in which they are listed, and so which one
    wins a tie; routers that share workers take different ones lest all send their next request to
    the same idle worker. objective: what workers are priced by, and requests are admitted by.
    """

    def __init__(self, first: float = 0.0, objective: ServiceObjective = OBJECTIVE) -> None:
        if not 0 <= first < 1:
            raise ValueError(f"first is {first}; give a share of the workers, from 0 to below 1")
        self._first, self.objective = first, objective
        # A plain tuple, as compiled loops take one soonest.
        self._slo = (
            objective.ttft_s, objective.ttft_idle_factor, objective.tpot_s,
            objective.tpot_idle_factor,
        )  # fmt: skip
        self.names: list[str] = []
        """Of the worker in each place; empty where there is none."""
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self.records = np.zeros(_MORE_RECORDS, dtype=ttft.WORKER)
        """A worker in each place (`ttft.WORKER`)."""
        # By place: the requests with prompts that are not done, in the order of their arrival.
        self._prompts: list[OrderedDict[str, Flight]] = []
        self._nodes: dict[str, NodeProfile] = {}
        # All workers in the order in which they are listed: places, names, nodes.
        self._active: Slots = np.empty(0, dtype=np.intp)
        self._active_names: list[str] = []
        self._active_nodes: tuple[NodeProfile, ...] = ()
        self._compile()

    def _compile(self) -> None:
        """Call each loop once, now rather than while the first request waits."""
        nothing, records = np.empty(0), self.records
        estimates = self.estimate(
            self._active, 0.0, PricedPrompt(1, 1), Held(nothing, nothing, nothing)
        )
        ttft.queued_s(records[0], 0.0)
        ttft.bounded_s(records, 0)
        row = np.zeros(1, dtype=estimates.rows.dtype)
        ttft.median_idle(records, np.zeros(1, dtype=np.intp), row, 1.0)
        reservations.reserve(records, 0, row, 0, 0.0, USE_WINDOW_S)
        reservations.correct(records, 0, (0, 0, 0, 0), (0.0, 0.0, 0), True)
        reservations.finish_prompt(records, 0, (0.0, 0.0, 0), 0.0)
        reservations.decode(records, 0, 0, 0, 0.0, USE_WINDOW_S)
        reservations.depart(records, 0, 0)

    # -- workers ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, worker: str) -> int:
        return self._slots[worker]

    def join(self, announced: Announcement, now_s: float) -> int:
        """A worker gets a place, which it keeps for life and which is returned; again: only what it
        is changes. `calibrate` follows."""
        node, slot = announced.node, self._slots.get(announced.worker)
        if slot is None:
            slot = self._free.pop() if self._free else len(self.names)
            if slot == len(self.names):
                self.names.append("")
                self._prompts.append(OrderedDict())
            if slot == len(self.records):
                more = np.zeros(len(self.records) + _MORE_RECORDS, dtype=ttft.WORKER)
                self.records = np.concatenate([self.records, more])
            self._slots[announced.worker] = slot
            self.names[slot] = announced.worker
            self.records[slot] = 0.0
            self.records["gpu_since_s"][slot] = self.records["used_s"][slot] = now_s
        self._nodes[announced.worker] = node
        self._activate()
        kv_bytes_per_token = announced.kv_bytes_per_token * node.dilation
        self._set(
            slot,
            max_sequences=announced.max_sequences or np.inf,
            kappa_literal=announced.kappa_literal,
            h2d_bytes_per_s=node.h2d_bytes_per_s,
            flops_per_s=node.flops_per_s,
            cost_per_hour=node.cost_per_hour,
            net_tokens_per_s=announced.net_bytes_per_s / kv_bytes_per_token,
            dilation=node.dilation,
            seen_s=now_s,
        )
        return slot

    def calibrate(
        self, worker: str, speed: EngineSpeed, overhead_s: float, certainty: Certainty = SURE
    ) -> None:
        """Set the speed that predictions use from now on."""
        step = speed.step
        self.records["factors"][self._slots[worker]] = speed.factors or 0.0
        self._set(
            self._slots[worker],
            budget_tokens=speed.budget_tokens,
            step_factor=speed.step_factor,
            capacity_tokens=speed.capacity_tokens,
            load_token_s=speed.load_token_s,
            load_fixed_s=speed.load_fixed_s,
            disk_token_s=speed.disk_token_s,
            expert_idle=step.expert_idle,
            exposed=step.exposed,
            **{name: getattr(step, name) * step.dilation for name in STEP_SECONDS},
            overhead_s=overhead_s,
            **certainty._asdict(),
        )
        reservations.keep_factors(self.records, self._slots[worker])

    def reported(
        self, worker: str, now_s: float, spare_tokens: float, net_tokens_per_s: float = 0.0
    ) -> None:
        """A worker reported: its host tier has room for `spare_tokens` that a peer holds too; at
        which rate it fetched, 0 if it did not."""
        measured = {"net_tokens_per_s": net_tokens_per_s} if net_tokens_per_s else {}
        self._set(self._slots[worker], seen_s=now_s, spare_tokens=spare_tokens, **measured)

    def leave(self, worker: str) -> None:
        """A worker is gone, with all that was reserved there."""
        slot = self._slots.pop(worker)
        self._prompts[slot].clear()
        self.names[slot] = ""
        del self._nodes[worker]
        self._free.append(slot)
        self._activate()

    def _set(self, slot: int, **values: float) -> None:
        record = self.records[slot]
        for name, value in values.items():
            record[name] = value

    def _activate(self) -> None:
        slots = np.array(sorted(self._slots.values()), dtype=np.intp)
        self._active = np.roll(slots, -int(self._first * len(slots)))
        self._active_names = [self.names[slot] for slot in self._active]
        self._active_nodes = tuple(self._nodes[name] for name in self._active_names)

    # -- requests -----------------------------------------------------------------------------

    def reserve(self, request_id: str, estimates: Estimates, index: int) -> Flight:
        """Put a request on the worker that row `index` of its estimates is about."""
        slot, now_s, row = int(estimates.slots[index]), estimates.now_s, estimates.row(index)
        flight = Flight(
            request_id, estimates.workers[index], slot, row.load_s, row.work_s,
            int(row.new_tokens), estimates.prompt_tokens,
        )  # fmt: skip
        flight.host_tokens, flight.disk_tokens = int(row.cached_tokens), int(row.disk_tokens)
        flight.beside = reservations.reserve(
            self.records, slot, estimates.rows, index, now_s, USE_WINDOW_S
        )
        self._prompts[slot][request_id] = flight
        if estimates.fetch_from:
            flight.fetch_tokens = row.fetch_tokens
            self.records["promised_tokens"][slot] += flight.fetch_tokens
            ends = np.array([slot, self._slots[estimates.fetch_from]])
            self.transfer(ends, row.fetch_s, now_s)
        return flight

    def correct(
        self, flight: Flight, host_tokens: int, new_tokens: int, disk_tokens: int = 0
    ) -> None:
        """The engine admitted a request, with these tokens instead of the expected ones;
        `disk_tokens` of those in host came from disk."""
        if flight.prefilled:
            return
        flight.host_tokens, flight.disk_tokens = host_tokens, disk_tokens
        if flight.new_tokens == new_tokens:
            return
        slot, before = flight.slot, (flight.link_s, flight.gpu_s, flight.new_tokens)
        first = next(iter(self._prompts[slot].values())) is flight
        context_tokens = flight.prompt_tokens - new_tokens
        found = host_tokens, new_tokens, context_tokens, disk_tokens
        flight.link_s, flight.gpu_s = reservations.correct(self.records, slot, found, before, first)
        flight.new_tokens = new_tokens

    def prefilled(self, flight: Flight, now_s: float) -> None:
        """A request's prompt is done: its link and gpu work are no longer ahead of anyone."""
        if not flight.prefilled:
            self._finish_prompt(flight, now_s)
            flight.prefilled = True
            self._decode(flight, 1, now_s)

    def release(self, flight: Flight, now_s: float) -> None:
        if flight.prefilled:
            self._decode(flight, -1, now_s)
        else:
            self._finish_prompt(flight, now_s)
        reservations.depart(self.records, flight.slot, flight.prompt_tokens)

    def _decode(self, flight: Flight, more: int, now_s: float) -> None:
        tokens = more * flight.prompt_tokens
        reservations.decode(self.records, flight.slot, more, tokens, now_s, USE_WINDOW_S)

    def _finish_prompt(self, flight: Flight, now_s: float) -> None:
        slot, prompts = flight.slot, self._prompts[flight.slot]
        first = next(iter(prompts.values())) is flight
        del prompts[flight.request_id]
        done = flight.link_s, flight.gpu_s, flight.new_tokens
        reservations.finish_prompt(self.records, slot, done, now_s)
        if flight.fetch_tokens:
            promised = self.records["promised_tokens"]
            promised[slot] = max(promised[slot] - flight.fetch_tokens, 0.0)
        if first:
            head = next(iter(prompts.values()), None)
            self.records["gpu_since_s"][slot] = now_s
            self.records["gpu_head_s"][slot] = head.gpu_s if head is not None else 0.0

    def transfer(self, ends: Slots, seconds: float, now_s: float) -> None:
        """A transfer is queued on the network cards of two workers."""
        free_s = self.records["net_free_s"]
        free_s[ends] = max(float(free_s[ends].max()), now_s) + seconds

    # -- what a request costs -----------------------------------------------------------------

    def backlog_s(self, worker: str, now_s: float) -> tuple[float, float]:
        """Seconds of queued work on one worker's (link, gpu)."""
        return ttft.queued_s(self.records[self._slots[worker]], now_s)

    def ready(self, now_s: float, stale_after_s: float, exclude: frozenset[str]) -> Slots:
        """Places of the workers that have reported recently and are not excluded."""
        slots = self._active
        if math.isfinite(stale_after_s) and len(slots):
            fresh = now_s - self.records["seen_s"][slots] <= stale_after_s
            if not fresh.all():
                slots = slots[fresh]
        if not exclude:
            return slots
        out = [self._slots[worker] for worker in exclude if worker in self._slots]
        return slots[~np.isin(slots, out)] if out else slots

    def estimate(
        self,
        slots: Slots,
        now_s: float,
        prompt: PricedPrompt,
        held: Held,
        fetch: tuple[str, Floats] | None = None,
    ) -> Estimates:
        """Price a request on each of `slots`.

        held: leading tokens in each tier. fetch: a worker, and how many of the cached tokens have
        to come from it first. A transfer occupies the network cards of both ends, and takes for
        ever where the host tier has no spare room for it beside what was promised to others.
        """
        rows = np.empty(len(slots), dtype=ESTIMATE)
        rows["device_tokens"], rows["cached_tokens"], rows["disk_tokens"] = held
        fetch_from, source = "", -1
        if fetch is not None:
            fetch_from, rows["fetch_tokens"] = fetch
            source = self._slots[fetch_from]
        request = now_s, USE_WINDOW_S, float(prompt.tokens), float(prompt.output_tokens)
        ttft.price(self.records, slots, rows, request, source, self._slo)
        names, nodes = self._active_names, self._active_nodes
        if len(slots) < len(names):
            names = [self.names[slot] for slot in slots]
            nodes = tuple(self._nodes[name] for name in names)
        return Estimates(
            now_s, names, slots, rows, prompt.tokens, prompt.block_tokens, prompt.prefix_hashes,
            prompt.session, prompt.output_tokens, nodes, fetch_from,
        )  # fmt: skip

    def idle_s(self, estimates: Estimates) -> ttft.IdleMedians:
        """As `ttft.median_idle`, for the workers and the request of these estimates."""
        return ttft.median_idle(
            self.records, estimates.slots, estimates.rows, float(estimates.prompt_tokens)
        )
