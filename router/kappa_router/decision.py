"""The router's input and output: a request, its cost on every worker, a decision.

Policies see `Estimates` and nothing else, so the same ones run live and simulated.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.cost import Bound, TokenCounts, bound, kappa_crit
from kappa.hardware import NodeProfile
from kappa_router.index.prefix_hash import UInt64s

Floats = NDArray[np.float64]
Slots = NDArray[np.intp]

NO_HASHES: UInt64s = np.empty(0, dtype=np.uint64)


class NoWorkerError(Exception):
    """No worker can take the request now."""


class OverloadedError(NoWorkerError):
    """The request would miss its objective; `retry_after_s` is when to come again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MismatchError(ValueError):
    """A worker announced another model, block size or fingerprint than the pool's."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as the router sees it."""

    request_id: str
    # The prompt; None where it could not be tokenized: routing then fails open.
    token_ids: np.ndarray | None = None
    # The bound on generated tokens; 0: the context alone.
    max_tokens: int = 0
    # Sets the tenant's cached prefixes apart (`prefix_hash.salt_of`).
    salt: int = 0
    # Workers that must not be chosen.
    exclude: frozenset[str] = frozenset()
    # Instead of `token_ids`, with `prompt_tokens`, from callers that have hashes already.
    prefix_hashes: UInt64s | None = None
    # Alone, the most that a prompt which could not be tokenized comes to.
    prompt_tokens: int = 0
    # The client's name for its conversation, for policies that stick to it.
    session: str = ""
    # It was admitted before, and its worker failed it.
    retry: bool = False
    # Tokens of the prompt that are computed, and on their way to the worker that is chosen.
    handed_tokens: int = 0
    # Its worker must serve this model; empty: the only one that there is.
    model: str = ""
    # Who is charged, and its share.
    tenant: str = ""
    weight: float = 1.0
    # Its class; lower goes first.
    priority: int = 0
    # Real seconds to its first token that it asks for; 0: those of the objective.
    ttft_limit_s: float = 0.0

    @property
    def informed(self) -> bool:
        """Whether anything is known of the prompt."""
        return self.token_ids is not None or self.prefix_hashes is not None

    @property
    def sized(self) -> bool:
        """Whether the length of the prompt is known or bounded, so that it can be priced."""
        return self.informed or self.prompt_tokens > 0

    @property
    def tokens(self) -> int:
        """Length of the prompt; an engine computes at least one token."""
        return max(self.prompt_tokens if self.token_ids is None else len(self.token_ids), 1)


class Held(NamedTuple):
    """Leading tokens of a prompt that workers hold, shape (workers,) each."""

    # On the device.
    device: Floats
    # Further ones, in the tiers behind it.
    cached: Floats
    # Of `cached`, those on disk alone.
    disk: Floats


@dataclass(slots=True)
class PricedPrompt:
    """A prompt to be priced: its tokens and its answer's, its blocks, its conversation."""

    tokens: int
    output_tokens: int
    block_tokens: int = 1
    prefix_hashes: UInt64s = field(default_factory=lambda: NO_HASHES)
    session: str = ""


class PlannedLoad(NamedTuple):
    """A worker's plan to bring a cached prefix back."""

    # In words.
    kind: str
    # Cached tokens that it computes again.
    recomputed_tokens: int
    # Tokens that cross the link.
    crossing_tokens: int
    # Real seconds of the shorter of link and gpu work that hide behind the longer.
    hidden_s: float


