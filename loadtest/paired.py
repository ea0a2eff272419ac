"""What something costs in requests/s, from rounds played in turns with and without it. Pure.

Rounds of one prompt and concurrency are paired in the order in which they were played, so that a
machine that slows down meanwhile slows both of a pair. The cost is one less the geometric mean of
the pairs' ratios, with a bootstrap interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.bench_serve import Round

_RESAMPLES = 4000


def cost(rounds: Sequence[Round], with_it: str, without: str, seed: int = 0) -> dict[str, Any]:
    """The share of requests/s that `with_it` costs against `without`; negative: it gains.

    Returns cost, its 95 % interval (low, high), the number of pairs, and the same by cell.

    Raises:
        ValueError: no pairs, or rounds without a partner.
    """
    cells = list(dict.fromkeys((r.prompt, r.concurrency) for r in rounds))
    by_cell = {cell: _ratios(rounds, cell, with_it, without) for cell in cells}
    every = [ratio for ratios in by_cell.values() for ratio in ratios]
    if not every:
        raise ValueError("no rounds to compare: play at least one of each")
    whole = _interval(np.log(every), np.random.default_rng(seed))
    rows = [
        {
            "prompt": prompt, "concurrency": concurrency, "pairs": len(ratios),
            "cost": 1.0 - float(np.exp(np.mean(np.log(ratios)))),
        }
        for (prompt, concurrency), ratios in by_cell.items()
    ]  # fmt: skip
    return {**whole, "pairs": len(every), "cells": rows}


def _ratios(
    rounds: Sequence[Round], cell: tuple[str, int], with_it: str, without: str
) -> list[float]:
    mine, theirs = (
        [r.rps for r in rounds if (r.prompt, r.concurrency) == cell and r.system == system]
        for system in (with_it, without)
    )
    if len(mine) != len(theirs):
        raise ValueError(
            f"{cell[0]}, {cell[1]} clients: {len(mine)} rounds of {with_it}, {len(theirs)} of "
            f"{without}: play them in pairs"
        )
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def _interval(logs: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    picks = rng.integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.quantile(logs[picks].mean(axis=1), (0.025, 0.975))
    return {
        "cost": 1.0 - float(np.exp(logs.mean())),
        "low": 1.0 - float(np.exp(high)),
        "high": 1.0 - float(np.exp(low)),
    }
