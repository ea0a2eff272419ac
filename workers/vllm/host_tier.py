"""The host tier: KV blocks kept in host memory behind vLLM's `OffloadingConnector`.

vLLM's own manager decides what is stored, evicted and looked up; this spec supplies the copy engine
for machines without a GPU, and the order of the link (`workers.vllm.link`): a real copy
between the device cache and host memory. On a *paced* node a transfer also lasts as long as its
bytes would take on the named node's link, in dilated time. Stores are bounded: they are dropped,
and counted, when too many seconds of them are queued already, or when the engine wants their blocks
back before their turn came. Configured through `kv_connector_extra_config`:

    spec_name=HostTierSpec  spec_module_path=workers.vllm.host_tier  cpu_bytes_to_use=<bytes>
    kappa_stats=<ipc endpoint>  kappa_pace={"token_s": …, "store_token_s": …, "fixed_s": …, …}
    kappa_link={"duplex": "full", "order": "loads_first", "store_backlog_s": 10.0, …}
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from scheduler.link_order import HALF, LOADS_FIRST
from workers.stats_channel import StatsSender
from workers.vllm.kept_tier import KEEP_KEY, KeptTier, kept_tensor
from workers.vllm.layer_clock import LayerClock
from workers.vllm.link import Link, Route
from workers.vllm.link_queue import LOAD, STORE, LinkPace, LinkRules
from workers.vllm.loading_tier import LoadingTier

# `kappa_load` of the extra configuration: loads come in the prompt's own step.
BY_LAYER = "layers"
# An engine with nothing to do but stores under way must not poll as fast as it can, nor be late.
_STORE_POLL_S = 0.002
# Of so many requests it is remembered what their loads took; those that never run are forgotten.
_LOADS_REMEMBERED = 4096


class HostTierWorker(OffloadingWorker):
    """Moves blocks between the device cache and host memory, over one link or one each way."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks: int,
        tokens_per_block: int,
        pace: LinkPace,
        stats: StatsSender,
        rules: LinkRules = LinkRules(),
        keep: Path | None = None,
        by_layer: bool = False,
    ) -> None:
        """Allocate `blocks` host blocks shaped like the device's; one chunk is one block.

        keep: the shelf that they lie on, to be found there by a successor. by_layer: loads are
        waited for layer by layer.
        """
        device = [t.tensor for t in kv_caches.tensors]
        host = [_host_blocks(keep, i, blocks, int(t.shape[1])) for i, t in enumerate(device)]
        self.device = device
        """The device cache's blocks, as int8 tensors of (blocks, bytes of one)."""
        self._by_layer, self._clock = by_layer, LayerClock(len(device))
        self._report_lock = threading.Lock()
        self._loading: dict[int, str] = {}
        self._loaded_s: OrderedDict[str, float] = OrderedDict()
        self._stats = stats
        self._tokens_per_block = tokens_per_block
        self._pace = pace
        routes = {LOAD: Route(host, device), STORE: Route(device, host)}
        shares = [routes] if rules.duplex == HALF else [{d: routes[d]} for d in routes]
        self._links: dict[str, Link] = {}
        for share in shares:
            link = Link(
                "-".join(share), share, rules.order, self._pace_s, self._report, rules.late_wait_s
            )
            self._links.update(dict.fromkeys(share, link))
        self._each = list(dict.fromkeys(self._links.values()))
        CURRENT.append(self)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Queue device -> host."""
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._links[STORE].submit(STORE, job_id, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue host -> device."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        return self._links[LOAD].submit(
            LOAD, job_id, src_spec.block_ids, dst_spec.block_ids, self._by_layer
        )

    def get_finished(self) -> list[TransferResult]:
        """Transfers of both directions that ended since the last call, dropped stores too."""
        return [result for link in self._each for result in link.take_finished()]

    def loading(self, job_id: int, request: str) -> None:
        """A load that is about to be submitted is this request's (vLLM's id)."""
        with self._report_lock:
            self._loading[job_id] = request

    def take_load_s(self, request: str) -> float:
        """Seconds that the link spent on a request's loads; forgets them."""
        with self._report_lock:
            return self._loaded_s.pop(request, 0.0)

    def take_dropped(self) -> set[int]:
        """Stores given up since the last call; at the latest when `get_finished` names them."""
        return set().union(*(link.take_dropped() for link in self._each))

    @property
    def store_block_s(self) -> float:
        """Measured seconds to copy one block to the host; 0 before the first."""
        return self._links[STORE].block_s[STORE]

    def begin_step(self, pace_s: float) -> None:
        """A step begins that is to last so long beside its loads."""
        self._clock.begin(pace_s)

    def wait_layer(self, job_ids: Collection[int], layer: int) -> None:
        """Block until a layer of these loads is there; the layer before lasts its share first."""
        self._clock.reach()
        self._links[LOAD].wait_layer(job_ids, layer)
        self._clock.enter()

    def owed_s(self) -> float | None:
        """Seconds that the last layer of a step must still last; None: it waited for none."""
        return self._clock.owed_s()

    def wait(self, job_ids: set[int]) -> None:
        """Block until `job_ids` have ended, and report how long that held the engine up."""
        start_s = time.monotonic()
        for link in self._each:
            link.wait(job_ids)
        self._stats_send({"kind": "wait", "took_s": time.monotonic() - start_s})

    def wait_for_load(self, timeout_s: float) -> bool:
        """Sleep until a load ends, at most `timeout_s`; a moment if only stores are in flight.

        Returns False when no load is in flight.
        """
        if self._links[LOAD].has_unfinished(LOAD):
            self._links[LOAD].wait_change(timeout_s)
            return True
        if self._links[STORE].has_unfinished(STORE):
            self._links[STORE].wait_change(min(timeout_s, _STORE_POLL_S))
        return False

    def shutdown(self) -> None:
        """Stop the link's threads."""
        for link in self._each:
            link.close()

    def _pace_s(self, direction: str, blocks: int) -> float:
        tokens = blocks * self._tokens_per_block
        return self._pace.load_s(tokens) if direction == LOAD else self._pace.store_s(tokens)

    def _report(self, message: dict[str, Any]) -> None:
        with self._report_lock:
            request = self._loading.pop(message.pop("job", -1), None)
            if request is not None:
                known_s = self._loaded_s.get(request, 0.0)
                self._loaded_s[request] = known_s + message["took_s"]
                if len(self._loaded_s) > _LOADS_REMEMBERED:
                    self._loaded_s.popitem(last=False)
        self._stats_send({**message, "tokens": message["blocks"] * self._tokens_per_block})

    def _stats_send(self, message: dict[str, object]) -> None:
        with self._report_lock:
            self._stats.send(message)


