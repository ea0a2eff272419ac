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
Listener = Callable[[str, Announcements, frozenset[str]], None]


class Board:
    """Announcements by deployment and replica id; an empty announcement means not ready yet.

    A listener is called with the deployment, all that is posted of it, and which of its replicas
    are known to have died. One that is missing otherwise may be finishing its requests.
    """

    def __init__(self) -> None:
        # Held while listeners run, so that each hears all posts in their order.
        self._lock = threading.RLock()
        self._posts: dict[str, Announcements] = {}
        self._listeners: list[Listener] = []

    def post(self, deployment: str, announcements: Announcements) -> None:
        """Replace what is known of a deployment's replicas; listeners run here: none may wait."""
        self._tell(deployment, announcements, frozenset())

    def remove(self, deployment: str, replica: str) -> None:
        """A replica died; others stay."""
        with self._lock:
            posted = {k: v for k, v in self._posts.get(deployment, {}).items() if k != replica}
            self._tell(deployment, posted, frozenset({replica}))

    def _tell(self, deployment: str, posted: Announcements, died: frozenset[str]) -> None:
        with self._lock:
            self._posts[deployment] = dict(posted)
            for listener in list(self._listeners):
                listener(deployment, dict(posted), died)

    def listen(self, listener: Listener) -> None:
        """Call `listener` now for all that is known, and at every post from now on."""
        with self._lock:
            self._listeners.append(listener)
            for deployment, announcements in self._posts.items():
                listener(deployment, dict(announcements), frozenset())

    def unlisten(self, listener: Listener) -> None:
        """Call `listener` no more; one that is not known is let be."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


class PinGoneError(Exception):
    """The replica that the ingress chose has gone before the request reached it."""


BOARD = Board()
