"""Dynamo's `SelectionService`, in its own environment.

First line of stdin: {"nodes": [{"name", "events_endpoint", "device_blocks", "max_batch_tokens"}],
"block_tokens", "settings": the service's environment}. "route" is answered with the node's name;
"first" (the first token came) and "done" with nothing; "time" with microseconds of decisions.
Blocks become known by the nodes' own KV events; where nodes have no endpoint, by events that this
script sends until the service knows what "held" of a "route" says: leading blocks on each node's
device, and further ones in its host tier.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("DYN_LOG", "error")

import msgpack  # type: ignore[import-untyped]
import uvloop
import zmq

# Before our folder is on the path, where a module of ours has the name of this package.
from dynamo.llm import SelectionService  # type: ignore[import-not-found]

sys.path.append(str(Path(__file__).parents[1]))
from wire import prompt_tokens, quantiles_us, serve  # type: ignore[import-not-found]

MODEL = "m"
WARM_UP = 10
SETTLE_S = 20.0
CONNECT_S = 1.0
AGAIN_S = 0.2


async def registered(nodes, size):
    """A service that knows the nodes."""
    service = SelectionService()
    for number, node in enumerate(nodes):
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://127.0.0.1:{9 + number}",
                "block_size": size,
                "max_num_batched_tokens": node["max_batch_tokens"],
                "total_kv_blocks": node["device_blocks"],
                "kv_events_endpoints": {0: node["events_endpoint"]},
            }
        )
    return service


async def chooser(hello):
    """Handles the bench's lines."""
    os.environ.update(hello["settings"])
    nodes, size = hello["nodes"], hello["block_tokens"]
    caches = None if not nodes or "events_endpoint" in nodes[0] else Caches(nodes, size)
    service = await registered(nodes, size)
    if caches is not None:
        await asyncio.sleep(CONNECT_S)

    async def handle(message):
        if message["op"] == "time":
            return {"rows": await decision_rows(message["lengths"], message["repeats"], size)}
        request = message["request"]
        if message["op"] == "first":
            await service.prefill_complete(request)
        elif message["op"] == "done":
            await service.free_reservation(request)
        if message["op"] != "route":
            return None
        ids = prompt_tokens(message["blocks"], size, message["tokens"])
        if caches is not None:
            await caches.show(service, message["blocks"], ids, message["held"])
        asked = {"model_name": MODEL, "selection_id": request, "token_ids": ids}
        asked["expected_output_tokens"] = message["output_tokens"]
        selection = await service.select_and_reserve(asked)
        return {
            "worker": nodes[selection["worker_id"]]["name"],
            "matched_tokens": selection["overlap"]["longest_matched"],
        }

    return handle


