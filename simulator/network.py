"""Network cards: KV fetched from one node's host tier into another's.

Each card sends or receives one transfer at a time, first come first served. A transfer occupies the
cards of both ends and runs at the slower one's rate.
"""

from __future__ import annotations

from collections.abc import Sequence


class Network:
    """The cards of all nodes, and the fixed cost of a transfer in seconds."""

    def __init__(self, bytes_per_s: Sequence[float], fixed_s: float = 1e-3) -> None:
        self._rates = list(bytes_per_s)
        self._free_s = [0.0] * len(self._rates)
        self._fixed_s = fixed_s
        self.busy_s = [0.0] * len(self._rates)

    def transfer(self, source: int, target: int, size_bytes: float, now_s: float) -> float:
        """Queue a transfer; returns the time at which it will be done."""
        seconds = self._fixed_s + size_bytes / min(self._rates[source], self._rates[target])
        end_s = max(now_s, self._free_s[source], self._free_s[target]) + seconds
        self._free_s[source] = self._free_s[target] = end_s
        self.busy_s[source] += seconds
        self.busy_s[target] += seconds
        return end_s
