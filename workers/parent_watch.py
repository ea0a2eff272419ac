"""Engine processes must not outlive the replica that started them.

A killed parent leaves vLLM's processes running for minutes. The Linux kernel can signal a child
when its parent dies, but only if the child asks; so a tiny watcher process does it for all of them:
it waits for the parent to vanish and then ends the children that the parent had.
"""

from __future__ import annotations

import os
import subprocess
import sys

_WATCHER = """
import os, signal, sys, time
import psutil
parent = psutil.Process(int(sys.argv[1]))
born = parent.create_time()
family = {}
def alive():
    try:
        return psutil.Process(parent.pid).create_time() == born and parent.status() != 'zombie'
    except psutil.NoSuchProcess:
        return False
while alive():
    try:
        for child in parent.children(recursive=True):
            if child.pid != os.getpid():
                family[child.pid] = child
    except psutil.Error:
        pass
    time.sleep(1.0)
for child in family.values():
    try:
        if child.is_running():
            child.kill()
    except psutil.Error:
        pass
"""


def watch_children() -> None:
    """Start the watcher for this process; it ends by itself after this process."""
    subprocess.Popen(
        [sys.executable, "-c", _WATCHER, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
