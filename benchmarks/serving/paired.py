"""What something costs in requests per second, from rounds in turns with and without it. Pure.

Rounds of one prompt and concurrency are paired in the order in which they were played, so that a
machine that slows down meanwhile slows both of a pair. Where the two stand may matter, too: it is
played once in each order of them, and both count alike. The cost is one less the geometric mean of
the pairs' ratios, with a bootstrap interval (resampled within each order and cell).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from benchmarks.serving.serve import Round

_RESAMPLES = 4000


def cost(
    orders: Sequence[Sequence[Round]],
    with_it: str,
    without: str,
    seed: int = 0,
    rate: Callable[[Round], float] = attrgetter("rps"),
) -> dict[str, Any]:
    """The share of requests/s (of `rate`) that `with_it` costs; negative: it gains.

    Args:
        orders: the rounds of each order of the two, all of the same cells.
        with_it: the system that has it; `without`: the one that does not.
        seed: of the bootstrap.
        rate: of a round; its requests per processor second vary less than those per second.

    Returns cost, its 95 % interval (low, high), the number of pairs, and the cost by cell and by
    order.

    Raises:
        ValueError: no pairs, or rounds without a partner.
    """
    cells = list(dict.fromkeys((r.prompt, r.concurrency) for order in orders for r in order))
    logs = [
        {cell: _logs(order, cell, with_it, without, rate) for cell in cells} for order in orders
    ]
    strata = [part for order in logs for part in order.values()]
    if not strata or min(map(len, strata)) == 0:
        raise ValueError("no rounds to compare: play at least one of each")
    rows = [
        {
            "prompt": cell[0], "concurrency": cell[1],
            "pairs": sum(len(order[cell]) for order in logs),
            "cost": _cost([order[cell] for order in logs]),
        }
        for cell in cells
    ]  # fmt: skip
    low, high = _interval(strata, np.random.default_rng(seed))
    return {
        "cost": _cost(strata),
        "low": low,
        "high": high,
        "pairs": sum(map(len, strata)),
        "cells": rows,
        "by_order": [_cost(list(order.values())) for order in logs],
    }


def _logs(
    rounds: Sequence[Round],
    cell: tuple[str, int],
    with_it: str,
    without: str,
    rate: Callable[[Round], float],
) -> np.ndarray:
    mine, theirs = (
        [rate(r) for r in rounds if (r.prompt, r.concurrency) == cell and r.system == system]
        for system in (with_it, without)
    )
    if len(mine) != len(theirs):
        raise ValueError(
            f"{cell[0]}, {cell[1]} clients: {len(mine)} rounds of {with_it}, {len(theirs)} of "
            f"{without}: play them in pairs"
        )
    return np.log(mine) - np.log(theirs)


def _cost(strata: Sequence[np.ndarray]) -> float:
    return 1.0 - float(np.exp(np.mean([part.mean() for part in strata])))


def _interval(strata: Sequence[np.ndarray], rng: np.random.Generator) -> tuple[float, float]:
    means = [
        part[rng.integers(0, len(part), (_RESAMPLES, len(part)))].mean(axis=1) for part in strata
    ]
    low, high = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    return 1.0 - float(np.exp(high)), 1.0 - float(np.exp(low))
