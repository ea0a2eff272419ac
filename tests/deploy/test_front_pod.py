"""What a front pod's containers run, before an Envoy and without one."""

import socket
import stat

import httpx
import pytest

from kappa.settings.cluster import load_settings
from kappa_deploy import front_pod
from kappa_deploy.app.front_door import FrontDoor
from kappa_router.gateway.spec import GatewaySpec


def test_prepare_makes_a_private_folder_with_envoys_files(tmp_path):
    source, folder = tmp_path / "mounted", tmp_path / "run" / "front"
    source.mkdir()
    (source / "envoy.json").write_text("{}")
    front_pod.prepare(source, folder)
    spec = GatewaySpec(folder, "", 0, (), ())
    assert spec.bootstrap_file.read_text() == "{}"
    assert spec.endpoints_file.exists()
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077


def test_prepare_leaves_the_list_of_servers_that_is_there(tmp_path):
    front_pod.prepare(tmp_path, tmp_path / "front")
    written = GatewaySpec(tmp_path / "front", "", 0, (), ()).endpoints_file
    written.write_text("[]")
    front_pod.prepare(tmp_path, tmp_path / "front")
    assert written.read_text() == "[]"


@pytest.fixture
def door():
    made = FrontDoor(load_settings(None, http={"port": 0}))
    made.start()
    yield made.spec
    made.stop(0.0)


def test_envoy_is_alive_and_takes_nothing_new_once_it_drains(door):
    assert front_pod.ask("GET", "/ready", door.folder) == "LIVE\n"
    with pytest.raises(OSError, match="404"):
        front_pod.ask("GET", "/nowhere", door.folder)
    assert httpx.get(f"{door.url}/nowhere", timeout=10).status_code == 404
    assert front_pod.drain(10, door.folder, unlisted_s=0.0) == 0
    answer = httpx.get(f"{door.url}/nowhere", timeout=10)
    assert answer.headers["connection"] == "close"


def test_drain_ends_before_requests_that_outlast_it(door):
    with socket.create_connection((door.host, door.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
        while front_pod._open(door.folder) < 1:
            pass
        assert front_pod.drain(0.5, door.folder, unlisted_s=0.0) == 1


@pytest.mark.parametrize("verb", [["alive"], ["drain", "1"]])
def test_a_verb_fails_where_envoy_does_not_answer(verb, monkeypatch, tmp_path, capsys):
    before = front_pod._Admin.__init__
    monkeypatch.setattr(front_pod._Admin, "__init__", lambda self, _: before(self, tmp_path))
    assert front_pod.main(verb) == 1
    assert "No such file" in capsys.readouterr().err
