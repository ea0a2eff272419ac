"""Emulated nodes behind real sockets: the simulator's node, run against the wall clock.

For `kappa bench peers`, which puts real routers before them. Nothing here computes tokens: answers
are words of filler, streamed when the simulated engine would have had them, and every name, header
and log line says that the nodes are emulated. All nodes live in this one process; each has an
OpenAI endpoint and a stream of KV events of its own. It is told what to be by a JSON line on stdin
and ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import structlog
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deploy.paced_loop import PacedLoop
from kappa.model import kv_bytes_per_token
from kappa.report import KV, REPORT, Admission, Announcement, WorkerReport
from kappa.shapes import model_shape
from kappa.step import step_model
from kappa.types import ModelShape
from loadtest.peers.wire import (
    NODE_HEADER,
    SHAPE_KEY,
    answer,
    block_tokens,
    blocks_in,
    read_stdin,
    serve_lines,
)
from simulator.cache import Ids
from simulator.clusters import NodeSpec, cluster_named, kv_room
from simulator.job import Job
from simulator.node import Node, NodeModel
from simulator.noise import Noise

log = structlog.get_logger(__name__)

BUDGET_TOKENS = 8192
USABLE_HBM = 0.9
_REPORT_EVERY_S = 0.1
_FINGERPRINT = "emulated"


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
        self._tickets: dict[Job, Ticket] = {}
        self._parents: dict[int, int | None] = {}
        self._admitted: list[Admission] = []
        self._prefilled: list[str] = []
        self._sequence = 0
        context = zmq.asyncio.Context.instance()
        self._events, self.events_endpoint = _publisher(context)
        self._reports, self.reports_endpoint = _publisher(context)
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
        job = Job(self._served, prompt_tokens, output, ids, len(ids), self._loop.now_s)
        self._served += 1
        ticket = Ticket(request_id, asyncio.Event(), asyncio.Event())
        self._tickets[job] = ticket
        self.node.submit(job)
        return ticket

    def _on_admitted(self, job: Job) -> None:
        cached = job.device_tokens + job.cached_tokens
        self._admitted.append(
            Admission(
                self._tickets[job].request_id, job.device_tokens, job.cached_tokens,
                job.prompt_tokens - cached,
            )
        )  # fmt: skip

    def _on_first(self, job: Job) -> None:
        ticket = self._tickets[job]
        self._prefilled.append(ticket.request_id)
        ticket.first.set()

    def _on_finished(self, job: Job) -> None:
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
        load_tokens, store_tokens = link.load_blocks * size, link.store_blocks * size
        token_bytes = kv_bytes_per_token(self.shape)
        report = WorkerReport(
            worker=self.name,
            time_s=now_s,
            steps_total=totals.steps,
            step_seconds_total=totals.step_s * real,
            step_predicted_seconds_total=totals.step_predicted_s * real,
            step_tokens_total=totals.step_tokens,
            load_tokens_total=load_tokens,
            load_bytes_total=int(load_tokens * token_bytes),
            load_seconds_total=link.load_s * real,
            store_tokens_total=store_tokens,
            store_bytes_total=int(store_tokens * token_bytes),
            store_seconds_total=link.store_s * real,
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

    # -- its endpoint -------------------------------------------------------------------------

    def app(self) -> Starlette:
        """The OpenAI endpoint, and what routers ask of a server before they use it."""

        async def about(request: Request) -> Response:
            return JSONResponse({"emulated": True, "model": self._model_id, "node": self.name})

        async def models(request: Request) -> Response:
            model = {"id": self._model_id, "object": "model", "owned_by": "kappa-serve, emulated"}
            return JSONResponse({"object": "list", "data": [model]}, headers=self._headers)

        paths = ("/health", "/health_generate", "/server_info", "/model_info")
        return Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", models),
                *(Route(path, about) for path in (*paths, "/get_server_info", "/get_model_info")),
            ]
        )

    @property
    def _model_id(self) -> str:
        return f"{self.shape.name} (emulated)"

    @property
    def _headers(self) -> dict[str, str]:
        return {NODE_HEADER: self.name, "x-kappa-emulated": "true"}

    async def _completions(self, request: Request) -> Response:
        try:
            body = await request.json()
            shape = body[SHAPE_KEY]
            blocks = blocks_in(body["prompt"])
            kept = [*blocks, *(int(block, 16) for block in shape["kept"])]
            ticket = self.submit(
                shape["request"], kept, int(shape["tokens"]), int(body["max_tokens"])
            )
        except (ValueError, KeyError, TypeError) as error:
            message = f"{type(error).__name__}: {error}; emulated nodes take the bench's requests"
            return JSONResponse({"error": {"message": message}}, 400, headers=self._headers)
        return StreamingResponse(
            self._stream(ticket, body["max_tokens"]),
            media_type="text/event-stream",
            headers=self._headers,
        )

    async def _stream(self, ticket: Ticket, output_tokens: int) -> AsyncIterator[bytes]:
        await ticket.first.wait()
        yield self._event(ticket, " emulated", None)
        await ticket.done.wait()
        yield self._event(ticket, " emulated" * (output_tokens - 1), "length")
        yield b"data: [DONE]\n\n"

    def _event(self, ticket: Ticket, text: str, finish: str | None) -> bytes:
        chunk = {
            "id": ticket.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model_id,
            "system_fingerprint": f"emulated {self.name}",
            "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}],
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


_MEDIA = {"device": "GPU", "host": "CPU"}


def scaled_memory(spec: NodeSpec, shape: ModelShape, scale: int) -> NodeSpec:
    """The node with a `scale`-th of its memory for KV, for prompts that much shorter."""
    weights_bytes = shape.params_total * shape.weight_dtype_bytes
    free_bytes = USABLE_HBM * spec.profile.hbm_bytes - weights_bytes
    hbm_bytes = (weights_bytes + free_bytes / scale) / USABLE_HBM
    profile = replace(spec.profile, hbm_bytes=hbm_bytes)
    return replace(spec, profile=profile, host_bytes=spec.host_bytes / scale)


def node_model(spec: NodeSpec, shape: ModelShape, block_tokens: int) -> NodeModel:
    """The true constants of a node in simulated seconds, which it also announces."""
    profile, fits = spec.profile, kv_room(spec, shape, block_tokens)
    block_bytes = kv_bytes_per_token(shape) * block_tokens
    step = step_model(shape, profile)
    return NodeModel(
        step=step,
        announced_step=step,
        block_tokens=block_tokens,
        device_blocks=fits.device_blocks,
        host_blocks=fits.host_blocks,
        load_block_s=block_bytes / profile.h2d_bytes_per_s,
        store_block_s=block_bytes / profile.store_bytes_per_s,
        load_fixed_s=profile.load_fixed_s,
        budget_tokens=BUDGET_TOKENS,
    )


def _publisher(context: zmq.asyncio.Context) -> tuple[Any, str]:
    # The plain socket: sending never waits, so no task is needed for it.
    made = zmq.Context(context).socket(zmq.PUB)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 100_000)
    port = made.bind_to_random_port("tcp://127.0.0.1")
    return made, f"tcp://127.0.0.1:{port}"


def _server(app: Starlette) -> tuple[uvicorn.Server, socket.socket, str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="error", lifespan="off", access_log=False, timeout_graceful_shutdown=1
    )
    return uvicorn.Server(config), listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


async def serve() -> None:
    """Read what to be, serve, and stop when stdin ends."""
    reader = await read_stdin()
    hello = json.loads(await reader.readline())
    loop = PacedLoop(float(hello["dilation"]))
    shape, cluster = model_shape(hello["model"]), cluster_named(hello["cluster"])
    specs = [scaled_memory(spec, shape, int(hello["scale"])) for spec in cluster.nodes]
    nodes = [EmulatedNode(i, spec, shape, hello, loop) for i, spec in enumerate(specs)]
    servers = [_server(node.app()) for node in nodes]
    serving = [
        asyncio.create_task(server.serve(sockets=[listener])) for server, listener, _ in servers
    ]
    tasks = [asyncio.create_task(loop.drive()), asyncio.create_task(_report(nodes))]
    while not all(server.started for server, _, _ in servers):
        await asyncio.sleep(0.01)
    log.info("emulated_nodes_ready", emulated=True, nodes=[node.name for node in nodes])
    said = [
        {
            "name": node.name,
            "url": url,
            "events_endpoint": node.events_endpoint,
            "reports_endpoint": node.reports_endpoint,
            "device_blocks": node.model.device_blocks,
            "max_batch_tokens": BUDGET_TOKENS,
            "announcement": node.announcement().to_dict(),
        }
        for node, (_, _, url) in zip(nodes, servers, strict=True)
    ]
    answer({"ready": True, "emulated": True, "nodes": said})

    async def totals(message: dict[str, Any]) -> dict[str, Any]:
        return {
            "nodes": {node.name: node.totals() for node in nodes},
            "late_ms": 1e3 * float(np.quantile(loop.late_s, 0.99)) if loop.late_s else 0.0,
        }

    await serve_lines(reader, totals)
    for task in tasks:
        task.cancel()
    for server, _, _ in servers:
        server.should_exit = True
    await asyncio.gather(*serving, *tasks, return_exceptions=True)


async def _report(nodes: list[EmulatedNode]) -> None:
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        for node in nodes:
            node.report(time.time())


def main() -> None:
    """The process."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        asyncio.run(serve())
    except (ValueError, KeyError) as error:
        answer({"error": str(error)})
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
