"""The processes of a cluster on this machine: who is who, and signals to them.

A cluster is the process that started it and all that it started. Ray names its processes by what
they run; a worker is found by the Unix sockets that carry its name. Linux only.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_SOCKET = re.compile(r"@kappa-(\d+)-(.+)-(?:stats|kv)$")
_ROLES = (
    ("controller", re.compile(r"ServeController")),
    ("proxy", re.compile(r"ray::ProxyActor")),
    ("ingress", re.compile(r"ray::(?:ServeReplica|SERVE_REPLICA).*KappaIngress")),
    ("worker", re.compile(r"ray::(?:ServeReplica|SERVE_REPLICA)")),
    ("engine", re.compile(r"EngineCore|VLLM::|multiprocessing.spawn")),
    ("raylet", re.compile(r"raylet/raylet")),
    ("gcs", re.compile(r"gcs_server")),
)


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it is, and what it holds now. started_s: wall time."""

    pid: int
    role: str
    title: str
    rss_bytes: int
    fds: int
    started_s: float


class Family:
    """The cluster that `pid` started; remembers everyone it has seen, to find what outlives it."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], str] = {}

    def members(self) -> list[Process]:
        """All living processes, the starter among them."""
        found = []
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                title = " ".join(process.cmdline())[:160] or process.name()
                self._seen[process.pid, process.create_time()] = title
                found.append(
                    Process(
                        process.pid, _role(title), title, process.memory_info().rss,
                        process.num_fds(), process.create_time(),
                    )
                )  # fmt: skip
        return found

    def of_role(self, role: str) -> list[int]:
        return [process.pid for process in self.members() if process.role == role]

    def below(self, pid: int) -> list[int]:
        """Pids of all that a process started."""
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []

    def strays(self) -> list[str]:
        """What this cluster started and nobody of it is the parent of any more."""
        family = {process.pid for process in self.members()}
        return [f"{pid} {title}" for (pid, _), title in self._living() if pid not in family]

    def survivors(self) -> list[str]:
        """Everyone ever seen who lives."""
        return [f"{pid} {title}" for (pid, _), title in self._living()]

    def _living(self) -> list[tuple[tuple[int, float], str]]:
        living = []
        for (pid, created_s), title in self._seen.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                zombie = process.status() == psutil.STATUS_ZOMBIE
                if process.create_time() == created_s and not zombie:
                    living.append(((pid, created_s), title))
        return living


def worker_pids() -> dict[str, int]:
    """Workers of this machine by name; those whose process is gone are left out."""
    pids = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        found = _SOCKET.search(line)
        if found is not None and alive(int(found[1])):
            pids[found[2]] = int(found[1])
    return pids


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def kill(pids: Iterable[int]) -> None:
    """End them at once; who is gone already is."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _role(title: str) -> str:
    return next((role for role, pattern in _ROLES if pattern.search(title)), "other")
