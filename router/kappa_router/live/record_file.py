"""The files of `router.record` and of a rollout's journal, readable by their owner alone since a
record holds prompts. A loss ends one for the life of this process, be it a failed write, the bound,
or a disk that is too slow: a log with a gap, or without its beginning, could not be replayed. What
a failed write left is taken back."""

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
_WAITING_BYTES = 64 << 20
_CLOSE_S = 5.0


class RecordFile:
    """Appends entries as JSON lines while that works. A thread of its own writes, so that the
    caller never waits for the disk; `on_drop` is called for each that is lost, on either thread."""

    def __init__(self, path: str, on_drop: Callable[[], None], max_bytes: int = MAX_BYTES) -> None:
        self._path, self._on_drop, self._max_bytes = path, on_drop, max_bytes
        self._file, self._size, self._ended = -1, 0, False
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Each is counted by one thread alone.
        self._given_bytes = self._taken_bytes = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.fchmod(self._file, 0o600)  # It may be there from before, with another mode.
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            self._end(str(error))
        self._thread = threading.Thread(target=self._write, name="record", daemon=True)
        self._thread.start()

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Have an entry appended; never raises for what the disk does."""
        if self._given_bytes - self._taken_bytes > _WAITING_BYTES:
            self._end("the disk is too slow")
        if self._ended:
            self._on_drop()
        else:
            line = json.dumps(entry).encode() + b"\n"
            self._given_bytes += len(line)
            self._waiting.put(line)

    def close(self) -> None:
        """Write what waits, for five seconds at most, and no more."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        self._ended = True

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._taken_bytes += len(line)
            if self._ended or not self._append(line):
                self._on_drop()
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _append(self, line: bytes) -> bool:
        why = "the disk is full"
        try:
            if self._size + len(line) > self._max_bytes:
                why = f"it has reached its {self._max_bytes} bytes"
            elif os.write(self._file, line) == len(line):
                self._size += len(line)
                return True
        except OSError as error:
            why = str(error)
        self._end(why)
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size)
        return False

    def _end(self, why: str) -> None:
        if not self._ended:
            log.error("record_ended", path=self._path, why=why)
        self._ended = True
