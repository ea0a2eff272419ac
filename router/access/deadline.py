"""When an answer is of no more use: the client's `x-kappa-deadline-ms`, from its request's arrival.

The answer must have begun by then: the first token of a streamed one, all of another. What is
predicted to miss it is refused at once; what has missed it while it waited, here or in an engine's
queue, is dropped, and its room goes to those that can still make it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.decision import Estimates
from router.errors import ApiError, deadline_passed, deadline_unmeetable

HEADER = "x-kappa-deadline-ms"
_LONGEST_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Deadline:
    """By when an answer must have begun, in seconds of the clock that `arrived_s` was read from."""

    arrived_s: float
    allowed_s: float

    @property
    def at_s(self) -> float:
        """The moment itself."""
        return self.arrived_s + self.allowed_s

    def check(self, now_s: float) -> None:
        """Raises ApiError 504 once it has passed."""
        if now_s >= self.at_s:
            raise deadline_passed(self.allowed_s)


def late_workers(
    deadline: Deadline, estimates: Estimates, now_s: float, *, streamed: bool
) -> frozenset[str]:
    """The workers that would answer too late, none if all make it.

    An answer that is not streamed is there with its last token: as many as are expected, at the
    worker's predicted pace.

    Raises:
        ApiError: 429 with the seconds that the soonest one lacks, if that is all of them.
    """
    needed_s = estimates.ttft_s
    if not streamed:
        needed_s = needed_s + estimates.expected_output_tokens * estimates.tpot_s
    late = needed_s > deadline.at_s - now_s
    if late.all():
        soonest_s = float(needed_s.min())
        raise deadline_unmeetable(deadline.allowed_s, soonest_s, now_s + soonest_s - deadline.at_s)
    return frozenset(estimates.workers[i] for i in np.flatnonzero(late))


def deadline_of(header: str, arrived_s: float) -> Deadline | None:
    """The deadline that a request's header asks for; None without one.

    Raises:
        ApiError: 400, it is no whole number of milliseconds above 0, or more than a day.
    """
    text = header.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise _unreadable()
    allowed_ms = int(text)
    if not 1 <= allowed_ms <= _LONGEST_MS:
        raise _unreadable()
    return Deadline(arrived_s, allowed_ms / 1000)


def _unreadable() -> ApiError:
    return ApiError(
        400,
        f"{HEADER}: give whole milliseconds from 1 to {_LONGEST_MS}.",
        code="invalid_value",
        param=HEADER,
    )
