"""Loaded by vLLM in each of its processes (entry point `vllm.general_plugins`), for what the
environment asks for: `KAPPA_QUEUE_SPIN_S`: queues in shared memory busy-wait for so long instead of
a second, which on a paced node, or one with few cores, burns a core per engine.
`KAPPA_DIE_WITH_PARENT`: engine processes end with a killed parent and with their replica
(`kappa_workers.reaper`). `KAPPA_LOG`: how they log (`log_setting`)."""

from __future__ import annotations

import os
import time
from typing import Any

from kappa.host import die_with_parent
from kappa_workers.reaper import follow_owner

SPIN_ENV, REAP_ENV, LOG_ENV = "KAPPA_QUEUE_SPIN_S", "KAPPA_DIE_WITH_PARENT", "KAPPA_LOG"
_NAP_SHARE = 0.2
_LONGEST_NAP_MS = 100


def register() -> None:
    end_with_owner()
    if setting := os.environ.get(LOG_ENV):
        log_as(setting)
    if spin := os.environ.get(SPIN_ENV):
        shorten_queue_spin(float(spin))


def end_with_owner() -> None:
    """End this process with its parent and with its replica, where the environment asks for it."""
    if os.environ.get(REAP_ENV):
        die_with_parent()
        follow_owner()


def log_setting(log_format: str, log_file: str | None, level: str) -> str:
    """The settings of the log as a value for the environment, which `log_as` reads."""
    return f"{log_format}|{level}|{log_file or ''}"


def log_as(setting: str) -> None:
    from kappa.logging import configure

    log_format, level, log_file = setting.split("|", 2)
    configure(log_format, log_file or None, level)


def shorten_queue_spin(seconds: float) -> None:
    """Let queues made from now on in this process spin for `seconds` only."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    *others, _ = SpinCondition.__init__.__defaults__ or (None,)
    SpinCondition.__init__.__defaults__ = (*others, seconds)
    wait = SpinCondition.wait

    def wait_in_short_naps(self: Any, timeout_ms: int | None = None) -> None:
        # vLLM's writers drop a wake-up now and then, and its readers then sleep for 5 s; a second
        # of spinning hides that. The longer nothing came, the longer the naps between looks.
        idle_ms = 1000.0 * (time.monotonic() - self.last_read)
        nap_ms = max(1, min(_LONGEST_NAP_MS, int(_NAP_SHARE * idle_ms)))
        wait(self, nap_ms if timeout_ms is None else min(timeout_ms, nap_ms))

    SpinCondition.wait = wait_in_short_naps
