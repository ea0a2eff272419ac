"""Processes that a command started: when they serve, and CPU seconds by their roles."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import httpx
import psutil

# By a pattern in a process' title or command; the first that fits.
_ROLES = (
    ("kappa_deploy.cli", "kappa route"), ("KappaDecider", "decider"), ("LLMRouter", "stock router"),
    ("OpenAiIngress", "stock ingress"),
    ("ServeReplica:kappa:", "replica"), ("ServeReplica:stock", "stock replica"),
    ("ProxyActor", "proxy"), ("(?i)haproxy", "haproxy"), ("ServeController", "ray"),
    ("VLLM::|spawn_main", "engine"), ("vllm", "vllm"), ("envoy", "envoy"), ("ray", "ray"),
)  # fmt: skip


def role_of(title: str) -> str:
    """The role of a process, by its command line."""
    return next((role for word, role in _ROLES if re.search(word, title)), "other")


def cpu_by_role(pid: int | None = None, without: Collection[int] = ()) -> Counter[str]:
    """CPU seconds so far of a process and of all below it, by role; by default of all below this
    one, which is the client. without: processes that are left out with all below them."""
    found = Counter[str]()
    waiting = [psutil.Process(pid)] if pid is not None else psutil.Process().children()
    while waiting:
        process = waiting.pop()
        if process.pid in without:
            continue
        with contextlib.suppress(psutil.Error):
            waiting += process.children()
            used = process.cpu_times()
            found[role_of(" ".join(process.cmdline()))] += used.user + used.system
    return found


def until_served(
    url: str, limit_s: float, by: subprocess.Popen[Any] | None = None,
    good: Callable[[httpx.Response], bool] = lambda _: True,
) -> None:  # fmt: skip
    """Wait until `url` answers 200, and what is `good`.

    Raises:
        TimeoutError: it did not in time, or the process that should serve it has ended.
    """
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and (by is None or by.poll() is None):
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = httpx.get(url, timeout=10.0)
            if answer.status_code == 200 and good(answer):
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not answered within {limit_s:g} s, or its process ended")
