"""The hop before Dynamo's frontend, the same for all arms; our arm's router decides in it.

    python -m kappa_benchmarks.routing.peers.dynamo_proxy

First line of stdin: {"port", "upstream", "ours": None or the arguments of `Ours`}. Requests go on
as they came, in our arm with the header that `--router-mode direct` obeys. Each further line is
answered with the decisions so far, predicted and actual; the hop ends with its standard input. Our
router learns the nodes' caches from Dynamo's own KV events, their speed from first tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web

from kappa.protocol import Announcement
from kappa_benchmarks.routing.peers.routers import LINE_BYTES
from kappa_router.config import RouterConfig
from kappa_router.decision import RouteRequest
from kappa_router.index.kv_event_types import Tier
from kappa_router.index.prefix_hash import UInt64s
from kappa_router.index.prefix_index import PrefixIndex
from kappa_router.policy import policy_named
from kappa_router.router import Router

HEADER = "x-dynamo-worker-instance-id"
_SEED = 1337
_TIERS: dict[str, Tier] = {"device": "device", "host_pinned": "host", "disk": "disk"}
_BODY_BYTES = 64 << 20
_HEAD_BYTES = 5  # of an event's frame: version, length


# -- Dynamo's KV events ---------------------------------------------------------------------------


class _Block(msgspec.Struct, gc=False):
    block_hash: int


class _StoredBlocks(msgspec.Struct, gc=False):
    blocks: list[_Block]


class _RemovedBlocks(msgspec.Struct, gc=False):
    block_hashes: list[int]


class _Data(msgspec.Struct, gc=False):
    stored: _StoredBlocks | None = None
    removed: _RemovedBlocks | None = None


class _Event(msgspec.Struct, gc=False):
    data: _Data | str


class _TierEvent(msgspec.Struct, gc=False):
    worker_id: int
    storage_tier: str
    event: _Event


class _Envelope(msgspec.Struct, gc=False):
    payload: msgspec.Raw


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_events = msgspec.msgpack.Decoder(list[_TierEvent]).decode


def block_hashes(token_ids: Sequence[int], block_tokens: int) -> UInt64s:
    """Dynamo's names of a prompt's full blocks: XXH3 of the tokens, chained."""
    raw, size = np.asarray(token_ids, dtype="<u4").tobytes(), 4 * block_tokens
    found = np.empty(len(raw) // size, dtype=np.uint64)
    name = 0
    for i in range(len(found)):
        own = xxhash.xxh3_64_intdigest(raw[size * i : size * (i + 1)], seed=_SEED)
        pair = struct.pack("<QQ", name, own)
        name = xxhash.xxh3_64_intdigest(pair, seed=_SEED) if i else own
        found[i] = name
    return found


def tier_events(frame: bytes) -> list[_TierEvent]:
    """The events of one message of the native event plane.

    Raises:
        ValueError: it is malformed.
    """
    try:
        payload = bytes(_decode_envelope(frame[_HEAD_BYTES:]).payload)
        if payload[:1] in (b"\xc4", b"\xc5", b"\xc6"):  # bytes within
            payload = msgspec.msgpack.decode(payload)
        return _decode_events(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed KV event of Dynamo's: {error}") from error


def apply(index: PrefixIndex, events: Iterable[_TierEvent]) -> int:
    """Apply events to an index of Dynamo's hashes; returns how many blocks changed."""
    blocks = 0
    for each in events:
        worker, tier = str(each.worker_id), _TIERS.get(each.storage_tier)
        data = each.event.data
        if tier is None or isinstance(data, str):
            continue  # a tier of the whole cluster, or "cleared", which no arm does
        if data.stored is not None:
            names = np.array([b.block_hash for b in data.stored.blocks], dtype=np.uint64)
            index.hold(worker, tier, names)
            blocks += len(names)
        if data.removed is not None:
            names = np.array(data.removed.block_hashes, dtype=np.uint64)
            index.drop(worker, tier, names)
            blocks += len(names)
    return blocks


# -- our router -----------------------------------------------------------------------------------


