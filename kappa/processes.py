"""Between processes of one machine: a lock on a file, and children that end with their parent."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.2


class Lock:
    """A lock on a file or a folder, held by this process until it ends or `release`s it.

    Raises:
        OSError: the file cannot be opened, or made.
    """

    def __init__(self, path: Path) -> None:
        mode = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, mode | os.O_CLOEXEC, 0o600)

    def take(self, wait_s: float = 0.0) -> bool:
        """Whether it is ours, within so many seconds.

        Raises:
            OSError: its file system has no locks.
        """
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(_POLL_S)

    def release(self) -> None:
        """Let it go; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere nothing).

    parent: its id, where it may have died before this was called; as it is now, if not given.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked
