"""What the plugin does in vLLM's processes, each in a process of its own."""

import os
import select
import signal
import subprocess
import sys
from importlib import metadata

import pytest

pytestmark = pytest.mark.vllm

_PATIENCE_S = 120.0


def test_vllm_finds_the_plugin():
    (entry,) = (e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "kappa")
    assert entry.load().__module__ == "workers.vllm_plugin"


def in_a_process(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=True,
    )
    return done.stdout.split()[-1]


SPIN = """
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from workers.vllm_plugin import register
register()
print(SpinCondition.__init__.__defaults__[-1])
"""


def test_queues_spin_as_long_as_asked():
    assert in_a_process(SPIN, KAPPA_QUEUE_SPIN_S="0.0005") == "0.0005"


NAP = """
import time, zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from workers.vllm_plugin import register
register()
queue = SpinCondition(is_reader=True, context=zmq.Context(), notify_address="inproc://nobody")
waits = []
for idle_s in (0.05, 60.0):
    queue.last_read = time.monotonic() - idle_s
    start = time.monotonic()
    queue.wait(timeout_ms=5000)
    waits.append(time.monotonic() - start)
print(waits[0] < 0.1 and waits[1] < 1.0)
"""


def test_a_lost_wake_up_costs_no_more_than_a_nap():
    assert in_a_process(NAP, KAPPA_QUEUE_SPIN_S="0.0005") == "True"


def test_without_the_variable_queues_are_left_alone():
    assert in_a_process(SPIN, KAPPA_QUEUE_SPIN_S="") == "1"


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import time
from workers.vllm_plugin import register
register()
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux facility")
def test_a_process_dies_with_its_killed_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, "KAPPA_DIE_WITH_PARENT": "1", "KAPPA_QUEUE_SPIN_S": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    handle = os.pidfd_open(child)
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # The descriptor becomes readable when the process has ended.
        readable, _, _ = select.select([handle], [], [], _PATIENCE_S)
        assert readable, "the child outlived its parent"
    finally:
        os.close(handle)
        parent.stdin.close()
        parent.stdout.close()
