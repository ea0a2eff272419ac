"""An EMULATED OpenAI server for the benches of `kappa route`: no model, its time is made up.

    python -m kappa_benchmarks.serving.route_backend 8001 --load-token-us 20

In real time: a prefix cache on the device and in a host tier behind it, both least recently used
first; a link on which loads queue; an engine with a token budget for each step. Its laws are not
the router's: tokens are computed in tiles of 128 and long chunks cost more than in proportion,
decoding is padded to powers of two, every step and load is jittered. It reports `usage`, and the
sizes of its cache in `/metrics` if it is told to.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from aiohttp import web

BLOCK_BYTES = 256
BLOCK_TOKENS = 64
_BYTES_PER_TOKEN = 4
_BUDGET_TOKENS = 2048
_TILE_TOKENS = 128
_LONG_TOKENS = 4096
_MOST_OUTPUT = 4096
_MODEL = "emulated"


@dataclass(frozen=True, slots=True)
class EmulatedLaw:
    """Seconds of an emulated engine."""

    # Of a new token, and of each pair of query and key.
    token_s: float = 150e-6
    pair_s: float = 6e-9
    # Of a decoded token.
    decode_s: float = 1.5e-3
    # Of each step besides.
    step_s: float = 12e-3
    # Of a loaded token, and of each load besides.
    load_token_s: float = 20e-6
    load_s: float = 4e-3
    # Standard deviation of the logarithm of steps and loads.
    jitter: float = 0.1

    def of_step(self, chunks: Iterable[tuple[int, int]], decoding: int) -> float:
        """Seconds of a step over (new tokens, context before them) and requests that decode."""
        seconds = self.step_s
        for new, context in chunks:
            tiled = -(-new // _TILE_TOKENS) * _TILE_TOKENS
            seconds += tiled * self.token_s * (1 + tiled / _LONG_TOKENS)
            seconds += new * (context + new / 2) * self.pair_s
        padded = 1 << (decoding - 1).bit_length() if decoding else 0
        return seconds + padded * self.decode_s

    def of_load(self, tokens: int) -> float:
        """Seconds of the link to load `tokens` tokens."""
        return self.load_s + tokens * self.load_token_s if tokens else 0.0


class LruTier:
    """Blocks of a tier, least recently used first; at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: list[int]) -> int:
        """The number of leading blocks that it holds."""
        return next((i for i, b in enumerate(blocks) if b not in self._blocks), len(blocks))

    def keep(self, blocks: list[int]) -> None:
        """Mark blocks as used, a prompt's end as less recent than its beginning."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


@dataclass(slots=True, eq=False)
class EmulatedJob:
    """A request in the engine."""

    # Tokens to compute, and those before them.
    new: int
    context: int
    # Tokens to generate.
    output: int
    # One entry for each generated token.
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    generated: int = 0


class EmulatedEngine:
    """Caches, link and steps in real time. `run` serves until it is cancelled."""

    def __init__(self, law: EmulatedLaw, device_blocks: int, host_blocks: int, seed: int) -> None:
        self.law = law
        self.device, self.host = LruTier(device_blocks), LruTier(host_blocks)
        self._random = random.Random(seed)
        self._link = asyncio.Lock()
        self._jobs: list[EmulatedJob] = []
        self._work = asyncio.Event()

    async def submit(self, blocks: list[int], tokens: int, output: int) -> tuple[EmulatedJob, int]:
        """Load the cached prefix and queue the rest; the job, and the tokens found in caches."""
        usable = blocks[: (tokens - 1) // BLOCK_TOKENS]
        on_device = self.device.leading(usable)
        found = max(on_device, self.host.leading(usable))
        if found > on_device:
            async with self._link:
                seconds = self.law.of_load((found - on_device) * BLOCK_TOKENS)
                await asyncio.sleep(seconds * self._noise())
        cached = found * BLOCK_TOKENS
        self.device.keep(usable[:found])
        job = EmulatedJob(tokens - cached, cached, output)
        self._jobs.append(job)
        self._work.set()
        return job, cached

    def computed(self, blocks: list[int]) -> None:
        """A prompt is computed: its blocks are on the device, and written through."""
        self.device.keep(blocks)
        self.host.keep(blocks)

    def leave(self, job: EmulatedJob) -> None:
        """Drop a job that is done, or without a client."""
        if job in self._jobs:
            self._jobs.remove(job)

    async def run(self) -> None:
        while True:
            if not self._jobs:
                self._work.clear()
                await self._work.wait()
            decoding = [job for job in self._jobs if not job.new]
            budget, chunks = _BUDGET_TOKENS - len(decoding), []
            for job in self._jobs:
                if job.new and budget > 0:
                    chunks.append((job, min(job.new, budget)))
                    budget -= chunks[-1][1]
            seconds = self.law.of_step([(n, j.context) for j, n in chunks], len(decoding))
            await asyncio.sleep(seconds * self._noise())
            for job, tokens in chunks:
                job.new -= tokens
                job.context += tokens
            for job in [*decoding, *(job for job, _ in chunks if not job.new)]:
                job.generated += 1
                job.tokens.put_nowait(job.generated)
                if job.generated >= job.output:
                    self.leave(job)

    def _noise(self) -> float:
        return self._random.lognormvariate(0.0, self.law.jitter)


def prompt_blocks(prompt: bytes) -> list[int]:
    """Names of a prompt's whole blocks, each of all that comes before it, too."""
    names, before = [], 0
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        before = hash((before, prompt[start : start + BLOCK_BYTES]))
        names.append(before)
    return names


