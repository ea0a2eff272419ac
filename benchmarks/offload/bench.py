"""One model with its arena, mover, forward pass and measured rates, ready to be experimented with.

`rig` takes the memory and gives it back. Rates are measured in the same process, right before the
experiments, through the same mover; on a busy machine a fit may be too poor to plan with, and is
measured again a few times before that is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.offload.meter import Metered, metered_mover, settled
from benchmarks.offload.needs import arena_size
from benchmarks.offload.rounds import Sample
from benchmarks.offload.settings import Group, Setting
from benchmarks.offload.shapes import model
from engine.arena import Arena
from engine.config import ModelConfig
from engine.forward import Forward
from engine.profiling import ProfileSettings, profile
from engine.step import Ids
from engine.weights import DTYPES, Weights, random_weights
from kappa.plan.rates import PlanRates, rates_from_measured

_PROFILES = 4
# A run is asked for in advance and waited for at its end.
_LONGEST_S = 900.0
_SEED = 7


class Unsteady(ValueError):
    """The machine gives no profile that a plan can be made from."""


@dataclass(slots=True)
class Rig:
    """What experiments run on.

    rates: with the link as it is beside the computation; rates_alone: with nothing beside it.
    """

    forward: Forward
    arena: Arena
    mover: Metered
    config: ModelConfig
    device: torch.device
    rates: PlanRates
    rates_alone: PlanRates
    measured: dict[str, Any]
    streamed: bool

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.arena.block_tokens

    def finish(self) -> None:
        """Wait until nothing is under way."""
        self.mover.drain(_LONGEST_S)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prompts(self, count: int, length: int) -> list[Ids]:
        """Random tokens, the same every time."""
        rng = np.random.default_rng(_SEED)
        return list(rng.integers(3, self.config.vocab, (count, length)))

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
            latency_s,
            h2d_bytes=more - copied,
            link_s=more_s - link_s,
            stalled_s=self.mover.stalled_s() - stalled_s,
        )


@contextmanager
def rig(setting: Setting, group: Group) -> Iterator[Rig]:
    """A rig for the cells of a group.

    Raises:
        ArenaTooLarge: it does not fit after all.
        Unsteady: no profile fits well enough to plan with.
    """
    config, dtype = model(group.model, setting.dtype), DTYPES[setting.dtype]
    device = torch.device(setting.device)
    with _capped(setting.cap_bytes), _threads(setting.threads):
        weights = random_weights(
            config, seed=_SEED, dtype=dtype, device=device, streamed=group.streamed
        )
        mover = metered_mover(device, setting.link_bytes_per_s)
        arena = forward = None
        try:
            size = arena_size(setting, group)
            arena = Arena(config.shape, size, dtype=dtype, device=device)
            forward = Forward(weights, arena, mover, cpu_threads=group.cpu_threads)
            # Streaming is link time, which plans count apart: profiled as if all were there.
            here = forward
            if group.streamed:
                here = Forward(_one_layer_everywhere(weights), arena, mover)
            rates, measured = _rates(here, setting.profile)
            del here
            # A CPU that computes is a CPU that is busy while its threads copy.
            busy = rates.under(cpu_busy=device.type == "cpu")
            yield Rig(forward, arena, mover, config, device, busy, rates, measured, group.streamed)
        finally:
            if forward is not None:
                forward.close()
            mover.stop()
            if arena is not None:
                arena.close()
            weights.close()


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
def _threads(count: int) -> Iterator[None]:
    """So many threads for torch's computation; 0: as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _capped(cap_bytes: int) -> Iterator[None]:
    """Of a GPU's memory only so much for this process."""
    if not cap_bytes:
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
