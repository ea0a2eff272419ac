"""Routes with Dynamo's `SelectionService`, in its own environment, for `kappa bench peers`.

First line of stdin: {"nodes": [{"name", "url", "events_endpoint", "device_blocks",
"max_batch_tokens"}], "block_tokens", "settings": the service's environment}. Then {"op": "route"},
answered with the node's name, and "first" (the first token came) and "done". Blocks become known by
the nodes' own KV events.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DYN_LOG", "error")
sys.path.append(str(Path(__file__).parents[1]))

import json

import uvloop
from dynamo.llm import SelectionService  # type: ignore[import-not-found]
from wire import answer, prompt_tokens, read_stdin, serve_lines  # type: ignore[import-not-found]

MODEL = "m"


class Selector:
    """The service, and the names of its workers."""

    def __init__(self, hello):
        self.nodes = hello["nodes"]
        self.block_tokens = hello["block_tokens"]
        os.environ.update(hello["settings"])
        self.service = SelectionService()

    async def register(self):
        """Tell the service of every node."""
        for number, node in enumerate(self.nodes):
            await self.service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": MODEL,
                    "endpoint": node["url"],
                    "block_size": self.block_tokens,
                    "max_num_batched_tokens": node["max_batch_tokens"],
                    "total_kv_blocks": node["device_blocks"],
                    "kv_events_endpoints": {0: node["events_endpoint"]},
                }
            )

    async def handle(self, message):
        """One line."""
        request = message["request"]
        if message["op"] == "route":
            ids = prompt_tokens(message["blocks"], self.block_tokens, message["tokens"])
            selection = await self.service.select_and_reserve(
                {
                    "model_name": MODEL,
                    "selection_id": request,
                    "token_ids": ids,
                    "expected_output_tokens": message["output_tokens"],
                }
            )
            overlap = selection["overlap"]
            return {
                "worker": self.nodes[selection["worker_id"]]["name"],
                "matched_tokens": overlap["longest_matched"],
            }
        if message["op"] == "first":
            await self.service.prefill_complete(request)
        elif message["op"] == "done":
            await self.service.free_reservation(request)
        return None


async def main():
    """Serve until stdin ends."""
    reader = await read_stdin()
    selector = Selector(json.loads(await reader.readline()))
    await selector.register()
    answer({"ready": True})
    await serve_lines(reader, selector.handle)
    selector.service.shutdown()


uvloop.run(main())
