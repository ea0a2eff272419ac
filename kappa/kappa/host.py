"""The host that this process runs on: installed extensions, memory, locks, ports, children.

Extensions come by name, through entry points of installed distributions: `kappa.commands` adds
commands to `kappa`, `kappa.doctor` examinations to `kappa doctor`, `kappa.routing_policies` and
`kappa.scheduling_rules` policies and rules. Our own `benchmarks` comes in this way
(pyproject.toml). Memory is the machine's, within this process' control groups.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

COMMANDS = "kappa.commands"
EXAMINATIONS = "kappa.doctor"
ROUTING_POLICIES = "kappa.routing_policies"
SCHEDULING_RULES = "kappa.scheduling_rules"
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
_UNLIMITED = 1 << 60
# Files of a cgroup's limit and use, version 2 and 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.2
# Above those of Ray's workers, below Kubernetes' of nodes and what Linux gives out.
_PORTS: Sequence[int] = range(20_000, 30_000)


@cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group by name, in alphabetical order; nothing is imported yet."""
    return {entry.name: entry for entry in sorted(entry_points(group=group))}


def version_of(distribution: str) -> str:
    """The installed version of a distribution; empty if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(distribution)
    return ""


# Modules that extras bring, by the extra that a user would ask for (deploy/pyproject.toml).
EXTRAS = {
    "serve": (
        "fastapi", "gguf", "grafana_foundation_sdk", "kappa_dashboards", "kappa_engine",
        "kappa_workers", "opentelemetry", "packaging", "psutil", "pynvml", "ray", "safetensors",
        "tokenizers", "transformers",
    ),
    "gpu": ("lmcache", "torch", "vllm"),
    "loadtest": (
        "huggingface_hub", "jinja2", "kappa_benchmarks", "kappa_loadtest", "kappa_simulator",
        "kappa_workload", "matplotlib", "polars", "scipy",
    ),
    "kubernetes": ("jsonschema", "kubernetes_validate"),
}  # fmt: skip


def remedy_for(module: str) -> str:
    """The command that installs a missing module; empty if no extra of ours brings it."""
    package = module.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if package in modules:
            return f"needs {package}: pip install 'kappa-serve[{extra}]'"
    return ""


def lacking(extras: Iterable[str]) -> str:
    """The command that installs the first missing module of these extras; empty if all are here."""
    for module in (module for extra in extras for module in EXTRAS[extra]):
        try:
            is_here = find_spec(module) is not None
        except ValueError:  # it is known not to be importable
            is_here = False
        if not is_here:
            return remedy_for(module)
    return ""


def memory_bytes(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Memory of the machine, or this process' cgroup limit if that is lower; 0 if not known."""
    whole = 1024 * _figures(proc / "meminfo").get("MemTotal:", 0)
    return min([limit for _, limit, _ in _cgroup_limits(cgroups, proc)] + [whole])


def machine_free(proc: Path = PROC) -> int | None:
    """The kernel's estimate of the machine's available memory, in bytes; None if not known."""
    available = _figures(proc / "meminfo").get("MemAvailable:")
    return None if available is None else 1024 * available


def cgroup_free(cgroups: Path = CGROUPS, proc: Path = PROC) -> int | None:
    """Bytes left below the tightest cgroup limit; None without a limit.

    Page cache counts as free: the kernel drops it before it kills a process.
    """
    frees = []
    for folder, limit, used_name in _cgroup_limits(cgroups, proc):
        stat = _figures(folder / "memory.stat")
        cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
        used = (_number(folder / used_name) or 0) - cache
        frees.append(max(limit - max(used, 0), 0))
    return min(frees, default=None)


def _cgroup_limits(cgroups: Path, proc: Path) -> Iterator[tuple[Path, int, str]]:
    """(folder, limit in bytes, name of the file with the use) for each limit from this process'
    cgroup up to the root (v2, else v1)."""
    path = ""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, place = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                path = place
                break
    for root in (cgroups, cgroups / "memory"):
        here = root / path.lstrip("/")
        for folder in (here, *(up for up in here.parents if up.is_relative_to(root))):
            for limit_name, used_name in _CGROUP_FILES:
                limit = _number(folder / limit_name)
                if limit is not None and limit < _UNLIMITED:
                    yield folder, limit, used_name


def _figures(path: Path) -> dict[str, int]:
    """Figures by name, from a file of such lines; empty if it cannot be read."""
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                name, figure, *_ = line.split()
                found[name] = int(figure)
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class Lock:
    """A lock on a file or a folder, held by this process until it ends or `release`s it.

    Raises:
        OSError: the file cannot be opened, or made.
    """

    def __init__(self, path: Path) -> None:
        mode = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, mode | os.O_CLOEXEC, 0o600)

    def take(self, wait_s: float = 0.0) -> bool:
        """Take the lock, waiting up to `wait_s` seconds; False if another process holds it.

        Raises:
            OSError: its file system has no locks.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(_POLL_S)

    def release(self) -> None:
        """Let it go; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def free_port(host: str) -> int:
    """A TCP port on `host` that nothing listens on now."""
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """`count` different TCP ports of `host` on which nothing listens, of a range from which Linux
    gives no process a port by itself before they are used.

    Raises:
        OSError: `host` is no address of this machine, or the range has fewer that are free.
    """
    found, first = list[int](), secrets.randbelow(len(_PORTS))
    with ExitStack() as held:
        held.enter_context(socket.socket()).bind((host, 0))
        for at in range(len(_PORTS)):
            port = _PORTS[(first + at) % len(_PORTS)]
            with suppress(OSError):
                held.enter_context(socket.socket()).bind((host, port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"{host} has {len(found)} free ports of {_PORTS}, and {count} are needed")


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies (Linux only).

    parent: the parent's id, where it may have died before this call; default: the present one.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl took effect
