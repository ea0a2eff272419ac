"""Our router as the others are asked: `router.core` behind JSON lines, in a process of its own.

What the nodes hold and how fast they are it learns as it does live, from their KV events and their
reports over ZMQ.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from benchmarks.routing.peers.wire import Handler, prompt_tokens, serve
from kappa.protocol import Announcement, WorkerReport
from router.config import RouterConfig
from router.decision import RouteRequest
from router.index.kv_events import decode_batch
from router.policy import policy_named
from router.router import Router


async def chooser(hello: dict[str, Any]) -> Handler:
    """Follows the nodes' streams and handles the bench's lines."""
    size = int(hello["block_tokens"])
    policy = policy_named(hello["policy"], seed=int(hello["seed"]))
    router = Router(RouterConfig(policy=policy, secret=1, stale_after_s=math.inf))

    def on_blocks(worker: str, payload: bytes) -> None:
        router.blocks(decode_batch(payload, worker))

    def on_report(worker: str, payload: bytes) -> None:
        report = WorkerReport.from_dict(msgspec.msgpack.decode(payload))
        router.report(report, time.monotonic())

    followers = []
    for node in hello["nodes"]:
        announcement = Announcement.from_dict(node["announcement"])
        router.join(announcement, time.monotonic())
        for key, handler in (("events_endpoint", on_blocks), ("reports_endpoint", on_report)):
            follower = _follow(node[key], announcement.worker, handler)
            followers.append(asyncio.create_task(follower))

    async def handle(message: dict[str, Any]) -> dict[str, Any] | None:
        for follower in followers:
            if follower.done():
                follower.result()
        now_s, request = time.monotonic(), message["request"]
        if message["op"] == "first":
            router.first_token(request, now_s)
        elif message["op"] == "done":
            router.tokens(request, message["output_tokens"])
            router.release(request, now_s, complete=True)
        if message["op"] != "route":
            return None
        ids = prompt_tokens(message["blocks"], size, message["tokens"])
        decision = router.route(
            RouteRequest(
                request, np.array(ids, dtype=np.int64), max_tokens=message["output_tokens"],
                session=message["session"],
            ),
            now_s,
        )  # fmt: skip
        counts = decision.chosen.counts
        return {
            "worker": decision.worker,
            "matched_tokens": counts.device_tokens + counts.cached_tokens,
        }

    return handle


async def _follow(endpoint: str, worker: str, handler: Callable[[str, bytes], None]) -> None:
    stream = zmq.asyncio.Context.instance().socket(zmq.SUB)
    stream.setsockopt(zmq.SUBSCRIBE, b"")
    stream.setsockopt(zmq.RCVHWM, 100_000)
    stream.setsockopt(zmq.LINGER, 0)
    stream.connect(endpoint)
    try:
        while True:
            handler(worker, (await stream.recv_multipart())[-1])
    finally:
        stream.close()


if __name__ == "__main__":
    asyncio.run(serve(chooser))
