"""Ports for servers that tests start as processes, which bind them seconds later."""

import random
import socket
from contextlib import suppress


def steady_port() -> int:
    """A free port of loopback below those that the kernel gives to whoever asks for any: other
    processes take many of these between now and when the port is bound."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError("of 100 ports between 20000 and 30000 none is free")
