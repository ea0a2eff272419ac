"""Emulated nodes on the wall clock: the simulator's engine, with the streams of a real worker.

A node publishes KV events as vLLM does and reports as our workers do, so that real routers learn
from it. An event happens at its own simulated time, however late the process wakes up, so the
physics stays exact; only its announcement is late. Nothing here computes tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop
from typing import Any

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace as dilated

from benchmarks.routing.peers.wire import block_tokens
from kappa.cost import step_model
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.protocol import KV, REPORT, Admission, Announcement, WorkerReport
from simulator.cache import Ids
from simulator.clusters import NodeSpec, node_model
from simulator.loop import Loop, Noise
from simulator.memory import SimulatedJob
from simulator.node import JobEvents, Node
from workload.shapes import TurnShape

BUDGET_TOKENS = 8192
_USABLE_HBM = 0.9
_REPORT_EVERY_S = 0.1
_LATE_KEPT = 200_000
_MEDIA = {"device": "GPU", "host": "CPU"}


class PacedLoop(Loop):
    """The simulator's loop, whose events happen when the wall clock reaches them.

    dilation: wall seconds per simulated one. late_s: by how many wall seconds, for the latest
    events.
    """

    def __init__(self, dilation: float) -> None:
        super().__init__()
        self.dilation = dilation
        self.late_s: deque[float] = deque(maxlen=_LATE_KEPT)
        self._origin_s = time.monotonic()
        self._sooner = asyncio.Event()

    def at(self, time_s: float, handler: Callable[[Any], None], argument: Any = None) -> None:
        """Schedule; a time just passed is taken as now."""
        super().at(max(time_s, self.now_s), handler, argument)
        self._sooner.set()

    def catch_up(self) -> None:
        """Handle all that is due and make it now: to be called before anything comes in."""
        wall_s = (time.monotonic() - self._origin_s) / self.dilation
        while self._heap and self._heap[0][0] <= wall_s:
            self.now_s, _, handler, argument = heappop(self._heap)
            self.late_s.append(time.monotonic() - self._origin_s - self.now_s * self.dilation)
            handler(argument)
        self.now_s = max(self.now_s, wall_s)

    async def drive(self) -> None:
        """Handle events as they come due, until cancelled."""
        while True:
            self.catch_up()
            self._sooner.clear()
            wait_s = None
            if self._heap:
                wait_s = max((self._heap[0][0] - self.now_s) * self.dilation, 0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), wait_s)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request inside a node; times are of the loop."""

    request_id: str
    first: asyncio.Event
    done: asyncio.Event
    first_s: float = 0.0
    done_s: float = 0.0


