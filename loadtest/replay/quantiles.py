"""Quantiles of any number of values in constant memory: counts in buckets of equal ratio.

Every bucket spans a factor of (1 + e)/(1 - e), so that its middle is within e of all that it holds:
DDSketch (Masson, Rim, Lee, VLDB 2019), without the merging of small buckets, since latencies span
few decades. Mean, least and largest are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RELATIVE_ERROR = 0.005
_LEAST = 1e-9
_BATCH = 512
_LOG_RATIO = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))


class Quantiles:
    """Adds values up, below zero too; NaN is left out. Quantiles are within 0.5 %."""

    def __init__(self) -> None:
        self._count = 0
        self._least = math.inf
        self._largest = -math.inf
        self._sum = 0.0
        self._pending: list[float] = []
        self._above: Counter[int] = Counter()
        self._below: Counter[int] = Counter()
        self._zeros = 0

    def add(self, value: float) -> None:
        """One value; counted in batches, which is what makes it cheap."""
        self._pending.append(value)
        if len(self._pending) >= _BATCH:
            self._count_pending()

    def add_all(self, values: ArrayLike) -> None:
        """Many values."""
        found = np.asarray(values, dtype=np.float64).ravel()
        found = found[~np.isnan(found)]
        if not len(found):
            return
        self._count += len(found)
        self._sum += float(found.sum())
        self._least = min(self._least, float(found.min()))
        self._largest = max(self._largest, float(found.max()))
        above, below = found[found > _LEAST], -found[found < -_LEAST]
        self._zeros += len(found) - len(above) - len(below)
        for store, size in ((self._above, above), (self._below, below)):
            buckets, counts = np.unique(np.ceil(np.log(size) / _LOG_RATIO), return_counts=True)
            for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
                store[int(bucket)] += count

    def _count_pending(self) -> None:
        pending, self._pending = self._pending, []
        self.add_all(pending)

    @property
    def count(self) -> int:
        """How many there are."""
        self._count_pending()
        return self._count

    @property
    def mean(self) -> float | None:
        """Their mean; None without any."""
        return self._sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` of them lies; None without any."""
        count_all = self.count
        if not count_all:
            return None
        rank, passed = q * (count_all - 1), 0
        for value, count in self._ordered():
            passed += count
            if passed > rank:
                return min(max(value, self._least), self._largest)
        return self._largest

    def spread(self) -> dict[str, float | None]:
        """Mean, quantiles and largest; None where there are no values."""
        return {
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self._largest if self.count else None,
        }

    def cdf(self, points: int = 400) -> list[tuple[float, float]]:
        """(value, share of values at most that), at most `points` of them, the last one 1."""
        pairs: list[tuple[float, float]] = []
        passed, count_all = 0, self.count
        for value, count in self._ordered():
            passed += count
            pairs.append((value, passed / count_all))
        step = max(1, -(-len(pairs) // points))
        return [*pairs[: -1 if len(pairs) else None][::step], *pairs[-1:]]

    def _ordered(self) -> list[tuple[float, int]]:
        """(middle of the bucket, count) from the least to the largest."""
        found: list[tuple[float, int]] = [
            (-_middle(bucket), count) for bucket, count in sorted(self._below.items(), reverse=True)
        ]
        if self._zeros:
            found.append((0.0, self._zeros))
        found += [(_middle(bucket), count) for bucket, count in sorted(self._above.items())]
        return found


def _middle(bucket: int) -> float:
    """The value within `RELATIVE_ERROR` of both ends of a bucket."""
    upper = math.exp(bucket * _LOG_RATIO)
    return upper * (1 - RELATIVE_ERROR)


def jain(values: ArrayLike) -> float | None:
    """Jain's index of shares: 1 if all are alike, 1/n if one of n has everything.

    Source: Jain, Chiu, Hawe, "A quantitative measure of fairness" (1984). None for fewer than two.
    """
    found: Any = np.asarray(values, dtype=np.float64)
    squares = float((found**2).sum())
    if len(found) < 2 or not squares:
        return None
    return float(found.sum()) ** 2 / (len(found) * squares)
