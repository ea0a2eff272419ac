from contextlib import ExitStack

import msgspec
import pytest
import zmq


@pytest.fixture
def stats(tmp_path):
    """An endpoint and a function that returns the next message sent there."""
    endpoint = f"ipc://{tmp_path}/stats"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.bind(endpoint)
        yield endpoint, lambda: msgspec.msgpack.decode(socket.recv())


@pytest.fixture
def closing():
    """Keeps a thing until the test's end and closes it then; returns it."""
    with ExitStack() as stack:

        def keep(thing):
            stack.callback(thing.close)
            return thing

        yield keep
