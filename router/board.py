"""Who is there: the meeting point of Ray's router and our ingress, in one process.

Ray Serve runs a deployment's request router on a thread of its own and tells it, by long poll,
which replicas exist and what each announced. It posts that here; the ingress reads it on its own
loop. Plain data under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Announcements = dict[str, Mapping[str, Any]]
Listener = Callable[[str, Announcements], None]


class Board:
    """Announcements by deployment and replica id; an empty announcement means not ready yet."""

    def __init__(self) -> None:
        # Held while listeners run, so that each hears all posts in their order.
        self._lock = threading.RLock()
        self._posts: dict[str, Announcements] = {}
        self._listeners: list[Listener] = []

    def post(self, deployment: str, announcements: Announcements) -> None:
        """Replace what is known of a deployment's replicas; listeners run here: none may wait."""
        with self._lock:
            self._posts[deployment] = dict(announcements)
            for listener in list(self._listeners):
                listener(deployment, dict(announcements))

    def remove(self, deployment: str, replica: str) -> None:
        """A replica died; others stay."""
        with self._lock:
            posted = {k: v for k, v in self._posts.get(deployment, {}).items() if k != replica}
            self.post(deployment, posted)

    def listen(self, listener: Listener) -> None:
        """Call `listener` now for all that is known, and at every post from now on."""
        with self._lock:
            self._listeners.append(listener)
            for deployment, announcements in self._posts.items():
                listener(deployment, dict(announcements))

    def unlisten(self, listener: Listener) -> None:
        """Call `listener` no more; one that is not known is let be."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


BOARD = Board()
