"""Faults inside Python processes of a cluster under test: clocks that jump, disks that are full.

Only where the harness puts this folder on `PYTHONPATH` and names a file in `KAPPA_PROCESS_FAULTS`;
the product does not know of either. The file is JSON: `{"clock": {"PID": seconds}, "full":
[folders]}`. A clock jumps for the Python code of that process, in `time.time`; a full disk is
ENOSPC for every file opened for writing, and every folder made, below a folder.
"""

import errno
import json
import os
import sys
import time
from typing import Any

_ENV = "KAPPA_PROCESS_FAULTS"
_LOOK_EVERY_S = 0.1


def _install(path: str) -> None:
    state: dict[str, Any] = {"looked": 0.0, "seen": 0, "told": {}, "busy": False}
    monotonic, real_time, real_time_ns = time.monotonic, time.time, time.time_ns

    def told() -> dict[str, Any]:
        now = monotonic()
        if not state["busy"] and now - state["looked"] >= _LOOK_EVERY_S:
            state["looked"], state["busy"] = now, True
            try:
                changed = os.stat(path).st_mtime_ns
                if changed != state["seen"]:
                    with open(path) as file:
                        state["told"] = json.load(file)
                    state["seen"] = changed
            except (OSError, ValueError):
                state["told"] = {}
            finally:
                state["busy"] = False
        found: dict[str, Any] = state["told"]
        return found

    def jump() -> float:
        return float(told().get("clock", {}).get(str(os.getpid()), 0.0))

    time.time = lambda: real_time() + jump()
    time.time_ns = lambda: real_time_ns() + int(1e9 * jump())

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = arguments
            if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event == "os.mkdir":
            name = arguments[0]
        else:
            return
        if isinstance(name, str) and any(name.startswith(f) for f in told().get("full", ())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    sys.addaudithook(refuse)


if os.environ.get(_ENV):
    _install(os.environ[_ENV])