def _wanted(read: bytes) -> tuple[dict[str, Any], str, int]:
    """A body, the text of its prompt, and tokens to answer with; raises for a malformed body."""
    body = json.loads(read)
    chat = body.get("messages")
    text = json.dumps(chat)[:-1] if chat is not None else str(body.get("prompt", ""))
    text.encode()
    output = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
    if not 0 < output <= _MOST_OUTPUT:
        raise ValueError(f"max_tokens: {output} is not from 1 to {_MOST_OUTPUT}")
    return body, text, output


class _Face:
    """The OpenAI face of an engine."""

    def __init__(self, engine: EmulatedEngine, name: str) -> None:
        self.engine, self.name = engine, name

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat, streamed or whole."""
        try:
            body, text, output = _wanted(await request.read())
        except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
            refusal = {"message": f"{error}"[:200], "type": "invalid_request_error", "code": 400}
            return web.json_response({"error": refusal}, status=400)
        is_chat, prompt = body.get("messages") is not None, text.encode()
        tokens, blocks = max(len(prompt) // _BYTES_PER_TOKEN, 1), prompt_blocks(prompt)
        job, cached = await self.engine.submit(blocks, tokens, output)
        usage = {
            "prompt_tokens": tokens, "completion_tokens": output, "total_tokens": tokens + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        head: dict[str, Any] = {"id": "emulated", "object": "text_completion", "created": 0}
        head["model"] = body.get("model", _MODEL)
        try:
            if body.get("stream"):
                return await self._streamed(request, job, blocks, head, usage, is_chat)
            for number in range(output):
                await job.tokens.get()
                if not number:
                    self.engine.computed(blocks)
        finally:
            self.engine.leave(job)
        said = "x" * output
        word = {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
        choice = {"index": 0, "finish_reason": "length", **word}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    async def _streamed(
        self, request: web.Request, job: EmulatedJob, blocks: list[int], head: dict[str, Any],
        usage: dict[str, Any], is_chat: bool,
    ) -> web.StreamResponse:  # fmt: skip
        headers = {"content-type": "text/event-stream", "x-backend": self.name}
        answer = web.StreamResponse(headers=headers)
        word = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
        for number in range(job.output):
            await job.tokens.get()
            if not number:
                self.engine.computed(blocks)
                await answer.prepare(request)
            end = "length" if number + 1 == job.output else None
            choice = {"index": 0, "finish_reason": end, **word}
            await answer.write(_event({**head, "choices": [choice]}))
        await answer.write(_event({**head, "choices": [], "usage": usage}))
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def reset(self, _: web.Request) -> web.Response:
        """Empty the caches."""
        self.engine.device.clear()
        self.engine.host.clear()
        return web.Response()

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """Have the engine run while its application does."""
        task = asyncio.create_task(self.engine.run())
        yield
        task.cancel()


def make_server(engine: EmulatedEngine, name: str, *, tells_metrics: bool) -> web.Application:
    """A server of an engine. `POST /reset` empties its caches."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": _MODEL, "object": "model"}]})

    async def metrics(_: web.Request) -> web.Response:
        if not tells_metrics:
            raise web.HTTPNotFound
        size = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{engine.device._most}"'
        return web.Response(text=f"vllm:cache_config_info{{{size}}} 1.0\n")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    face, app = _Face(engine, name), web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(face.running)
    app.add_routes([
        web.get("/health", health), web.get("/v1/models", models), web.get("/metrics", metrics),
        web.post("/reset", face.reset), web.post("/v1/completions", face.complete),
        web.post("/v1/chat/completions", face.complete),
    ])  # fmt: skip
    return app


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def main(
    port: int,
    load_token_us: Annotated[float, typer.Option(help="Of the link, a token.")] = 20.0,
    device_tokens: int = 40_000,
    host_tokens: int = 1_000_000,
    speed: Annotated[float, typer.Option(help="Divides the engine's seconds.")] = 1.0,
    seed: int = 0,
    metrics: Annotated[bool, typer.Option(help="Tell the size of its cache.")] = False,
) -> None:
    """Serve until ended."""
    law = EmulatedLaw()
    law = EmulatedLaw(
        law.token_s / speed, law.pair_s / speed, law.decode_s / speed, law.step_s / speed,
        load_token_us * 1e-6,
    )  # fmt: skip

    async def made() -> web.Application:
        engine = EmulatedEngine(
            law, device_tokens // BLOCK_TOKENS, host_tokens // BLOCK_TOKENS, seed
        )
        return make_server(engine, f"127.0.0.1:{port}", tells_metrics=metrics)

    web.run_app(made(), host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    typer.run(main)