class Caches:
    """What the service was told of each node's two tiers, by events on a socket of its own."""

    def __init__(self, nodes, size):
        self.size, self.context, self.sockets = size, zmq.Context(), []
        self.known: list[dict[str, set[int]]] = [{"GPU": set(), "CPU": set()} for _ in nodes]
        self.numbers = [0] * len(nodes)
        for node in nodes:
            socket = self.context.socket(zmq.PUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            node["events_endpoint"] = (
                f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            )
            self.sockets.append(socket)

    async def show(self, service, blocks, ids, held):
        """Send events until the service knows these leading blocks of a prompt, and no more."""
        for node, (device, host) in enumerate(held):
            self.tell(node, "GPU", blocks, ids, device)
            self.tell(node, "CPU", blocks, ids, device + host if host else 0, device)
        asked = {"model_name": MODEL, "token_ids": ids}
        deadline_s = time.monotonic() + SETTLE_S
        again_s = time.monotonic() + AGAIN_S
        while time.monotonic() < deadline_s:
            scores = (await service.overlap_scores(asked))["workers"]
            found = {each["worker_id"]: each for each in scores}
            wrong = [
                node
                for node, (device, host) in enumerate(held)
                if found[node]["device_blocks"] != device
                or found[node]["host_pinned_extension_blocks"] != host
            ]
            if not wrong:
                return
            if time.monotonic() > again_s:
                # An ancestor that was removed took its descendants along: tell them again.
                for node in wrong:
                    for known in self.known[node].values():
                        known.difference_update(blocks)
                    device, host = held[node]
                    self.tell(node, "GPU", blocks, ids, device)
                    self.tell(node, "CPU", blocks, ids, device + host if host else 0, device)
                again_s = time.monotonic() + AGAIN_S
            await asyncio.sleep(0.001)
        raise RuntimeError(f"the service holds {found}, not {held}, after {SETTLE_S:g} s")

    def tell(self, node, medium, blocks, ids, count, keep=0):
        """Store `blocks[:count]`, remove what is known behind them (and behind `keep`)."""
        known = self.known[node][medium]
        gone = [block for block in blocks[max(count, keep) :] if block in known]
        first = next((at for at in range(count) if blocks[at] not in known), count)
        events = []
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": medium})
        if first < count:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": blocks[first:count],
                    "parent_block_hash": blocks[first - 1] if first else None,
                    "token_ids": ids[first * self.size : count * self.size],
                    "block_size": self.size,
                    "lora_id": None,
                    "medium": medium,
                }
            )
        known.difference_update(gone)
        known.update(blocks[first:count])
        if events:
            batch = msgpack.packb([time.time(), events, 0])
            number = self.numbers[node].to_bytes(8, "big")
            self.sockets[node].send_multipart([b"", number, batch])
            self.numbers[node] += 1


async def decision_rows(lengths, repeats, size):
    """Microseconds of `select_and_reserve` among four workers: on an empty index, then where one of
    them holds the whole prompt. Ids are a list; reservations are freed outside the timed part."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(4)]
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    room = {"max_batch_tokens": 8192, "device_blocks": 100_000}
    nodes = [{"events_endpoint": f"tcp://127.0.0.1:{port}", **room} for port in ports]
    service = await registered(nodes, size)
    count = repeats + WARM_UP
    rows = [
        await timed(service, tokens, "empty", drawn(tokens, count, seed=tokens))
        for tokens in lengths
    ]
    for sequence, tokens in enumerate(lengths):
        (held,) = drawn(tokens, 1, seed=-1 - tokens)
        await hold(service, sockets[0], sequence, held, size)
        rows.append(await timed(service, tokens, "held", [list(held) for _ in range(count)]))
    service.shutdown()
    context.destroy(linger=0)
    return rows


def drawn(tokens, count, seed):
    rng = random.Random(seed)
    return [rng.choices(range(128_000), k=tokens) for _ in range(count)]


async def timed(service, tokens, index, prompts):
    """A row of the time that decisions take."""
    taken_ns = []
    for number, ids in enumerate(prompts):
        name = f"{index}-{tokens}-{number}"
        asked = {"model_name": MODEL, "selection_id": name, "token_ids": ids}
        start_ns = time.perf_counter_ns()
        await service.select_and_reserve(asked)
        taken_ns.append(time.perf_counter_ns() - start_ns)
        await service.free_reservation(name)
    return {"tokens": tokens, "index": index, "us": quantiles_us(taken_ns, WARM_UP)}


async def hold(service, socket, sequence, ids, size):
    """Tell the service that the first worker holds a prompt, and wait until it knows."""
    blocks = len(ids) // size
    stored = {
        "type": "BlockStored",
        "block_hashes": [(sequence << 32) + block for block in range(blocks)],
        "parent_block_hash": None,
        "token_ids": ids[: blocks * size],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
    }
    deadline_s = time.monotonic() + SETTLE_S
    number = sequence * 1000
    while time.monotonic() < deadline_s:
        batch = msgpack.packb([time.time(), [stored], 0])
        socket.send_multipart([b"", number.to_bytes(8, "big"), batch])
        await asyncio.sleep(0.2)
        scores = await service.overlap_scores({"model_name": MODEL, "token_ids": ids})
        if any(worker["device_blocks"] == blocks for worker in scores["workers"]):
            return
        number += 1
    raise RuntimeError(f"the service did not index {blocks} blocks within {SETTLE_S:g} s")


uvloop.run(serve(chooser))
