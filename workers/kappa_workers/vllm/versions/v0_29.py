"""vLLM 0.29: requests that are blocked, load or have loaded wait in a queue of their own, which is
looked at first; the host tier counts blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import Request


class Scheduler29(AsyncScheduler):
    """Private names of vLLM's scheduler."""

    waiting: Any
    skipped_waiting: Any

    @property
    def held(self) -> Any:
        return self.skipped_waiting

    @property
    def most_running(self) -> int:
        return self.max_num_running_reqs

    def is_ready(self, request: Request) -> bool:
        """Whether a held request may run or be planned: it is unblocked if its time has come."""
        blocked = self._is_blocked_waiting_status(request.status)
        return not blocked or self._try_promote_blocked_waiting_request(request)

    def expose_only(self, waiting: Iterable[Request], held: Iterable[Request]) -> tuple[Any, Any]:
        """Let the coming iteration see only these; returns both queues, for `restore`."""
        queues = self.waiting, self.skipped_waiting
        self.waiting, self.skipped_waiting = type(self.waiting)(waiting), type(self.held)(held)
        return queues

    def restore(self, queues: tuple[Any, Any]) -> tuple[Any, Collection[Request]]:
        """Undo `expose_only`; returns the rest of `waiting`, and what vLLM deferred."""
        left, deferred = self.waiting, self.skipped_waiting
        self.waiting, self.skipped_waiting = queues
        return left, deferred

    def split_blocked(self) -> None:
        """Restore which queue a request waits in after an iteration in vLLM's own order."""

    def refuse(self, request: Request) -> None:
        """End a request with an error before it runs, as vLLM does where a grammar does not
        compile."""
        self.grammar_compile_error_reqs.add(request.request_id)


def note_use(offloading: Any, status: Any) -> None:
    """What a request may load counts as used now, as vLLM counts it at its first look-up.
    offloading: vLLM's scheduler side of the connector; status: its state of the request."""
    offloading._touch(status)


class Spec29(CPUOffloadingSpec):
    """Private names of vLLM's description of host memory."""

    @property
    def host_blocks(self) -> int:
        """Blocks that it holds, where a chunk is one."""
        return int(self.num_blocks)


class Manager29(CPUOffloadingManager):
    """Private names of vLLM's manager of host memory."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks=num_blocks, **options)

    def slot(self, key: OffloadKey) -> int:
        """Where in host memory a block is, or is being stored."""
        block = self._policy.get(key)
        assert block is not None
        return int(block.block_id)

    @property
    def free_blocks(self) -> int:
        """Places that hold nothing."""
        return int(self._get_num_free_blocks())

    def drop(self, keys: Collection[OffloadKey]) -> None:
        """Forget blocks that are not being loaded."""
        for key in keys:
            block = self._policy.get(key)
            assert block is not None and block.ref_cnt == 0
            self._policy.remove(key)
            self._free_block(block)
            self._num_evictable_cache_blocks -= 1
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(list(keys), self.medium, removed=True))
