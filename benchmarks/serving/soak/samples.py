"""What a cluster holds, looked at again and again.

Memory and descriptors of every process, blocks in the index, reservations: over HTTP and from the
kernel, so that looking changes nothing of what is looked at.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from benchmarks.faults.target import FaultsError, Target


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process at one moment."""

    role: str
    rss_bytes: int
    fds: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. t_s: since the start; index_blocks and reservations: -1 while nobody answers."""

    t_s: float
    index_blocks: int
    reservations: int
    processes: dict[int, Held]


def look(target: Target, start_s: float) -> Sample:
    """Look once."""
    processes = {p.pid: Held(p.role, p.rss_bytes, p.fds) for p in target.family.members()}
    return Sample(
        time.monotonic() - start_s,
        int(target.metric("kappa_index_blocks")),
        target.reservations(),
        processes,
    )


class Sampler:
    """Looks every so many seconds until it is stopped; use as an asynchronous context manager.

    Raises:
        FaultsError: at the end, where a look failed: what came before it would pass for all.
    """

    def __init__(self, target: Target, every_s: float, start_s: float) -> None:
        self.samples: list[Sample] = []
        self._target, self._every_s, self._start_s = target, every_s, start_s

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(ended, Exception):
            raise FaultsError(f"the cluster could not be looked at: {ended!r}") from ended

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sample = await loop.run_in_executor(None, look, self._target, self._start_s)
            self.samples.append(sample)
            await asyncio.sleep(self._every_s)
