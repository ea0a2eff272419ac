"""Times the decisions of Dynamo's `SelectionService`, in its own environment.

    python -I dynamo_router.py '[[512, 4096], 200]'     # lengths in tokens, repeats

`select_and_reserve` among four workers: on an empty index, then where one of them holds the whole
prompt. Ids are a list; reservations are freed outside the timed part.
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
BLOCK_TOKENS = 16
WARM_UP = 10
SETTLE_S = 20.0


async def decision_rows(lengths, repeats):
    """Every length on either index."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(4)]
    service = SelectionService()
    for number, socket in enumerate(sockets):
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://127.0.0.1:{9 + number}",
                "block_size": BLOCK_TOKENS,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 100_000,
                "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
            }
        )
    count = repeats + WARM_UP
    rows = [
        await timed(service, tokens, "empty", drawn(tokens, count, seed=tokens))
        for tokens in lengths
    ]
    for sequence, tokens in enumerate(lengths):
        (held,) = drawn(tokens, 1, seed=-1 - tokens)
        await hold(service, sockets[0], sequence, held)
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
    return {"tokens": tokens, "index": index, "ns": taken_ns[WARM_UP:]}


async def hold(service, socket, sequence, ids):
    """Tell the service that the first worker holds a prompt, and wait until it knows."""
    blocks = len(ids) // BLOCK_TOKENS
    stored = {
        "type": "BlockStored",
        "block_hashes": [(sequence << 32) + block for block in range(blocks)],
        "parent_block_hash": None,
        "token_ids": ids[: blocks * BLOCK_TOKENS],
        "block_size": BLOCK_TOKENS,
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


print(json.dumps(uvloop.run(decision_rows(*json.loads(sys.argv[1])))))
