"""What brings KV to a worker process, as its metered worker sees it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Protocol

# Of so many requests it is remembered what their loads took; those that never run are forgotten.
_REMEMBERED = 4096


class LoadSource(Protocol):
    """A host tier, or the transfer from other workers."""

    def wait_for_load(self, timeout_s: float) -> bool:
        """Sleep until a load may have ended, at most so long; False if none is in flight."""

    def take_load_s(self, request: str) -> float:
        """Seconds that a request's KV (vLLM's id) took to come; forgets them."""


LOAD_SOURCES: list[LoadSource] = []
"""Those of this process."""


class LoadSeconds:
    """Seconds that requests' loads took, of the latest few thousand requests. Thread-safe."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, request: str, seconds: float) -> None:
        with self._lock:
            self._seconds[request] = self._seconds.get(request, 0.0) + seconds
            if len(self._seconds) > _REMEMBERED:
                self._seconds.popitem(last=False)

    def take(self, request: str) -> float:
        with self._lock:
            return self._seconds.pop(request, 0.0)
