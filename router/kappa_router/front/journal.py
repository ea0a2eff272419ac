"""The file of `kappa route`'s journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path

from kappa import metrics as m
from kappa.settings.front import FrontSettings
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.record_file import RecordFile
from kappa_router.rollout_journal import CacheBlocks, JournalWriter

_CHUNK_BYTES = 1 << 18


class Journal(JournalWriter):
    """Writes to the file at `path`; the rest is as the writer has it."""

    def __init__(
        self,
        path: str,
        settings: FrontSettings,
        live: LiveRouter,
        caches: Callable[[], Mapping[str, CacheBlocks]],
    ) -> None:
        router, dropped = settings.router, partial(live.metrics.inc, m.RECORD_DROPPED)
        self._path, self._file = Path(path), RecordFile(path, dropped, settings.journal_bytes)
        about = router.mode, settings.present, router.policy
        super().__init__(*about, live.router, caches, self._file)

    async def parts(self) -> AsyncIterator[bytes]:
        """The file as it is now; nothing if it could not be made."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            left = self._path.stat().st_size
            while left > 0 and (part := await asyncio.to_thread(file.read, _CHUNK_BYTES)):
                yield part[:left]
                left -= len(part)

    def close(self) -> None:
        """Write what waits and what was learnt last."""
        if self._router.workers:
            self.describe(time.time())
        self._file.close()
