"""The host that a process runs on: what of `kappa.host` no other test covers."""

import socket

import pytest

from kappa.host import free_ports


def test_free_ports_differ_and_can_be_bound():
    ports = free_ports("127.0.0.1", 50)
    assert len(set(ports)) == 50
    with pytest.raises(OSError):
        free_ports("192.0.2.77", 1)
    for port in ports[:3]:
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))


def test_free_ports_are_none_that_somebody_has(monkeypatch):
    taken, other = free_ports("127.0.0.1", 2)
    monkeypatch.setattr("kappa.host._PORTS", (taken, other))
    with socket.socket() as held:
        held.bind(("127.0.0.1", taken))
        assert free_ports("127.0.0.1", 1) == [other]
        with pytest.raises(OSError, match="has 1 free ports"):
            free_ports("127.0.0.1", 2)
