"""Where LMCache is, how it is started, and the remedy where it is not there."""

import os
import subprocess
import sys

import pytest

from kappa_workers.vllm.lmcache import server as lmcache_server
from kappa_workers.vllm.lmcache.server import (
    STAMP,
    LmcacheInstall,
    LmcacheMissingError,
    LmcacheServer,
    install_root,
    prepare_lmcache,
    server_command,
)


@pytest.fixture
def path_restored(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PYTHONPATH", "LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)


def installed(home, script="#!/bin/sh\nexec sleep 60\n"):
    """An installation with a server that only sleeps."""
    root = install_root(home)
    found = LmcacheInstall.at(root)
    found.executable.parent.mkdir(parents=True)
    found.executable.write_text(script)
    found.executable.chmod(0o755)
    (root / "client" / "lmcache").mkdir(parents=True)
    (root / STAMP).write_text("")
    return found


def test_an_installation_counts_only_when_it_is_complete(tmp_path):
    found = installed(tmp_path)
    assert LmcacheInstall.find(tmp_path) == found
    (install_root(tmp_path) / STAMP).unlink()
    with pytest.raises(LmcacheMissingError, match="run 'kappa lmcache setup'"):
        LmcacheInstall.find(tmp_path)


def test_a_named_server_is_not_started_but_its_client_is_found(tmp_path, path_restored):
    found = installed(tmp_path)
    log = tmp_path / "logs" / "server.log"
    assert prepare_lmcache(tmp_path, "tcp://cache:1", 32, 1 << 20, log) is None
    assert sys.path[-1] == str(found.client)  # behind everything else
    assert os.environ["PYTHONPATH"].split(os.pathsep)[-1] == str(found.client)
    prepare_lmcache(tmp_path, "tcp://cache:1", 32, 1 << 20, log)
    assert sys.path.count(str(found.client)) == 1


def test_a_server_of_ones_own_is_started_and_ended(tmp_path, path_restored):
    installed(tmp_path, '#!/bin/sh\necho "$@"\nexec sleep 60\n')
    log = tmp_path / "logs" / "server.log"
    server = prepare_lmcache(tmp_path, "", 64, 3 << 30, log)
    assert server is not None
    try:
        assert server.process.poll() is None
        assert server.url.startswith("tcp://127.0.0.1:")
        while not log.read_text():
            assert server.process.poll() is None
    finally:
        server.close()
    assert server.process.poll() is not None
    server.close()  # twice is fine
    command = log.read_text()
    assert "--chunk-size 64" in command and "--l1-size-gb 3.0" in command
    assert f"--port {server.url.rsplit(':', 1)[1]}" in command


def test_a_server_that_ignores_the_polite_way_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(lmcache_server, "_END_S", 0.2)
    found = installed(tmp_path, "#!/bin/sh\ntrap '' TERM\necho on\nwhile :; do sleep 1; done\n")
    log = tmp_path / "server.log"
    server = LmcacheServer(found, 32, 1 << 20, log)
    while "on" not in log.read_text():
        assert server.process.poll() is None
    server.close()
    assert server.process.returncode == -9


def test_the_command_names_the_way_that_works_without_a_gpu(tmp_path):
    command = server_command(installed(tmp_path), 5555, 8089, 32, 1 << 29, "0.0.0.0")
    flags = dict(zip(command[2::2], command[3::2], strict=True))
    assert flags["--supported-transfer-mode"] == "auto"
    assert flags["--host"] == "0.0.0.0" and flags["--http-host"] == "127.0.0.1"
    assert float(flags["--l1-size-gb"]) == 0.5


def test_server_command_names_setup_without_an_installation(tmp_path):
    environment = {**os.environ, "KAPPA_HOME": str(tmp_path)}
    code = "from kappa_deploy.commands.lmcache import app; app(['server', '--port', '5999'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "kappa lmcache setup" in done.stderr
