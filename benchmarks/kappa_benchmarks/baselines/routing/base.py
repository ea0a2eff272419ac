"""The base of the reimplemented policies: a seeded generator, and ways to break ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import ClassVar

import numpy as np

from kappa_router.decision import Choice, Estimates, Floats
from kappa_router.policy import Stateless


@dataclass(eq=False)
class Baseline(Stateless):
    """A policy of another system. Parameters of a subclass are fields with defaults.

    Attributes:
        source: one line: what it reimplements, and where that is written.
        least: the lowest value of a parameter, where that is not 0.
    """

    seed: int = 0
    name = ""
    source = ""
    least: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        """Refuse a number that is below its least, or none."""
        self.rng = Random(self.seed)
        for parameter in parameters(type(self)):
            value, low = getattr(self, parameter), self.least.get(parameter, 0.0)
            if not value >= low:
                raise ValueError(f"{parameter} must be at least {low:g}, got {value:g}")

    def choose(self, estimates: Estimates) -> Choice:
        """Pick one of `estimates` (at least one)."""
        raise NotImplementedError


def power_of_two(rng: Random, queue: Floats) -> int:
    """The less loaded of two random rows; the one drawn first if they are level."""
    if len(queue) == 1:
        return 0
    first, second = rng.randrange(len(queue)), rng.randrange(len(queue) - 1)
    second += second >= first
    return second if queue[second] < queue[first] else first


def first_least(rows: Sequence[int], queue: Floats) -> int:
    """The first of `rows` with the shortest queue."""
    return rows[0] if len(rows) == 1 else rows[int(queue[list(rows)].argmin())]


def random_least(rng: Random, cost: Floats) -> int:
    """A random one of the rows with the least cost."""
    rows = np.flatnonzero(cost == cost.min())
    return int(rows[0] if len(rows) == 1 else rows[rng.randrange(len(rows))])


def parameters(cls: type[Baseline]) -> dict[str, float | int]:
    """Parameters of a baseline with their defaults."""
    return {field.name: getattr(cls, field.name) for field in fields(cls) if field.name != "seed"}
