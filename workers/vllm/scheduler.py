"""vLLM's scheduler, admitting what a rule says. Translation only.

Named in an engine's arguments as `scheduler_cls="workers.vllm.scheduler.FairScheduler"`, configured
by `additional_config["kappa_scheduler"]` (`workers.vllm.options`). Before an iteration the rule
says what is admitted; vLLM's own `schedule()` then sees only that, and what has been loaded, in its
two queues, and the rest is put back. Should the rule fail, both queues are as vLLM would have them,
and it runs in its own order. Private names of vLLM: tests/workers/vllm/test_scheduler_contract.py.
"""

from __future__ import annotations

import time
from typing import Any

import structlog
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from scheduler.work import Plan
from workers.vllm.blocks import EngineMemory, EngineWork, by_tenant, heard
from workers.vllm.headroom import offer
from workers.vllm.recorded_scheduler import LOADING, RecordedScheduler
from workers.vllm.rule_guard import GuardedRule

log = structlog.get_logger(__name__)


class FairScheduler(RecordedScheduler):
    """Any rule of ours in vLLM. Between iterations `waiting` holds what the rule knows to wait,
    `skipped_waiting` what is blocked, loading, or just loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rule = GuardedRule(self._options.make_rule, self._rule_failed)
        self._memory = EngineMemory(self.kv_cache_manager, self.block_size, bool(self.connector))
        self._works: dict[str, EngineWork] = {}
        self._rule.restart((), time.monotonic())

    def _rule_failed(self, event: str, error: Exception) -> None:
        log.error("scheduling_rule_failed", during=event, reason=repr(error), exc_info=error)

    def _enqueue_waiting_request(self, request: Request) -> None:
        now_s = time.monotonic()
        work = self._works.get(request.request_id)
        if work is None:
            work = self._works[request.request_id] = EngineWork(request, now_s)
            self._rule.heard(*heard(work), now_s)
        if request.num_computed_tokens:  # a session that goes on, with its blocks
            return self.skipped_waiting.add_request(request)
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
        work = self._works[request.request_id]
        work.again()
        self._rule.preempted(work, time.monotonic())

    def _schedule(self, throttle_prefills: bool) -> Any:
        now_s, chosen = time.monotonic(), None
        if self.pause_state == PauseState.UNPAUSED and not self._rule.given_up:
            try:
                chosen = self._choose(now_s)
            except Exception as error:
                self._rule.failed("translate", error)
        self._now.plan_s = time.monotonic() - now_s
        if chosen is None:
            return super()._schedule(throttle_prefills)
        queues, (going, plan) = (self.waiting, self.skipped_waiting), chosen
        self.waiting = type(self.waiting)(work.request for work, _ in plan.admitted)
        self.skipped_waiting = type(self.skipped_waiting)(going)
        output = super()._schedule(throttle_prefills)
        self._put_back(queues, going, plan, now_s)
        return output

    def _choose(self, now_s: float) -> tuple[list[Request], Any] | None:
        """Loaded requests that fit, and the rule's plan for the others; None: vLLM's own order."""
        loaded, rule = self._promote(now_s), self._rule
        if not rule.works:
            rule.restart([self._works[request.request_id] for request in self.waiting], now_s)
        if not rule.agrees(len(self.waiting)):
            return None
        found = offer(self, self._memory, self._works, loaded, self._counts()[1])
        if found.room is None:
            victim: Any = rule.victim([self._works[r.request_id] for r in self.running])
            if victim is not None:  # vLLM preempts the last
                self.running.append(self.running.pop(self.running.index(victim.request)))
        plan = rule.plan(found.room, now_s) if found.room and self.waiting else Plan()
        return None if plan is None else (found.going, plan)

    def _promote(self, now_s: float) -> list[Request]:
        """Sort out what vLLM skipped: blocked requests stay, others wait; returns loaded ones."""
        loaded = []
        for request in reversed(list(self.skipped_waiting)):
            was_loading = request.status == LOADING
            blocked = self._is_blocked_waiting_status(request.status)
            if blocked and not self._try_promote_blocked_waiting_request(request):
                continue
            work = self._works[request.request_id]
            if was_loading:
                self._memory.landed()
            if request.num_computed_tokens:
                loaded.append(request)
                if was_loading:
                    self._rule.landed(work, now_s)
            else:  # it may be planned now; or its load has failed
                self.skipped_waiting.remove(request)
                self.waiting.prepend_request(request)
                self._rule.returned(work, now_s)
        return loaded[::-1]

    def _put_back(self, queues: Any, going: list[Request], plan: Any, now_s: float) -> None:
        """Join what vLLM left in its queues with what was kept from it; tell what became of it."""
        left, skipped = self.waiting, self.skipped_waiting
        self.waiting, self.skipped_waiting = queues
        for request in (r for r in going if r.status == RequestStatus.RUNNING):
            self.skipped_waiting.remove(request)
        planned = {work.request for work, _ in plan.admitted}
        for request in (r for r in reversed(left) if r not in planned):
            self.waiting.prepend_request(request)  # just preempted
        for work, quote in plan.admitted:
            request = work.request
            if request.status not in (RequestStatus.RUNNING, LOADING):
                self._now.returned += 1
                if request in skipped:
                    self._memory.put_off(work)
                self._rule.returned(work, now_s)
                continue
            self._now.admitted += 1
            self.waiting.remove(request)
            if request.status == LOADING:
                self.skipped_waiting.append(request)
            elif quote.host_tokens:
                self._rule.landed(work, now_s)  # there was nothing to load after all
        self._now.passed, self._now.stock = plan.passed, False

    def _ran(self, seconds: float, tokens: Any, now_s: float) -> None:
        if sums := by_tenant(tokens, self._works):
            self._rule.ran(seconds, sums, now_s)

    def _said(self) -> Any:
        return self._rule.errors_total, self._rule.charges()
