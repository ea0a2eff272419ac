"""Host tiers that several workers share: what one has stored there, all of them can load. Pure.

Workers that name the same LMCache server announce it (`Announcement.shared_tier`). Each tells only
of what it stored or found itself, so the router adds them up: what any of them holds, on the device
or there, counts as held for all. That is an estimate: a prompt's blocks on a device are in the
server too, unless their store failed or was evicted; the engine's look-up then finds less, loads
that and computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.offers import Floats


class SharedTiers:
    """Which workers have their host tier in common."""

    def __init__(self) -> None:
        self._server_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._server_of)

    def join(self, worker: str, server: str) -> None:
        """A worker announced its tier; without a server that is its own."""
        if server:
            self._server_of[worker] = server
        else:
            self._server_of.pop(worker, None)

    def leave(self, worker: str) -> None:
        """A worker is gone."""
        self._server_of.pop(worker, None)

    def widen(self, workers: Sequence[str], device_tokens: Floats, cached_tokens: Floats) -> None:
        """Raise `cached_tokens`, behind each one's own device tokens, to what its server has.

        Args:
            workers: names, one per entry of the arrays.
            device_tokens: leading tokens on each one's device.
            cached_tokens: those behind them in its host tier, as it told itself; changed in place.
        """
        servers: dict[str, list[int]] = {}
        for row, worker in enumerate(workers):
            server = self._server_of.get(worker)
            if server is not None:
                servers.setdefault(server, []).append(row)
        for rows in servers.values():
            if len(rows) > 1:
                at = np.array(rows)
                reach = float((device_tokens[at] + cached_tokens[at]).max())
                cached_tokens[at] = np.maximum(cached_tokens[at], reach - device_tokens[at])
