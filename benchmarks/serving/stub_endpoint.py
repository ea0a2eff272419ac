"""A stub of an OpenAI endpoint, to measure a load-test client: no model, the same tokens each time.

Speaks just enough HTTP/1.1 to stream `tokens` events, the first after `ttft_s`, the others `gap_s`
apart, and costs little, so that the client is what is measured. It notes when the last byte of each
request came, on the machine's monotonic clock; `GET /stub/received` hands these times over. Run
as a process of its own: python -m benchmarks.serving.stub_endpoint
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from array import array
from dataclasses import dataclass
from typing import Annotated

import typer

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-request-id: stub\r\n\r\n"
)
MODEL = "stub"


def _chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


_TOKEN = _chunk(
    '{"id":"stub","object":"text_completion","created":0,"model":"stub",'
    '"choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}'
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What every completion is: so many tokens, in seconds from the request's last byte."""

    tokens: int
    ttft_s: float
    gap_s: float

    def last(self) -> bytes:
        """The end of the stream: the reason, the usage and the end marker."""
        finish = _chunk('{"choices":[{"index":0,"text":"","finish_reason":"length"}]}')
        usage = {"prompt_tokens": 1, "completion_tokens": self.tokens}
        told = _chunk(json.dumps({"choices": [], "usage": usage}))
        return finish + told + _chunk("[DONE]") + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One request after the other on one connection."""

    def __init__(self, answer: Answer, received: array[float]) -> None:
        self._answer, self._received = answer, received
        self._last = answer.last()
        self._got = bytearray()
        self._body_at = self._need = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._need:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body_at = end + 4
            self._need = self._body_at + _content_length(bytes(self._got[:end]))
        if len(self._got) >= self._need:
            self._answer_to(bytes(self._got[: self._body_at]).split(b"\r\n", 1)[0])
            del self._got[: self._need]
            self._need = 0

    def _answer_to(self, line: bytes) -> None:
        if line.startswith(b"POST"):
            self._received.append(time.monotonic())
            asyncio.get_running_loop().call_later(self._answer.ttft_s, self._token, 1)
        elif b"/stub/received" in line:
            self._json(json.dumps(self._received.tolist()))
            del self._received[:]
        elif b"/v1/models" in line:
            self._json(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        else:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    def _token(self, number: int) -> None:
        if self._transport.is_closing():
            return
        piece = _HEAD + _TOKEN if number == 1 else _TOKEN
        if number >= self._answer.tokens:
            self._transport.write(piece + self._last)
            return
        self._transport.write(piece)
        asyncio.get_running_loop().call_later(self._answer.gap_s, self._token, number + 1)

    def _json(self, text: str) -> None:
        body = text.encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + body)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def serve(answer: Answer, parent_gone: asyncio.Event) -> None:
    """Serve on a free port, told as a line of JSON on stdout, until stdin ends."""
    received: array[float] = array("d")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Connection(answer, received), "127.0.0.1", 0, backlog=4096
    )
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)
    loop.add_reader(sys.stdin.fileno(), _ended, parent_gone)
    await parent_gone.wait()
    loop.remove_reader(sys.stdin.fileno())
    server.close()


def _ended(parent_gone: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        parent_gone.set()


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 4,
    ttft_s: Annotated[float, typer.Option(min=0, help="Seconds to the first.")] = 0.02,
    gap_s: Annotated[float, typer.Option(min=0, help="Seconds between tokens.")] = 0.01,
) -> None:
    """Serve until stdin ends."""

    async def run() -> None:
        await serve(Answer(tokens, ttft_s, gap_s), asyncio.Event())

    asyncio.run(run())


if __name__ == "__main__":
    typer.run(main)
