"""SGLang's gateway, or vLLM's fork of it, before workers that answer when they are told to.

First line of stdin: {"nodes": [{"name"}], "package": "sglang_router" or "vllm_router", "options":
more of its command line}. "route" sends a completion through the gateway and is answered with the
name of the worker that got it, which holds it until "done"; "first" is not for it. vLLM's has each
worker render a prompt first: without token ids it goes by queues alone.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import aiohttp
from aiohttp import web
from wire import prompt_text, prompt_tokens, serve  # type: ignore[import-not-found] # by sys.path

START_S = 40.0
LIMIT_BYTES = 1 << 26


async def chooser(hello):
    """Starts workers and gateway, and handles the bench's lines."""
    reached: dict = {}
    released: dict = {}
    answered: dict = {}
    rendered: dict = {}

    async def listening(name):
        async def complete(request):
            request_id = (await request.json())["user"]
            reached[request_id].set_result(name)
            await released[request_id].wait()
            return web.json_response({"choices": [{"text": "."}], "usage": {}})

        async def render(request):
            ids = rendered[(await request.json())["user"]]
            return web.json_response([{"request_id": "", "token_ids": ids}])

        async def anything(request):
            return web.json_response({"status": "ok", "data": [{"id": "m"}]})

        app = web.Application(client_max_size=LIMIT_BYTES)
        app.router.add_post("/v1/completions", complete)
        app.router.add_post("/v1/completions/render", render)
        app.router.add_route("*", "/{path:.*}", anything)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    urls = [await listening(node["name"]) for node in hello["nodes"]]
    gateway, metrics = free_port(), free_port()
    command = [sys.executable, "-m", f"{hello['package']}.launch_router", "--worker-urls", *urls]
    command += ["--host", "127.0.0.1", "--port", str(gateway), "--prometheus-port", str(metrics)]
    # The bench ends the whole group of processes.
    process = subprocess.Popen([*command, *hello["options"]], stdout=subprocess.DEVNULL)
    client = aiohttp.ClientSession(
        f"http://127.0.0.1:{gateway}", timeout=aiohttp.ClientTimeout(None),
        connector=aiohttp.TCPConnector(limit=0),
    )  # fmt: skip
    await ready(client, process)

    async def handle(message):
        request_id = message["request"]
        if message["op"] == "route":
            reached[request_id] = asyncio.get_running_loop().create_future()
            released[request_id] = asyncio.Event()
            blocks = message["blocks"]
            rendered[request_id] = prompt_tokens(blocks, hello["block_tokens"], message["tokens"])
            text = prompt_text(blocks, request_id)
            body = {"model": "m", "prompt": text, "user": request_id, "max_tokens": 1}
            answered[request_id] = asyncio.create_task(post(client, body))
            done, _ = await asyncio.wait(
                (reached[request_id], answered[request_id]), return_when=asyncio.FIRST_COMPLETED
            )
            if reached[request_id] not in done:
                raise RuntimeError(f"the gateway answered itself: {answered[request_id].result()}")
            del rendered[request_id]
            return {"worker": reached.pop(request_id).result()}
        if message["op"] == "done":
            released.pop(request_id).set()
            await answered.pop(request_id)
        return {}

    return handle


async def post(client, body):
    """The gateway's answer: its status and text."""
    async with client.post("/v1/completions", json=body) as response:
        return response.status, (await response.text())[:200]


async def ready(client, process):
    """Wait until the gateway has taken in its workers."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise ValueError(f"the gateway ended with status {process.returncode}")
        try:
            async with client.get("/health_generate") as response:
                await response.read()
            async with client.get("/readiness") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.2)
    raise ValueError(f"the gateway was not ready within {START_S:g} s")


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


asyncio.run(serve(chooser))
