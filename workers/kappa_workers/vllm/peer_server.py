"""Blocks of one host tier, read by the engines of other workers over TCP.

A reader names blocks by their keys and is sent the leading ones that are there, row by row; of a
prompt that is handed over, those that are being stored are waited for. Nothing is pinned: the
scheduler's thread may evict a block while it is sent, so the last word of an answer is how many of
the blocks were still in their places when all was sent. KV cache is as good as text: a reader must
know a token, which only the router has, and the bytes are not encrypted. A question begins with the
token; if it does not, no more is read. A whole question must come in time.
"""

from __future__ import annotations

import hmac
import os
import socket
import socketserver
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import torch

from kappa_workers.vllm.options import PeerOptions

log = structlog.get_logger(__name__)

# A question is keys of some 40 bytes; readers at a time; a transfer slower than this is ended.
_MOST_QUESTION_BYTES, _MOST_READERS, _LEAST_BYTES_PER_S = 4 << 20, 16, 10e6
_QUESTION_S = 5.0
# Connections that have not shown the token; who shows it does so at once.
_MOST_STRANGERS = 64
_STORED_POLL_S = 0.002
LENGTH = struct.Struct("<I")


class PeerError(Exception):
    """Blocks that a peer did not give; the message says why. Their tokens are computed."""


class BlockQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader sends, the token first."""

    token: str
    keys: list[bytes]
    # Seconds that the reader will take to say that it has all.
    pace_s: float = 0.0
    # Whether the prompt was just computed for the reader: its blocks may still be on their way to
    # host memory.
    handed: bool = False


class HostRows:
    """The host tier's memory: a row of bytes per block in each tensor."""

    def __init__(self, tensors: Sequence[np.ndarray]) -> None:
        self._tensors = tensors
        self.widths = [int(tensor.shape[1]) for tensor in tensors]

    def of(self, slot: int) -> list[memoryview]:
        return [memoryview(tensor[slot]) for tensor in self._tensors]


def shared_tensor(rows: int, width: int) -> tuple[int, torch.Tensor]:
    """Memory of `rows` rows of `width` bytes, int8, that other processes of this user can map, and
    its descriptor; freed with the last process that has it."""
    descriptor = os.memfd_create("kappa-host-tier")
    os.ftruncate(descriptor, rows * width)
    place = f"/proc/self/fd/{descriptor}"
    flat = torch.from_file(place, shared=True, size=rows * width, dtype=torch.int8)
    return descriptor, flat.view(rows, width)


