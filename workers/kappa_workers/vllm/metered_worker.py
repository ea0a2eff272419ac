"""vLLM workers that report every engine step.

Of an engine's ranks the one reports that gives vLLM its outputs. With asynchronous scheduling a
step is handed out while the one before it still runs: it lasted from its hand-out, or the end of
the one before if that is later, until its outputs are there; on a GPU events on its stream say so
more exactly. On machines without one a step can be made to last
(`kappa_workers.paced.metered_worker`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from kappa.cost import batch_work
from kappa_workers.request_metadata import request_id_of
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.load_sources import LOAD_SOURCES
from kappa_workers.vllm.measured_worker import MeasuredWorker
from kappa_workers.vllm.options import STATS_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# An engine with nothing to compute but loads in flight would poll as fast as it can.
_LOAD_POLL_S = 0.01


@dataclass(slots=True)
class _Prompt:
    """A prompt that is being computed."""

    tokens: int
    # The decider's id; "" without.
    request_id: str
    # Seconds of all steps that computed a part.
    compute_s: float = 0.0


@dataclass(slots=True)
class ScheduledStep:
    """The work of one step."""

    # (new tokens, context tokens before them) of each request.
    chunks: list[tuple[int, int]] = field(default_factory=list)
    # Prompts that it computes a part of.
    computing: list[_Prompt] = field(default_factory=list)
    # Prompts that it computes the last part of, with vLLM's ids.
    finishing: list[tuple[str, _Prompt]] = field(default_factory=list)

    @property
    def prefilled(self) -> list[str]:
        """The decider's ids of prompts that it finishes."""
        return [prompt.request_id for _, prompt in self.finishing]

    def took(self, seconds: float) -> list[tuple[str, str, float]]:
        """Note how long it lasted; (vLLM's id, ours, seconds of all its steps) of each prompt that
        it finished."""
        for prompt in self.computing:
            prompt.compute_s += seconds
        finished = [(req_id, p.request_id, p.compute_s) for req_id, p in self.finishing]
        for _, prompt in self.finishing:
            prompt.compute_s = 0.0
        return finished


