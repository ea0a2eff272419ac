"""What a vLLM engine measures of itself before it serves, in its worker process: its host tier's
link and real steps, to which its step model is fitted.

The steps' batches are made by hand and run through the worker's own `execute_model` and
`sample_tokens`, as vLLM's warm-up does (`vllm.v1.worker.gpu.warmup`): a prompt behind 8,192 tokens
costs that one step, nothing becomes findable in a cache, no connector loads or stores. A context's
KV is whatever the blocks hold. Private names of vLLM:
tests/workers/vllm/test_measured_engine.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import structlog
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kappa.cost import StepModel, StepWork, batch_work
from kappa.plans.measured import fit_steps, rate_steps
from kappa_workers.vllm.measured_link import LinkTimer, TierRoom, beside_work

log = structlog.get_logger(__name__)

# Of the time there is, the link's part.
_LINK_SHARE = 0.25
_NEW_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CONTEXT_TOKENS = (0, 512, 2048, 8192, 32768)
_SEQUENCES = (2, 4, 8, 16, 32, 64, 128, 256)
# So often all steps are run, if there is time for it, after a first time of each that touches
# memory and compiles. What else runs on the machine only adds: the least of the seconds counts.
_ROUNDS = 8
# The seconds of a step are guessed from this many before it.
_RECENT = 3
# A step is skipped unless this many times its expected seconds, repeats included, are left.
_MARGIN = 1.5


class StepSize(NamedTuple):
    """A step: `requests` compute `new` tokens each behind `context`, and decode where `new` is
    1."""

    requests: int
    new: int
    context: int

    @property
    def chunks(self) -> list[tuple[int, int]]:
        return [(self.new, self.context)] * self.requests


class StepLimits(NamedTuple):
    """What a batch may hold."""

    # Tokens of a request.
    context_tokens: int
    # Tokens of a step.
    batch_tokens: int
    # Requests of a step.
    sequences: int
    block_tokens: int
    # Blocks on the device; block 0 is vLLM's own.
    blocks: int
    # Groups of layers with blocks of their own.
    groups: int = 1


def step_sizes(limits: StepLimits, prior: StepModel) -> list[StepSize]:
    """Prefills and decodes that fit, the shortest first by the prior."""
    most = limits.context_tokens - 3
    contexts = [c for c in (*_CONTEXT_TOKENS, most // 2) if c < most]
    sizes = {
        StepSize(1, new, context)
        for new in (*_NEW_TOKENS, limits.batch_tokens)
        for context in contexts
        if new <= limits.batch_tokens and new + context <= most
    }
    sizes |= {
        StepSize(requests, 1, context)
        for requests in (*_SEQUENCES, limits.sequences)
        for context in contexts
        if requests <= min(limits.sequences, limits.batch_tokens)
    }
    return sorted(sizes, key=lambda size: (prior.step_s(size.chunks), size))


class StepTimer:
    """Runs steps on a vLLM worker. execute, sample: its `execute_model` and `sample_tokens`,
    unmetered. agree: what the engine's first rank says, given what this one does: all run the same
    steps, and their clocks differ. clock: seconds."""

    def __init__(
        self,
        execute: Callable[[SchedulerOutput], Any],
        sample: Callable[[None], Any],
        limits: StepLimits,
        agree: Callable[[bool], bool] = bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._execute, self._sample, self._limits = execute, sample, limits
        self._agree, self._clock = agree, clock
        self._made = 0
        self._over: set[str] = set()

    def measure(self, prior: StepModel, budget_s: float) -> dict[str, Any]:
        """The constants fitted to all steps that there is time for, the shortest first: the fields
        of a `StepModel` and of its `StepFit`, and `prior_error`, the fit's `error` of the prior.

        Raises:
            ValueError: too few steps, or none that shows what computing takes.
        """
        samples = self.samples(prior, budget_s)
        works, seconds = [work for work, _ in samples], [took_s for _, took_s in samples]
        fit = fit_steps(works, seconds, prior.expert_idle)
        how = {"r2": fit.r2, "steps": fit.steps, "error": fit.error, "errors": dict(fit.errors)}
        return {**fit.step.to_dict(), **how, "prior_error": rate_steps(prior, works, seconds).error}

    def samples(self, prior: StepModel, budget_s: float) -> list[tuple[StepWork[float], float]]:
        """The work of steps, and their seconds. The seconds of a step are guessed from the steps
        before it, as a multiple of the prior's; a step that lacks the time has another chance in
        every round."""
        found: dict[StepSize, tuple[StepWork[float], float]] = {}
        sizes = step_sizes(self._limits, prior)
        end_s = self._clock() + budget_s
        try:
            for size in _ROUNDS * sizes:
                known = found.get(size)
                if known is None:
                    recent = [(found[s][1], prior.step_s(s.chunks)) for s in [*found][-_RECENT:]]
                    slower = max((took_s / prior_s for took_s, prior_s in recent), default=0.0)
                    expected_s = 2 * slower * prior.step_s(size.chunks)
                else:
                    expected_s = known[1]
                if self._agree(self._clock() + _MARGIN * expected_s > end_s):
                    continue
                if known is None:
                    self._once(size)
                work, took_s = self._once(size)
                found[size] = work, min(took_s, known[1] if known else took_s)
        finally:  # the last requests leave; nothing runs
            with suppress(Exception):
                self._execute(self._output([], CachedRequestData.make_empty(), {}))
        return list(found.values())

    def _once(self, size: StepSize) -> tuple[StepWork[float], float]:
        names = [f"kappa-measured-{self._made + i}" for i in range(size.requests)]
        self._made += size.requests
        fresh, context = self._fresh(names, size), size.context
        self._over.update(names)
        took_s = self._run(fresh)
        if size.new == 1 and context:  # decoding: the same requests, a token further
            context += 1
            self._over.clear()
            going = self._output([], self._going(names, context), dict.fromkeys(names, 1))
            self._over.update(names)
            took_s = self._run(going)
        return batch_work([(size.new, context)] * size.requests), took_s

    def _run(self, output: SchedulerOutput) -> float:
        start_s = self._clock()
        result = self._execute(output)
        if result is None:
            result = self._sample(None)
        if hasattr(result, "get_output"):  # asynchronous: the tokens are on their way
            result.get_output()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._clock() - start_s

    def _fresh(self, names: list[str], size: StepSize) -> SchedulerOutput:
        prompt = [1] * (size.context + size.new)
        block_tokens, usable = self._limits.block_tokens, self._limits.blocks - 1
        held = -(-(len(prompt) + 1) // block_tokens)
        new = []
        for index, name in enumerate(names):
            # More than there is: the same blocks again.
            ids = [1 + (index * held + i) % usable for i in range(held)]
            new.append(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=prompt,
                    mm_features=[],
                    # Drawing compiles a kernel on CPUs, for many seconds.
                    sampling_params=SamplingParams(temperature=0.0),
                    pooling_params=None,
                    block_ids=tuple(list(ids) for _ in range(self._limits.groups)),
                    num_computed_tokens=size.context,
                    lora_request=None,
                    prefill_token_ids=prompt,
                )
            )
        tokens = dict.fromkeys(names, size.new)
        return self._output(new, CachedRequestData.make_empty(), tokens)

    def _going(self, names: list[str], computed: int) -> CachedRequestData:
        going = CachedRequestData.make_empty()
        going.req_ids = list(names)
        going.new_block_ids = [None] * len(names)
        going.num_computed_tokens = [computed] * len(names)
        going.num_output_tokens = [1] * len(names)
        return going

    def _output(
        self, new: list[NewRequestData], going: CachedRequestData, tokens: dict[str, int]
    ) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, going
        output.num_scheduled_tokens = tokens
        output.total_num_scheduled_tokens = sum(tokens.values())
        output.num_common_prefix_blocks = [0] * self._limits.groups
        output.finished_req_ids, self._over = self._over, set()
        return output


@contextmanager
def without_connector(runner: Any) -> Iterator[None]:
    """Steps of a model runner that no KV connector takes part in; vLLM's newer one has a switch."""
    connector = kv_transfer_state._KV_CONNECTOR_AGENT
    switch = getattr(getattr(runner, "kv_connector", None), "set_disabled", lambda _: None)
    switch(True)
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        switch(False)
        kv_transfer_state._KV_CONNECTOR_AGENT = connector


