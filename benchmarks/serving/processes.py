"""CPU seconds of what a command started, by what each process is."""

from __future__ import annotations

import contextlib
import re
from collections import Counter

import psutil

# By what stands in a process' title or command, the first that fits.
_ROLES = (
    ("KappaDecider", "decider"), ("KappaIngress", "ingress"), ("ServeReplica:kappa:", "replica"),
    ("ServeReplica:envoy:", "replica"), ("OpenAiIngress", "stock ingress"),
    ("ServeReplica:stock", "stock replica"), ("ProxyActor", "proxy"), ("ServeController", "ray"),
    ("VLLM::", "engine"), ("vllm", "vllm"), ("envoy", "envoy"), ("ray", "ray"),
)  # fmt: skip


def role_of(title: str) -> str:
    """What a process is, by its command line."""
    return next((role for word, role in _ROLES if re.search(word, title)), "other")


def cpu_by_role(pid: int | None = None) -> Counter[str]:
    """CPU seconds so far of all processes below one, by default this one, by role."""
    found = Counter[str]()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            found[role_of(" ".join(process.cmdline()))] += used.user + used.system
    return found