class StepMeter:
    """Follows requests over steps: what each computes, and which prompts it finishes."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def work(self, scheduled: SchedulerOutput) -> ScheduledStep:
        contexts = []
        for new in scheduled.scheduled_new_reqs:
            tokens, name = len(new.prompt_token_ids or ()), request_id_of(new.sampling_params)
            self._prompts[new.req_id] = _Prompt(tokens, name)
            contexts.append((new.req_id, new.num_computed_tokens))
        cached = scheduled.scheduled_cached_reqs
        contexts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        step = ScheduledStep()
        for req_id, context in contexts:
            new_tokens = scheduled.num_scheduled_tokens[req_id]
            step.chunks.append((new_tokens, context))
            prompt = self._prompts.get(req_id)
            if prompt is not None and context < prompt.tokens:
                step.computing.append(prompt)
                if prompt.tokens <= context + new_tokens:
                    step.finishing.append((req_id, prompt))
        for req_id in scheduled.finished_req_ids:
            self._prompts.pop(req_id, None)
        return step


@dataclass(slots=True)
class Timed:
    """A step under way."""

    scheduled: ScheduledStep
    # Its report so far.
    message: dict[str, Any]
    # When it was handed out (monotonic).
    start_s: float
    # An event on the GPU's stream before the step; None on a CPU, as the next.
    begun: Any = None
    # The event behind the step.
    done: Any = None

    def device_s(self) -> float | None:
        """Seconds between its events; None where there are none, or the device is not there yet."""
        if self.done is None or not self.done.query():
            return None
        return float(self.begun.elapsed_time(self.done)) / 1e3


class TimedOutput(AsyncModelRunnerOutput):
    """Outputs that are not there yet; once they are, `ended` is called."""

    def __init__(self, output: AsyncModelRunnerOutput, ended: Callable[[], None]) -> None:
        self._output, self._ended = output, ended

    def get_output(self) -> Any:
        output = self._output.get_output()
        self._ended()
        return output


class Metered(MeasuredWorker):
    """A report per step, in front of a vLLM worker's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = self.vllm_config  # type: ignore[attr-defined]
        config, ranks = vllm_config.additional_config, vllm_config.parallel_config
        self._kappa_stats = StatsSender(config.get(STATS_KEY, ""))
        self._kappa_meter = StepMeter()
        self._kappa_step: Timed | None = None
        self._kappa_last_end_s = 0.0
        # Outputs that are waited for may be taken by another thread than the one that runs steps.
        self._kappa_lock = threading.Lock()
        # The first rank of the last stage, as in vLLM's executors.
        last = ranks.tensor_parallel_size * ranks.prefill_context_parallel_size
        self._kappa_reports: bool = self.rank == ranks.world_size - last  # type: ignore[attr-defined]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step; its report follows once its tokens are sampled."""
        self._kappa_begin(scheduler_output)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens == 0:
            with self._kappa_lock:
                self._kappa_stats.flush()
            for source in LOAD_SOURCES:
                source.wait_for_load(_LOAD_POLL_S)
        elif output is not None:
            return self._kappa_end(output)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as vLLM does, then report the step."""
        return self._kappa_end(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def _kappa_step_calls(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # vLLM's own: steps that measure the engine are not reported.
        return super().execute_model, super().sample_tokens  # type: ignore[misc]

    def _kappa_mark(self) -> Any:
        """Something on the device's stream that says when the device came by; None on a CPU."""
        return None

    def _kappa_begin(self, scheduler_output: SchedulerOutput) -> None:
        if not self._kappa_reports:
            return
        scheduled = self._kappa_meter.work(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens == 0:
            return
        message = {
            "kind": "step",
            "tokens": tokens,
            # Its work (`kappa.cost.StepWork`), then how many requests share it.
            "work": (*batch_work(scheduled.chunks), len(scheduled.chunks)),
            "prefilled": [request_id for request_id in scheduled.prefilled if request_id],
            "pace_s": 0.0,
        }
        self._kappa_step = Timed(scheduled, message, time.monotonic(), self._kappa_mark())

    def _kappa_end(self, output: Any) -> Any:
        """The step has been handed out, and on a CPU has ended; returns its output."""
        step, self._kappa_step = self._kappa_step, None
        if step is None:
            return output
        step.done = self._kappa_mark()
        if isinstance(output, AsyncModelRunnerOutput):
            return TimedOutput(output, lambda: self._kappa_report(step))
        self._kappa_report(step)
        return output

    def _kappa_lasted(self, step: Timed, start_s: float) -> tuple[float, float]:
        """Seconds of a step that began then and has just ended, and of them those that its
        computing took."""
        self._kappa_last_end_s = end_s = time.monotonic()
        device_s = step.device_s()
        took_s = end_s - start_s if device_s is None else device_s
        return took_s, took_s

    def _kappa_report(self, step: Timed) -> None:
        """The step's outputs are there: report it."""
        with self._kappa_lock:
            message = step.message
            took_s, real_s = self._kappa_lasted(step, max(step.start_s, self._kappa_last_end_s))
            message.update(
                took_s=took_s,
                real_s=real_s,
                overrun=bool(message["pace_s"] and real_s > message["pace_s"]),
                spent=[
                    (name, sum(source.take_load_s(req_id) for source in LOAD_SOURCES), compute_s)
                    for req_id, name, compute_s in step.scheduled.took(took_s)
                    if name
                ],
                t_s=time.time(),
            )
            # Each message wakes two processes: steps that complete no prompt go together.
            self._kappa_stats.send(message, urgent=bool(message["prefilled"]))


class MeteredGPUWorker(Metered, Worker):
    """vLLM's GPU worker, metered."""

    def _kappa_mark(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark
