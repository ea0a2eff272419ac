"""A front door: a real Envoy before a scripted decider, face and servers."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kappa.host import free_port
from kappa.protocol import ENDPOINT_HEADER, TO_ID_HEADER
from kappa_router.gateway.endpoints import EndpointsFile
from kappa_router.gateway.events import Ends
from kappa_router.gateway.process import Gateway, known_of
from kappa_router.gateway.spec import AGAIN, SLOT_HEADER, Bounds, GatewaySpec, ServerEndpoint
from tests.router.envoys import lent
from tests.router.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
_WAIT_S = 10.0


@dataclass
class Heard:
    """A request as a server of ours read it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What a scripted server answers. chunks: of the body, each by itself; cut: the connection
    ends after them instead of the answer, or without a head if there are none."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    chunks: AsyncIterator[bytes] | None = None
    cut: bool = False


Script = Callable[[Heard], Answer | Awaitable[Answer]]


class Scripted:
    """An HTTP/1.1 server that does as a function says, and keeps what it heard. always: headers
    of every answer."""

    def __init__(self, script: Script | None = None, always: dict[str, str] | None = None) -> None:
        self.script, self.always = script or (lambda heard: Answer()), always or {}
        self.heard: list[Heard] = []
        self.cancelled = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def listen(self, path: Path | None = None, host: str = "127.0.0.1", **more: Any) -> None:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._talk, path, **more)
        else:
            self._server = await asyncio.start_server(self._talk, host, self.port, **more)
            self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End it, and every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or not self._server.is_serving():
            # It had come before the end.
            writer.transport.abort()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        gone = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*gone):
            while True:
                heard = await read_request(reader)
                self.heard.append(heard)
                if not await self._answered(heard, reader, writer):
                    break
        writer.transport.abort()

    async def _answered(
        self, heard: Heard, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection goes on; sets `cancelled` if the other side leaves meanwhile."""
        made = self.script(heard)
        if not isinstance(made, Answer):
            deciding = asyncio.ensure_future(made)
            leaving = asyncio.ensure_future(reader.read(1))
            done, _ = await asyncio.wait({deciding, leaving}, return_when="FIRST_COMPLETED")
            if deciding not in done:
                deciding.cancel()
                self.cancelled.set()
                return False
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            made = deciding.result()
        if made.cut and made.chunks is None:
            writer.transport.abort()
            return False
        length = {} if made.chunks else {"content-length": str(len(made.body))}
        head = {"transfer-encoding": "chunked"} if made.chunks else length
        lines = [
            f"{name}: {value}\r\n"
            for name, value in {**self.always, **made.headers, **head}.items()
        ]
        writer.write(f"HTTP/1.1 {made.status} X\r\n{''.join(lines)}\r\n".encode())
        if made.chunks is None:
            writer.write(made.body)
        else:
            async for chunk in made.chunks:
                writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await writer.drain()
            if made.cut:
                writer.transport.abort()
                return False
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def read_request(reader: asyncio.StreamReader) -> Heard:
    first, *rows = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (row.partition(": ") for row in rows)}
    method, target, _ = first.split(" ")
    return Heard(method, target, headers, await _body(reader, headers))


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


@dataclass
class Got:
    """An answer as the client sees it; cut: the connection ended before it did."""

    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool = False

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@dataclass
class Door:
    """What a test has in its hands."""

    spec: GatewaySpec
    gateway: Gateway
    deciders: list[Scripted]
    faces: list[Scripted]
    servers: list[Scripted]
    file: EndpointsFile
    endpoints: list[ServerEndpoint]

    @property
    def decider(self) -> Scripted:
        """The first, which is the only one unless several are wanted."""
        return self.deciders[0]

    def addresses(self, *order: int) -> str:
        """The decider's list."""
        return ",".join(self.endpoints[at].address for at in order)

    def send_to(self, *order: int, **headers: str) -> None:
        """From now on all deciders let everything go to these servers."""
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = Answer(
            headers={ENDPOINT_HEADER: self.addresses(*order), TO_ID_HEADER: "id-1", **more}
        )
        for decider in self.deciders:
            decider.script = lambda heard: answer

    async def reopen(self, slot: int = 0) -> None:
        """A decider that was closed takes its place again."""
        socket = self.spec.slots[slot].decider_socket
        socket.unlink(missing_ok=True)
        await self.deciders[slot].listen(socket)

    def refuses(self, got: Got, code: str) -> bool:
        """Whether an answer is the door's own 503 of that code."""
        return (got.status, got.error["code"]) == (503, code)

    def asked(self, kind: str, slot: int = 0) -> list[Heard]:
        """What a decider was asked of one kind."""
        return [one for one in self.deciders[slot].heard if one.target.startswith(kind)]

    async def ask(
        self, path: str = CHAT, body: bytes = b"{}", method: str = "POST", **headers: str
    ) -> Got:
        """One request on a connection of its own."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {"host": "door", "content-length": str(len(body)), **named}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return await self.send(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)

    async def until(self, wanted: Callable[[Got], bool], path: str = CHAT) -> Got:
        """The first answer, of requests one after another, that is as wanted."""
        async with asyncio.timeout(PATIENCE_S):
            while not wanted(got := await self.ask(path)):
                await asyncio.sleep(0.02)
        return got

    async def send(self, *parts: bytes) -> Got:
        """These bytes on a connection of their own, and the answer to them."""
        async with asyncio.timeout(_WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.spec.port)
            try:
                for part in parts:
                    writer.write(part)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                return await read_answer(reader)
            finally:
                writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Got:
    """The next answer that is not 100 Continue."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *rows = head.strip().split("\r\n")
        status = int(first.split(" ")[1])
        if status != 100:
            break
    headers = {name.lower(): value for name, _, value in (row.partition(": ") for row in rows)}
    try:
        return Got(status, headers, await _body(reader, headers))
    except (asyncio.IncompleteReadError, ValueError):
        return Got(status, headers, b"", cut=True)


async def never(heard: Heard) -> Answer:
    """The script of a server that does not answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def in_two(going_on: asyncio.Event) -> AsyncIterator[bytes]:
    """Chunks of an answer of which the second waits for the event."""
    yield b"begun "
    await going_on.wait()
    yield b"ended"


@contextlib.asynccontextmanager
async def open_door(
    servers: Sequence[Script | None] = (None,),
    endpoint: Callable[[int, ServerEndpoint], ServerEndpoint] = lambda at, made: made,
    bounds: Bounds | None = None,
    own: bool = False,
    **more: Any,
) -> AsyncIterator[Door]:
    """A door with these servers, of which deciders know the first. endpoint: what each server is to
    Envoy; own: the door does not share its Envoy; more: of its `GatewaySpec`."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kd-"))
        spec = GatewaySpec(
            Path(folder) / "door", "127.0.0.1", free_port("127.0.0.1"),
            decided=(CHAT, "/v1/messages"), own=("/", "/v1/nodes", "/v1/decisions/"),
            bounds=bounds or Bounds(), **more,
        )  # fmt: skip
        if own or spec.deciders > 1:
            gateway = await stack.enter_async_context(Gateway(spec, threads=1))
        else:
            gateway = stack.enter_context(lent(spec))
            spec = gateway.spec
        made = [Scripted(script) for script in servers]
        deciders = [Scripted(always={SLOT_HEADER: str(one.number)}) for one in spec.slots]
        faces = [Scripted(lambda heard: Answer(body=b"face")) for _ in spec.slots]
        for one in (*deciders, *faces, *made):
            stack.push_async_callback(one.close)
        for slot, decider, face in zip(spec.slots, deciders, faces, strict=True):
            await decider.listen(slot.decider_socket)
            await face.listen(slot.face_socket)
        for one in made:
            await one.listen()
        ends = [
            endpoint(at, ServerEndpoint(f"w{at}", "127.0.0.1", one.port))
            for at, one in enumerate(made)
        ]
        file = EndpointsFile(spec.endpoints_file)
        file.write(ends)
        await known_of(gateway, frozenset(one.address for one in ends))
        door = Door(spec, gateway, deciders, faces, made, file, ends)
        door.send_to(0)
        yield door


def ends_heard(socket, ended=print, failed=print, goes_on=print, cut=int):
    """Envoy's log at a socket, heard by these."""
    return Ends(socket, SimpleNamespace(ended=ended, failed=failed, goes_on=goes_on, cut=cut))


__all__ = ["AGAIN", "CHAT", "Answer", "Door", "Got", "Heard", "Scripted", "open_door", "replace"]
