"""The connector of machines without a GPU: `kappa_workers.vllm.connector`, and loads by layers.
With `engine.load: layers` a request that has its engine to itself loads in its prompt's own step,
each layer while the one before is computed (paper 001, Eq. 4; docs/host-tiers.md). vLLM computes
the blocks that do not come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kappa_workers.paced.host_tier import HostTierWorker
from kappa_workers.vllm.connector import HostTierConnector, HostTierMetadata
from kappa_workers.vllm.options import LINK_KEY, LinkRules, read_options

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass
class CpuHostTierMetadata(HostTierMetadata):
    """by_layer: requests that load in the step, layer by layer, by job."""

    by_layer: dict[int, str] = field(default_factory=dict)


class CpuHostTierConnector(HostTierConnector):
    """Named in the engine's `kv_transfer_config` (`kappa_workers.vllm.arguments`)."""

    # The request that was last looked up, if it loads in its prompt's own step.
    _kappa_in_step = ""
    # Requests with loads that the step under way waits for, by job.
    _kappa_waiting: Mapping[int, str] = MappingProxyType({})

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        # With several groups of layers vLLM cannot compute the blocks that did not come.
        one_group = self._kappa_may_shorten and len(kv_cache_config.kv_cache_groups) == 1
        self._kappa_by_layer = one_group and read_options(extra, LINK_KEY, LinkRules).by_layer

    # -- the scheduler's side -----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As `HostTierConnector`'s; a load by layers takes no steps before the prompt's own."""
        loaded, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return loaded, later and request.request_id != self._kappa_in_step

    def _kappa_planned(self, request: Request, device_tokens: int, hit: int) -> int:
        by_layer = self._kappa_by_layer and self._kappa_alone(request)
        if by_layer:  # a step computes the last token at least, hence its block
            last = (request.num_tokens - 1) // self._kappa_block_tokens * self._kappa_block_tokens
            hit = max(min(hit, last - device_tokens), 0)
        loaded = self._kappa_admissions.loaded_tokens(
            request, device_tokens, hit, by_layer=by_layer
        )
        self._kappa_in_step = request.request_id if by_layer and loaded else ""
        return loaded

    def _kappa_alone(self, request: Request) -> bool:
        """Whether a step that waits for this request's load holds up no other request."""
        assert self.connector_scheduler is not None
        others = self.connector_scheduler._req_status.values()
        return all(each.req is request or each.req.is_finished() for each in others)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens and request.request_id == self._kappa_in_step:
            blocks = self._kappa_unloaded(request, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _kappa_unloaded(self, request: Request, blocks: KVCacheBlocks) -> KVCacheBlocks:
        """Blocks of a request that loads in this step, as they are before that. vLLM lists them in
        its prefix cache at once, which its connector takes for being there: it would load none."""
        here = self._kappa_status(request).num_locally_computed_tokens // self._kappa_block_tokens
        (ours,) = blocks.blocks
        rest = [KVCacheBlock(block.block_id) for block in ours[here:]]
        return type(blocks)(([*ours[:here], *rest],))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.connector_scheduler is not None
        jobs = self.connector_scheduler._current_batch_load_jobs
        by_layer = {n: job.req_id for n, job in jobs.items() if job.req_id == self._kappa_in_step}
        statuses = [self.connector_scheduler._req_status[name] for name in by_layer.values()]
        limits = [status.max_offload_tokens for status in statuses]
        for status in statuses:
            # vLLM takes a request's load or its stores, not both; its blocks may yet be wrong.
            status.max_offload_tokens = 0
        meta = super().build_connector_meta(scheduler_output)
        for status, limit in zip(statuses, limits, strict=True):
            status.max_offload_tokens = limit
        return CpuHostTierMetadata(**vars(meta), by_layer=by_layer) if by_layer else meta

    # -- the worker's side --------------------------------------------------------------------

    def _kappa_tier(self) -> HostTierWorker | None:
        tier = super()._kappa_tier()
        assert tier is None or isinstance(tier, HostTierWorker)
        return tier

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; finds out which of the tier's tensors is which layer's."""
        super().register_kv_caches(kv_caches)
        if (tier := self._kappa_tier()) is not None:
            places = {tensor.data_ptr(): number for number, tensor in enumerate(tier.device)}
            last = len(places) - 1
            # What lies elsewhere, as where layers share blocks, is there once all is.
            self._kappa_layers = {n: places.get(t.data_ptr(), last) for n, t in kv_caches.items()}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._kappa_waiting = getattr(connector_metadata, "by_layer", {})
        if self._kappa_waiting and (tier := self._kappa_tier()) is not None:
            tier.begin_step(self._kappa_waiting)
        super().bind_connector_metadata(connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer that vLLM is about to attend to."""
        if self._kappa_waiting and (tier := self._kappa_tier()) is not None:
            tier.wait_for_layer(self._kappa_layers[layer_name])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; requests that loaded in this step wait no longer."""
        tier, waiting = self._kappa_tier(), self._kappa_waiting
        if waiting and tier is not None:
            tier.wait_for_layer(len(tier.device))  # none may go on behind the step
        sent, received = super().get_finished(finished_req_ids)
        return sent, received.difference(waiting.values())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As vLLM's, with the blocks that did not come: vLLM computes them."""
        tier, lost = self._kappa_tier(), super().get_block_ids_with_load_errors()
        return lost if tier is None else lost | tier.take_lost()
