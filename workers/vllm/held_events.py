"""vLLM's KV events of several iterations as one batch: each batch wakes its publisher's thread, the
replica and every ingress."""

from __future__ import annotations

from typing import Any

# A batch leaves at once after a pause, else with what else happens within so long.
_HOLD_S = 0.05


class HeldEvents:
    """Stands in for an engine's `EventPublisher`, which it gives what is due."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._batch: Any = None
        self._sent_s = float("-inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    def publish(self, batch: Any) -> None:
        """Hold a `KVEventBatch` until `flush`."""
        if self._batch is None:
            self._batch = batch
        else:
            self._batch.events.extend(batch.events)

    def flush(self, now_s: float, *, idle: bool) -> None:
        """Publish what is held; unless the engine is idle, 50 ms after the last batch."""
        if self._batch is not None and (idle or now_s - self._sent_s >= _HOLD_S):
            self._publisher.publish(self._batch)
            self._batch, self._sent_s = None, now_s

    def shutdown(self) -> None:
        """Publish all, and end."""
        self.flush(self._sent_s, idle=True)
        self._publisher.shutdown()
