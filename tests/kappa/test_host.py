"""The host that a process runs on: what of `kappa.host` no other test covers."""

import socket

from kappa.host import free_ports


def test_free_ports_differ_and_can_be_bound():
    ports = free_ports("127.0.0.1", 50)
    assert len(set(ports)) == 50
    for port in ports[:3]:
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))
