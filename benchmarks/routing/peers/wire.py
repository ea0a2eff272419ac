"""What the bench, the emulated nodes and the peers' scripts say to each other.

A prompt is known by the ids of its full blocks. As text, a block is one word of 16 characters; as
tokens, it is as many as a block has, made from the id. Helpers of the bench are processes that read
JSON lines and end with their standard input, so that none outlives the bench. Nothing but the
standard library: a peer's script imports this file alone, by its path.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

NODE_HEADER = "x-kappa-emulated-node"
"""Response header that says which emulated node answered."""

SHAPE_KEY = "kappa"
"""Field of a request's body: {"request", "tokens", "kept": ids of blocks that its output fills}."""

CHARACTERS_PER_BLOCK = 17
_LINE_BYTES = 1 << 24


def prompt_text(blocks: Sequence[int], request: str) -> str:
    """A prompt as words: one per full block, and one of its own for the rest."""
    return " ".join([*(f"{block:016x}" for block in blocks), f"?{request}"])


def blocks_in(text: str) -> list[int]:
    """The ids of the blocks of `prompt_text`.

    Raises:
        ValueError: it is not such a text.
    """
    *words, last = text.split(" ")
    if not last.startswith("?"):
        raise ValueError("the prompt must be block ids in hex and a last word that begins with '?'")
    return [int(word, 16) for word in words]


def block_tokens(block: int, size: int) -> list[int]:
    """The tokens of a block: its id in four pieces, over and over."""
    pieces = [block & 0xFFFF, block >> 16 & 0xFFFF, block >> 32 & 0xFFFF, block >> 48]
    return (pieces * (-(-size // 4)))[:size]


def prompt_tokens(blocks: Sequence[int], size: int, tokens: int) -> list[int]:
    """All tokens of a prompt; those behind the last full block are its own."""
    ids: list[int] = []
    for block in blocks:
        ids += block_tokens(block, size)
    last = blocks[-1] if blocks else 0
    return ids + block_tokens(last ^ tokens, max(tokens - len(ids), 0))


Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


async def read_stdin() -> asyncio.StreamReader:
    """Standard input as a stream of lines."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def answer(message: dict[str, Any]) -> None:
    """Say something to the bench."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def serve_lines(reader: asyncio.StreamReader, handle: Handler) -> None:
    """Answer each line that asks (has an "id"), several at a time, until there are no more."""
    tasks: set[asyncio.Task[None]] = set()

    async def one(message: dict[str, Any]) -> None:
        try:
            reply = await handle(message)
        except Exception as error:  # The bench must hear of it, whatever it is.
            reply = {"error": f"{type(error).__name__}: {error}"}
        if "id" in message:
            answer({"id": message["id"], **(reply or {})})
        elif reply and "error" in reply:
            print(reply["error"], file=sys.stderr, flush=True)

    while line := await reader.readline():
        task = asyncio.create_task(one(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
