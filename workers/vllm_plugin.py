"""Loaded by vLLM in each of its processes (entry point `vllm.general_plugins`).

One job: on machines with few cores, vLLM's shared-memory queues must not spin. Their readers
busy-wait for a second after every message before they sleep; on a paced or a two-core node that
is a whole core burnt per engine. `KAPPA_QUEUE_SPIN_S` shortens it; unset leaves vLLM alone.
"""

from __future__ import annotations

import os

SPIN_ENV = "KAPPA_QUEUE_SPIN_S"


def register() -> None:
    """Apply `KAPPA_QUEUE_SPIN_S` to the queues that this process will make."""
    spin = os.environ.get(SPIN_ENV)
    if not spin:
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    *others, _ = SpinCondition.__init__.__defaults__ or (None,)
    SpinCondition.__init__.__defaults__ = (*others, float(spin))