class Ours:
    """Our router before Dynamo's workers.

    Args:
        announcements: of the workers, named by their instance ids.
        events: addresses of KV events.
    """

    def __init__(
        self, announcements: Sequence[dict[str, Any]], events: Sequence[str], policy: str, seed: int
    ) -> None:
        config = RouterConfig(policy_named(policy, seed=seed), secret=1, stale_after_s=math.inf)
        self._router = Router(config)
        for row in announcements:
            announcement = Announcement.from_dict(row)
            self._router.join(announcement, time.monotonic())
            self._size = announcement.block_tokens
        self.decisions: dict[str, dict[str, Any]] = {}
        self._follower = asyncio.create_task(self._follow(events))
        self.blocks = 0

    def check(self) -> None:
        """Raise what ended the follower: a router without events must not look like ours."""
        if self._follower.done():
            self._follower.result()

    async def _follow(self, events: Sequence[str]) -> None:
        stream = zmq.asyncio.Context.instance().socket(zmq.SUB)
        stream.setsockopt(zmq.SUBSCRIBE, b"")
        stream.setsockopt(zmq.RCVHWM, 0)
        stream.setsockopt(zmq.LINGER, 0)
        for address in events:
            stream.connect(address)
        index = self._router.index
        assert index is not None
        while True:
            self.blocks += apply(index, tier_events((await stream.recv_multipart())[-1]))

    def route(self, request: str, body: dict[str, Any]) -> str:
        """The instance that a completion goes to."""
        began_s, ids = time.perf_counter(), body["prompt"]
        now_s = time.monotonic()
        decision = self._router.route(
            RouteRequest(
                request, prefix_hashes=block_hashes(ids, self._size), prompt_tokens=len(ids),
                max_tokens=body["max_tokens"],
            ),
            now_s,
        )  # fmt: skip
        chosen = decision.chosen
        self.decisions[request] = {
            "sent_s": now_s, "predicted_s": chosen.ttft_s, "kind": decision.kind,
            "held": chosen.counts.device_tokens + chosen.counts.cached_tokens,
            "host": chosen.counts.cached_tokens, "new": chosen.counts.new_tokens,
            "queue_s": chosen.queue_s, "load_s": chosen.load_s, "compute_s": chosen.compute_s,
            "in_flight": chosen.in_flight, "route_ms": 1e3 * (time.perf_counter() - began_s),
        }  # fmt: skip
        return decision.worker

    def first(self, request: str) -> None:
        """Note that a first token came."""
        now_s = time.monotonic()
        row = self.decisions[request]
        row["ttft_s"] = now_s - row.pop("sent_s")
        self._router.first_token(request, now_s)

    def ended(self, request: str, tokens: int) -> None:
        """Note that a stream ended after `tokens` tokens."""
        self._router.tokens(request, tokens)
        self._router.release(request, time.monotonic(), complete=tokens > 0)

    def scales(self) -> dict[str, dict[str, float]]:
        """Calibration by worker: factors of the announced seconds, and seconds of overhead."""
        return {
            name: {"compute": c.compute_scale, "link": c.link_scale, "overhead_s": c.overhead_s}
            for name, c in ((n, s.calibration) for n, s in self._router.workers.items())
        }


async def hop(hello: dict[str, Any]) -> Ours | None:
    """Serve the hop until this process ends; our router, if it is the one that decides."""
    ours = Ours(**hello["ours"]) if hello["ours"] else None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    http = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
    )

    async def forward(request: web.Request) -> web.StreamResponse:
        body, name = await request.read(), request.headers["x-request-id"]
        headers = {"content-type": "application/json"}
        if ours is not None:
            headers[HEADER] = ours.route(name, msgspec.json.decode(body))
        events = 0
        try:
            url = hello["upstream"] + request.path
            async with http.post(url, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    if ours is not None and answer.status == 200 and b'"text"' in chunk:
                        if not events:
                            ours.first(name)
                        events += chunk.count(b'"text"')
                    await response.write(chunk)
                await response.write_eof()
                return response
        finally:
            if ours is not None:
                # The last event ends the answer and has no token.
                ours.ended(name, max(events - 1, 0))

    app = web.Application(client_max_size=_BODY_BYTES)
    app.router.add_post("/v1/completions", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", hello["port"]).start()

    return ours


def decisions(ours: Ours | None) -> dict[str, Any]:
    """Our router's predictions and what came, by request."""
    if ours is None:
        return {}
    ours.check()
    return {"decisions": ours.decisions, "blocks": ours.blocks, "learnt": ours.scales()}


async def main() -> None:
    """Answer the bench's lines until there are no more."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        ours, answer = await hop(json.loads(await reader.readline())), dict[str, Any]()
        while True:
            print(json.dumps(answer), flush=True)
            if not await reader.readline():
                return
            answer = decisions(ours)
    except Exception as error:  # The bench must learn of any error.
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
