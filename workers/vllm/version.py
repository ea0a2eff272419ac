"""The version of vLLM whose private names our scheduler and host tier use."""

from __future__ import annotations

import vllm

KNOWN = "0.29"


def check_version(installed: str = vllm.__version__) -> None:
    """Refuse any other: half of the names would match, and an engine that fails in its loop is
    worse than one that does not start.

    Raises:
        ImportError: another version is installed; says what runs with it.
    """
    if installed.split(".")[:2] != KNOWN.split("."):
        raise ImportError(
            f"vLLM {installed}: our scheduler and host tier know {KNOWN}. Install that, or run "
            "without them: scheduler.name: stock and engine.host_tier: stock"
        )
