"""Host memory that can still be had: the machine's, within this process' control groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
_UNLIMITED = 1 << 60
# Of a cgroup, version 2 and 1: its limit and its use.
_CGROUP_FILES = (
    ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)  # fmt: skip


def memory_bytes(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Of the machine in all, or as much of it as this process' cgroups allow; 0: not known."""
    whole = 1024 * _figures(proc / "meminfo").get("MemTotal:", 0)
    return min([limit for _, limit, _ in _cgroup_limits(cgroups, proc)] + [whole])


def machine_free(held: int = 0, proc: Path = PROC) -> int | None:
    """The kernel's estimate for the machine; None: not known.

    held: bytes of shared memory that are taken over or replaced, so that they count as free.
    """
    meminfo = _figures(proc / "meminfo")
    if "MemAvailable:" not in meminfo:
        return None
    return 1024 * meminfo["MemAvailable:"] + min(held, 1024 * meminfo.get("Shmem:", 0))


def cgroup_free(held: int = 0, cgroups: Path = CGROUPS, proc: Path = PROC) -> int | None:
    """Below the tightest of the limits, None without one; held: as `machine_free`'s.

    Page cache counts as free: the kernel drops it before it kills anybody.
    """
    frees = []
    for folder, limit, used_name in _cgroup_limits(cgroups, proc):
        stat = _figures(folder / "memory.stat")
        cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
        shared = stat.get("shmem", stat.get("total_shmem", 0))
        used = (_number(folder / used_name) or 0) - cache - min(held, shared)
        frees.append(max(limit - max(used, 0), 0))
    return min(frees, default=None)


def _cgroup_limits(cgroups: Path, proc: Path) -> Iterator[tuple[Path, int, str]]:
    """(folder, bytes, name of the file of what is used) of each limit from this process' cgroup up
    to the root (v2, else v1)."""
    path = ""
    with contextlib.suppress(OSError):
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
    """A file of names and figures; empty where it cannot be read."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                name, figure, *_ = line.split()
                found[name] = int(figure)
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
