"""A publisher that sends as fast as it can, and who counts the turns that others get meanwhile."""

import asyncio
import itertools
import threading
from contextlib import asynccontextmanager, contextmanager, suppress

import zmq

from tests.router.kv_batches import published
from tests.router.patience import PATIENCE_S


@contextmanager
def flood(kind=b"", payload=None, numbers=None):
    """The endpoint of a PUB socket that sends one message after the other from a thread."""
    payload, numbers = payload or published(1), numbers or itertools.count()
    stop, bound = threading.Event(), threading.Event()
    context, ports = zmq.Context(), []

    def send():
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.LINGER, 0)
        ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        bound.set()
        while not stop.is_set():
            socket.send_multipart([kind, next(numbers).to_bytes(8, "big"), payload])
        socket.close()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert bound.wait(PATIENCE_S)
    try:
        yield f"tcp://127.0.0.1:{ports[0]}"
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        context.destroy(linger=0)


class Turns:
    """heard: messages in all; longest: most of them without a turn for other tasks."""

    def __init__(self):
        self.heard = self.longest = self._run = 0

    def message(self):
        self.heard += 1
        self._run += 1
        self.longest = max(self.longest, self._run)

    @asynccontextmanager
    async def counted(self):
        async def take_turns():
            while True:
                self._run = 0
                await asyncio.sleep(0)

        task = asyncio.create_task(take_turns())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
