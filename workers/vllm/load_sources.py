"""What brings KV to a worker process, as its metered worker sees it."""

from __future__ import annotations

import threading
from collections import OrderedDict

# Of so many requests it is remembered what their loads took; those that never run are forgotten.
_REMEMBERED = 4096


class LoadSource:
    """A host tier, or the transfer from other workers. Thread-safe; known to its process."""

    def __init__(self) -> None:
        self._load_s: OrderedDict[str, float] = OrderedDict()
        self._load_lock = threading.Lock()
        LOAD_SOURCES.append(self)

    def wait_for_load(self, timeout_s: float) -> bool:
        """Sleep until a load may have ended, at most so long; False if none is in flight."""
        raise NotImplementedError

    def add_load_s(self, request: str, seconds: float) -> None:
        """A load of a request's KV (vLLM's id) took so long."""
        with self._load_lock:
            self._load_s[request] = self._load_s.get(request, 0.0) + seconds
            if len(self._load_s) > _REMEMBERED:
                self._load_s.popitem(last=False)

    def take_load_s(self, request: str) -> float:
        """Seconds that a request's loads took; forgets them."""
        with self._load_lock:
            return self._load_s.pop(request, 0.0)

    def leave(self) -> None:
        """Nothing comes from here any more."""
        if self in LOAD_SOURCES:
            LOAD_SOURCES.remove(self)


LOAD_SOURCES: list[LoadSource] = []
"""Those of this process."""
