"""vLLM's worker on a CPU, which reports every step and on a paced node makes it last.

A pace in `additional_config` has the real step followed by a sleep until it has lasted as long as
on the named node, in dilated time; a step that is slower is an overrun."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from kappa_workers.paced.steps import PacedSteps
from kappa_workers.vllm.load_sources import LOAD_SOURCES
from kappa_workers.vllm.metered_worker import Metered, Timed
from kappa_workers.vllm.options import PACE_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# Steps closer together than this are one busy period: their overhead is part of the pace.
_BACK_TO_BACK_S = 0.02


class Rewindable(torch.Generator):
    """A generator on the CPU that can take back what was drawn since it was marked. A request with
    a seed draws in every step of its prompt; vLLM takes back all draws but the last by the
    generator's offset, which one on a CPU does not have: its exception ends the engine."""

    def mark(self) -> None:
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Back to the mark, whatever the offset."""
        self.set_state(self._marked)


def mark_generators(runner: Any) -> None:
    """Make all generators of a model runner's batch rewindable to what they are now."""
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        if not isinstance(generator, Rewindable):
            plain, generator = generator, Rewindable()
            generator.set_state(plain.get_state())
            batch.generators[index] = runner.requests[batch.req_ids[index]].generator = generator
        generator.mark()


class MeteredCPUWorker(Metered, CPUWorker):
    """vLLM's CPU worker, metered and, on a paced node, paced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pace = self.vllm_config.additional_config.get(PACE_KEY)
        self._kappa_step_model = PacedSteps(pace) if pace else None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As `Metered`, with generators that vLLM can take a step back."""
        mark_generators(self.model_runner)
        return super().sample_tokens(grammar_output)

    def _kappa_begin(self, scheduler_output: SchedulerOutput) -> None:
        super()._kappa_begin(scheduler_output)
        step, model = self._kappa_step, self._kappa_step_model
        if step is not None and model is not None:
            if step.start_s - self._kappa_last_end_s < _BACK_TO_BACK_S:
                step.start_s = self._kappa_last_end_s
            step.message["pace_s"] = model.real_s(step.scheduled.chunks)

    def _kappa_lasted(self, step: Timed, start_s: float) -> tuple[float, float]:
        """As `Metered`, once the step has lasted its pace and what its loads add to it."""
        pace_s = step.message["pace_s"]
        waits = [source.take_waits(start_s, pace_s) for source in LOAD_SOURCES]
        held_s, beyond_s = sum(held for held, _ in waits), sum(more for _, more in waits)
        passed_s, lasts_s = time.monotonic() - start_s, pace_s + beyond_s
        if passed_s < lasts_s:
            time.sleep(lasts_s - passed_s)
        end_s = time.monotonic()
        self._kappa_last_end_s = start_s + lasts_s if passed_s < lasts_s else end_s
        return end_s - start_s - beyond_s, passed_s - held_s
