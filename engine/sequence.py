"""A request and what it is inside the engine: its tokens, its blocks, how it is to be loaded.

The scheduler sees a `Work`; the memory owns `blocks` and what lies behind it, the loop the rest.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.block_pool import BlockError, Ids
from engine.prefix_cache import BlockKey, extend_keys
from engine.sampling import GREEDY, Sampling
from engine.stats import Account
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
        """`RequestRefused` for no token, one outside the vocabulary, or more than can ever fit into
        `most` tokens."""
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
    started_s: float = 0.0


@dataclass(slots=True)
class HostResident:
    """What of a request's context lies in host memory while it runs (kind C).

    kv, act: the host block of each of its blocks so far; -1 where there is none in that form. Held
    until the request is over. plan: of the whole prefix behind what the device had. cpu_tokens: the
    first so many are left to the CPU as the request decodes, where they lie there as KV; the others
    cross at every step, unless the link has failed it. grows: every block follows as soon as it is
    stored, and room for the first `promised` of them was set aside. split: of what is there in both
    forms, a planned share comes from activations.
    """

    kv: Ids
    act: Ids
    plan: LoadPlan
    cpu_tokens: int = 0
    crosses: bool = True
    grows: bool = False
    promised: int = 0
    split: bool = False

    @property
    def blocks(self) -> int:
        """How many lie in host memory."""
        return int(((self.kv >= 0) | (self.act >= 0)).sum())


class Sequence(Work):
    """A request in the engine.

    tokens: prompt and answer. keys: of its full blocks. blocks: its device blocks, each with
    `block_tokens` tokens, -1 where one stays in host memory; some may stand ready behind its
    tokens. load: set by the memory when it is admitted with something to load. kept: what stays in
    host memory; keeps: what is to, as it was quoted: its plan, and blocks. resides: the planner by
    which all of its context is to lie there; "": it does not. published, stored: how
    many of its full blocks others can find on the device, and how many were given to the host
    store. host_stop: where its run of blocks ended in host memory at the last look. quoted: what
    admitting it takes, and the state of the caches for which that holds. slot: in which it is
    computed sparsely; approx: it may still get one.
    """

    __slots__ = (
        "account", "approx", "block_tokens", "blocks", "finish_reason", "host_stop", "keeps",
        "kept", "keys", "load", "prompt_tokens", "published", "quoted", "request", "request_id",
        "resides", "rng", "slot", "stored", "submitted_s", "tokens",
    )  # fmt: skip

    def __init__(
        self, request_id: int, request: EngineRequest, arrival_s: float, max_tokens: int,
        block_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__(
            len(request.tokens), arrival_s, max_tokens, request.tenant, request.priority
        )
        self.request_id, self.request, self.block_tokens = request_id, request, block_tokens
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(self.tokens)
        # Some rules count a preempted request's waiting anew.
        self.submitted_s = arrival_s
        self.rng = np.random.default_rng(request.sampling.seed)
        self.approx = request.approx
        self.keys: list[BlockKey] = []
        self.blocks: Ids = np.empty(0, np.int64)
        self.load: Load | None = None
        self.kept: HostResident | None = None
        self.keeps: tuple[LoadPlan, int] | None = None
        self.slot: int | None = None
        self.resides = ""
        self.published = self.stored = self.host_stop = 0
        self.quoted: tuple[tuple[int, int], Any] | None = None
        self.account = Account()
        self.finish_reason: FinishReason | None = None
        extend_keys(self.keys, self.tokens, block_tokens, request.salt)

    @property
    def first_key(self) -> int:
        """Its first full block as a number; 0 if it has none."""
        return int.from_bytes(self.keys[0].digest[:7]) + 1 if self.keys else 0

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def room_tokens(self) -> int:
        return len(self.blocks) * self.block_tokens

    def append(self, token: int) -> None:
        """Its next token, and the name of the block that is full with it."""
        self.tokens.append(token)
        extend_keys(self.keys, self.tokens, self.block_tokens, self.request.salt)

    def device_blocks(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Ids of its blocks [start, stop), all of which must be on the device."""
        ids: list[int] = self.blocks[start:stop].tolist()
        if -1 in ids:
            raise BlockError(
                f"block {start + ids.index(-1)} of a sequence is in host memory, wanted on the "
                "device"
            )
        return ids


class Output(NamedTuple):
    """What a request got in an iteration: at most one token; if it ended, why. account: its own, as
    it is by then, with the first token and with the last."""

    request_id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    account: Account | None = None
