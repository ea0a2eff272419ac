"""What the bench and the processes of the routers exchange: JSON lines, and prompts as block ids.

A prompt is known by the ids of its full blocks; as tokens, a block is as many as it has, made from
the id, and as text, one word of 16 characters. Processes read JSON lines and end with their
standard input, so that none outlives the bench. Nothing but the standard library: the script of
another system's router imports this file alone, by its path.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

LINE_BYTES = 1 << 24


def prompt_text(blocks: Sequence[int], request: str) -> str:
    """A prompt as words: one per full block, and one of its own for the rest."""
    return " ".join([*(f"{block:016x}" for block in blocks), f"?{request}"])


def block_tokens(block: int, size: int) -> list[int]:
    """The tokens of a block: its id in four pieces, over and over."""
    pieces = [block & 0xFFFF, block >> 16 & 0xFFFF, block >> 32 & 0xFFFF, block >> 48]
    return (pieces * (-(-size // 4)))[:size]


def prompt_tokens(blocks: Sequence[int], size: int, tokens: int) -> list[int]:
    """All tokens of a prompt; those behind the last full block are its own."""
    ids = [token for block in blocks for token in block_tokens(block, size)]
    last = blocks[-1] if blocks else 0
    return ids + block_tokens(last ^ tokens, max(tokens - len(ids), 0))


def quantiles_us(taken_ns: Sequence[int], warm_up: int) -> dict[str, float]:
    """p50 and p99 in microseconds of what comes behind the warm-up."""
    taken_us = sorted(ns / 1e3 for ns in taken_ns[warm_up:])
    last = len(taken_us) - 1
    return {"p50": taken_us[last // 2], "p99": taken_us[round(0.99 * last)]}


Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


async def serve(make: Callable[[dict[str, Any]], Awaitable[Handler]]) -> None:
    """Make a handler from the first line, then answer each line that has an "id", several at a
    time, until standard input ends."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        handle = await make(json.loads(await reader.readline()))
    except (ValueError, KeyError) as error:
        _answer({"error": f"{type(error).__name__}: {error}"})
        return
    _answer({"ready": True})
    tasks: set[asyncio.Task[None]] = set()

    async def one(message: dict[str, Any]) -> None:
        try:
            reply = await handle(message)
        except Exception as error:  # The bench must learn of it, whatever it is.
            reply = {"error": f"{type(error).__name__}: {error}"}
        if "id" in message:
            _answer({"id": message["id"], **(reply or {})})
        elif reply and "error" in reply:
            print(reply["error"], file=sys.stderr, flush=True)

    while line := await reader.readline():
        task = asyncio.create_task(one(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
