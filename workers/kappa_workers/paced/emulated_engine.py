"""An engine that computes nothing: `engine: emulated`, for tests of a cluster on a small machine.
Replica, router, Serve, HTTP and the engine's loop (scheduling, blocks, loads) are the real ones;
tokens are synthetic and timed as the paced node's (`kappa_workers.paced.steps`). Every answer says
so in its text and its `system_fingerprint`. Never a default."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
import torch
from torch import Tensor

from kappa.cost import transfer_s
from kappa.model import ModelShape
from kappa.plans.cpu_offload import Division
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.llm_engine import Engine
from kappa_engine.settings import EngineOptions
from kappa_engine.step import Source, StepRow
from kappa_engine.transfer import Copies, CpuMover, Direction, LinkMover
from kappa_scheduler.fcfs import Fcfs
from kappa_workers.own_engine.core import Built
from kappa_workers.own_engine.reports import EngineReports, KvPublisher
from kappa_workers.own_engine.server import OwnEngine
from kappa_workers.paced.steps import PacedSteps
from kappa_workers.vllm.arguments import Pace
from kappa_workers.vllm.options import LinkPace

log = structlog.get_logger(__name__)

WORD = " emulated"
# As little as a model can be: a token's KV is its place in a block, and no more.
_SHAPE = ModelShape("emulated", 1, 1, 1, 1, 1, 1.0, 1.0, "mha")
_DTYPE = torch.float32
_TOKEN_BYTES = 2 * _DTYPE.itemsize

ENV = "KAPPA_EMULATED_FAULTS"
_LOOK_EVERY_S = 0.2


class EngineFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of one worker."""

    # The factor on the seconds of a load.
    link_slower: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    # No load arrives.
    loads_fail: bool = False
    # No step ends.
    hangs: bool = False
    # Befalls every second batch of KV events.
    events: Literal["", "lose", "repeat", "reorder"] = ""


class FaultsFile:
    """The faults of one worker, from the JSON file that `KAPPA_EMULATED_FAULTS` names:
    `{"WORKER": {"link_slower": 10, "loads_fail": true, "events": "lose"}}`, with `*` for every
    worker. It is read again when it changes, a few times a second at most. A file that cannot be
    read means no fault, and is logged."""

    def __init__(self, path: str, worker: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._worker, self._clock = path, worker, clock
        self._faults = EngineFaults()
        self._looked_s, self._seen = float("-inf"), 0

    def now(self) -> EngineFaults:
        """The faults at this moment."""
        now_s, path = self._clock(), Path(self._path)
        if not self._path or now_s - self._looked_s < _LOOK_EVERY_S:
            return self._faults
        self._looked_s = now_s
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            self._faults, self._seen = EngineFaults(), 0
            return self._faults
        if changed != self._seen:
            self._seen = changed
            try:
                read = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
                mine = {**read.get("*", {}), **read.get(self._worker, {})}
                self._faults = msgspec.convert(mine, EngineFaults)
            except (OSError, msgspec.MsgspecError) as error:
                self._faults = EngineFaults()
                log.warning("faults_unreadable", path=self._path, reason=str(error))
        return self._faults


class FaultyPublisher(KvPublisher):
    """Loses, repeats or reorders every second batch, as a network could, while a fault says so."""

    def __init__(self, endpoint: str, faults: FaultsFile) -> None:
        super().__init__(endpoint)
        self._network_faults = faults
        self._late: tuple[int, list[bytes]] | None = None

    def send(self, number: int, frames: list[bytes]) -> None:
        fault = self._network_faults.now().events if number % 2 else ""
        if fault == "reorder":
            self._late = number, frames
        elif fault != "lose":
            for _ in range(2 if fault == "repeat" else 1):
                super().send(number, frames)
            if self._late is not None:
                super().send(*self._late)
                self._late = None


class EmulatedEngine(OwnEngine):
    """An engine of the node that its plan has for its rank, which must be a paced one."""

    CALLED = "the emulated engine"
    FINGERPRINT = "emulated"

    def build(self) -> Built:
        plan, limits, node = self.plan, self.plan.limits, self.plan.node(self.own.rank)
        pace = Pace(plan.emulated, node)
        faults = FaultsFile(os.environ.get(ENV, ""), self.own.worker)
        device_blocks = limits.device_blocks - 1  # vLLM keeps one block to itself.
        size = ArenaSize(device_blocks, plan.host_blocks, block_tokens=limits.block_tokens)
        arena = Arena(_SHAPE, size, dtype=_DTYPE)
        endpoints, blocks = self.own.endpoints, limits.device_blocks + plan.host_blocks
        publisher = FaultyPublisher(endpoints.kv_events, faults)
        reports = EngineReports(endpoints.stats, publisher, blocks=blocks, paced=True)
        options = EngineOptions(
            budget_tokens=limits.max_batch_tokens,
            max_running=limits.max_sequences,
            scheduler=Fcfs.name,
            planner="kv",
        )
        link = PacedLink(pace.link, faults)
        steps = PacedSteps(pace.steps)
        model = PacedModel(steps, arena, link, limits.max_context_tokens, faults)
        return Built(Engine(model, options, observer=reports), reports, arena.close)

    def words(self, tokenizer: Any) -> Sequence[int]:
        return list(tokenizer.encode(WORD, add_special_tokens=False))


class PacedLink(CpuMover):
    """Loads last as long as on the emulated link, or fail; stores take no time."""

    def __init__(self, pace: LinkPace, faults: FaultsFile) -> None:
        super().__init__()
        self._pace, self._emulated_faults = pace, faults

    def _copy(self, direction: Direction, copies: Copies) -> None:
        if direction == "d2h":
            return
        pace, faults = self._pace, self._emulated_faults.now()
        tokens = sum(target.nbytes for target, _ in copies) // _TOKEN_BYTES
        time.sleep(transfer_s(tokens, pace.token_s * faults.link_slower, pace.fixed_s))
        if faults.loads_fail:
            raise OSError("loads fail, as the file of faults says")


class PacedModel:
    """A `kappa_engine.step.ServedModel` with steps that last as long as on the emulated
    node."""

    vocab = 1 << 62

    def __init__(
        self, step: PacedSteps, arena: Arena, mover: PacedLink, max_tokens: int, faults: FaultsFile
    ) -> None:
        self.max_tokens, self._faults = max_tokens, faults
        self.arena = arena
        self.mover: LinkMover = mover
        self._step = step

    def compute(self, *batches: Sequence[StepRow], division: Division | None = None) -> Tensor:
        """Logits of token 0, after the seconds that the rows take together.

        Raises:
            TransferFailed: a load within the step failed.
        """
        rows = [row for batch in batches for row in batch]
        for span in (span for row in rows for span in row.spans):
            if span.source is Source.KV_HOST:
                content = torch.empty(span.stop - span.start, 2, dtype=_DTYPE)
                self.mover.h2d([(content, torch.empty_like(content))]).block()
        work = ((len(row.tokens), row.length - len(row.tokens)) for row in rows)
        time.sleep(self._step.real_s(work))
        while self._faults.now().hangs:
            time.sleep(_LOOK_EVERY_S)
        return torch.zeros(len(rows), 1)