def measure_engine(
    worker: Any, execute: Callable[[Any], Any], sample: Callable[[None], Any],
    prior: Mapping[str, float], budget_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Measure an engine that has nothing in flight; its device cache is zeros afterwards: an
    attention kernel may multiply slots past a sequence's end by zero, so they must be finite.

    execute, sample: the worker's methods for a step, unmetered. prior: the fields of a `StepModel`,
    which orders the steps and is compared to the fit. budget_s: seconds for all measurements.
    Returns the figures of `LinkTimer.measure`, "step" (those of `StepTimer.measure`), and
    "unmeasured": a sentence on each that is missing."""
    found: dict[str, Any] = {"unmeasured": []}
    scheduler, ranks = worker.scheduler_config, worker.parallel_config
    limits = StepLimits(
        context_tokens=int(worker.model_config.max_model_len),
        batch_tokens=int(scheduler.max_num_batched_tokens),
        sequences=int(scheduler.max_num_seqs),
        block_tokens=int(worker.cache_config.block_size),
        blocks=int(worker.cache_config.num_gpu_blocks),
        groups=len(worker.model_runner.kv_cache_config.kv_cache_groups),
    )
    connector = getattr(kv_transfer_state._KV_CONNECTOR_AGENT, "connector_worker", None)
    tier, spec = getattr(connector, "worker", None), getattr(connector, "spec", None)
    with _zeroed(worker.model_runner):
        if tier is not None and spec is not None:
            room = TierRoom(limits.blocks, int(spec.host_blocks), limits.groups)
            timer = LinkTimer(tier, room, beside_work(torch.device(worker.device)))
            with _noted("the host tier's link", found):
                found |= timer.measure(_LINK_SHARE * budget_s)
        if ranks.pipeline_parallel_size > 1:
            found["unmeasured"].append("a step: its stages run on several devices in turn")
            return found
        steps = StepTimer(execute, sample, limits, _agreement(ranks.world_size))
        with without_connector(worker.model_runner), _noted("a step", found):
            left_s = (1 - _LINK_SHARE) * budget_s
            found["step"] = steps.measure(StepModel.from_dict(prior), left_s)
    return found


@contextmanager
def _zeroed(runner: Any) -> Iterator[None]:
    """Leave the device cache of a model runner at zero."""
    try:
        yield
    finally:
        for cache in runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()


def _agreement(ranks: int) -> Callable[[bool], bool]:
    if ranks == 1:
        return bool
    return lambda mine: bool(get_world_group().broadcast_object(mine, src=0))


@contextmanager
def _noted(what: str, found: dict[str, Any]) -> Iterator[None]:
    """An error of a measurement costs no more than what it would have given."""
    try:
        yield
    except Exception as error:
        log.warning("engine_unmeasured", what=what, exc_info=error)
        found["unmeasured"].append(f"{what}: {error!r}")
