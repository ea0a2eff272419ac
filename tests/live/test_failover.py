"""An engine that is killed under its replica: no request is lost, and the worker comes back."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

_RECOVERY_S = 400.0
_REQUESTS = 24


def engines(pid):
    """The processes of vLLM's engine cores below a process: each replica spawns its own.

    Only where setproctitle is installed do they carry a name.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            words = f"{process.name()} {' '.join(process.cmdline())}"
            parent = process.parent()
            of_replica = parent is not None and "KappaServer" in " ".join(parent.cmdline())
        except psutil.NoSuchProcess:
            continue
        if of_replica and ("EngineCore" in words or "spawn_main" in words):
            found.append(process)
    return found


def test_killed_engine_loses_no_request_and_its_worker_returns(live, idle):
    before = {row["node"]: row["worker"] for row in live.nodes()}
    cores = engines(live.pid)
    family = [process.name() for process in psutil.Process(live.pid).children(recursive=True)]
    assert len(cores) >= len(before), f"every worker has an engine of its own: {family}"
    url = "/v1/chat/completions"
    body = {
        "model": live.model,
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 8,
    }
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(live.http.post, url, json=body) for _ in range(_REQUESTS // 2)]
        os.kill(cores[0].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        answers += [pool.submit(live.http.post, url, json=body) for _ in range(_REQUESTS // 2)]
        statuses = [answer.result().status_code for answer in answers]
    assert statuses == [200] * _REQUESTS

    def replaced():
        now = {row["node"]: row for row in live.nodes()}
        others = {node for node, row in now.items() if before.get(node) != row["worker"]}
        return set(now) == set(before) and len(others) == 1

    live.until(replaced, "the worker did not come back", _RECOVERY_S)
    print(f"back after {time.monotonic() - killed_s:.1f} s")
    live.wait_idle()
    assert {row["breaker"]["state"] for row in live.nodes()} == {"closed"}
    # Each has one again, and none is left of the one that died.
    live.until(lambda: len(engines(live.pid)) == len(cores), "an engine was left over")
