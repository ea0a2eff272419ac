"""vLLM workers that measure every engine step, and on a paced node make it last.

vLLM's worker plus a report per step on the stats channel: how long, how many tokens, which prompts
were finished. With a pace in the engine's `additional_config` it also runs the real step and then
sleeps until the step has lasted as long as it would on the named node, in dilated time; a step that
cannot keep its pace is reported as an overrun.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from kappa.cost import StepModel, batch_work
from workers.request_metadata import request_id_of
from workers.stats_channel import StatsSender
from workers.vllm.load_sources import LOAD_SOURCES
from workers.vllm.options import PACE_KEY, STATS_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# An engine with nothing to compute but loads in flight would poll as fast as it can.
_LOAD_POLL_S = 0.01
# Steps closer together than this are one busy period: their overhead is part of the pace.
_BACK_TO_BACK_S = 0.02


@dataclass(slots=True)
class _Prompt:
    """request_id: the ingress', "" without; compute_s: of all steps that computed some of it."""

    tokens: int
    request_id: str
    compute_s: float = 0.0


class StepMeter:
    """Follows requests over steps: what each step computes, which prompts it finishes, and how long
    the steps that computed a prompt took."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._computing: list[str] = []
        self._finishing: list[str] = []

    def work(self, scheduled: SchedulerOutput) -> tuple[list[tuple[int, int]], list[str]]:
        """Return [(new tokens, context tokens before them)] and the finished prompts' ids."""
        steps = []
        for new in scheduled.scheduled_new_reqs:
            tokens, name = len(new.prompt_token_ids or ()), request_id_of(new.sampling_params)
            self._prompts[new.req_id] = _Prompt(tokens, name)
            steps.append((new.req_id, new.num_computed_tokens))
        cached = scheduled.scheduled_cached_reqs
        steps += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        self._computing, self._finishing, work = [], [], []
        for req_id, context in steps:
            new_tokens = scheduled.num_scheduled_tokens[req_id]
            work.append((new_tokens, context))
            prompt = self._prompts.get(req_id)
            if prompt is not None and context < prompt.tokens:
                self._computing.append(req_id)
                if prompt.tokens <= context + new_tokens:
                    self._finishing.append(req_id)
        prefilled = [self._prompts[req_id].request_id for req_id in self._finishing]
        for req_id in scheduled.finished_req_ids:
            self._prompts.pop(req_id, None)
        return work, prefilled

    def took(self, seconds: float) -> list[tuple[str, str, float]]:
        """The step lasted so long; (vLLM's id, ours, seconds of all steps that computed it) of each
        prompt that it finished."""
        for req_id in self._computing:
            if req_id in self._prompts:
                self._prompts[req_id].compute_s += seconds
        finished = []
        for req_id in self._finishing:
            prompt = self._prompts.get(req_id)
            if prompt is not None:
                finished.append((req_id, prompt.request_id, prompt.compute_s))
                prompt.compute_s = 0.0
        return finished


class Metered:
    """A report per step and, on a paced node, a pace, in front of a vLLM worker's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.additional_config  # type: ignore[attr-defined]
        pace = config.get(PACE_KEY)
        self._kappa_step_model = StepModel.from_dict(pace) if pace else None
        self._kappa_stats = StatsSender(config.get(STATS_KEY, ""))
        self._kappa_meter = StepMeter()
        self._kappa_step: dict[str, Any] | None = None
        self._kappa_start_s = self._kappa_last_end_s = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the real step; the report and the pace follow once its tokens are sampled."""
        self._kappa_begin(scheduler_output)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._kappa_stats.flush()
            for source in LOAD_SOURCES:
                source.wait_for_load(_LOAD_POLL_S)
        elif output is not None:
            self._kappa_end()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as vLLM does, then finish the step's pace and report it."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._kappa_end()
        return output

    def kappa_profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measure this process' memory bandwidth and FLOP/s (`workers.profiler.measure`)."""
        from workers.profiler import measure

        return measure(request)

    def _kappa_begin(self, scheduler_output: SchedulerOutput) -> None:
        work, prefilled = self._kappa_meter.work(scheduler_output)
        tokens, model = scheduler_output.total_num_scheduled_tokens, self._kappa_step_model
        if tokens == 0:
            return
        start_s = time.monotonic()
        if model is not None and start_s - self._kappa_last_end_s < _BACK_TO_BACK_S:
            start_s = self._kappa_last_end_s
        self._kappa_start_s = start_s
        parts = model.real_parts(work) if model is not None else None
        self._kappa_step = {
            "kind": "step",
            "tokens": tokens,
            # Its work (`kappa.cost.StepWork`), then how many requests share it.
            "work": (*batch_work(work), len(work)),
            "prefilled": [request_id for request_id in prefilled if request_id],
            "pace_s": parts.step_s if parts else 0.0,
            "announced": parts,
        }

    def _kappa_end(self) -> None:
        step, self._kappa_step = self._kappa_step, None
        if step is None:
            return
        start_s, pace_s = self._kappa_start_s, step["pace_s"]
        real_s = time.monotonic() - start_s
        if real_s < pace_s:
            time.sleep(pace_s - real_s)
        end_s = time.monotonic()
        self._kappa_last_end_s = start_s + pace_s if real_s < pace_s else end_s
        step.update(
            took_s=end_s - start_s,
            real_s=real_s,
            overrun=bool(pace_s and real_s > pace_s),
            spent=[
                (name, sum(source.take_load_s(req_id) for source in LOAD_SOURCES), compute_s)
                for req_id, name, compute_s in self._kappa_meter.took(end_s - start_s)
                if name
            ],
            t_s=time.time(),
        )
        # Each message wakes two processes: steps that complete no prompt go together.
        self._kappa_stats.send(step, urgent=bool(step["prefilled"]))


class Rewindable(torch.Generator):
    """A generator on the CPU that can take back what was drawn since it was marked.

    A request with a seed draws in every step of its prompt. vLLM takes back all draws but the last
    by the generator's offset, which one on a CPU does not have: its exception ends the engine.
    """

    def mark(self) -> None:
        """Where to come back to."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        """Of no meaning here."""
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
    """vLLM's CPU worker, metered."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As `Metered`, with generators that vLLM can take a step back."""
        mark_generators(self.model_runner)
        return super().sample_tokens(grammar_output)


class MeteredGPUWorker(Metered, Worker):
    """vLLM's GPU worker, metered. A step's seconds are those until its tokens are sampled; with
    vLLM's asynchronous scheduling that is when they were submitted, not when the device had
    computed them."""
