"""The replicas that exist: Ray Serve announces them to its request router, on a thread of its own,
which publishes them here; the decider reads them on its own loop. Plain data under a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Announcements = dict[str, Mapping[str, Any]]
Listener = Callable[[str, Announcements, frozenset[str]], None]


class ReplicaRegistry:
    """Announcements by deployment and replica id; an empty one means not ready yet. A listener is
    called with the deployment, all its announcements, and which of its replicas are known to have
    died. One that is missing otherwise may be finishing its requests."""

    def __init__(self) -> None:
        # Held while listeners run, so that each sees all changes in their order.
        self._lock = threading.RLock()
        self._published: dict[str, Announcements] = {}
        self._listeners: list[Listener] = []

    def publish(
        self, deployment: str, announcements: Announcements, died: frozenset[str] = frozenset()
    ) -> None:
        """Replace a deployment's announcements; listeners run here: none may wait."""
        with self._lock:
            self._published[deployment] = dict(announcements)
            for listener in list(self._listeners):
                listener(deployment, dict(announcements), died)

    def remove(self, deployment: str, replica: str) -> None:
        with self._lock:
            known = self._published.get(deployment, {})
            left = {name: data for name, data in known.items() if name != replica}
            self.publish(deployment, left, frozenset({replica}))

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` now for all that is known, and at every change from now on."""
        with self._lock:
            self._listeners.append(listener)
            for deployment, announcements in self._published.items():
                listener(deployment, dict(announcements), frozenset())

    def unsubscribe(self, listener: Listener) -> None:
        """Call `listener` no more; one that is not known does not matter."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


REGISTRY = ReplicaRegistry()
