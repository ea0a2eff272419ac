"""Times Dynamo's `SelectionService.select_and_reserve`, in its own environment.

JSON on stdin: {"lengths", "repeats", "workers", "block_tokens"}. The last line of stdout is a list
of {"tokens", "index", "us": {"p50", "p99"}}: `index` is "empty" when no worker holds any block, and
"held" when one holds the whole prompt, as it said with a KV event. The prompt's ids are a list; the
reservation is freed outside the timed part. The event loop is uvloop, which the wheel brings.
"""

import asyncio
import json
import os
import random
import sys
import time

os.environ.setdefault("DYN_LOG", "error")

import msgpack  # type: ignore[import-untyped]
import uvloop
import zmq
from dynamo.llm import SelectionService  # type: ignore[import-not-found]

MODEL = "m"
WARM_UP = 10
SETTLE_S = 20.0


async def main(request):
    """Measure every length on an empty index, then on a full one."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(request["workers"])]
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    service = SelectionService()
    size = request["block_tokens"]
    for worker, port in enumerate(ports):
        await service.upsert_worker(
            {
                "worker_id": worker,
                "model_name": MODEL,
                "endpoint": f"http://127.0.0.1:{9 + worker}",
                "block_size": size,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 100_000,
                "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
            }
        )
    rows = []
    for tokens in request["lengths"]:
        prompts = _prompts(tokens, request["repeats"] + WARM_UP, seed=tokens)
        rows.append(await _timed(service, tokens, "empty", prompts))
    for sequence, tokens in enumerate(request["lengths"]):
        held = _prompts(tokens, 1, seed=-1 - tokens)[0]
        await _hold(service, sockets[0], sequence, held, size)
        prompts = [list(held) for _ in range(request["repeats"] + WARM_UP)]
        rows.append(await _timed(service, tokens, "held", prompts))
    service.shutdown()
    context.destroy(linger=0)
    return rows


def _prompts(tokens, count, seed):
    rng = random.Random(seed)
    return [rng.choices(range(128_000), k=tokens) for _ in range(count)]


async def _timed(service, tokens, index, prompts):
    taken_us = []
    for number, ids in enumerate(prompts):
        name = f"{index}-{tokens}-{number}"
        asked = {"model_name": MODEL, "selection_id": name, "token_ids": ids}
        start_ns = time.perf_counter_ns()
        await service.select_and_reserve(asked)
        taken_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        await service.free_reservation(name)
    taken_us = sorted(taken_us[WARM_UP:])
    last = len(taken_us) - 1
    us = {"p50": taken_us[last // 2], "p99": taken_us[round(0.99 * last)]}
    return {"tokens": tokens, "index": index, "us": us}


async def _hold(service, socket, sequence, ids, size):
    """Tell the service that the first worker holds a prompt, and wait until it knows."""
    blocks = len(ids) // size
    names = [(sequence << 32) + block for block in range(blocks)]
    stored = {
        "type": "BlockStored",
        "block_hashes": names,
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
        if any(w["device_blocks"] == blocks for w in scores["workers"]):
            return
        number += 1
    raise SystemExit(f"the service did not index {blocks} blocks within {SETTLE_S:g} s")


print(json.dumps(uvloop.run(main(json.load(sys.stdin)))))
