"""The files of `router.record` and of `kappa route`'s journal, readable by their owner alone since
a record holds prompts. A failed write, or the bound, ends one for the life of this process: a log
with a gap, or without its beginning, could not be replayed. What a failed write left is taken
back."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog

log = structlog.get_logger(__name__)

MAX_BYTES = 1 << 30
_WAITING = 4096
_CLOSE_S = 5.0


class RecordFile:
    """Appends entries as JSON lines while that works; `on_drop` is called for each that is lost."""

    def __init__(self, path: str, on_drop: Callable[[], None], max_bytes: int = MAX_BYTES) -> None:
        self._path, self._on_drop, self._max_bytes = path, on_drop, max_bytes
        self._file: int | None = None
        self._size = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.fchmod(self._file, 0o600)  # It may be there from before, with another mode.
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            self._end(str(error))

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Append an entry; never raises for what the disk does."""
        if self._file is not None:
            line = json.dumps(entry).encode() + b"\n"
            why = "the disk is full"
            try:
                if self._size + len(line) > self._max_bytes:
                    why = f"it has reached its {self._max_bytes} bytes"
                elif os.write(self._file, line) == len(line):
                    self._size += len(line)
                    return
            except OSError as error:
                why = str(error)
            self._end(why)
        self._on_drop()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)

    def _end(self, why: str) -> None:
        log.error("record_ended", path=self._path, why=why)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
        self.close()


class ThreadedFile:
    """A `RecordFile` that a thread of its own writes: the caller never waits for the disk. At most
    4,096 entries wait; `on_drop` is called for each that is lost, on either thread."""

    def __init__(self, path: str, on_drop: Callable[[], None], max_bytes: int = MAX_BYTES) -> None:
        self._file, self._on_drop = RecordFile(path, on_drop, max_bytes), on_drop
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def __call__(self, entry: Mapping[str, Any]) -> bool:
        """Have an entry written; False if there is no room for it."""
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._on_drop()
            return False
        return True

    def close(self) -> None:
        """Write what waits, for five seconds at most, and no more."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._file(entry)
        self._file.close()
