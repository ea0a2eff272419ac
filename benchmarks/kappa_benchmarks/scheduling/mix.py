"""The fixed workloads of `kappa bench scheduler`: what arrives, when, and on what engine.

In the mixed case requests with a prefix in the host tier come before fresh short ones, on an engine
with few blocks: a scheduler that charges new tokens alone fills the device with requests that wait
for the link. Sizes, arrivals and seeds are all here, so that any backend plays the same. Seconds
are emulated; a backend on a paced engine multiplies them by its dilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

BLOCK_TOKENS = 32
BUDGET_TOKENS = 256
KV_BYTES_PER_TOKEN = 1024.0
LINK_BYTES_PER_S = 5e6
LINK_FIXED_S = 0.02
LINKS = {"x0.25": 0.25, "x1": 1.0, "x4": 4.0, "free": math.inf}
STORES = ("free", "shared")
# An iteration: seconds per token computed, and besides.
STEP_TOKEN_S = 4e-5
STEP_FIXED_S = 5e-3
OUTPUT_TOKENS = 8
MAX_RUNNING = 256
SEED = 20260

FRESH, OFFLOADED, LARGE = "fresh", "offloaded", "large"
POLICIES = (
    "fcfs", "fcfs_link", "priority", "vtc", "dlpm", "equinox", "hrrn", "cap1", "greedy", "fair",
)  # fmt: skip
WORKLOADS = (
    "mixed", "mixed10", "mixed_stream", "roomy", "packing", "fresh", "heavy_light",
    "small_vs_large",
)  # fmt: skip
"""mixed: all at once, offloaded ones first. mixed10: ten times the blocks and the requests.
mixed_stream: those requests on the small device, in a drawn order at drawn times. roomy: those of
mixed10, with blocks for all. packing: Figure 8 of the paper thirty times, in a drawn order: pairs
of prompts fill the blocks, some of them the budget, too. fresh: no reuse, all at once. heavy_light:
like requests, three times as many of one tenant, which came first. small_vs_large: a stream that
keeps the blocks taken, and one request that needs most."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    # By which it is counted: fresh, offloaded or large.
    kind: str
    # Of its prompt: in the host tier when it comes, and the rest.
    prefix_tokens: int
    new_tokens: int
    output_tokens: int = OUTPUT_TOKENS
    # Arrival, from the start of the run.
    at_s: float = 0.0
    tenant: str = "a"
    # Lower goes first, under the policy of that name.
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
    """A fixed workload."""

    # Usable blocks of the device that serves it.
    blocks: int
    # In order of arrival.
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A case that policies are tried on: workload, link's speed, and whether stores share it."""

    workload: str
    link: str
    stores: str

    @property
    def load_token_s(self) -> float:
        """Emulated seconds per token on the link."""
        return KV_BYTES_PER_TOKEN / (LINK_BYTES_PER_S * LINKS[self.link])

    @property
    def load_fixed_s(self) -> float:
        """Emulated seconds of a load besides."""
        return LINK_FIXED_S if self.load_token_s else 0.0


def workload_of(name: str, seed: int = SEED) -> Workload:
    """The workload of that name; `seed` moves arrivals where those are drawn."""
    offloaded, small = Request(OFFLOADED, 512, 16, priority=1), Request(FRESH, 0, 96)
    if name == "mixed":
        return Workload(39, (offloaded,) * 6 + (small,) * 12)
    if name == "mixed10":
        return Workload(390, (offloaded,) * 60 + (small,) * 120)
    if name == "roomy":
        return Workload(1500, (offloaded,) * 60 + (small,) * 120)
    if name == "packing":
        # Of Figure 8 a token is 51 here, its budget of 5 ours of 256, its 10 tokens of VRAM 17
        # blocks: the first two fit together, and the last with the first.
        sizes = ((160, 100), (160, 48), (192, 100), (96, 154))
        figure = [Request(OFFLOADED, *size, output_tokens=1) for size in sizes]
        order = np.random.default_rng(seed).permutation(120).tolist()
        return Workload(17, tuple(figure[i % 4] for i in order))
    if name == "fresh":
        return Workload(390, (small,) * 400)
    if name == "heavy_light":
        heavy, light = replace(small, tenant="heavy", priority=1), replace(small, tenant="light")
        return Workload(39, (heavy,) * 90 + (light,) * 30)
    if name == "mixed_stream":
        rng = np.random.default_rng(seed)
        requests = [offloaded] * 60 + [small] * 120
        order = rng.permutation(len(requests)).tolist()
        times_s = np.cumsum(rng.exponential(0.05, size=len(requests))).tolist()
        drawn = zip(order, times_s, strict=True)
        return Workload(39, tuple(replace(requests[i], at_s=at_s) for i, at_s in drawn))
    assert name == "small_vs_large"
    stream = [replace(small, at_s=0.012 * i) for i in range(300)]
    large = Request(LARGE, 0, 1000, at_s=0.5, tenant="b", priority=1)
    return Workload(39, tuple(sorted([*stream, large], key=lambda one: one.at_s)))


def prompts(
    requests: Sequence[Request], seed: int, run: int, vocabulary: tuple[int, int]
) -> list[list[int]]:
    """Token ids of each request's prompt, no two with a block in common; other ones each run."""
    rng = np.random.default_rng((seed, run))
    return [rng.integers(*vocabulary, size=one.prompt_tokens).tolist() for one in requests]
