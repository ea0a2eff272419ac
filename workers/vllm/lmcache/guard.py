"""When an LMCache server is asked, and when it is left alone: after a failure, for a while. Pure.

Whatever goes wrong with the server costs a request no more than one bounded wait, and an engine no
more than one such wait per pause, which doubles up to a minute while it stays wrong. Failures are
counted; a warning is due once a minute at most. There is one in each of an engine's processes.
"""

from __future__ import annotations

from collections import Counter

_LONGEST_PAUSE_S = 60.0
_WARN_EVERY_S = 60.0
ABSENT, LOOKUP, LOAD, STORE = "absent", "lookup", "load", "store"


class TierGuard:
    """Failures of one tier, as one process sees them.

    Args:
        retry_s: the first pause.
        slow_s: a call that takes longer has failed, even if it came back with an answer.
    """

    def __init__(self, retry_s: float, slow_s: float) -> None:
        self._retry_s, self.slow_s = retry_s, slow_s
        self._pause_s = retry_s
        self._closed_until_s = 0.0
        self._warned_s = float("-inf")
        self._unwarned: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def allows(self, now_s: float) -> bool:
        """Whether the server may be asked now."""
        return now_s >= self._closed_until_s

    def noted(self, why: str) -> None:
        """Something went wrong that somebody else saw to: it is only counted."""
        self.failures[why] += 1
        self._unwarned[why] += 1

    def failed(self, why: str, now_s: float) -> None:
        """Something went wrong: leave the server alone for a while."""
        self.noted(why)
        if now_s >= self._closed_until_s:
            self._closed_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, max(_LONGEST_PAUSE_S, self._retry_s))

    def answered(self) -> None:
        """The server did what it was asked for: the next pause is a short one again."""
        self._pause_s = self._retry_s

    def warning(self, now_s: float) -> dict[str, int]:
        """What to warn of now: failures by kind since the last warning; empty: nothing."""
        if not self._unwarned or now_s - self._warned_s < _WARN_EVERY_S:
            return {}
        due, self._unwarned = dict(self._unwarned), Counter()
        self._warned_s = now_s
        return due
