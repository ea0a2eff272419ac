"""A replica without an engine ends itself; so does a process without its owner."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kappa.cost import StepModel
from kappa_workers.reaper import (
    OWNER_ENV,
    follow_owner,
    hang_patience_s,
    own_engines,
    watch_engine,
)

_PATIENCE_S = 60.0


async def watched(check, **options):
    ended = []
    await asyncio.wait_for(
        watch_engine(check, ended.append, every_s=0.001, last_words_s=0.0, **options), _PATIENCE_S
    )
    return ended


async def test_watch_ends_the_replica_only_once_its_engine_is_dead():
    asked = 0

    async def check():
        nonlocal asked
        asked += 1
        if asked == 3:
            raise RuntimeError("EngineCore is gone")

    assert await watched(check) == [1]
    assert asked == 3


async def test_a_watch_that_is_cancelled_ends_nothing():
    ended = []

    async def check():
        return

    task = asyncio.create_task(watch_engine(check, ended.append, every_s=0.001))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == []


def test_without_an_owner_nothing_is_followed(monkeypatch):
    monkeypatch.delenv(OWNER_ENV, raising=False)
    assert follow_owner(lambda _: pytest.fail("ended")) is None
    own_engines()
    monkeypatch.setenv(OWNER_ENV, os.environ[OWNER_ENV])
    assert follow_owner(lambda _: pytest.fail("ended")) is None, "this process is the owner"


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux facility")
def test_one_whose_owner_has_gone_before_it_asked_ends_at_once(monkeypatch):
    pid_of_itself = [sys.executable, "-c", "import os; print(os.getpid())"]
    gone = subprocess.check_output(pid_of_itself, text=True, timeout=_PATIENCE_S).strip()
    another_by_that_number = f"{os.getppid()}:1"
    for owner in (f"{gone}:1", another_by_that_number):
        ended = []
        monkeypatch.setenv(OWNER_ENV, owner)
        assert follow_owner(ended.append) is None
        assert ended == [1]


FOLLOWER = """
import time
from kappa_workers.reaper import follow_owner
assert follow_owner() is not None
print(1, flush=True)
time.sleep(600)
"""

BETWEEN = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""

OWNER = """
import subprocess, sys
from kappa_workers.reaper import own_engines
own_engines()
between = subprocess.Popen(
    [sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, stdin=subprocess.PIPE,
    text=True, start_new_session=True,
)
print(between.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux facility")
def test_process_ends_with_its_killed_owner_across_a_parent():
    command = [sys.executable, "-c", OWNER, BETWEEN, FOLLOWER]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    handle = os.pidfd_open(int(owner.stdout.readline()))
    try:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        readable, _, _ = select.select([handle], [], [], _PATIENCE_S)
        assert readable, "the process outlived its owner"
    finally:
        os.close(handle)
        owner.stdin.close()
        owner.stdout.close()


def test_hang_patience_is_120_s_plus_ten_longest_steps_and_loads():
    said = SimpleNamespace(
        max_context_tokens=1000, max_batch_tokens=100, max_sequences=2, kv_bytes_per_token=50.0,
        step=StepModel(0.01, 0.0, 0.0, 0.001, 0.5, dilation=4.0),
        node=SimpleNamespace(h2d_bytes_per_s=1e4, dilation=4.0),
    )  # fmt: skip
    # The GEMMs' 100 x 0.01 s, then reading 3 contexts and a budget, (1100 + 1000 + 1000) x 0.001 s:
    # a step of 1 + 3.1 + 0.5 s. A load: 1000 x 50 / 10^4 = 5 s. Both four times as long.
    assert hang_patience_s(said) == pytest.approx(120 + 10 * 4 * (4.6 + 5.0))


FENCED = """
import sys
from kappa_workers.reaper import fence
thread = fence(5.0)
print("fenced", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux facility")
def test_a_fence_ends_a_process_that_is_stopped():
    owner = subprocess.Popen(
        [sys.executable, "-c", FENCED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "fenced\n"
        with pytest.raises(subprocess.TimeoutExpired):
            owner.wait(7.0)
        owner.send_signal(signal.SIGSTOP)
        assert owner.wait(_PATIENCE_S) == -signal.SIGKILL
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()
