"""An engine that computes nothing: `engine: emulated`, for tests of a cluster on a small machine.

The replica, its report stream, the router, Ray Serve and HTTP are the real ones, and so is the
engine's loop: its scheduling, its blocks, its loads. Only tokens are made up, as late as the
emulated node would have had them: a step lasts as long as `kappa.cost` says, a load as long as on
the node's link. Every answer says so in its text and its `system_fingerprint`. Nodes must be paced:
the pace is all there is. Never a default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.arena import Arena, ArenaSize
from engine.loop import Engine
from engine.settings import EngineOptions
from engine.step import Source, StepRow
from engine.transfer import Copies, CpuMover, Direction, LinkMover
from kappa.cost import transfer_s
from kappa.model import ModelShape
from scheduler.fcfs import Fcfs
from workers.own_engine.faults import FaultsFile, FaultyPublisher
from workers.own_engine.plans import EmulatedPlan
from workers.own_engine.reports import EngineReports
from workers.own_engine.server import Built, OwnEngine
from workers.vllm.arguments import Pace

if TYPE_CHECKING:
    from workers.identity import WorkerPlan

WORD = " emulated"
# As little as a model can be: a token's KV is its place in a block, and no more.
_SHAPE = ModelShape("emulated", 1, 1, 1, 1, 1, 1.0, 1.0, "mha")
_DTYPE = torch.float32
_TOKEN_BYTES = 2 * _DTYPE.itemsize


def emulated_plan(
    plan: WorkerPlan, worker: str, stats_endpoint: str, kv_endpoint: str, rank: int
) -> EmulatedPlan:
    """What the replica of this rank emulates.

    Raises:
        ValueError: its node is not paced.
    """
    node, limits = plan.node(rank), plan.limits
    if node.source != "paced":
        raise ValueError(f"node {node.name} is not paced: an emulated engine has no other speed")
    pace = Pace(plan.emulated, node)
    return EmulatedPlan(
        worker=worker,
        step=pace.step,
        load_token_s=pace.link.token_s,
        load_fixed_s=pace.link.fixed_s,
        max_batch_tokens=limits.max_batch_tokens,
        max_sequences=limits.max_sequences,
        block_tokens=limits.block_tokens,
        device_blocks=limits.device_blocks,
        host_blocks=plan.host_blocks,
        max_context_tokens=limits.max_context_tokens,
        stats_endpoint=stats_endpoint,
        kv_endpoint=kv_endpoint,
    )


class EmulatedEngine(OwnEngine):
    """`llm_config.engine_kwargs["kappa_emulated"]` is an `EmulatedPlan`."""

    CALLED = "the emulated engine"
    FINGERPRINT = "emulated"

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config.model_id)
        self._plan: EmulatedPlan = llm_config.engine_kwargs["kappa_emulated"]

    def build(self) -> Built:
        plan = self._plan
        faults = FaultsFile.of_environment(plan.worker)
        # vLLM keeps one block to itself.
        size = ArenaSize(plan.device_blocks - 1, plan.host_blocks, block_tokens=plan.block_tokens)
        arena = Arena(_SHAPE, size, dtype=_DTYPE)
        publisher = FaultyPublisher(plan.kv_endpoint, faults)
        reports = EngineReports(
            plan.stats_endpoint, publisher, blocks=plan.device_blocks + plan.host_blocks,
            paced=True,
        )  # fmt: skip
        settings = EngineOptions(
            budget_tokens=plan.max_batch_tokens, max_running=plan.max_sequences,
            scheduler=Fcfs.name, planner="kv",
        )  # fmt: skip
        model = PacedModel(plan, arena, PacedLink(plan, faults))
        return Built(Engine(model, settings, observer=reports), reports, _Words(), (), arena.close)


class _Words:
    """A tokenizer: every token is the same word."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return WORD * len(tokens)


class PacedLink(CpuMover):
    """Loads last as long as on the emulated link, or fail; stores take no time."""

    def __init__(self, plan: EmulatedPlan, faults: FaultsFile) -> None:
        super().__init__()
        self._plan, self._emulated_faults = plan, faults

    def _copy(self, direction: Direction, copies: Copies) -> None:
        if direction == "d2h":
            return
        plan, faults = self._plan, self._emulated_faults.now()
        tokens = sum(target.nbytes for target, _ in copies) // _TOKEN_BYTES
        time.sleep(transfer_s(tokens, plan.load_token_s * faults.link_slower, plan.load_fixed_s))
        if faults.loads_fail:
            raise OSError("loads fail, as the file of faults says")


class PacedModel:
    """An `engine.forward.Model` whose steps last as long as on the emulated node."""

    vocab = 1 << 62

    def __init__(self, plan: EmulatedPlan, arena: Arena, mover: PacedLink) -> None:
        self.max_tokens = plan.max_context_tokens
        self.arena = arena
        self.mover: LinkMover = mover
        self._step = plan.step

    def compute(self, rows: Sequence[StepRow]) -> Tensor:
        """Logits of token 0, after the seconds that the rows take.

        Raises:
            TransferFailed: a load within the step failed.
        """
        loaded = [
            span.stop - span.start
            for row in rows
            for span in row.spans
            if span.source is Source.KV_HOST
        ]
        for tokens in loaded:
            content = torch.empty(tokens, 2, dtype=_DTYPE)
            self.mover.h2d([(content, torch.empty_like(content))]).block()
        work = ((len(row.tokens), row.length - len(row.tokens)) for row in rows)
        time.sleep(self._step.real_s(work))
        return torch.zeros(len(rows), 1)
