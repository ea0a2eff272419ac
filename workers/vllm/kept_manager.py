"""The manager of a host tier that outlives its engine.

It takes over what a predecessor left on the shelf, and writes down what it stores for a successor.
Chosen by `workers.vllm.host_tier` where there is a shelf.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus

from workers.vllm.host_tier import HostTierManager
from workers.vllm.kept_tier import KeptTier


class KeptTierManager(HostTierManager):
    """As `HostTierManager`, with its blocks on a shelf."""

    def __init__(self, kept: KeptTier, **options: Any) -> None:
        """`options`: as `HostTierManager`'s."""
        super().__init__(**options)
        self.kept = kept
        self._adopt()

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As `HostTierManager`'s; the slots are void from now on."""
        output = super().prepare_store(keys, req_context)
        for key in output.keys_to_store if output is not None else ():
            block = self._policy.get(key)
            assert block is not None
            self.kept.overwriting(block.block_id)
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As `HostTierManager`'s; what was stored is there for a successor."""
        super().complete_store(keys, req_context, success)
        for key in keys:
            # A store that a worker gave up has left no block, whatever `success` says.
            block = self._policy.get(key)
            if block is not None and block.is_ready:
                self.kept.stored(bytes(key), block.block_id)
        self.kept.failed(bytes(key) for key in keys)

    def reset_cache(self) -> None:
        """As `HostTierManager`'s; nothing is left to a successor either."""
        self.kept.clear()
        super().reset_cache()

    def shutdown(self) -> None:
        """As vLLM's; leaves the shelf to a successor."""
        super().shutdown()
        self.kept.close()

    def _adopt(self) -> None:
        """Take blocks that were found for stored ones, the oldest first to be evicted."""
        for slot, block in self.kept.found:
            key, status = OffloadKey(block.key), BlockStatus(slot)
            self._policy.insert(key, status)
            status.ref_cnt = 0
            self._policy.mark_evictable(key)
        taken = {slot for slot, _ in self.kept.found}
        self._num_allocated_blocks = self._num_blocks
        self._free_list = [slot for slot in range(self._num_blocks) if slot not in taken]
        self._num_evictable_cache_blocks = len(taken)
