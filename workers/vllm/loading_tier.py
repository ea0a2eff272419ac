"""What a metered worker asks of its host tier, ours or another.

Loads run beside the engine's steps: the worker must not poll for them as fast as it can, tells what
each request's loads took, and has a paced step last as long as the loads that it waited for let it.
"""

from __future__ import annotations

from typing import Protocol


class LoadingTier(Protocol):
    """What the metered worker asks of a host tier, ours or another."""

    def take_load_s(self, request: str) -> float:
        """Seconds that the link spent on a request's loads; forgets them."""

    def wait_for_load(self, timeout_s: float) -> bool:
        """Sleep until a load may have ended, at most so long; False if none is in flight."""

    def begin_step(self, pace_s: float) -> None:
        """A step begins that is to last so long beside its loads."""

    def owed_s(self) -> float | None:
        """Seconds that a step which waited for loads must still last; None: it waited for none."""
