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
