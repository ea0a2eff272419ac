"""Processes that a bench asks: each question answered, each failure named, none outlives it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kappa_benchmarks.faults.cluster import alive
from kappa_benchmarks.routing.peers.routers import PeerError, dynamo_python, started

ROOT = Path(__file__).parents[4]
ECHO = """
import json, os, sys
if "of" not in json.loads(input()):
    print(json.dumps({"error": "no hello"}))
print("noise on stdout")
print("{}")
for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "die":
        os.write(2, b"a last word\\n")
        os._exit(3)
    failed = {"error": "ValueError: no such luck"}
    said = {"what": message.get("what"), "pid": os.getpid()}
    print(json.dumps(failed if message["op"] == "fail" else said))
"""
COMMAND = [sys.executable, "-c", ECHO]


async def test_a_process_answers_each_question_and_ends():
    async with started("echo", COMMAND, {"of": 1}) as ask:
        for n in range(20):
            answer = await ask({"op": "say", "what": n})
            assert answer["what"] == n
        with pytest.raises(PeerError, match="echo: ValueError: no such luck"):
            await ask({"op": "fail"})
        with pytest.raises(PeerError, match="it has ended: a last word"):
            await ask({"op": "die"})
        with pytest.raises(PeerError, match="ended"):
            await ask({"op": "say", "what": 1})
    assert not psutil.pid_exists(answer["pid"])


@pytest.mark.parametrize(
    ("command", "hello", "why"),
    [
        (COMMAND, {}, "no hello"),
        ([sys.executable, "-c", "import sys; sys.exit('no wheel')"], {}, "no wheel"),
        (["/nowhere/nothing"], {}, "nothing"),
    ],
)
async def test_a_process_that_does_not_start_is_an_error(command, hello, why):
    with pytest.raises(PeerError, match=why):
        async with started("s", command, hello):
            pass


def test_dynamo_python_names_the_remedy_when_it_cannot_install(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(PeerError, match=r"(?s)ai-dynamo-.* could not be .*PIP_INDEX_URL"):
        dynamo_python()


def test_processes_end_when_the_bench_is_killed():
    program = f"""
import asyncio
from kappa_benchmarks.routing.peers.routers import started
async def main():
    async with started("echo", {COMMAND!r}, {{"of": 1}}) as ask:
        print((await ask({{"op": "say"}}))["pid"], flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    bench = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pid = int(bench.stdout.readline())
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    deadline_s = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
