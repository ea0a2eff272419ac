"""A peer's environment: where it is, when it is made, and what is said when it cannot be."""

import fcntl
import sys

import pytest

from benchmarks.routing.peers import venvs
from benchmarks.routing.peers.venvs import Peer, PeerError, peer_python, peers_dir

NO_NETWORK = {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}
NOWHERE = Peer("no-such-wheel", "0.0.1")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch):
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)


def put_ready(peer):
    """An environment as a finished one looks."""
    venv = peers_dir() / f"{peer.name}-{peer.version}"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "kappa-peer").write_text("\n".join(peer.requirements) + "\n")
    return venv


def test_the_environments_live_under_the_users_cache(cache, monkeypatch):
    assert peers_dir() == cache / "kappa-serve" / "peers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cache / "home"))
    assert peers_dir() == cache / "home" / ".cache" / "kappa-serve" / "peers"


def test_a_finished_environment_is_used_without_a_word(cache, offline):
    venv, said = put_ready(NOWHERE), []
    assert peer_python(NOWHERE, said.append) == venv / "bin" / "python"
    assert said == []


def test_without_an_index_the_error_names_the_peer_the_reason_and_the_remedy(cache, offline):
    said = []
    with pytest.raises(PeerError) as caught:
        peer_python(NOWHERE, said.append)
    message = str(caught.value)
    assert "no-such-wheel 0.0.1" in message
    assert "pip:" in message
    assert "PIP_INDEX_URL" in message and "UV_FIND_LINKS" in message
    assert len(said) == 1 and "no-such-wheel" in said[0]
    assert not (peers_dir() / "no-such-wheel-0.0.1").exists()


def test_an_environment_made_of_something_else_is_not_taken(cache, offline):
    venv = put_ready(NOWHERE)
    (venv / "kappa-peer").write_text("no-such-wheel==0.0.0\n")
    with pytest.raises(PeerError):
        peer_python(NOWHERE, lambda what: None)


def test_a_half_made_environment_is_not_taken(cache, offline):
    venv = put_ready(NOWHERE)
    (venv / "kappa-peer").unlink()
    with pytest.raises(PeerError):
        peer_python(NOWHERE, lambda what: None)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PeerError, match="XDG_CACHE_HOME"):
        peer_python(NOWHERE, lambda what: None)


def test_another_bench_that_never_ends_is_waited_for_only_so_long(cache, offline, monkeypatch):
    monkeypatch.setattr(venvs, "_LOCK_S", 0.1)
    monkeypatch.setattr(venvs, "_POLL_S", 0.02)
    lock = peers_dir() / "no-such-wheel-0.0.1.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PeerError, match="another process"):
            peer_python(NOWHERE, lambda what: None)


def test_every_peer_is_pinned():
    for peer in (venvs.DYNAMO, venvs.SGLANG_ROUTER):
        assert all("==" in requirement for requirement in peer.requirements)
