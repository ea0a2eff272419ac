"""Whether a machine suits a cluster: versions, memory, GPUs, and the cluster file on it. Pure.

`kappa doctor` shows what each row finds; a start holds the driver against the same figures.
"""

from __future__ import annotations

from kappa_deploy.app.machine import Machine
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import Finding

CUDA = 13
"""Major version of the CUDA that the GPU lock brings; a test holds it against the lock."""

# NVIDIA's CUDA release notes, table of minor version compatibility: from this driver on (Linux).
_LEAST_DRIVER = {12: (525, 60, 13), 13: (580, 65, 6)}
_LEAST_SHM_BYTES, _LEAST_MEMORY_BYTES = 512 << 20, 2 << 30


def versions(facts: Facts) -> Finding:
    """Packages that a cluster stands on, against the lock."""
    if not facts.locked:
        return Finding("skip", "no lock file beside the package: an image is built from it")
    shown = ", ".join(f"{name} {have}" for name, have in facts.installed.items())
    other = [f"{n} {have} for {facts.locked[n]}" for n, have in facts.installed.items()
             if n in facts.locked and facts.locked[n] != have]  # fmt: skip
    if other:
        return Finding("fail", ", ".join(other), "run './dev setup': only the lock is tested")
    return Finding("pass", shown)


def memory(facts: Facts) -> Finding:
    """Free memory and /dev/shm, where Ray's object store and vLLM's host tier lie."""
    left, shm = facts.machine.memory_bytes, facts.machine.shm_bytes
    shown = ", ".join(
        f"{'unknown' if free is None else f'{free / 1e9:.4g} GB'} free {where}"
        for free, where in ((left, "of memory"), (shm, "in /dev/shm"))
    )
    if shm is not None and shm < _LEAST_SHM_BYTES:
        least = f"{_LEAST_SHM_BYTES / 1e9:.2g} GB"
        return Finding("fail", shown, f"give /dev/shm {least} or more (docker: --shm-size)")
    if left is not None and left < _LEAST_MEMORY_BYTES:
        return Finding("warn", shown, "stop what else runs here, or lower engine.host_bytes")
    return Finding("pass", shown)


def gpus(facts: Facts) -> Finding:
    """GPUs that may be used, and their driver."""
    if not facts.machine.gpus:
        return Finding("skip", facts.machine.no_gpus or "no GPU")
    first = facts.machine.gpus[0]
    shown = f"{len(facts.machine.gpus)} x {first.name}, driver {first.driver or 'unknown'}"
    fault = old_driver(facts.machine)
    if fault:
        return Finding("fail", fault, "update NVIDIA's driver")
    if facts.machine.engine_build == "cpu":
        return Finding("warn", f"{shown}, and vLLM's CPU build", "KAPPA_EXTRA=gpu ./dev setup")
    return Finding("pass", shown)


def cluster_file(facts: Facts) -> Finding:
    """The cluster file, by a dry run."""
    if facts.file_faults is None:
        return Finding("skip", "of a cluster file: give --config")
    if facts.file_faults:
        shown = f"{len(facts.file_faults)} fault(s): {facts.file_faults[0]}"
        return Finding("fail", shown, "'kappa serve --dry-run' shows all")
    return Finding("pass", "0 faults")


def old_driver(machine: Machine) -> str:
    """Why a machine's driver is too old for the lock's CUDA; empty: it is not."""
    least = _LEAST_DRIVER[CUDA]
    old = next((g for g in machine.gpus or () if g.driver and _parts(g.driver) < least), None)
    if old is None:
        return ""
    needed = ".".join(f"{part:02}" for part in least)
    return (
        f"the driver of {machine.name} is {old.driver}, and CUDA {CUDA}, which the GPU lock "
        f"brings, needs {needed} or newer"
    )


def _parts(driver: str) -> tuple[int, ...]:
    return tuple(int(part) for part in driver.split(".") if part.isdigit())
