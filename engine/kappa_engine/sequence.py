"""A request inside the engine: its tokens, its blocks, and the load of its prefix.

The scheduler sees a `Work`; the block manager owns blocks and loads, the engine the rest.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from kappa.plans.load_plan import LoadPlan
from kappa.plans.planners import Planner
from kappa_engine.account import Account
from kappa_engine.block_pool import BlockError, Ids
from kappa_engine.prefix_cache import BlockKey, extend_keys
from kappa_engine.sampling import GREEDY, Sampling
from kappa_scheduler.work import Work

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefused(ValueError):
    """A request that this engine can never serve."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt, and how it is to be answered."""

    # The prompt.
    tokens: Run[int]
    # Bound on the answer, which is shorter where the context ends.
    max_tokens: int
    sampling: Sampling = GREEDY
    tenant: str = ""
    # Lower classes go first.
    priority: int = 0
    # Makes its load plan; None: the engine's planner does.
    planner: str | Planner | None = None
    # Requests of different salts share no blocks.
    salt: str = ""
    # The caller's name for it, for observers.
    name: str = ""
    # It may be computed sparsely, which changes the answer.
    approx: bool = False

    def check(self, most: int, vocab: int) -> None:
        """Raise `RequestRefused` for no token, one outside the vocabulary, or more than `most`."""
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
    """A load of blocks [start, stop) of a sequence from host memory."""

    start: int
    stop: int
    # Over the tokens of these blocks, from 0 at `start`.
    plan: LoadPlan
    # The host block of each, -1 where host memory lacks that form; held until the load is over.
    kv: list[int]
    act: list[int]
    started_s: float = 0.0


@dataclass(slots=True)
class HostResident:
    """The part of a running request's context that lies in host memory (kind C)."""

    # The host block of each of its blocks so far, -1 where host memory lacks that form; held until
    # the request is over.
    kv: Ids
    act: Ids
    # Of the whole prefix behind the part that the device had.
    plan: LoadPlan
    # The CPU attends to this many first tokens as the request decodes, if they lie there as KV; the
    # others cross at every step.
    cpu_tokens: int = 0
    # False once the link has failed the request.
    crosses: bool = True
    # Every block leaves the device as soon as it is stored; room in host memory was set aside for
    # the first `promised` of them.
    grows: bool = False
    promised: int = 0
    # A planned share of the blocks that are there in both forms comes from activations.
    split: bool = False
    # Device blocks of activations: of each of those blocks, -1 where there is none; and by index,
    # of all that stay on the device until the request is over.
    here: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    stays: dict[int, int] = field(default_factory=dict)
    # From this block on activations of the `promised` blocks stay there; how many may in all.
    stays_from: int = 0
    most_stay: int = 0

    @property
    def blocks(self) -> int:
        """Blocks in host memory."""
        return int(((self.kv >= 0) | (self.act >= 0)).sum())


class Sequence(Work):
    """A request in the engine."""

    def __init__(
        self, request_id: int, request: EngineRequest, arrival_s: float, max_tokens: int,
        block_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__(
            len(request.tokens), arrival_s, max_tokens, request.tenant, request.priority
        )
        self.request_id, self.request, self.block_tokens = request_id, request, block_tokens
        # Of prompt and answer.
        self.tokens = list(request.tokens)
        self.prompt_tokens = len(self.tokens)
        self.rng = np.random.default_rng(request.sampling.seed)
        # approx: it may (still) get a slot. planner: loads its prefix; None: the engine's does.
        self.approx, self.planner = request.approx, request.planner
        # Of its full blocks.
        self.keys: list[BlockKey] = []
        # Its device blocks, -1 where one stays in host memory; some may stand ready behind its
        # tokens.
        self.blocks: Ids = np.empty(0, np.int64)
        # Set by the block manager when it is admitted with a prefix to load.
        self.load: Load | None = None
        # The part of its context that stays in host memory; and what its quote says of that part
        # before the admission: the plan, and how many blocks.
        self.kept: HostResident | None = None
        self.keeps: tuple[LoadPlan, int] | None = None
        # In which it is computed approximately.
        self.slot: int | None = None
        # The planner that keeps all of its context in host memory; "": none does.
        self.resides = ""
        # How many of its full blocks others can find on the device; how many were given to the host
        # store; and where its run of blocks in host memory ended at the last look.
        self.published = self.stored = self.host_stop = 0
        # The cost of admitting it, and the state of the caches for which that holds.
        self.quoted: tuple[tuple[int, int], Any] | None = None
        self.account = Account()
        self.finish_reason: FinishReason | None = None
        extend_keys(self.keys, self.tokens, block_tokens, request.salt)

    @property
    def first_key(self) -> int:
        """The key of its first full block as a number; 0 if it has none."""
        return int.from_bytes(self.keys[0].digest[:7]) + 1 if self.keys else 0

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def room_tokens(self) -> int:
        return len(self.blocks) * self.block_tokens

    def append(self, token: int) -> None:
        """Append its next token, and the key of the block that is full with it."""
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
    """A request's output of one iteration."""

    request_id: int
    # At most one.
    tokens: list[int]
    finish_reason: FinishReason | None = None
    # Its account by then, with the first token and with the last.
    account: Account | None = None
