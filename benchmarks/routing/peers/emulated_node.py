"""One emulated node: the simulator's engine on the wall clock, and what it tells the world.

It publishes KV events as vLLM does and reports as our workers do; `emulated_nodes` puts an OpenAI
endpoint before it. Nothing here computes tokens.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.routing.peers.paced_loop import PacedLoop
from benchmarks.routing.peers.wire import block_tokens
from kappa.cost import step_model
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.protocol import KV, REPORT, Admission, Announcement, WorkerReport
from simulator.cache import Ids
from simulator.clusters import NodeSpec, node_model
from simulator.loop import Noise
from simulator.memory import SimulatedJob
from simulator.node import Node

BUDGET_TOKENS = 8192
USABLE_HBM = 0.9
_FINGERPRINT = "emulated"
_MEDIA = {"device": "GPU", "host": "CPU"}


@dataclass(slots=True, eq=False)
class Ticket:
    """A request inside a node, and what its client waits for."""

    request_id: str
    first: asyncio.Event
    done: asyncio.Event


class EmulatedNode:
    """One node: the simulator's engine, its events on a socket, and its OpenAI endpoint."""

    def __init__(
        self, number: int, spec: NodeSpec, shape: ModelShape, hello: dict[str, Any], loop: PacedLoop
    ) -> None:
        self.name, self.spec, self.shape = spec.name, spec, shape
        self.block_tokens = int(hello["block_tokens"])
        self._loop = loop
        self._tickets: dict[SimulatedJob, Ticket] = {}
        self._parents: dict[int, int | None] = {}
        self._admitted: list[Admission] = []
        self._prefilled: list[str] = []
        self._sequence = 0
        self._events, self.events_endpoint = _publisher()
        self._reports, self.reports_endpoint = _publisher()
        rng = np.random.default_rng((int(hello["seed"]), number))
        self.model = node_model(spec, shape, self.block_tokens)
        self.node = Node(
            number, self.model, loop, Noise(rng, hello["noise"]),
            Noise(rng.spawn(1)[0], hello["noise"]), self,
            admitted=self._on_admitted, first_token=self._on_first, finished=self._on_finished,
        )  # fmt: skip
        self._served = 0
        self._found = {"prompt_tokens": 0, "device_tokens": 0, "host_tokens": 0}

    # -- requests -----------------------------------------------------------------------------

    def submit(self, request_id: str, kept: list[int], prompt_tokens: int, output: int) -> Ticket:
        """Hand a request to the engine; `kept`: ids of the blocks of prompt and output.

        Raises:
            ValueError: it can never fit, or its lengths do not go with its blocks.
        """
        size = self.block_tokens
        if output < 1 or not 0 <= prompt_tokens // size <= len(kept):
            raise ValueError(f"{prompt_tokens} prompt tokens do not go with {len(kept)} blocks")
        if not self.node.fits(prompt_tokens, output):
            raise ValueError(f"{prompt_tokens} prompt tokens never fit on {self.name}")
        self._loop.catch_up()
        for before, block in zip([None, *kept[:-1]], kept, strict=True):
            self._parents[block] = before
        ids = np.array(kept, dtype=np.uint64)
        job = SimulatedJob(self._served, prompt_tokens, output, ids, len(ids), self._loop.now_s)
        self._served += 1
        ticket = Ticket(request_id, asyncio.Event(), asyncio.Event())
        self._tickets[job] = ticket
        self.node.submit(job)
        return ticket

    def _on_admitted(self, job: SimulatedJob) -> None:
        cached = job.device_tokens + job.cached_tokens
        self._admitted.append(
            Admission(
                self._tickets[job].request_id, job.device_tokens, job.cached_tokens,
                job.prompt_tokens - cached,
            )
        )  # fmt: skip

    def _on_first(self, job: SimulatedJob) -> None:
        ticket = self._tickets[job]
        self._prefilled.append(ticket.request_id)
        ticket.first.set()

    def _on_finished(self, job: SimulatedJob) -> None:
        ticket = self._tickets.pop(job)
        self._found["prompt_tokens"] += job.prompt_tokens
        self._found["device_tokens"] += job.device_tokens
        self._found["host_tokens"] += job.cached_tokens
        ticket.first.set()
        ticket.done.set()

    # -- what the node tells ------------------------------------------------------------------

    def hold(self, node: int, tier: str, ids: Ids) -> None:
        """Publish that blocks are held, as vLLM would."""
        blocks = ids.tolist()
        tokens: list[int] = []
        for block in blocks:
            tokens += block_tokens(block, self.block_tokens)
        self._publish(
            {
                "type": "BlockStored",
                "block_hashes": blocks,
                "parent_block_hash": self._parents[blocks[0]],
                "token_ids": tokens,
                "block_size": self.block_tokens,
                "lora_id": None,
                "medium": _MEDIA[tier],
            }
        )

    def drop(self, node: int, tier: str, ids: list[Ids]) -> None:
        """Publish that blocks are gone."""
        blocks = np.concatenate(ids).tolist()
        self._publish({"type": "BlockRemoved", "block_hashes": blocks, "medium": _MEDIA[tier]})

    def _publish(self, event: dict[str, Any]) -> None:
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._events.send_multipart([KV, self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1

    def report(self, now_s: float) -> None:
        """Publish what was measured; seconds are wall seconds."""
        totals, link, real = self.node.totals, self.node.link, self._loop.dilation
        size = self.block_tokens
        load_tokens, store_tokens = link.up.load_blocks * size, link.down.store_blocks * size
        token_bytes = kv_bytes_per_token(self.shape)
        report = WorkerReport(
            worker=self.name,
            time_s=now_s,
            steps_total=totals.steps,
            step_seconds_total=totals.step_s * real,
            computed_seconds_total=totals.computed_s * real,
            computed_announced_seconds_total=totals.computed_announced_s * real,
            step_tokens_total=totals.step_tokens,
            load_tokens_total=load_tokens,
            load_bytes_total=int(load_tokens * token_bytes),
            load_seconds_total=link.up.load_s * real,
            store_tokens_total=store_tokens,
            store_bytes_total=int(store_tokens * token_bytes),
            store_seconds_total=link.down.store_s * real,
            h2d_bytes_per_s=self.spec.profile.h2d_bytes_per_s / real,
            admitted=tuple(self._admitted),
            prefilled=tuple(self._prefilled),
        )
        self._admitted, self._prefilled = [], []
        self._reports.send_multipart([REPORT, msgspec.msgpack.encode(report.to_dict())])

    def totals(self) -> dict[str, float]:
        """What it did since the start, in emulated seconds and tokens."""
        busy_s, link_s = self.node.totals.busy_s, self.node.link.busy_s
        return {"busy_s": busy_s, "link_busy_s": link_s, **self._found}

    def announcement(self) -> Announcement:
        """What the node says of itself: the truth, with its dilation."""
        dilation = self._loop.dilation
        profile = self.spec.profile
        if dilation > 1:
            profile = replace(profile, dilation=dilation, source="paced")
        return Announcement(
            worker=self.name,
            model=self.shape.name,
            node=profile,
            step=step_model(self.shape, profile),
            kv_bytes_per_token=kv_bytes_per_token(self.shape),
            emulated_model=self.shape.name,
            fingerprint=_FINGERPRINT,
            block_tokens=self.block_tokens,
            device_blocks=self.model.device_blocks,
            host_blocks=self.model.host_blocks,
            max_batch_tokens=BUDGET_TOKENS,
            max_context_tokens=self.model.device_blocks * self.block_tokens,
            events_endpoint=self.events_endpoint,
            snapshot_endpoint="",
        )


def scaled_memory(spec: NodeSpec, shape: ModelShape, scale: int) -> NodeSpec:
    """The node with a `scale`-th of its memory for KV, for prompts that much shorter."""
    weights_bytes = shape.params_total * shape.weight_dtype_bytes
    free_bytes = USABLE_HBM * spec.profile.hbm_bytes - weights_bytes
    hbm_bytes = (weights_bytes + free_bytes / scale) / USABLE_HBM
    profile = replace(spec.profile, hbm_bytes=hbm_bytes)
    return replace(spec, profile=profile, host_bytes=spec.host_bytes / scale)


def _publisher() -> tuple[Any, str]:
    # A plain socket, although on an event loop: publishing never waits.
    made: Any = zmq.Context.instance().socket(zmq.PUB)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 100_000)
    port = made.bind_to_random_port("tcp://127.0.0.1")
    return made, f"tcp://127.0.0.1:{port}"
