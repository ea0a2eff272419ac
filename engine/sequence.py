"""A request and what it is inside the engine: its tokens, its blocks, how it is to be loaded, what
it cost. The scheduler sees a `Work`; the memory owns `table` and what lies behind it, the loop the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.blocks import SequenceTable
from engine.prefix import BlockKey, extend_keys
from engine.sampling import GREEDY, Sampling
from kappa.plans.load_plan import LoadPlan
from kappa.plans.planners import Planner
from scheduler.work import Work

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefused(ValueError):
    """A request that this engine can never serve."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is asked of an engine.

    tokens: of the prompt. max_tokens: of the answer at most; fewer where the context ends. tenant,
    priority: for the scheduling rule. planner: of its load plan, instead of the engine's. salt:
    requests of different salts share no blocks. name: the caller's, for whoever observes. approx:
    it may be computed sparsely, which changes the answer.
    """

    tokens: Run[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    tenant: str = ""
    priority: int = 0
    planner: str | Planner | None = None
    salt: str = ""
    name: str = ""
    approx: bool = False

    def check(self, most: int, vocab: int) -> None:
        """Do nothing for a request that an engine can serve.

        most: tokens that it holds of a request. vocab: token ids are below.

        Raises:
            RequestRefused: no token, one outside the vocabulary, or more than can ever fit.
        """
        tokens = self.tokens
        if not tokens or self.max_tokens < 1:
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens and an answer of {self.max_tokens}: "
                "give at least one of each"
            )
        if len(tokens) >= most:
            raise RequestRefused(
                f"a prompt of {len(tokens)} tokens: this engine holds {most} tokens of a request "
                "at most, its answer included"
            )
        if not (min(tokens) >= 0 and max(tokens) < vocab):
            raise RequestRefused(
                f"token ids {min(tokens)} to {max(tokens)}: the model's are 0 to {vocab - 1}"
            )


@dataclass(slots=True)
class Account:
    """What a request was predicted to take and what it took: seconds, and prompt tokens by source.

    Seconds are of the engine's clock. queue_s: until its first admission; load_s: from the start of
    its load to its end; compute_s: iterations that computed its prompt; ttft_s: all until its first
    token. predicted_*: of its load plan. Tokens: device (found there), loaded (as KV), activations
    (KV projected from them), recomputed (were cached, computed all the same), sparse (stayed in
    host memory, attended to in part), kept (stayed there, attended to whole), new; approximate: of
    the answer, computed sparsely.
    plan, why: the kinds of its load plan, and what the planner saw.
    """

    queue_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    predicted_load_s: float = 0.0
    predicted_compute_s: float = 0.0
    predicted_ttft_s: float = 0.0
    load_bytes: int = 0
    device_tokens: int = 0
    loaded_tokens: int = 0
    activation_tokens: int = 0
    recomputed_tokens: int = 0
    sparse_tokens: int = 0
    kept_tokens: int = 0
    approximate_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    plan: str = ""
    why: str = ""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return (
            self.device_tokens + self.loaded_tokens + self.activation_tokens
            + self.sparse_tokens + self.kept_tokens
        )  # fmt: skip

    def found(self, sequence: Sequence, there_tokens: int, queue_s: float) -> None:
        """It was admitted for the first time; so many of its tokens need no load."""
        kept = sequence.kept
        self.kept_tokens = len(kept.blocks) * sequence.table.block_tokens if kept else 0
        self.device_tokens = there_tokens - self.kept_tokens
        self.queue_s, self.new_tokens = queue_s, sequence.total_tokens - there_tokens

    def predicted(self, plan: LoadPlan) -> None:
        """It was admitted, and this is how it is to get its prefix."""
        self.plan, self.why = (plan.kind if plan.segments else ""), plan.why
        self.predicted_load_s += plan.load_s
        self.predicted_compute_s += plan.compute_s
        self.predicted_ttft_s += plan.ttft_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Load:
    """A cached prefix that is to be brought back.

    start, stop: blocks of the sequence. plan: over their tokens, from 0 at `start`. kv, act: the
    host block of each, or -1 where the host does not hold it so; held until the load is over.
    """

    start: int
    stop: int
    plan: LoadPlan
    kv: list[int]
    act: list[int]
    block_tokens: int
    started_s: float = 0.0


@dataclass(slots=True)
class HostResident:
    """Part of a cached prefix that stays in host memory while its request runs (kind C).

    start: index of its first block. blocks: of host memory, held until the request is over. plan:
    of the whole prefix behind what the device had. cpu_tokens: of these, those that the CPU attends
    to as the request decodes; the others cross at every step, unless the link has failed it.
    """

    start: int
    blocks: list[int]
    plan: LoadPlan
    cpu_tokens: int
    crosses: bool = True


class Sequence(Work):
    """A request in the engine.

    tokens: prompt and answer. load: set by the memory when it is admitted with something to load.
    kept: what stays in host memory; keeps: what is to, as it was quoted: its plan, and blocks.
    published, stored: how many of its full blocks others can find on the device, and how many were
    given to the host store. host_stop: where its run of blocks ended in host memory at the last
    look. quoted: what admitting it takes, and the state of the caches for which that holds. approx:
    may still be computed sparsely.
    """

    __slots__ = (
        "account", "approx", "finish_reason", "host_stop", "keeps", "kept", "keys", "load",
        "prompt_tokens", "published", "quoted", "request", "request_id", "rng", "stored",
        "submitted_s", "table", "tokens",
    )  # fmt: skip

    def __init__(
        self, request_id: int, request: EngineRequest, arrival_s: float, max_tokens: int,
        block_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__(
            len(request.tokens), arrival_s, max_tokens, request.tenant, request.priority
        )
        self.request_id, self.request = request_id, request
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(self.tokens)
        # Some rules count a preempted request's waiting anew.
        self.submitted_s = arrival_s
        self.rng = np.random.default_rng(request.sampling.seed)
        self.approx = request.approx
        self.keys: list[BlockKey] = []
        self.table = SequenceTable(block_tokens)
        self.load: Load | None = None
        self.kept: HostResident | None = None
        self.keeps: tuple[LoadPlan, int] | None = None
        self.published = self.stored = self.host_stop = 0
        self.quoted: tuple[tuple[int, int], Any] | None = None
        self.account = Account()
        self.finish_reason: FinishReason | None = None
        self.extend_keys()

    @property
    def name(self) -> str:
        """The caller's."""
        return self.request.name

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    def extend_keys(self) -> None:
        """Name the blocks that its latest tokens completed."""
        extend_keys(self.keys, self.tokens, self.table.block_tokens, self.request.salt)


class Output(NamedTuple):
    """What a request got in an iteration: at most one token; if it ended, why, and its account."""

    request_id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    account: Account | None = None
