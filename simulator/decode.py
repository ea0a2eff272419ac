"""How long many decode-only iterations last, in closed form.

While the same requests decode, each step computes a token for each of them and their contexts grow
by one: compute time and read time are lines in the step's number, the step lasts the longer of
the two, and sums over steps are quadratics with at most one crossing. Equal to going step by step.
"""

from __future__ import annotations

import math

from kappa.cost import StepModel, decode_work


class Stretch:
    """`requests` decode together, with `context_tokens` in the cache between them at the start."""

    __slots__ = ("_cross", "_first", "_fixed_s", "_second")

    def __init__(self, step: StepModel, requests: int, context_tokens: int) -> None:
        compute_s, read_s, self._fixed_s = step.parts(decode_work(requests, context_tokens))
        compute = (compute_s, requests * step.pair_s)
        read = (read_s, requests * step.context_token_s)
        # The line that is higher at the start, the other, and the first step at which it overtakes.
        self._first, self._second = (compute, read) if compute[0] >= read[0] else (read, compute)
        lead, gain = self._first[0] - self._second[0], self._second[1] - self._first[1]
        self._cross: float = math.floor(lead / gain) + 1 if gain > 0 else math.inf

    def seconds(self, steps: int) -> float:
        """Seconds that the first `steps` steps take."""
        base, slope = self._first
        cross = self._cross
        if steps <= cross:
            return steps * (self._fixed_s + base + slope * (steps - 1) * 0.5)
        other_base, other_slope = self._second
        rest = steps - cross
        return (
            cross * (base + slope * (cross - 1) * 0.5)
            + rest * (other_base + other_slope * (cross + (rest - 1) * 0.5))
            + steps * self._fixed_s
        )

    def steps(self, seconds: float) -> int:
        """How many steps have ended after `seconds`."""
        if seconds <= 0:
            return 0
        base, slope = self._first
        count = _solve(base + self._fixed_s, slope, seconds)
        cross = self._cross
        if count > cross:
            # From the crossing on the second line rules, counted from there.
            past = int(cross)
            base, slope = self._second
            rest = seconds - self.seconds(past)
            count = past + _solve(base + self._fixed_s + slope * past, slope, rest)
        # The root is exact up to rounding: settle it against the sum itself.
        while count > 0 and self.seconds(count) > seconds:
            count -= 1
        while self.seconds(count + 1) <= seconds:
            count += 1
        return count


def _solve(base: float, slope: float, seconds: float) -> int:
    """Largest k with k·base + slope·k(k-1)/2 ≤ seconds, give or take one."""
    if slope <= 0.0:
        return int(seconds / base)
    linear = base - 0.5 * slope
    return int((math.sqrt(linear * linear + 2.0 * slope * seconds) - linear) / slope)
