"""Helpers of the bench: they start, answer, and never outlive it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.routing.peers import sidecar as module
from benchmarks.routing.peers.sidecar import Sidecar, SidecarError
from deploy.prometheus import tethered

ROOT = Path(module.__file__).parents[3]
ECHO = """
import asyncio, json, os, sys
sys.path.append({peers!r})
from wire import answer, read_stdin, serve_lines

async def handle(message):
    if message["op"] == "fail":
        raise ValueError("no such luck")
    if message["op"] == "die":
        os.write(2, b"a last word\\n")
        os._exit(3)
    return {{"said": message["what"]}}

async def main():
    reader = await read_stdin()
    hello = json.loads(await reader.readline())
    print("noise on stdout", flush=True)
    answer({{"ready": True, **hello}})
    await serve_lines(reader, handle)

asyncio.run(main())
"""


@pytest.fixture
def echo(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text(ECHO.format(peers=str(ROOT / "benchmarks" / "routing" / "peers")))
    return [sys.executable, str(path)]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids):
    for _ in range(1500):
        if not any(map(running, pids)):
            return True
        time.sleep(0.01)
    return False


async def test_it_is_ready_answers_each_who_asked_and_ends(echo):
    helper = await Sidecar.started("echo", echo, {"of": 1}, 30.0)
    try:
        assert helper.ready == {"ready": True, "of": 1}
        asked = [helper.ask({"op": "say", "what": number}) for number in range(20)]
        answers = await asyncio.gather(*asked)
        assert [answer["said"] for answer in answers] == list(range(20))
    finally:
        await helper.close()
    assert gone(helper.pid)


async def test_a_failure_in_it_is_an_error_of_the_one_who_asked(echo):
    helper = await Sidecar.started("echo", echo, {}, 30.0)
    try:
        with pytest.raises(SidecarError, match="echo: ValueError: no such luck"):
            await helper.ask({"op": "fail"})
        assert (await helper.ask({"op": "say", "what": "still here"}))["said"] == "still here"
    finally:
        await helper.close()


async def test_its_death_is_told_at_once_to_those_who_wait(echo):
    helper = await Sidecar.started("echo", echo, {}, 30.0)
    try:
        with pytest.raises(SidecarError, match="a last word"):
            await helper.ask({"op": "die"})
        with pytest.raises(SidecarError, match="ended"):
            await helper.ask({"op": "say", "what": 1})
    finally:
        await helper.close()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import sys; sys.exit('no wheel')", "no wheel"),
        ("import time; time.sleep(600)", "not ready within"),
        ('print(\'{"error": "no such model"}\')', "no such model"),
    ],
)
async def test_one_that_does_not_start_is_an_error_and_gone(program, why):
    with pytest.raises(SidecarError, match=why):
        await Sidecar.started("s", [sys.executable, "-c", program], {}, 1.0)


async def test_a_command_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(SidecarError):
        await Sidecar.started("s", [str(tmp_path / "nothing")], {}, 1.0)


def killed_bench(tmp_path, program):
    """Runs a bench that starts helpers and prints their pids, then kills it with SIGKILL."""
    path = tmp_path / "bench.py"
    path.write_text(textwrap.dedent(program))
    bench = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert bench.stdout is not None
        pids = [int(pid) for pid in bench.stdout.readline().split()]
    finally:
        bench.send_signal(signal.SIGKILL)
        bench.wait()
        bench.stdout.close()
    return pids


def test_helpers_end_when_the_bench_is_killed(tmp_path, echo):
    pids = killed_bench(
        tmp_path,
        f"""
        import asyncio
        from benchmarks.routing.peers.sidecar import Sidecar
        async def main():
            helper = await Sidecar.started("echo", {echo!r}, {{}}, 30.0)
            print(helper.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """,
    )
    assert len(pids) == 1
    assert gone(*pids)


SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
open({port!r}, "w").write(str(server.server_port))
server.serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    """A program that knows nothing of us and has a child; and a free port it will not use."""
    path = tmp_path / "server.py"
    names = {"pids": str(tmp_path / "pids"), "port": str(tmp_path / "port")}
    path.write_text(SERVER.format(**names).replace('("127.0.0.1", 0)', '("127.0.0.1", PORT)'))
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    path.write_text(path.read_text().replace("PORT", str(port)))
    return [sys.executable, str(path)], f"http://127.0.0.1:{port}/", tmp_path / "pids"


async def test_a_tethered_program_ends_with_its_tether(server):
    command, probe, pids = server
    helper = await Sidecar.started("t", tethered(), {"command": command, "probe": probe}, 30.0)
    found = [int(pid) for pid in pids.read_text().split()]
    assert all(map(running, found))
    await helper.close()
    assert gone(helper.pid, *found)


def test_a_tethered_program_ends_when_the_bench_is_killed(tmp_path, server):
    command, probe, pids = server
    (tether,) = killed_bench(
        tmp_path,
        f"""
        import asyncio, sys
        from benchmarks.routing.peers.sidecar import Sidecar
        from deploy.prometheus import tethered
        async def main():
            hello = {{"command": {command!r}, "probe": {probe!r}}}
            helper = await Sidecar.started("t", tethered(), hello, 30.0)
            print(helper.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """,
    )
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    assert gone(tether, *found)


async def test_a_tethered_program_that_ends_at_once_is_an_error():
    hello = {"command": [sys.executable, "-c", "raise SystemExit(7)"], "probe": "http://[::1]:9/"}
    with pytest.raises(SidecarError, match="code 7"):
        await Sidecar.started("t", tethered(), hello, 30.0)
