"""The class that vLLM loads by name for the LMCache tier (`kappa_workers.vllm.arguments`). The two
halves stand in modules of their own, on what they share (`base`)."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kappa_workers.vllm.lmcache.base import LmcacheBase
from kappa_workers.vllm.lmcache.scheduler import LmcacheScheduler
from kappa_workers.vllm.lmcache.worker import LmcacheWorker


class LmcacheConnector(LmcacheBase):
    """The tier as vLLM makes it: made for a role, it is `LmcacheScheduler` or `LmcacheWorker`, each
    of which answers what vLLM asks in its process."""

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        half = LmcacheScheduler if role == KVConnectorRole.SCHEDULER else LmcacheWorker
        return half(vllm_config, role, kv_cache_config)
