"""vLLM's `OffloadingConnector`, with one addition: it says what each request took from where.

When the scheduler has allocated a request, the split of its prompt into device, host and new
tokens is known for good; this is where it is read. Named in the engine's `kv_transfer_config`
as `kv_connector=HostTierConnector, kv_connector_module_path=workers.connector`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kappa.report import REQUEST_ID_KEY
from workers.stats_channel import StatsSender

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


def kappa_request_id(sampling_params: Any) -> str:
    """The ingress' request id, carried through vLLM in `SamplingParams.extra_args`; "" if none."""
    extra_args = getattr(sampling_params, "extra_args", None) or {}
    return str(extra_args.get(REQUEST_ID_KEY, ""))


class HostTierConnector(OffloadingConnector):
    """Reports each admitted request's tokens by source on the stats channel."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._kappa_device_tokens: dict[str, int] = {}
        self._kappa_stats: StatsSender | None = None
        if role == KVConnectorRole.SCHEDULER:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._kappa_stats = StatsSender(extra.get("kappa_stats", ""))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's; remembers the device hit, which vLLM does not repeat later."""
        self._kappa_device_tokens[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """As vLLM's; the request is admitted: report device, host and new tokens once."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        device_tokens = self._kappa_device_tokens.pop(request.request_id, None)
        if device_tokens is None or self._kappa_stats is None:
            return
        prompt_tokens = request.num_prompt_tokens
        self._kappa_stats.send(
            {
                "kind": "admit",
                "request_id": kappa_request_id(request.sampling_params),
                "device_tokens": device_tokens,
                "host_tokens": num_external_tokens,
                "new_tokens": max(prompt_tokens - device_tokens - num_external_tokens, 1),
                "t_s": time.time(),
            }
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; forgets a request that ended before it was admitted."""
        self._kappa_device_tokens.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; forgets a request that ended before it was admitted."""
        self._kappa_device_tokens.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)
