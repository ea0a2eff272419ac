"""What the offload microbenchmark asks for, and in which order: points, arms, rounds. Pure.

A point is an exact number of new tokens N behind an exact number of cached ones C. Each is asked
for in three arms, which differ only in where the C tokens are: nowhere (new tokens only), on the
device, or in the host tier. Points that an engine cannot hold, or that cannot tell the law's terms
apart, are refused before anything is started. Called by the command, the driver and the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Arm = Literal["new", "device", "host"]
ARMS: tuple[Arm, ...] = ("new", "device", "host")
# The load of a host hit leaves its prefix on the device for the device hit.
_HITS: tuple[Arm, ...] = ("host", "device")


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """N new tokens behind C cached ones."""

    new_tokens: int
    cached_tokens: int

    @property
    def ratio(self) -> float:
        """κ = C/N."""
        return self.cached_tokens / self.new_tokens

    def __str__(self) -> str:
        return f"{self.new_tokens}:{self.cached_tokens}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine holds: tokens of a sequence, a block, a step, the device, the host tier."""

    context_tokens: int
    block_tokens: int
    step_tokens: int
    device_tokens: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request. ttft_s: undilated. The rest is what the engine's counters say."""

    point: Point
    arm: Arm
    ttft_s: float
    computed_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    device_tokens: int
    overruns: int = 0

    @property
    def fault(self) -> str:
        """How the counters differ from what the arm asked for; empty if they do not."""
        cached = self.point.cached_tokens
        asked = {
            "computed": self.point.new_tokens,
            "loaded": cached if self.arm == "host" else 0,
            "device": cached if self.arm == "device" else 0,
        }
        found = {
            "computed": self.computed_tokens,
            "loaded": self.loaded_tokens,
            "device": self.device_tokens,
        }
        wrong = [f"{k} {found[k]} of {asked[k]} tokens" for k in asked if found[k] != asked[k]]
        return ", ".join(wrong)


def parse_points(text: str) -> tuple[Point, ...]:
    """Read "NEW:CACHED" pairs, separated by commas.

    Raises:
        ValueError: names the pair that is not one.
    """
    points = []
    for pair in text.split(","):
        new, colon, cached = pair.strip().partition(":")
        try:
            point = Point(int(new), int(cached))
        except ValueError:
            colon = ""
        if not colon:
            raise ValueError(
                f"point {pair.strip()!r}: write NEW:CACHED in tokens, such as 256:4096"
            )
        points.append(point)
    return tuple(dict.fromkeys(points))


def check_points(points: Sequence[Point], limits: Limits) -> None:
    """Refuse points that the engine cannot hold, or that leave a term of the law undetermined.

    Raises:
        ValueError: names the point, the limit and the remedy.
    """
    for point in points:
        _check(point, limits)
    prefixes = sum(point.cached_tokens for point in points)
    # New tokens are stored too, by whole blocks. A prefix is asked for once a round, at any place
    # in it, so that up to two rounds' stores come between and must not push it out.
    size = limits.block_tokens
    stored = 2 * len(ARMS) * sum(point.new_tokens // size * size for point in points)
    if prefixes + stored > limits.host_tokens:
        raise ValueError(
            f"the points need {prefixes + stored} tokens in the host tier, {prefixes} of prefixes "
            f"and {stored} of new tokens stored in between; the host tier holds "
            f"{limits.host_tokens}: give fewer points or smaller ones"
        )
    terms = law_terms(points)
    if np.linalg.matrix_rank(terms / np.abs(terms).max(axis=0)) < terms.shape[1]:
        raise ValueError(
            f"{len(points)} points cannot tell the terms 1, N, N·(C + N/2) and C apart: give at "
            "least four, with two or more values of N and of C, some of each with the other's"
        )


def law_terms(points: Sequence[Point]) -> NDArray[np.float64]:
    """The law's terms at each point, as columns: 1, N, query-key pairs N·(C + N/2), and C."""
    new = np.array([point.new_tokens for point in points], dtype=float)
    cached = np.array([point.cached_tokens for point in points], dtype=float)
    return np.column_stack([np.ones_like(new), new, new * (cached + new / 2), cached])


def _check(point: Point, limits: Limits) -> None:
    new, cached = point.new_tokens, point.cached_tokens
    if new < 1:
        raise ValueError(f"point {point}: an engine computes at least 1 new token; N is {new}")
    if cached < limits.block_tokens or cached % limits.block_tokens:
        raise ValueError(
            f"point {point}: only whole blocks of {limits.block_tokens} tokens are cached; "
            f"C is {cached}: give a multiple of {limits.block_tokens}, at least one block"
        )
    if new > limits.step_tokens:
        raise ValueError(
            f"point {point}: a step takes {limits.step_tokens} new tokens at most, and a prompt "
            "in two steps is no longer one term of the law"
        )
    # One token of room for the answer.
    for what, limit in (("context", limits.context_tokens), ("device", limits.device_tokens)):
        if new + cached + 1 > limit:
            raise ValueError(
                f"point {point}: needs {new + cached + 1} tokens, the engine's {what} limit is "
                f"{limit}"
            )


class Asked(Protocol):
    """A node that can be asked one request at a time."""

    name: str

    async def ask(self, point: Point, arm: Arm) -> Sample:
        """One request, measured."""
        ...


async def rounds(
    nodes: Sequence[Asked],
    points: Sequence[Point],
    count: int,
    warm_up: int,
    seed: int,
    heard: Callable[[str, int, Sample], None],
) -> None:
    """Ask every point in every arm `warm_up` + `count` times, all interleaved.

    A round asks every point once per arm on every node, points in random order and the arm of new
    tokens before or after the hits; nodes take turns request by request, so that one rests while
    another works. `heard` gets the node's name, the round (negative: warm-up), and the sample.
    """
    rng = np.random.default_rng(seed)
    for number in range(-warm_up, count):
        for index in rng.permutation(len(points)):
            new_first = bool(rng.integers(2))
            for arm in ("new", *_HITS) if new_first else (*_HITS, "new"):
                for node in nodes:
                    heard(node.name, number, await node.ask(points[index], arm))