class Column:
    """A field of the structured array `rows` of an object, as an attribute of that object."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Floats:
        column: Floats = instance.rows[self._name]
        return column

    def __set__(self, instance: Any, values: Any) -> None:
        instance.rows[self._name] = values


@dataclass(slots=True, eq=False)
class Estimates:
    """The cost of one request on each of n workers; seconds are real ones."""

    now_s: float
    workers: list[str]
    # The workers' places in the fleet, constant for life.
    slots: Slots
    # A record per worker; its fields are the columns below, shape (n,) each.
    rows: NDArray[np.void]
    prompt_tokens: int
    block_tokens: int
    prefix_hashes: UInt64s
    session: str
    expected_output_tokens: int
    # As the workers announced them.
    nodes: tuple[NodeProfile, ...] = ()
    # The worker from which `fetch_tokens` come first; empty: none do.
    fetch_from: str = ""
    # The estimates if every worker first fetched what a peer holds; None where none can.
    fetching: Estimates | None = None
    # Load plans by row, of the workers that plan (`load_plans`).
    plans: dict[int, PlannedLoad] = field(default_factory=dict)
    _read: tuple[int, Any] = (-1, None)

    # Leading tokens of the prompt in each tier, and the rest, to be computed.
    device_tokens = Column()
    cached_tokens = Column()
    new_tokens = Column()
    # Of the cached ones, those on disk alone.
    disk_tokens = Column()
    # The request's own seconds: of the link (whole, and per token), of the gpu.
    load_s = Column()
    load_token_s = Column()
    # work_s is what it adds to a busy engine: no weights read, no fixed cost of a step.
    work_s = Column()
    compute_s = Column()
    # Overhead besides the engine.
    fixed_s = Column()
    # Queued ahead of it; waiting requests have not had their first token.
    link_backlog_s = Column()
    gpu_backlog_s = Column()
    in_flight = Column()
    waiting = Column()
    queued_tokens = Column()
    # Context of all in flight, and what VRAM holds.
    resident_tokens = Column()
    capacity_tokens = Column()
    # Total delay that its prefill puts on those that decode there.
    tpot_impact_s = Column()
    # Decode interference: the part of the objective that its prompt and its tokens use up of the
    # requests in flight there, and of those that come during its prefill, as seconds of a TTFT; and
    # as much of it as the request is likely to be late itself.
    interference_s = Column()
    # Recent seconds of prefill per second (over 1: more than it can do), recent requests a second.
    gpu_use = Column()
    loads_per_s = Column()
    prefills_per_s = Column()
    # What the worker is.
    h2d_bytes_per_s = Column()
    flops_per_s = Column()
    cost_per_hour = Column()
    # The constant of paper 001, Eq. 6.
    kappa_literal = Column()
    # The network: tokens to fetch, seconds for that (infinite where there is no room for them), and
    # seconds queued ahead on the cards of both ends.
    fetch_tokens = Column()
    fetch_s = Column()
    net_backlog_s = Column()
    # Predicted time to first token; per output token once all in flight decode beside it, stretched
    # by recent prefills.
    ttft_s = Column()
    tpot_s = Column()
    # How sure the former is: standard deviation of its logarithm.
    ttft_sd = Column()

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def backlog_s(self) -> Floats:
        """Queued work on the busier of link and gpu."""
        return np.maximum(self.link_backlog_s, self.gpu_backlog_s)

    def row(self, index: int) -> Any:
        """Row `index`, priced for good, as a named tuple of plain numbers, which are read many
        times sooner; the last one is kept."""
        if self._read[0] != index:
            self._read = index, _Row._make(self.rows[index].item())
        return self._read[1]

    def candidate(self, index: int) -> PricedWorker:
        """Row `index` as a decision shows it."""
        row = self.row(index)
        device, cached, new = row.device_tokens, row.cached_tokens, row.new_tokens
        plan = self.plans.get(index)
        queue_s = row.ttft_s - row.load_s - row.compute_s - row.fixed_s
        # In order: names take a decision longer.
        return PricedWorker(
            self.workers[index], self.nodes[index],
            TokenCounts(int(device), int(cached), int(new), int(row.disk_tokens)),
            row.load_token_s, max(queue_s, 0.0), row.load_s, row.compute_s, row.ttft_s,
            row.tpot_impact_s, max(row.link_backlog_s, row.gpu_backlog_s), int(row.in_flight),
            plan.kind if plan is not None else "",
            plan.recomputed_tokens if plan is not None else 0, row.ttft_sd,
        )  # fmt: skip


ESTIMATE = np.dtype([(n, np.float64) for n, v in vars(Estimates).items() if isinstance(v, Column)])
# mypy wants the names spelt out; here they are those of the columns above.
_Row: Any = namedtuple("_Row", ESTIMATE.names or ())  # type: ignore[misc]


_TOKENS = ("device_tokens", "cached_tokens", "disk_tokens", "new_tokens")
_PREDICTED = ("queue_s", "load_s", "compute_s", "ttft_s", "ttft_sd")


class PricedWorker(NamedTuple):
    """One worker, priced for one request; seconds are real ones."""

    worker: str
    node: NodeProfile
    counts: TokenCounts
    # Of a cached token that is loaded.
    load_token_s: float
    # From now until its own load or prompt could start.
    queue_s: float
    load_s: float
    compute_s: float
    # Predicted, all included.
    ttft_s: float
    # Total delay of the requests that decode there.
    tpot_impact_s: float
    # Queued work on the busier of link and gpu.
    backlog_s: float
    in_flight: int
    # Its load plan in words; empty: it loads the prefix whole.
    plan: str = ""
    # Of the cached tokens, those that the plan computes again.
    recomputed_tokens: int = 0
    # Standard deviation of the logarithm of `ttft_s`.
    ttft_sd: float = 0.0

    @property
    def predicted(self) -> dict[str, float]:
        """Tokens by tier, and seconds, JSON-ready."""
        tokens = {name: getattr(self.counts, name) for name in _TOKENS}
        return tokens | {name: getattr(self, name) for name in _PREDICTED}

    @property
    def kappa_crit(self) -> float:
        """As `kappa.cost.kappa_crit`, by the seconds predicted here."""
        return kappa_crit(self.counts, self.load_s, self.compute_s, self.load_token_s)

    @property
    def bound(self) -> Bound:
        """As `kappa.cost.bound`, by the seconds predicted here."""
        return bound(self.load_s, self.compute_s)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring `tokens` leading tokens from a peer before loading."""

    source_worker: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer: a row of the estimates, and one word of reason."""

    index: int
    reason: str
    fetch: Fetch | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker chosen for a request, why, and the prediction; seconds are real ones."""

    request_id: str
    chosen: PricedWorker
    reason: str
    policy: str
    # 0 where the prompt is not known, which `informed` says.
    prompt_tokens: int
    informed: bool
    # Its price on every worker; None in logs.
    estimates: Estimates | None = field(default=None, compare=False, repr=False)
    # The chosen row of `estimates`.
    index: int = field(default=-1, compare=False, repr=False)
    # What to bring there first, if anything.
    fetch: Fetch | None = None

    @property
    def worker(self) -> str:
        return self.chosen.worker

    @property
    def priced(self) -> Estimates:
        """The estimates of a decision that has just been made."""
        assert self.estimates is not None
        return self.estimates

    @property
    def candidates(self) -> tuple[PricedWorker, ...]:
        """Every worker that could have been chosen, priced; none in a log."""
        estimates = self.estimates
        return () if estimates is None else tuple(map(estimates.candidate, range(len(estimates))))

    @property
    def soonest_other(self) -> tuple[str, float] | None:
        """Node and predicted TTFT, in seconds, of the soonest worker besides the chosen one; None:
        there was no other, or it is not known any more."""
        estimates = self.estimates
        if estimates is None or len(estimates) == 1:
            return None
        ttft_s = estimates.ttft_s.copy()
        ttft_s[self.index] = np.inf
        other = int(ttft_s.argmin())
        return estimates.nodes[other].name, float(ttft_s[other])

    @property
    def kind(self) -> str:
        """The largest part of the predicted TTFT: queue, load, compute or device."""
        chosen = self.chosen
        if chosen.queue_s > max(chosen.load_s, chosen.compute_s):
            return "queue"
        if chosen.counts.cached_tokens and chosen.load_s > chosen.compute_s:
            return "load"
        if chosen.counts.device_tokens > chosen.counts.new_tokens:
            return "device"
        return "compute"


def without_candidates(decision: Decision) -> Decision:
    """A copy that keeps only the choice, for logs."""
    return replace(decision, estimates=None, index=-1)
