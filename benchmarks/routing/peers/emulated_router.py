"""Our router before emulated nodes: `router.router` behind JSON lines, for `kappa bench peers`.

The same process as the peers' routers get: one line asks where a request goes, others tell of its
first token and its end. What the nodes hold and how fast they are it learns as it does live, from
their KV events and their reports over ZMQ. Ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from benchmarks.routing.peers.wire import answer, prompt_tokens, read_stdin, serve_lines
from kappa.protocol import Announcement, WorkerReport
from router.decision import RouteRequest
from router.index.kv_events import decode_batch
from router.policies import policy_named
from router.router import Router, RouterConfig


class Chooser:
    """A router and the streams that it follows."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.block_tokens = int(hello["block_tokens"])
        policy = policy_named(hello["policy"], seed=int(hello["seed"]))
        self.router = Router(RouterConfig(policy=policy, secret=1, stale_after_s=math.inf))
        context = zmq.asyncio.Context.instance()
        self._tasks = []
        for node in hello["nodes"]:
            said = Announcement.from_dict(node["announcement"])
            self.router.join(said, time.monotonic())
            for endpoint, heard in (
                (node["events_endpoint"], self._blocks),
                (node["reports_endpoint"], self._report),
            ):
                follow = _follow(context, endpoint, said.worker, heard)
                self._tasks.append(asyncio.create_task(follow))

    def _blocks(self, worker: str, payload: bytes) -> None:
        self.router.blocks(decode_batch(payload, worker))

    def _report(self, worker: str, payload: bytes) -> None:
        said = WorkerReport.from_dict(msgspec.msgpack.decode(payload))
        self.router.report(said, time.monotonic())

    async def handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """One line."""
        now_s, request = time.monotonic(), message["request"]
        if message["op"] == "route":
            ids = prompt_tokens(message["blocks"], self.block_tokens, message["tokens"])
            decision = self.router.route(
                RouteRequest(
                    request,
                    np.array(ids, dtype=np.int64),
                    max_tokens=message["output_tokens"],
                    session=message["session"],
                ),
                now_s,
            )
            counts = decision.chosen.counts
            return {
                "worker": decision.worker,
                "matched_tokens": counts.device_tokens + counts.cached_tokens,
                "reason": decision.reason,
                "predicted_ttft_s": decision.chosen.ttft_s,
            }
        if message["op"] == "first":
            self.router.first_token(request, now_s)
        elif message["op"] == "done":
            self.router.tokens(request, message["output_tokens"])
            self.router.release(request, now_s, complete=True)
        return None


async def _follow(
    context: zmq.asyncio.Context, endpoint: str, worker: str, heard: Callable[[str, bytes], None]
) -> None:
    stream = context.socket(zmq.SUB)
    stream.setsockopt(zmq.SUBSCRIBE, b"")
    stream.setsockopt(zmq.RCVHWM, 100_000)
    stream.setsockopt(zmq.LINGER, 0)
    stream.connect(endpoint)
    try:
        while True:
            heard(worker, (await stream.recv_multipart())[-1])
    finally:
        stream.close()


async def serve() -> None:
    """Answer until stdin ends."""
    reader = await read_stdin()
    try:
        chooser = Chooser(json.loads(await reader.readline()))
    except ValueError as error:
        answer({"error": str(error)})
        return
    answer({"ready": True})
    await serve_lines(reader, chooser.handle)


if __name__ == "__main__":
    asyncio.run(serve())
