"""A model in memory, ready to be experimented with: its mover metered, its rates measured.

Rates are measured in the same process, right before the experiments, through the same mover; on a
busy machine a fit may be too poor to plan with, and is measured again a few times before that is an
error. The mover counts how long the computation stood still for a copy. A paced link is emulated:
each copy takes at least its bytes over the bandwidth, asleep for the rest of that time, so that the
processor is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from kappa.plans.measured import rates_from_measured
from kappa.plans.rates import PlanRates
from kappa_benchmarks import harness
from kappa_benchmarks.offload.cells import (
    Cell,
    DecodeCell,
    Group,
    Setting,
    arena_size,
    model,
    trained_folder,
)
from kappa_engine.block_pool import Ids
from kappa_engine.config import ModelConfig
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.profile import ProfileSettings, profile
from kappa_engine.transfer import Copies, CpuMover, CudaMover, Direction, Event
from kappa_engine.weights import DTYPES, HostWeights, Weights, load_weights, random_weights

LINK = "link-alone"
"""The arm that copies what the baseline loads, with nothing else to do."""

LEAST_REPEATS = 5
_PROFILES = 4
# Copies of a whole run are queued in advance and waited for at its end.
_LONGEST_S = 900.0
_SEED = 7


class Unsteady(ValueError):
    """The machine gives no profile that a plan can be made from."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one arm."""

    # Of the part that is compared, and of the part before it.
    latency_s: float
    before_s: float = 0.0
    # Copied to the device meanwhile, and seconds in which the link copied.
    h2d_bytes: int = 0
    link_s: float = 0.0
    # In which the computation waited for copies.
    stalled_s: float = 0.0
    # That were generated.
    tokens: tuple[int, ...] = ()
    # Requests that ran at once, at most.
    held: int = 0


@dataclass(slots=True)
class Arm:
    """One of the compared ways."""

    name: str
    run: Callable[[], Sample]
    # Of `latency_s`; None: nothing predicts it.
    predicted_s: float | None = None
    # The planner's reason.
    note: str = ""
    # Whether the planner would take this one.
    chosen: bool = False
    # Arms of equal keys would do the very same: the first is run, the others share its samples.
    key: Hashable = None


def leaders(arms: Sequence[Arm]) -> dict[str, str]:
    """The arm that is run for each: the first one with its key."""
    first: dict[Hashable, str] = {}
    return {
        arm.name: arm.name if arm.key is None else first.setdefault(arm.key, arm.name)
        for arm in arms
    }


def alternate(arms: Sequence[Arm], repeats: int) -> dict[str, list[Sample]]:
    """Samples of each arm by round, those of equal keys measured once.

    Raises:
        ValueError: fewer than `LEAST_REPEATS` rounds.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats say too little: give {LEAST_REPEATS} or more")
    lead = leaders(arms)
    run_ones = {arm.name: arm.run for arm in arms if lead[arm.name] == arm.name}
    samples = harness.alternate(run_ones, repeats)
    return {arm.name: samples[lead[arm.name]] for arm in arms}


def ratios(samples: Mapping[str, Sequence[Sample]], over: str, under: str) -> list[float]:
    """Latency of `over` to that of `under`, round by round, where both met the same machine."""
    pairs = zip(samples[over], samples[under], strict=True)
    return [one.latency_s / other.latency_s for one, other in pairs]


class MeteredMover(CpuMover):
    """Args: link_bytes_per_s of an emulated link, for either direction; 0: as fast as it goes."""

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        super().__init__()
        self.pace_bytes_per_s = link_bytes_per_s
        self.stalled_s = 0.0

    def wait(self, event: Event) -> None:
        """As `CpuMover.wait`, timed."""
        start_s = time.perf_counter()
        super().wait(event)
        self.stalled_s += time.perf_counter() - start_s

    def _copy(self, direction: Direction, copies: Copies) -> None:
        start_s = time.perf_counter()
        super()._copy(direction, copies)
        if self.pace_bytes_per_s:
            due_s = start_s + sum(target.nbytes for target, _ in copies) / self.pace_bytes_per_s
            time.sleep(max(0.0, due_s - time.perf_counter()))


class MeteredCudaMover(CudaMover):
    """On a GPU the stream stands still, not the caller: events on either side of each wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stalled_s = 0.0

    def wait(self, event: Event) -> None:
        """As `CudaMover.wait`, between two events."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        super().wait(event)
        after.record()
        self._waits.append((before, after))

    @property
    def stalled_s(self) -> float:
        """Seconds of waits that are over; complete once the device is idle."""
        waits, self._waits = self._waits, []
        self._stalled_s += sum(before.elapsed_time(after) for before, after in waits) / 1e3
        return self._stalled_s


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A model with timed runs."""

    forward: Forward

    @property
    def arena(self) -> Arena:
        return self.forward.arena

    @property
    def mover(self) -> MeteredMover | MeteredCudaMover:
        return cast("MeteredMover | MeteredCudaMover", self.forward.mover)

    @property
    def config(self) -> ModelConfig:
        return self.forward.config

    def timed(self, action: Callable[[], Any]) -> Sample:
        """Run it and wait for its end."""
        mover, counters = self.mover, self.mover.counters["h2d"]
        self._finish()
        before = counters.copied_bytes, counters.busy_s, mover.stalled_s
        start_s = time.perf_counter()
        action()
        self._finish()
        latency_s = time.perf_counter() - start_s
        counters = mover.counters["h2d"]
        return Sample(
            latency_s, h2d_bytes=counters.copied_bytes - before[0],
            link_s=counters.busy_s - before[1], stalled_s=mover.stalled_s - before[2],
        )  # fmt: skip

    def _finish(self) -> None:
        """Wait for what was asked of the device and of both directions."""
        self.mover.mark().block(_LONGEST_S)
        self.mover.drain(_LONGEST_S)
        self.mover.settle()


