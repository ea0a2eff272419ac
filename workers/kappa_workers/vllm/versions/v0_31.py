"""vLLM 0.31 to 0.33: requests that hold KV wait in a queue that is drained first (vLLM's pull
request 57841), blocked ones without KV among all others, where the rule must not see them: they are
kept among those that hold KV, as in 0.29, and `split_blocked` brings them back there. The host tier
counts chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import Request


class Scheduler31(AsyncScheduler):
    """Private names of vLLM's scheduler."""

    waiting: Any
    kv_holding_waiting: Any
    deferred_waiting: set[Request]

    @property
    def held(self) -> Any:
        return self.kv_holding_waiting

    @property
    def most_running(self) -> int:
        return int(self.max_num_active_reqs)

    def _enqueue_waiting_request(self, request: Request) -> None:
        if self._is_blocked_waiting_status(request.status):
            self.deferred_waiting.add(request)
            self.held.add_request(request)
        else:
            super()._enqueue_waiting_request(request)

    def is_ready(self, request: Request) -> bool:
        return bool(self._handle_blocked_waiting_request(request))

    def expose_only(self, waiting: Iterable[Request], held: Iterable[Request]) -> tuple[Any, Any]:
        queues = self.waiting, self.kv_holding_waiting
        self.waiting, self.kv_holding_waiting = type(self.waiting)(waiting), type(self.held)(held)
        self.deferred_waiting.difference_update(self.waiting)
        return queues

    def restore(self, queues: tuple[Any, Any]) -> tuple[Any, Collection[Request]]:
        left = self.waiting
        self.waiting, self.kv_holding_waiting = queues
        return left, self.deferred_waiting

    def split_blocked(self) -> None:
        """Restore which queue a request waits in after an iteration in vLLM's own order."""
        for request in self.deferred_waiting:
            blocked = self._is_blocked_waiting_status(request.status)
            if blocked and request in self.waiting:
                self.waiting.remove(request)
                self.kv_holding_waiting.add_request(request)

    def refuse(self, request: Request) -> None:
        errors: Any = self.grammar_compile_error_reqs
        if isinstance(errors, set):  # until 0.32
            errors.add(request.request_id)
            return
        from vllm.outputs import RequestError

        errors[request.request_id] = RequestError(
            code="validation_error", message="the request names no tenant"
        )


def note_use(offloading: Any, status: Any) -> None:
    """As 0.29's; vLLM counts it when the request ends."""
    for group in status.group_states:
        offloading.manager.touch(group.offload_keys, status.req_context)


class Spec31(CPUOffloadingSpec):
    """Private names of vLLM's description of host memory."""

    @property
    def host_blocks(self) -> int:
        return int(self.num_chunks)


class Manager31(CPUOffloadingManager):
    """Private names of vLLM's manager of host memory."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_chunks=num_blocks, **options)

    def slot(self, key: OffloadKey) -> int:
        chunk = self._policy.get(key)
        assert chunk is not None
        return int(chunk.chunk_id)

    @property
    def free_blocks(self) -> int:
        return int(self._get_num_free_chunks())

    def drop(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            chunk = self._policy.get(key)
            assert chunk is not None and chunk.ref_cnt == 0
            self._policy.remove(key)
            self._free_chunk(chunk)
            self._num_evictable_cache_chunks -= 1
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(list(keys), self.medium, removed=True))
