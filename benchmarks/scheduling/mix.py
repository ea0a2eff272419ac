"""The fixed workloads of `kappa bench scheduler`: what arrives, when, and on what engine.

The mixed case is requests whose prefix lies in the host tier ahead of fresh short ones, on an
engine with few blocks: there a scheduler that charges new tokens only fills the device with
requests that wait for the link. Sizes, arrivals and seeds are all here, so that any backend plays
the same. Seconds are emulated; a backend on a paced engine multiplies them by its dilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

BLOCK_TOKENS = 32
BUDGET_TOKENS = 256
KV_BYTES_PER_TOKEN = 1024.0
LINK_BYTES_PER_S = 5e6
LINK_FIXED_S = 0.02
LINKS = {"x0.25": 0.25, "x1": 1.0, "x4": 4.0}
STORES = ("free", "shared")
# An iteration: seconds per token computed, and besides.
STEP_TOKEN_S = 4e-5
STEP_FIXED_S = 5e-3
OUTPUT_TOKENS = 8
MAX_RUNNING = 256
SEED = 20260

FRESH, OFFLOADED, LARGE = "fresh", "offloaded", "large"
POLICIES = (
    "fcfs", "fcfs_link", "priority", "vtc", "dlpm", "hrrn", "cap1", "greedy", "fair",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. prefix_tokens: of its prompt, in the host tier when it comes. kind: how it is
    counted. priority: lower goes first, under the policy that cares."""

    kind: str
    prefix_tokens: int
    new_tokens: int
    output_tokens: int = OUTPUT_TOKENS
    at_s: float = 0.0
    tenant: str = "a"
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.new_tokens

    @property
    def blocks(self) -> int:
        """Blocks that it holds when it ends (its last token is never written)."""
        return -(-(self.prompt_tokens + self.output_tokens - 1) // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the usable blocks of the device that serves them."""

    name: str
    blocks: int
    asks: tuple[Ask, ...]

    @property
    def tenants(self) -> tuple[str, ...]:
        """In order of first arrival."""
        return tuple(dict.fromkeys(ask.tenant for ask in self.asks))


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is tried on: a workload, the link's speed, and whether stores share it."""

    workload: str
    link: str
    stores: str

    @property
    def load_token_s(self) -> float:
        """Emulated seconds per token on the link."""
        return KV_BYTES_PER_TOKEN / (LINK_BYTES_PER_S * LINKS[self.link])

    def check(self, workloads: Sequence[str]) -> None:
        """Raise ValueError for a name that is not known; `workloads`: those of the backend."""
        for what, name, known in (
            ("workload", self.workload, workloads), ("link", self.link, tuple(LINKS)),
            ("stores", self.stores, STORES),
        ):  # fmt: skip
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}: choose one of {', '.join(known)}")


def workload_of(name: str, seed: int = SEED) -> Workload:
    """The workload of that name; `seed` moves arrivals where those are drawn."""
    return replace(WORKLOADS[name](np.random.default_rng(seed)), name=name)


def prompts(
    asks: Sequence[Ask], seed: int, run: int, vocabulary: tuple[int, int]
) -> list[list[int]]:
    """Token ids of each request's prompt, no two with a block in common; other ones each run."""
    rng = np.random.default_rng((seed, run))
    return [rng.integers(*vocabulary, size=ask.prompt_tokens).tolist() for ask in asks]


def _offloaded() -> Ask:
    return Ask(OFFLOADED, 512, 16, priority=1)


def _small(at_s: float = 0.0, tenant: str = "a", priority: int = 0) -> Ask:
    return Ask(FRESH, 0, 96, at_s=at_s, tenant=tenant, priority=priority)


def _mixed(_: np.random.Generator) -> Workload:
    return Workload("", 39, (_offloaded(),) * 6 + (_small(),) * 12)


def _mixed10(_: np.random.Generator) -> Workload:
    return Workload("", 390, (_offloaded(),) * 60 + (_small(),) * 120)


def _mixed_stream(rng: np.random.Generator) -> Workload:
    asks = [_offloaded()] * 60 + [_small()] * 120
    order = rng.permutation(len(asks))
    times = np.cumsum(rng.exponential(0.05, size=len(asks)))
    drawn = zip(order, times, strict=True)
    return Workload("", 39, tuple(replace(asks[i], at_s=float(t)) for i, t in drawn))


def _fresh(_: np.random.Generator) -> Workload:
    return Workload("", 390, (_small(),) * 400)


def _heavy_light(_: np.random.Generator) -> Workload:
    heavy, light = _small(tenant="heavy", priority=1), _small(tenant="light")
    return Workload("", 39, (heavy,) * 90 + (light,) * 30)


def _small_vs_large(_: np.random.Generator) -> Workload:
    stream = [_small(at_s=0.012 * i) for i in range(300)]
    large = Ask(LARGE, 0, 1000, at_s=0.5, tenant="b", priority=1)
    return Workload("", 39, tuple(sorted([*stream, large], key=lambda ask: ask.at_s)))


# mixed: all at once, offloaded ones first. mixed10: ten times the blocks and the requests.
# mixed_stream: those requests on the small device, in a drawn order at drawn times. fresh: no
# reuse, all at once. heavy_light: like requests, three times as many of one tenant, which came
# first. small_vs_large: a stream that keeps the blocks taken, and one request that needs most.
WORKLOADS: dict[str, Callable[[np.random.Generator], Workload]] = {
    "mixed": _mixed, "mixed10": _mixed10, "mixed_stream": _mixed_stream, "fresh": _fresh,
    "heavy_light": _heavy_light, "small_vs_large": _small_vs_large,
}  # fmt: skip