@dataclass(slots=True, kw_only=True)
class Rig(Loaded):
    """A model with measured rates, to try load plans on."""

    rates: PlanRates
    measured: dict[str, Any]

    @property
    def block_tokens(self) -> int:
        return self.arena.block_tokens

    def prompts(self, count: int, length: int) -> list[Ids]:
        """Random tokens, the same every time."""
        rng = np.random.default_rng(_SEED)
        return list(rng.integers(3, self.config.vocab, (count, length)))


@contextmanager
def rig(setting: Setting, group: Group) -> Iterator[Rig]:
    """A rig for the cells of a group.

    Raises:
        ArenaTooLarge: it does not fit.
        Unsteady: no profile fits well enough to plan with.
    """
    with loaded(setting, group, arena_size(setting, group)) as forward:
        mover = forward.mover
        if setting.psi_over_mu and isinstance(mover, MeteredMover):
            alone, _ = _rates(forward, replace(setting.profile, repeats=5))
            psi_s = projecting_s(alone, group.cells[0])
            mover.pace_bytes_per_s = alone.kv_bytes * setting.psi_over_mu / psi_s
        rates, measured = _rates(forward, setting.profile)
        yield Rig(forward=forward, rates=rates, measured=measured)


def projecting_s(rates: PlanRates, cell: Cell) -> float:
    """Seconds to project a token, as measured in a step of a cell that decodes."""
    assert isinstance(cell, DecodeCell)
    batch, context = cell.held or cell.requests, cell.prompt
    none_s, all_s = (rates.decode_s(batch, context, acts)[1] for acts in (0, context))
    return (all_s - none_s) / (batch * context)


@contextmanager
def loaded(setting: Setting, group: Group, size: ArenaSize) -> Iterator[Forward]:
    """A forward pass, closed behind it, over random or trained weights; a CPU has one thread."""
    config, threads = model(group.model, setting.dtype), torch.get_num_threads()
    device, dtype = torch.device(setting.device), DTYPES[setting.dtype]
    torch.set_num_threads(1)
    with ExitStack() as closing:
        closing.callback(torch.set_num_threads, threads)
        folder, host = trained_folder(group.model), HostWeights(group.weights)
        weights: Weights = (
            load_weights(folder, config, dtype=dtype, device=device, host=host)
            if folder
            else random_weights(config, seed=_SEED, dtype=dtype, device=device, host=host)
        )
        arena = Arena(config.shape, size, dtype=dtype, device=device)
        closing.callback(arena.close)
        cuda = device.type == "cuda"
        mover = MeteredCudaMover(device) if cuda else MeteredMover(setting.link_bytes_per_s)
        closing.callback(mover.stop)
        forward = Forward(weights, arena, mover, cpu_threads=group.cpu_threads)
        closing.callback(forward.close)
        yield forward


def _rates(forward: Forward, settings: ProfileSettings) -> tuple[PlanRates, dict[str, Any]]:
    """Rates of the first profile that fits; at worst of one that is too poor for the CPU's part."""
    problem: ValueError | None = None
    found: tuple[PlanRates, dict[str, Any]] | None = None
    for _ in range(_PROFILES):
        measured = profile(forward, settings)
        try:
            found = rates_from_measured(measured), measured
        except ValueError as error:
            problem = error
            continue
        if found[0].attend is not None or forward.cpu is None:
            break
    if found is None:
        raise Unsteady(f"{_PROFILES} profiles, none of them fit to plan with; the last: {problem}")
    return found
