"""A model in memory, ready to be experimented with: its movers are metered, its rates measured.

`rig` and `sparse_rig` take the memory and give it back. Rates are measured in the same process,
right before the experiments, through the same mover; on a busy machine a fit may be too poor to
plan with, and is measured again a few times before that is an error.

Movers count how long the computation stood still for a copy: on the CPU the time that `wait`
blocks, on a GPU what lies between two events around the wait on the computing stream (host code
that launches kernels too slowly is not seen by it). A paced link is emulated: each copy takes at
least its bytes over the bandwidth, and sleeps through what is left, so that the processor is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.offload.needs import arena_size, first_layer, longest_tokens, refuse_sparse
from benchmarks.offload.rounds import Sample
from benchmarks.offload.settings import Group, Setting, SparseCell
from benchmarks.offload.shapes import model
from engine.arena import Arena, ArenaSize
from engine.config import ModelConfig
from engine.forward import Forward
from engine.profiling import ProfileSettings, profile
from engine.sparse.lanes import Lanes
from engine.sparse.settings import SparseSettings
from engine.step import Ids
from engine.transfer import Copies, CpuMover, CudaMover, Direction, Event, Mover
from engine.weights import DTYPES, Weights, random_weights
from kappa.plans.clo import Persistent
from kappa.plans.measured import rates_from_measured
from kappa.plans.rates import PlanRates

_PROFILES = 4
# A run is asked for in advance and waited for at its end.
_LONGEST_S = 900.0
_SEED = 7


class Unsteady(ValueError):
    """The machine gives no profile that a plan can be made from."""


class MeteredCpuMover(CpuMover):
    """Args: link_bytes_per_s of an emulated link, for either direction; 0: as fast as it goes."""

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        super().__init__()
        self._pace = link_bytes_per_s
        self._stalled_s = 0.0

    def wait(self, event: Event) -> None:
        """As it is, timed."""
        start_s = time.perf_counter()
        super().wait(event)
        self._stalled_s += time.perf_counter() - start_s

    def stalled_s(self) -> float:
        """Seconds that the computing thread has waited."""
        return self._stalled_s

    def _copy(self, direction: Direction, copies: Copies) -> None:
        start_s = time.perf_counter()
        super()._copy(direction, copies)
        if self._pace:
            due_s = start_s + sum(target.nbytes for target, _ in copies) / self._pace
            time.sleep(max(0.0, due_s - time.perf_counter()))


class MeteredCudaMover(CudaMover):
    """A mover for a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._place = device
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stalled_s = 0.0

    def wait(self, event: Event) -> None:
        """As it is, between two events."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._place)
        before.record(stream)
        super().wait(event)
        after.record(stream)
        self._waits.append((before, after))

    def stalled_s(self) -> float:
        """Seconds that the computing stream has stood still; waits for what is under way."""
        torch.cuda.synchronize(self._place)
        self._stalled_s += sum(one.elapsed_time(other) for one, other in self._waits) / 1e3
        self._waits.clear()
        return self._stalled_s


Metered = MeteredCpuMover | MeteredCudaMover


def metered_mover(device: torch.device, link_bytes_per_s: float = 0.0) -> Metered:
    """The mover that fits a device; a paced link is for the CPU alone."""
    if device.type == "cuda":
        return MeteredCudaMover(device)
    return MeteredCpuMover(link_bytes_per_s)


def settled(mover: Mover) -> tuple[int, float]:
    """Bytes to the device so far, and seconds in which they were copied."""
    mover.settle()
    counters = mover.counters["h2d"]
    return counters.copied_bytes, counters.busy_s


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A model whose runs are timed."""

    forward: Forward

    @property
    def arena(self) -> Arena:
        """Its KV and activations."""
        return self.forward.arena

    @property
    def mover(self) -> Metered:
        """What copies."""
        return cast(Metered, self.forward.mover)

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.forward.config

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.arena.device

    def finish(self) -> None:
        """Wait until nothing is under way."""
        self.mover.drain(_LONGEST_S)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, action: Callable[[], Any]) -> Sample:
        """Run it and wait for its end."""
        self.finish()
        copied, link_s = settled(self.mover)
        stalled_s = self.mover.stalled_s()
        start_s = time.perf_counter()
        action()
        self.finish()
        latency_s = time.perf_counter() - start_s
        more, more_s = settled(self.mover)
        return Sample(
            latency_s, h2d_bytes=more - copied, link_s=more_s - link_s,
            stalled_s=self.mover.stalled_s() - stalled_s,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Rig(Loaded):
    """What plans are measured on.

    rates: with the link as it is beside the computation; rates_alone: with nothing beside it.
    """

    rates: PlanRates
    rates_alone: PlanRates
    measured: dict[str, Any]
    streamed: bool

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.arena.block_tokens

    def prompts(self, count: int, length: int) -> list[Ids]:
        """Random tokens, the same every time."""
        rng = np.random.default_rng(_SEED)
        return list(rng.integers(3, self.config.vocab, (count, length)))


@dataclass(slots=True, kw_only=True)
class SparseRig(Loaded):
    """Lanes that are open for a cell of sparse decoding, contents aside.

    Keys and values are zeros in host memory and codes are random: with hit rates that are injected,
    seconds and bytes do not depend on them, and half a million tokens need not be computed first.
    host_blocks (batch, blocks): of each sequence.
    """

    lanes: Lanes
    host_blocks: Ids
    cell: SparseCell
    persistent: Persistent

    def open(self) -> None:
        """Every lane as at the start: `context` tokens each, nothing chosen."""
        needed = self.lanes.host_part(self.cell.context) // self.arena.block_tokens
        for lane in range(self.cell.batch):
            taken = self.lanes.close(lane)[needed:]
            self.arena.pools["kv", "host"].free(taken)
        self.prepare()

    def prepare(self) -> None:
        """Fill lanes that are closed."""
        for lane, blocks in enumerate(self.host_blocks.tolist()):
            self.lanes.prepare(lane, self.cell.context, blocks)

    def take_block(self, lane: int) -> int:
        """A host block for what gets old."""
        return self.arena.pools["kv", "host"].allocate(1)[0]


@contextmanager
def rig(setting: Setting, group: Group) -> Iterator[Rig]:
    """A rig for the cells of a group.

    Raises:
        ArenaTooLarge: it does not fit after all.
        Unsteady: no profile fits well enough to plan with.
    """
    with _loaded(setting, group, arena_size(setting, group)) as forward:
        # Streaming is link time, which plans count apart: profiled as if all were there.
        here = forward
        if group.streamed:
            here = Forward(_one_layer_everywhere(forward.weights), forward.arena, forward.mover)
        rates, measured = _rates(here, setting.profile)
        del here
        # A CPU that computes is a CPU that is busy while its threads copy.
        busy = rates.under(cpu_busy=setting.device == "cpu")
        yield Rig(
            forward=forward, rates=busy, rates_alone=rates, measured=measured,
            streamed=group.streamed,
        )  # fmt: skip


@contextmanager
def sparse_rig(setting: Setting, group: Group, cell: SparseCell) -> Iterator[SparseRig]:
    """A rig for one cell of sparse decoding.

    Raises:
        ArenaTooLarge: it does not fit.
    """
    refuse_sparse(setting, group, cell)
    longest = longest_tokens(setting, cell)
    blocks = cell.batch * -(-longest // setting.block_tokens)
    size = ArenaSize(1, blocks, block_tokens=setting.block_tokens)
    with _loaded(setting, group, size) as forward:
        config, arena = forward.config, forward.arena
        settings = SparseSettings(setting.clo, cell.batch, longest, chunk_tokens=1)
        persistent = first_layer(config.kv_heads, config.layers)
        lanes = Lanes(config, arena, forward.mover, settings, persistent)
        for codes in lanes.codes:
            codes.random_()
        needed = lanes.host_part(cell.context) // setting.block_tokens
        taken = arena.pools["kv", "host"].allocate(cell.batch * needed)
        made = SparseRig(
            forward=forward, lanes=lanes, cell=cell, persistent=persistent,
            host_blocks=np.array(taken, np.int64).reshape(cell.batch, needed),
        )  # fmt: skip
        made.prepare()
        yield made


@contextmanager
def _loaded(setting: Setting, group: Group, size: ArenaSize) -> Iterator[Forward]:
    """A forward pass with random weights; weights, arena and mover are closed behind it."""
    config, dtype = model(group.model, setting.dtype), DTYPES[setting.dtype]
    device = torch.device(setting.device)
    with _limited(setting), ExitStack() as closing:
        weights = random_weights(
            config, seed=_SEED, dtype=dtype, device=device, streamed=group.streamed
        )
        closing.callback(weights.close)
        arena = Arena(config.shape, size, dtype=dtype, device=device)
        closing.callback(arena.close)
        mover = metered_mover(device, setting.link_bytes_per_s)
        closing.callback(mover.stop)
        forward = Forward(weights, arena, mover, cpu_threads=group.cpu_threads)
        closing.callback(forward.close)
        yield forward


def _one_layer_everywhere(weights: Weights) -> Weights:
    """The model with its first layer, on the device, in place of every layer."""
    first = weights.layers[:1].to(weights.device)
    layers = first.expand(weights.config.layers, -1)
    return replace(weights, streamed=False, layers=layers, _views={})


def _rates(forward: Forward, settings: ProfileSettings) -> tuple[PlanRates, dict[str, Any]]:
    problem: ValueError | None = None
    without: tuple[PlanRates, dict[str, Any]] | None = None
    for _ in range(_PROFILES):
        measured = profile(forward, settings)
        try:
            rates = rates_from_measured(measured)
        except ValueError as error:
            problem = error
            continue
        if rates.attend is not None or forward.cpu is None:
            return rates, measured
        # Its line is too poor: others' is not, and what the CPU does not do can be measured.
        without = rates, measured
    if without is not None:
        return without
    raise Unsteady(f"{_PROFILES} profiles, none of them fit to plan with; the last: {problem}")


@contextmanager
def _limited(setting: Setting) -> Iterator[None]:
    """So many threads for torch's computation, and of a GPU's memory only so much."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads or before)
    if setting.cap_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.cap_bytes / total))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if setting.cap_bytes:
            torch.cuda.set_per_process_memory_fraction(1.0)
