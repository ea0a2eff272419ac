"""The names of the version of vLLM that is installed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

KNOWN = "0.29, 0.31, 0.32 or 0.33"


def series(installed: str) -> str:
    """The module for an installed version such as "0.32.0+cpu".

    Raises:
        ImportError: our plug-ins do not know it.
    """
    major_minor = ".".join(installed.split(".")[:2])
    if major_minor == "0.29":
        return "v0_29"
    if major_minor in ("0.31", "0.32", "0.33"):
        return "v0_31"
    raise ImportError(
        f"vLLM {installed}: our scheduler and host tier know {KNOWN}. Install one of these, or run "
        "without them: scheduler.name: stock and engine.host_tier: stock"
    )


def installed_version() -> str:
    """The version of the vLLM that is imported here; another tree may shadow the installed one."""
    import vllm

    return str(vllm.__version__)


if TYPE_CHECKING or series(installed_version()) == "v0_29":
    from kappa_workers.vllm.versions.v0_29 import Manager29 as ManagerNames
    from kappa_workers.vllm.versions.v0_29 import Scheduler29 as SchedulerNames
    from kappa_workers.vllm.versions.v0_29 import Spec29 as SpecNames
    from kappa_workers.vllm.versions.v0_29 import note_use
else:
    from kappa_workers.vllm.versions.v0_31 import Manager31 as ManagerNames
    from kappa_workers.vllm.versions.v0_31 import Scheduler31 as SchedulerNames
    from kappa_workers.vllm.versions.v0_31 import Spec31 as SpecNames
    from kappa_workers.vllm.versions.v0_31 import note_use

__all__ = ["ManagerNames", "SchedulerNames", "SpecNames", "note_use"]
