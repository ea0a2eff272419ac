"""What waits for a worker, in the seconds that the router predicted for each request. Pure.

The ingress sends its prediction along with every request (`LINK_S_KEY`, `GPU_S_KEY`), so a worker
knows what waits for it whichever ingress sent it. From this the autoscaler learns the backlog, and
how much of the worker's time is asked for by what arrives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from kappa.protocol import GPU_S_KEY, LINK_S_KEY, REQUEST_ID_KEY

# What arrived counts less and less: after so many seconds by a factor of e.
_WINDOW_S = 30.0


class Backlog:
    """Requests whose first token has not come, and how fast they come. Safe between threads."""

    def __init__(self, now_s: float, max_sequences: int) -> None:
        """`max_sequences`: requests that the engine serves at once."""
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[float, float]] = {}
        self._open: set[str] = set()
        self._start_s = self._seen_s = now_s
        self._link_s = self._gpu_s = 0.0
        self._max_sequences = max(max_sequences, 1)

    def arrived(self, words: Mapping[str, Any] | None, now_s: float) -> str:
        """A request came with these words of the ingress; returns its id, "" without one."""
        words = words or {}
        request_id = str(words.get(REQUEST_ID_KEY, ""))
        if request_id:
            link_s, gpu_s = _seconds(words.get(LINK_S_KEY)), _seconds(words.get(GPU_S_KEY))
            with self._lock:
                self._fade(now_s)
                self._link_s += link_s
                self._gpu_s += gpu_s
                self._waiting[request_id] = link_s, gpu_s
                self._open.add(request_id)
        return request_id

    def started(self, request_id: str) -> None:
        """Its prompt is computed; unknown ids are ignored."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        """It is over, however it ended; unknown ids are ignored."""
        with self._lock:
            self._waiting.pop(request_id, None)
            self._open.discard(request_id)

    def seconds(self) -> tuple[float, float]:
        """Predicted seconds (link, gpu) of the requests that wait for their first token."""
        with self._lock:
            pairs = list(self._waiting.values())
        return sum(link for link, _ in pairs), sum(gpu for _, gpu in pairs)

    def demand(self, now_s: float) -> float:
        """Share of the worker's time that is asked for: of its link or its gpu by what arrives, or
        of its places by what is open, whichever is most."""
        with self._lock:
            self._fade(now_s)
            # While it has not run for a whole window yet, what came is taken to go on.
            seen_s = max(now_s - self._start_s, 1.0)
            window_s = _WINDOW_S * -math.expm1(-seen_s / _WINDOW_S)
            arriving = max(self._link_s, self._gpu_s) / window_s
            return max(arriving, len(self._open) / self._max_sequences)

    def _fade(self, now_s: float) -> None:
        factor = math.exp(-max(now_s - self._seen_s, 0.0) / _WINDOW_S)
        self._link_s, self._gpu_s = self._link_s * factor, self._gpu_s * factor
        self._seen_s = max(now_s, self._seen_s)


def _seconds(value: Any) -> float:
    """A prediction as the ingress wrote it; nonsense counts as none."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