def share_layout(path: Path, rows: int, tensors: Sequence[tuple[int, int]]) -> None:
    """Have `mapped_rows` find shared tensors by (descriptor, width), in order."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.msgpack.encode((os.getpid(), rows, list(tensors))))
    part.replace(path)


def mapped_rows(path: Path) -> HostRows | None:
    """The rows that another process of this engine, or this one, shared. None: it has not yet."""
    try:
        pid, rows, tensors = msgspec.msgpack.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    mapped = []
    for descriptor, width in tensors:
        with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
            mapped.append(np.memmap(file, dtype=np.uint8, mode="r+", shape=(rows, width)))
    path.unlink()
    return HostRows(mapped)


class PeerServer(socketserver.ThreadingTCPServer):
    """Answers readers, one transfer at a time: they share one network card."""

    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        options: PeerOptions,
        rows: Callable[[], HostRows | None],
        place: Callable[[bytes], tuple[Any, int] | None],
        coming: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """place: of a block that is ready, what stands for it while it is there, and its slot;
        coming: whether it is being stored. OSError: the port is taken."""
        super().__init__((options.host, options.port), _PeerReader)
        self.options, self._rows, self._place, self._coming = options, rows, place, coming
        self._card, self._readers = threading.Lock(), threading.Semaphore(_MOST_READERS)
        # As a question has it, behind the byte that says how many fields there are.
        self._greeting = msgspec.msgpack.encode({"token": options.token})[1:]
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        self._strangers_lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, name="kappa-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a reader that left or was too slow."""
        log.debug("peer_reader_failed", exc_info=True)

    def answer(self, connection: socket.socket) -> None:
        """Answer one reader's question with the rows."""
        until_s = time.monotonic() + _QUESTION_S
        try:
            begin, rest_bytes = self._greeted(connection, until_s)
            if not self._readers.acquire(blocking=False):
                raise PeerError("too many readers")
            try:
                body = begin + receive(connection, rest_bytes, until_s)
                question = msgspec.msgpack.decode(body, type=BlockQuestion)
                if question.handed:
                    self._await_stores(question.keys)
                with self._card:
                    self._send(connection, question)
            finally:
                self._readers.release()
        except (OSError, PeerError, msgspec.MsgspecError) as error:
            log.debug("peer_reader_refused", reason=repr(error))

    def _greeted(self, connection: socket.socket, until_s: float) -> tuple[bytes, int]:
        """A question up to its token, and how many bytes are to come; PeerError: it is another.

        Where too many have not shown the token yet, the oldest of them is ended: those that hold
        their places for long never keep out who shows it at once.
        """
        with self._strangers_lock:
            self._strangers[connection] = None
            if len(self._strangers) > _MOST_STRANGERS:
                oldest, _ = self._strangers.popitem(last=False)
                with suppress(OSError):  # it left by itself
                    oldest.shutdown(socket.SHUT_RDWR)
        try:
            size = _receive_size(connection, until_s)
            begin = receive(connection, min(1 + len(self._greeting), size), until_s)
        finally:
            with self._strangers_lock:
                self._strangers.pop(connection, None)
        if not hmac.compare_digest(begin[1:], self._greeting):
            raise PeerError("the question does not begin with the token")
        return begin, size - len(begin)

    def _await_stores(self, keys: Sequence[bytes]) -> None:
        until_s = time.monotonic() + self.options.wait_s
        for key in keys:
            while self._place(key) is None:
                if not self._coming(key) or time.monotonic() > until_s:
                    return
                time.sleep(_STORED_POLL_S)

    def _send(self, connection: socket.socket, question: BlockQuestion) -> None:
        rows, places = self._rows(), []
        for key in question.keys if rows is not None else ():
            found = self._place(key)
            if found is None:
                break
            places.append(found)
        widths = rows.widths if rows is not None else []
        connection.settimeout(self.options.wait_s)
        send_frame(connection, msgspec.msgpack.encode((len(places), widths)))
        size = len(places) * sum(widths)
        until_s = transfer_until_s(self.options, size)
        for _, slot in places:
            assert rows is not None
            for row in rows.of(slot):
                connection.settimeout(left_s(until_s))
                connection.sendall(row)
        # The reader holds its own card, and ours, for as long as a paced transfer takes.
        pace_s = min(max(question.pace_s, 0.0), 60.0)
        receive(connection, 1, time.monotonic() + self.options.wait_s + pace_s)
        whole = 0
        for key, (block, slot) in zip(question.keys, places, strict=False):
            found = self._place(key)
            if found is None or found[0] is not block or found[1] != slot:
                break
            whole += 1
        connection.sendall(LENGTH.pack(whole))


class _PeerReader(socketserver.BaseRequestHandler):
    server: PeerServer

    def handle(self) -> None:
        self.server.answer(self.request)


def transfer_until_s(options: PeerOptions, size_bytes: float) -> float:
    """When a transfer that begins now has taken too long, monotonic."""
    return time.monotonic() + options.wait_s + size_bytes / _LEAST_BYTES_PER_S


def left_s(until_s: float) -> float:
    """Seconds until then; PeerError: none are left."""
    left = until_s - time.monotonic()
    if left <= 0:
        raise PeerError("too slow")
    return left


def send_frame(connection: socket.socket, body: bytes) -> None:
    connection.sendall(LENGTH.pack(len(body)) + body)


def receive_frame(connection: socket.socket, until_s: float) -> bytes:
    """PeerError, OSError: as `receive_into`'s, or the peer says too much."""
    return receive(connection, _receive_size(connection, until_s), until_s)


def _receive_size(connection: socket.socket, until_s: float) -> int:
    size: int
    (size,) = LENGTH.unpack(receive(connection, LENGTH.size, until_s))
    if size > _MOST_QUESTION_BYTES:
        raise PeerError(f"a message of {size} bytes; at most {_MOST_QUESTION_BYTES} are read")
    return size


def receive(connection: socket.socket, size: int, until_s: float) -> bytes:
    """`size` bytes; PeerError, OSError: as `receive_into`'s."""
    body = bytearray(size)
    receive_into(connection, memoryview(body), until_s)
    return bytes(body)


def receive_into(connection: socket.socket, into: memoryview, until_s: float) -> None:
    """Fill a buffer. PeerError, TimeoutError: the peer left before, or has not sent all by then
    (monotonic), however it came."""
    while into:
        connection.settimeout(left_s(until_s))
        count = connection.recv_into(into)
        if not count:
            raise PeerError("the peer closed the connection")
        into = into[count:]