def _host_blocks(keep: Path | None, number: int, blocks: int, width: int) -> torch.Tensor:
    if keep is None:
        return torch.empty((blocks, width), dtype=torch.int8)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return kept_tensor(keep, rank, number, blocks, width)


# The worker process holds one host tier; the metered worker asks it whether a load is in flight.
CURRENT: list[LoadingTier] = []


class HostTierManager(CPUOffloadingManager):
    """vLLM's manager, in the scheduler's process; refuses stores that the link has no time for.

    A refused store is reported as "store_dropped"; vLLM takes it for stored, asks no more, and
    finds nothing when it looks.
    """

    def __init__(
        self,
        *args: Any,
        pace: LinkPace,
        block_tokens: int,
        backlog_s: float,
        report: Callable[[dict[str, object]], None],
        **kwargs: Any,
    ) -> None:
        """`backlog_s`: bound on the seconds of stores that are queued when another is taken."""
        super().__init__(*args, **kwargs)
        self._pace, self._block_tokens = pace, block_tokens
        self._backlog_s, self._report = backlog_s, report
        self._block_s = 0.0
        self._pending: dict[OffloadKey, float] = {}
        self._pending_s = 0.0
        self._lost: set[OffloadKey] = set()

    def hear(self, lost: Collection[OffloadKey], block_s: float) -> None:
        """A worker gave up storing `lost`: that store fails, whatever others say. `block_s`:
        seconds that it measured per block, of use where nothing is paced."""
        self._lost.update(lost)
        self._block_s = block_s

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """As vLLM's, unless the link is too far behind: then nothing is to be stored."""
        new = [key for key in keys if self._policy.get(key) is None]
        seconds = self._store_s(len(new))
        if new and self._pending and self._pending_s + seconds > self._backlog_s:
            self._report({
                "kind": "store_dropped", "blocks": len(new),
                "tokens": len(new) * self._block_tokens, "why": "backlog",
            })  # fmt: skip
            return PrepareStoreOutput([], self._get_load_store_spec([], []), [])
        output = super().prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            seconds = self._store_s(len(output.keys_to_store))
            share_s = seconds / len(output.keys_to_store)
            self._pending.update(dict.fromkeys(output.keys_to_store, share_s))
            self._pending_s += seconds
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As vLLM's; a store that any worker gave up has failed, and is never announced."""
        kept = self._lost.isdisjoint(keys)
        for key in keys:
            self._pending_s -= self._pending.pop(key, 0.0)
        self._lost.difference_update(keys)
        super().complete_store(keys, req_context, success and kept)

    def reset_cache(self) -> None:
        """As vLLM's: everything is forgotten, stores under way too."""
        self._pending.clear()
        self._pending_s = 0.0
        self._lost.clear()
        super().reset_cache()

    def _store_s(self, blocks: int) -> float:
        return self._pace.store_s(blocks * self._block_tokens) or blocks * self._block_s


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading spec with our copy engine in place of the CUDA one."""

    _manager: OffloadingManager | None

    @property
    def rules(self) -> LinkRules:
        """How the link is shared, in real seconds."""
        rules = LinkRules.from_dict(self.extra_config.get("kappa_link", {}))
        return rules.dilated(self.pace.dilation)

    @property
    def pace(self) -> LinkPace:
        """How long transfers last on a paced node."""
        return LinkPace(**self.extra_config.get("kappa_pace", {}))

    @property
    def keep(self) -> Path | None:
        """The shelf that the blocks lie on; None: they go with the engine.

        Raises:
            ValueError: vLLM's own order of transfers, which has no manager of ours.
        """
        folder = self.extra_config.get(KEEP_KEY)
        if folder and self.rules.order != LOADS_FIRST:
            raise ValueError(
                f"engine.handover_dir needs scheduler.link_order {LOADS_FIRST}, and this is "
                f"{self.rules.order}"
            )
        return Path(folder) if folder else None

    def get_manager(self) -> OffloadingManager:
        """vLLM's own manager for its own order, or else one that bounds the stores."""
        if self.rules.order == LOADS_FIRST and self._manager is None:
            self._manager = self._manager_of_ours(
                num_blocks=self.num_blocks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                pace=self.pace,
                block_tokens=self.tokens_per_block[0],
                backlog_s=self.rules.store_backlog_s,
                report=StatsSender(self.extra_config.get("kappa_stats", "")).send,
            )
        return super().get_manager()

    def _manager_of_ours(self, **options: Any) -> HostTierManager:
        if self.keep is None:
            return HostTierManager(**options)
        from workers.vllm.kept_manager import KeptTierManager

        seed = get_none_hash_seed()
        kept = KeptTier(self.keep, self.num_blocks, self.tokens_per_block[0], seed)
        return KeptTierManager(kept, **options)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the copy engine once, in the worker process."""
        worker = self.__dict__.get("_kappa_worker")
        if worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(
                    f"host tier: blocks_per_chunk is {self.blocks_per_chunk}; only 1 is supported"
                )
            worker = HostTierWorker(
                kv_caches,
                self.num_blocks,
                self.tokens_per_block[0],
                self.pace,
                StatsSender(self.extra_config.get("kappa_stats", "")),
                self.rules,
                self.keep,
                self.extra_config.get("kappa_load") == BY_LAYER,
            )
            self.__dict__["_kappa_worker"] = worker
        return worker
