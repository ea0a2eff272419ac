"""vLLM's scheduler, telling what each of its iterations did; the order is vLLM's own.

What `workers.vllm.scheduler` is built on, and what stock vLLM is measured with
(`scheduler_cls="workers.vllm.recorded_scheduler.RecordedScheduler"`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from kappa.protocol import Charge
from workers.iteration_log import Iteration, IterationLog
from workers.stats_channel import StatsSender
from workers.vllm.blocks import tenant_of
from workers.vllm.options import Options

log = structlog.get_logger(__name__)

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


class RecordedScheduler(AsyncScheduler):
    """As vLLM's, with a record of each iteration (`workers.iteration_log`)."""

    waiting: Any
    skipped_waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = Options.read(self.vllm_config.additional_config, self.policy.value)
        self._log = IterationLog(StatsSender(self._options.stats).send, self._options.log)
        self._now = Iteration(0.0)

    def add_request(self, request: Any) -> None:
        """As vLLM's; a request that no tenant pays for is ended with an error, where an ingress of
        ours names every tenant (the searches of a beam reach the engine without their names)."""
        refused = self._options.tenant_required and not _has_tenant(request)
        if refused:
            # Blocked, it is never scheduled; vLLM ends it as one whose grammar does not compile.
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = None
        super().add_request(request)
        if refused:
            log.warning("request_without_tenant_refused", request_id=request.request_id)
            self.grammar_compile_error_reqs.add(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM's."""
        now = self._now = Iteration(time.monotonic(), queued=bool(self.waiting))
        output = self._schedule(throttle_prefills)
        pool = self.kv_cache_manager.block_pool
        now.capacity_blocks = pool.num_gpu_blocks - 1
        now.blocks = now.capacity_blocks - pool.get_num_free_blocks()
        now.tokens = output.total_num_scheduled_tokens
        now.budget_tokens = self.max_num_scheduled_tokens
        now.waiting, now.loading, now.running = self._counts()
        self._log.scheduled(now)
        return output

    def _preempt_request(self, request: Any, timestamp: float, **options: Any) -> None:
        super()._preempt_request(request, timestamp, **options)
        self._now.preempted += 1

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's."""
        now_s = time.monotonic()
        iteration = self._log.ended(now_s)
        if iteration is not None:
            self._ran(iteration.step_s, scheduler_output.num_scheduled_tokens, now_s)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._log.due(now_s, idle=not self.requests):
            self._log.publish(now_s, self._counts(), *self._said())
        return outputs

    def shutdown(self) -> None:
        """As vLLM's; writes what is left of the log."""
        self._log.close()
        super().shutdown()

    def _counts(self) -> tuple[int, int, int]:
        """Requests that wait, load and run."""
        loading = sum(request.status == LOADING for request in self.skipped_waiting)
        return len(self.waiting) + len(self.skipped_waiting) - loading, loading, len(self.running)

    # -- for those who do not leave the order to vLLM -----------------------------------------

    def _schedule(self, throttle_prefills: bool) -> Any:
        self._now.stock = True
        return super().schedule(throttle_prefills)

    def _ran(self, seconds: float, tokens: Mapping[str, int], now_s: float) -> None:
        """An iteration took so long, with so many tokens of each request."""

    def _said(self) -> tuple[int, Mapping[str, Charge]]:
        """Errors of the rule, and what was charged to each tenant."""
        return 0, {}


def _has_tenant(request: Any) -> bool:
    return bool(tenant_of(getattr(request.sampling_params, "extra_args", None)))
