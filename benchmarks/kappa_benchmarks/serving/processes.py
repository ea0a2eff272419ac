"""CPU seconds of the processes that a command started, by their roles."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection

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
