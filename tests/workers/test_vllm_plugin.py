"""What the plugin does in vLLM's processes, each in a process of its own."""

import json
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
    assert entry.load().__module__ == "kappa_workers.vllm_plugin"


QUEUES = """
import json, os, time, zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from kappa_workers.vllm_plugin import register
spins, naps_ms = [], []
SpinCondition.wait = lambda self, timeout_ms: naps_ms.append(timeout_ms)
for spin in ("", "0.0005"):
    os.environ["KAPPA_QUEUE_SPIN_S"] = spin
    register()
    spins.append(SpinCondition.__init__.__defaults__[-1])
queue = SpinCondition(is_reader=True, context=zmq.Context(), notify_address="inproc://unheard")
for idle_s, timeout_ms in ((-60, None), (60, None), (60, 5000), (60, 7)):
    queue.last_read = time.monotonic() - idle_s
    queue.wait(timeout_ms)
print(json.dumps([spins, naps_ms]))
"""


def test_queues_spin_as_requested_and_nap_after_a_lost_wake_up():
    done = subprocess.run(
        [sys.executable, "-c", QUEUES], capture_output=True, text=True, timeout=_PATIENCE_S,
        check=True,
    )  # fmt: skip
    spins, naps_ms = json.loads(done.stdout.splitlines()[-1])
    assert spins == [1, 0.0005], "left alone without the variable"
    assert naps_ms == [1, 100, 100, 7]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import time
from kappa_workers.vllm_plugin import register
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
