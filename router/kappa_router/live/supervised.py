"""Tasks that must not end: one that fails is started again, later and later, and it is counted. An
exception in a task that is not awaited would end it silently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)

PAUSES_S = (0.2, 1.0, 5.0)
"""Before the first restart, the second, and every later one."""


def pause_s(attempt: int) -> float:
    """Seconds to wait before the attempt after this one; attempts count from 0."""
    return PAUSES_S[min(attempt, len(PAUSES_S) - 1)]


async def supervised(
    task: str, run: Callable[[], Awaitable[None]], on_restart: Callable[[str], None], worker: str
) -> None:
    """Run `run` again and again until cancelled; `on_restart(task)` is called before each restart.
    worker: whom it follows, for the log; empty: none."""
    attempt = 0
    while True:
        begun_s, error = time.monotonic(), "it returned"
        try:
            await run()
        except Exception as failure:
            error = repr(failure)
        # One that ran for long failed for another reason than the last time.
        attempt = 0 if time.monotonic() - begun_s > PAUSES_S[-1] else attempt
        log.error("task_restarted", task=task, worker=worker, error=error)
        on_restart(task)
        await asyncio.sleep(pause_s(attempt))
        attempt += 1
