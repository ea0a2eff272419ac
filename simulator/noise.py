"""Measurement-like noise: lognormal factors around 1, drawn ahead in vectors."""

from __future__ import annotations

import numpy as np

_DRAWS = 1024


class Noise:
    """Factors with median 1 and standard deviation `sigma` of the logarithm; 0 means none."""

    __slots__ = ("_factors", "_rng", "_sigma")

    def __init__(self, rng: np.random.Generator, sigma: float) -> None:
        self._rng = rng
        self._sigma = sigma
        self._factors: list[float] = []

    def factor(self) -> float:
        """The next factor."""
        if not self._sigma:
            return 1.0
        if not self._factors:
            self._factors = np.exp(self._rng.normal(0.0, self._sigma, _DRAWS)).tolist()
        return self._factors.pop()