class EmulatedNode:
    """One node. noise: seed and sigma of the durations of steps, and of transfers."""

    def __init__(
        self, spec: NodeSpec, shape: ModelShape, block_tokens: int,
        noise: tuple[tuple[int, int], float], loop: PacedLoop,
    ) -> None:  # fmt: skip
        self.name, self.spec, self.shape, self.block_tokens = spec.name, spec, shape, block_tokens
        self._loop = loop
        self._tickets: dict[SimulatedJob, Ticket] = {}
        self._parents: dict[int, int | None] = {}
        self._admitted: list[Admission] = []
        self._prefilled: list[str] = []
        self._batches = self._served = 0
        self._events, self.events_endpoint = _publisher()
        self._reports, self.reports_endpoint = _publisher()
        self.model = node_model(spec, shape, block_tokens)
        seed, sigma = noise
        rng = np.random.default_rng(seed)
        noises = Noise(rng, sigma), Noise(rng.spawn(1)[0], sigma)
        events = JobEvents(self._on_first, self._on_finished, self._on_admitted)
        self.node = Node(0, self.model, loop, noises, events, self)
        self.totals = {"prompt_tokens": 0, "device_tokens": 0, "host_tokens": 0}

    def submit(self, request_id: str, turn: TurnShape) -> Ticket:
        """Hand a request to the engine.

        Raises:
            ValueError: it can never fit.
        """
        prompt_tokens, output_tokens = turn.input_tokens, turn.output_tokens
        if not self.node.fits(prompt_tokens, output_tokens):
            raise ValueError(f"{prompt_tokens} prompt tokens never fit on {self.name}")
        self._loop.catch_up()
        kept = turn.kept_blocks.tolist()
        self._parents.update(zip(kept, [None, *kept[:-1]], strict=True))
        job = SimulatedJob(
            self._served, prompt_tokens, output_tokens, turn.kept_blocks, self._loop.now_s
        )
        self._served += 1
        ticket = Ticket(request_id, asyncio.Event(), asyncio.Event())
        self._tickets[job] = ticket
        self.node.submit(job)
        return ticket

    def _on_admitted(self, job: SimulatedJob) -> None:
        device, host = job.device_tokens, job.cached_tokens
        new_tokens = job.prompt_tokens - device - host
        self._admitted.append(Admission(self._tickets[job].request_id, device, host, new_tokens))

    def _on_first(self, job: SimulatedJob) -> None:
        ticket = self._tickets[job]
        self._prefilled.append(ticket.request_id)
        ticket.first_s = self._loop.now_s
        ticket.first.set()

    def _on_finished(self, job: SimulatedJob) -> None:
        ticket = self._tickets.pop(job)
        self.totals["prompt_tokens"] += job.prompt_tokens
        self.totals["device_tokens"] += job.device_tokens
        self.totals["host_tokens"] += job.cached_tokens
        ticket.done_s = self._loop.now_s
        ticket.first.set()
        ticket.done.set()

    def hold(self, node: int, tier: str, ids: Ids) -> None:
        """Publish that blocks are held, as vLLM would."""
        blocks = ids.tolist()
        tokens = [token for block in blocks for token in block_tokens(block, self.block_tokens)]
        self._publish(
            {
                "type": "BlockStored", "block_hashes": blocks,
                "parent_block_hash": self._parents[blocks[0]], "token_ids": tokens,
                "block_size": self.block_tokens, "lora_id": None, "medium": _MEDIA[tier],
            }
        )  # fmt: skip

    def drop(self, node: int, tier: str, ids: list[Ids]) -> None:
        blocks = np.concatenate(ids).tolist()
        self._publish({"type": "BlockRemoved", "block_hashes": blocks, "medium": _MEDIA[tier]})

    def _publish(self, event: dict[str, Any]) -> None:
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._events.send_multipart([KV, self._batches.to_bytes(8, "big"), batch])
        self._batches += 1

    def report(self) -> None:
        """Publish what was measured, in wall seconds."""
        totals, link, dilation = self.node.totals, self.node.link, self._loop.dilation
        size, token_bytes = self.block_tokens, kv_bytes_per_token(self.shape)
        loaded, stored = link.up.load_blocks * size, link.down.store_blocks * size
        steps, loads = self.node.samples.take()
        report = WorkerReport(
            worker=self.name, time_s=time.time(), steps_total=totals.steps,
            step_seconds_total=totals.step_s * dilation,
            step_tokens_total=totals.step_tokens,
            load_tokens_total=loaded, load_bytes_total=int(loaded * token_bytes),
            load_seconds_total=link.up.load_s * dilation,
            store_tokens_total=stored, store_bytes_total=int(stored * token_bytes),
            store_seconds_total=link.down.store_s * dilation,
            h2d_bytes_per_s=self.spec.profile.h2d_bytes_per_s / dilation,
            admitted=tuple(self._admitted), prefilled=tuple(self._prefilled),
            steps=tuple(dilated(each, seconds=each.seconds * dilation) for each in steps),
            loads=tuple(dilated(each, seconds=each.seconds * dilation) for each in loads),
        )  # fmt: skip
        self._admitted, self._prefilled = [], []
        self._reports.send_multipart([REPORT, msgspec.msgpack.encode(report.to_dict())])

    def row(self) -> dict[str, Any]:
        """What a router knows of the node to begin with: the truth, with its dilation."""
        profile = self.spec.profile
        if self._loop.dilation > 1:
            profile = replace(profile, dilation=self._loop.dilation, source="paced")
        announcement = Announcement(
            worker=self.name, model=self.shape.name, node=profile,
            step=step_model(self.shape, profile),
            kv_bytes_per_token=kv_bytes_per_token(self.shape), emulated_model=self.shape.name,
            fingerprint="emulated", block_tokens=self.block_tokens,
            device_blocks=self.model.device_blocks, host_blocks=self.model.host_blocks,
            max_batch_tokens=BUDGET_TOKENS,
            max_context_tokens=self.model.device_blocks * self.block_tokens,
            events_endpoint=self.events_endpoint, snapshot_endpoint="",
        )  # fmt: skip
        return {
            "name": self.name, "events_endpoint": self.events_endpoint,
            "reports_endpoint": self.reports_endpoint, "device_blocks": self.model.device_blocks,
            "max_batch_tokens": BUDGET_TOKENS, "announcement": announcement.to_dict(),
        }  # fmt: skip

    def close(self) -> None:
        """Let its sockets go."""
        self._events.close()
        self._reports.close()


async def report_all(nodes: list[EmulatedNode]) -> None:
    """Publish every node's report ten times a second, until cancelled."""
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        for node in nodes:
            node.report()


def scaled_memory(spec: NodeSpec, shape: ModelShape, scale: int) -> NodeSpec:
    """The node with a `scale`-th of its memory for KV, for prompts that much shorter."""
    weights_bytes = shape.params_total * shape.weight_dtype_bytes
    free_bytes = _USABLE_HBM * spec.profile.hbm_bytes - weights_bytes
    hbm_bytes = (weights_bytes + free_bytes / scale) / _USABLE_HBM
    profile = replace(spec.profile, hbm_bytes=hbm_bytes)
    return replace(spec, profile=profile, host_bytes=spec.host_bytes / scale)


def _publisher() -> tuple[Any, str]:
    # A plain socket, although on an event loop: publishing never waits.
    made: Any = zmq.Context.instance().socket(zmq.PUB)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 100_000)
    port = made.bind_to_random_port("tcp://127.0.0.1")
    return made, f"tcp://127.0.0.1:{port}"
