"""Emulated nodes behind real sockets: the simulator's node, run against the wall clock.

For `kappa bench peers`, which puts real routers before them. Answers are words of filler, streamed
when the simulated engine would have had them, and every name, header and log line says that the
nodes are emulated. All nodes live in this one process; each has an OpenAI endpoint and streams of
its own. It is told what to be by a JSON line on stdin and ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.routing.peers.emulated_node import (
    BUDGET_TOKENS,
    EmulatedNode,
    Ticket,
    scaled_memory,
)
from benchmarks.routing.peers.paced_loop import PacedLoop
from benchmarks.routing.peers.wire import (
    NODE_HEADER,
    SHAPE_KEY,
    answer,
    blocks_in,
    read_stdin,
    serve_lines,
)
from kappa.shapes import model_shape
from simulator.clusters import cluster_named

log = structlog.get_logger(__name__)

_REPORT_EVERY_S = 0.1


class Endpoint:
    """A node's OpenAI endpoint, as far as routers and the bench need one."""

    def __init__(self, node: EmulatedNode) -> None:
        self.node = node

    def app(self) -> Starlette:
        """The OpenAI endpoint, and what routers ask of a server before they use it."""

        async def about(request: Request) -> Response:
            return JSONResponse({"emulated": True, "model": self._model_id, "node": self.node.name})

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
        return f"{self.node.shape.name} (emulated)"

    @property
    def _headers(self) -> dict[str, str]:
        return {NODE_HEADER: self.node.name, "x-kappa-emulated": "true"}

    async def _completions(self, request: Request) -> Response:
        try:
            body = await request.json()
            shape = body[SHAPE_KEY]
            blocks = blocks_in(body["prompt"])
            kept = [*blocks, *(int(block, 16) for block in shape["kept"])]
            ticket = self.node.submit(
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
            "system_fingerprint": f"emulated {self.node.name}",
            "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}],
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


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
    servers = [_server(Endpoint(node).app()) for node in nodes]
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

    lines = asyncio.create_task(serve_lines(reader, totals))
    ended, _ = await asyncio.wait([lines, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for server, _, _ in servers:
        server.should_exit = True
    for task in (lines, *tasks):
        task.cancel()
    await asyncio.gather(*serving, lines, *tasks, return_exceptions=True)
    for task in ended:
        # A node that breaks must break the run: its requests would only look slow.
        task.result()


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
