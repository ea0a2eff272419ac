"""Where a request's KV comes from besides its device: the sources that load in this process, and
what loads of theirs took. Read by the worker that reports steps
(`kappa_workers.vllm.metered_worker`)."""

from __future__ import annotations

import threading
from collections import OrderedDict

LOAD, STORE = "load", "store"

# The loads' seconds of at most this many requests are kept; those that never run are forgotten.
_REMEMBERED = 4096
# Of a new measurement of seconds per block, against those before it.
_RATE_WEIGHT = 0.2


def averaged_s(known_s: float, latest_s: float) -> float:
    """EWMA of measured seconds per block; `known_s` is 0 before the first."""
    before_s = known_s or latest_s
    return before_s + _RATE_WEIGHT * (latest_s - before_s)


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

    def take_waits(self, _start_s: float, _compute_s: float) -> tuple[float, float]:
        """A step that began then and computes for so long (0: as long as it takes) has ended: how
        long it was held up, and how much longer it lasts, for loads that came layer by layer."""
        return 0.0, 0.0

    def leave(self) -> None:
        if self in LOAD_SOURCES:
            LOAD_SOURCES.remove(self)


LOAD_SOURCES: list[LoadSource] = []
"""Those of this process."""
