"""vLLM's scheduler, with a record of each iteration, and admitting what a rule says.

Before an iteration the rule picks the requests to admit; vLLM's own `schedule()` then sees only
these, and loaded ones, in its two queues, and the others are put back. If the rule fails, vLLM runs
in its own order. Configured by `kappa_workers.vllm.options`; private names of vLLM:
`kappa_workers.vllm.versions`, and tests/workers/vllm/test_scheduler_contract.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from kappa_scheduler.work import Plan, Room
from kappa_workers.iteration_log import Iteration, IterationLog
from kappa_workers.request_metadata import charges_of, tenant_of
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm import block_hashes
from kappa_workers.vllm.engine_view import EngineMemory, EngineWork
from kappa_workers.vllm.options import SchedulerOptions
from kappa_workers.vllm.rule_guard import GuardedRule
from kappa_workers.vllm.versions.installed import SchedulerNames

log = structlog.get_logger(__name__)

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
# A batch leaves at once after a pause, else with what else happens within so long.
_HOLD_S = 0.05


class HeldEvents:
    """Stands in for an engine's `EventPublisher` and holds batches back for it: each batch wakes
    its thread, the replica and every decider."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher
        self._batch: Any = None
        self._sent_s = float("-inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)

    def publish(self, batch: Any) -> None:
        """Hold a `KVEventBatch` until `flush`."""
        if self._batch is None:
            self._batch = batch
        else:
            self._batch.events.extend(batch.events)

    def flush(self, now_s: float, *, idle: bool) -> None:
        """Publish the held events; unless the engine is idle, 50 ms after the last batch."""
        if self._batch is not None and (idle or now_s - self._sent_s >= _HOLD_S):
            self._publisher.publish(self._batch)
            self._batch, self._sent_s = None, now_s

    def shutdown(self) -> None:
        self.flush(self._sent_s, idle=True)
        self._publisher.shutdown()


class FairScheduler(SchedulerNames):
    """Any rule of ours in vLLM, or (`STOCK`) vLLM's own order with the same records. Between
    iterations `waiting` holds the requests that wait as the rule knows it, `held` those that are
    blocked, load, or have just been loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        block_hashes.install()  # the engine makes its hasher after its scheduler
        options = self._options = SchedulerOptions.read(self.vllm_config.additional_config)
        self._log = IterationLog(StatsSender(options.stats).send, options.log)
        self._now = Iteration(0.0)
        self.kv_event_publisher: Any = HeldEvents(self.kv_event_publisher)
        self._rule = GuardedRule(options.make_rule, self._rule_failed)
        self._memory = EngineMemory(self.kv_cache_manager, self.block_size, bool(self.connector))
        self._works: dict[str, EngineWork] = {}
        self._rule.restart((), time.monotonic())
        self._measured = not options.profile
        self._limit = options.make_limit()
        self._most_tokens = self.max_num_scheduled_tokens

    def _rule_failed(self, event: str, error: Exception) -> None:
        log.error("scheduling_rule_failed", during=event, reason=repr(error), exc_info=error)

    # -- requests come and go -----------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """As vLLM's; a request that no tenant pays for is ended with an error, where a decider of
        ours names every tenant (the searches of a beam reach the engine without their names)."""
        extra = getattr(request.sampling_params, "extra_args", None)
        if not self._measured:  # it is now: an engine measures itself before it serves
            self._measured = True
            self._rule.restart((), time.monotonic())
            self._limit = self._options.make_limit()
        refused = self._options.tenant_required and not tenant_of(extra)
        if refused:
            # Blocked, it is never scheduled.
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = None
        super().add_request(request)
        if refused:
            log.warning("request_without_tenant_refused", request_id=request.request_id)
            self.refuse(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        now_s = time.monotonic()
        work = self._works.get(request.request_id)
        if work is None:
            work = self._works[request.request_id] = EngineWork(request, now_s)
            self._rule.charged_elsewhere(*charges_of(work.extra, work.tenant), now_s)
        if request.num_computed_tokens:  # a session that goes on, with its blocks
            self.held.add_request(request)
            return
        super()._enqueue_waiting_request(request)
        if not self._is_blocked_waiting_status(request.status):
            self._rule.add(work, now_s)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        freed = super()._free_request(request, delay_free_blocks)
        work = self._works.pop(request.request_id)
        self._rule.ended(work, request.num_output_tokens, time.monotonic())
        return freed

    def _preempt_request(self, request: Request, timestamp: float, **options: Any) -> None:
        super()._preempt_request(request, timestamp, **options)
        self._now.preempted += 1
        work = self._works[request.request_id]
        work.preempted()
        self._rule.preempted(work, time.monotonic())

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """As vLLM's, which has a running request compute the blocks that did not come. Meanwhile no
        other request may find them, and the step gives no token: vLLM leaves the blocks in its
        prefix cache, and in an `AsyncScheduler` waits for that token."""
        for request in self.running:
            (ids,) = self.kv_cache_manager.get_block_ids(request.request_id)
            lost = (place for place, block in enumerate(ids) if block in invalid_block_ids)
            self.kv_cache_manager.evict_blocks(set(ids[next(lost, len(ids)) :]))
        rescheduled: set[str] = super()._handle_invalid_blocks(
            invalid_block_ids, num_scheduled_tokens
        )
        for request_id in rescheduled & self.requests.keys():
            self.requests[request_id].num_output_placeholders = 0
        return rescheduled

    def shutdown(self) -> None:
        self._log.close()
        super().shutdown()

    # -- an iteration -------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now_s = time.monotonic()
        now = self._now = Iteration(now_s, queued=bool(self.waiting))
        arrived = getattr(self.connector, "kappa_arrived", None)
        if arrived is not None and arrived():
            self._memory.landed()
        self.max_num_scheduled_tokens = self._step_tokens(now_s)
        chosen = None
        if self.pause_state == PauseState.UNPAUSED and not self._rule.given_up:
            try:
                chosen = self._choose(now_s)
            except Exception as error:
                self._rule.failed("translate", error)
        now.plan_s = time.monotonic() - now_s
        now.stock = chosen is None
        if chosen is None or not (self.waiting or self.held):
            output = super().schedule(throttle_prefills)
            self.split_blocked()
        else:
            going, plan = chosen
            queues = self.expose_only((work.request for work, _ in plan.admitted), going)
            output = super().schedule(throttle_prefills)
            self._put_back(queues, going, plan, now_s)
        now.capacity_blocks = self._memory.capacity_blocks
        now.blocks = now.capacity_blocks - self._memory.free_blocks
        now.tokens = output.total_num_scheduled_tokens
        now.budget_tokens = self._most_tokens
        now.waiting, now.loading, now.running = self._counts()
        self._log.scheduled(now)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now_s, rule = time.monotonic(), self._rule
        iteration = self._log.ended(now_s)
        if iteration is not None and rule.works:
            by_tenant: dict[str, int] = {}
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
                work = self._works.get(request_id)
                if work is not None:  # else it is gone
                    work.ran(self.block_size)
                    by_tenant[work.tenant] = by_tenant.get(work.tenant, 0) + tokens
            if by_tenant:
                rule.ran(iteration.step_s, by_tenant, now_s)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        idle = not self.requests
        self.kv_event_publisher.flush(now_s, idle=idle)
        if self._log.due(now_s, idle):
            self._log.publish(now_s, self._counts(), rule.errors_total, rule.charges())
        return outputs

    def _counts(self) -> tuple[int, int, int]:
        """Requests that wait, load and run."""
        loading = sum(request.status == LOADING for request in self.held)
        return len(self.waiting) + len(self.held) - loading, loading, len(self.running)

    def _step_tokens(self, now_s: float) -> int:
        """Most tokens of the coming step: the engine's budget, or what those that decode have time
        for. An engine that computes prompts whole keeps its budget."""
        if self._limit is None or not self.scheduler_config.enable_chunked_prefill:
            return self._most_tokens
        prompts = self._inflight_prefills
        decoding = [request for request in self.running if request not in prompts]
        context = sum([r.num_computed_tokens for r in decoding])
        wanted = sum([r.num_tokens_with_spec + r.num_output_placeholders for r in decoding])
        head = next((request for request in self.running if request in prompts), None)
        prompt = (0, 0, 0.0)
        if head is not None:
            behind = head.num_computed_tokens
            arrival_s = self._works[head.request_id].arrival_s
            prompt = behind, head.num_tokens - behind, now_s - arrival_s
        tokens = self._limit.tokens(len(decoding), context, *prompt)
        return int(min(max(tokens, wanted - context + 1), self._most_tokens))

    # -- what the rule says -------------------------------------------------------------------

    def _choose(self, now_s: float) -> tuple[list[Request], Any] | None:
        """Loaded requests that fit, and the rule's plan for the others; None: vLLM's own order."""
        loaded, rule = self._promote(now_s) if self.held else [], self._rule
        if not rule.works:
            rule.restart([self._works[request.request_id] for request in self.waiting], now_s)
        if not rule.agrees(len(self.waiting)):
            return None
        if not (self.waiting or loaded):
            # None waits. Running requests take one block each besides the budget's at most.
            most_blocks = len(self.running) + self.max_num_scheduled_tokens // self.block_size
            if self._memory.free_blocks > most_blocks:
                self._memory.changed = True
                return [], Plan()
        going, room = self._room(loaded)
        if room is None:
            victim: Any = rule.victim([self._works[r.request_id] for r in self.running])
            if victim is not None:  # vLLM preempts the last
                self.running.append(self.running.pop(self.running.index(victim.request)))
        plan = rule.plan(room, now_s) if room and self.waiting else Plan()
        return None if plan is None else (going, plan)

    def _promote(self, now_s: float) -> list[Request]:
        """Sort out what vLLM skipped: blocked requests stay, others wait; returns loaded ones."""
        loaded = []
        for request in reversed(list(self.held)):
            was_loading = request.status == LOADING
            if not self.is_ready(request):
                continue
            work = self._works[request.request_id]
            if was_loading:
                self._memory.landed()
            if request.num_computed_tokens:
                loaded.append(request)
                if was_loading:
                    self._rule.landed(work, now_s)
            else:  # it may be planned now; or its load has failed
                self.held.remove(request)
                self.waiting.prepend_request(request)
                self._rule.returned(work, now_s)
        return loaded[::-1]

    def _room(self, loaded: Sequence[Request]) -> tuple[list[Request], Room | None]:
        """(loaded requests that fit now, what the coming iteration has to give to others). vLLM
        serves running requests first, in order; what admitted requests still need for their prompts
        is promised. None instead of a room: running ones need more blocks than there are, so that
        vLLM will preempt one and admit none."""
        budget, size = self.max_num_scheduled_tokens, self.block_size
        free_blocks, decode_blocks = self._memory.free_blocks, 0
        for request in self.running:
            done = request.num_computed_tokens
            wanted = request.num_tokens_with_spec + request.num_output_placeholders - done
            tokens = min(wanted, budget)
            blocks = -(-(done + tokens) // size) - -(-done // size)
            budget -= tokens
            free_blocks -= blocks
            if request not in self._inflight_prefills:
                decode_blocks += blocks
        if free_blocks < 0:
            return [], None
        slots = self.most_running - len(self.running) - self.num_waiting_for_streaming_input
        going: list[Request] = []
        for request in loaded:
            blocks = self._request_remaining_blocks(request)
            if blocks <= free_blocks and budget > 0 and len(going) < slots:
                going.append(request)
                free_blocks -= blocks
                budget -= min(request.num_tokens - request.num_computed_tokens, budget)
        # As vLLM does when it admits a load: what was admitted before must still fit as a whole.
        watermark = self.kv_cache_manager.watermark_blocks if self.running or going else 0
        promised = decode_blocks + self._inflight_prefill_reserved_blocks() + watermark
        loading = self._counts()[1]
        self._memory.begin(promised, loading, bool(self._inflight_prefills))
        holding = len(self.running) + len(loaded) + loading
        return going, Room(self._memory, budget, slots - len(going), holding)

    def _put_back(self, queues: Any, going: list[Request], plan: Any, now_s: float) -> None:
        """Join the requests that vLLM left in its queues with those kept from it (`queues`: as they
        were before), and tell the rule which ones were admitted."""
        left, deferred = self.restore(queues)
        for request in (r for r in going if r.status == RequestStatus.RUNNING):
            self.held.remove(request)
        planned = {work.request for work, _ in plan.admitted}
        for request in (r for r in reversed(left) if r not in planned):
            self.waiting.prepend_request(request)  # just preempted
        for work, quote in plan.admitted:
            request = work.request
            if request.status not in (RequestStatus.RUNNING, LOADING):
                self._now.returned += 1
                if request in deferred:
                    self._memory.put_off(work)
                self._rule.returned(work, now_s)
                continue
            self._now.admitted += 1
            self.waiting.remove(request)
            if request.status == LOADING:
                self.held.append(request)
            elif quote.host_tokens:
                self._rule.landed(work, now_s)  # there was nothing to load after all
        self._now.passed = plan.passed
