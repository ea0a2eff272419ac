"""A `server_cls` by which a plain Ray Serve LLM app is priced by its own hardware: each replica
tells the router its node, and how many requests its engine has.

`LLMConfig(server_cls="kappa_workers.announcing.AnnouncingServer", ...)` is all that changes; the
engine's worker gets a part that measures (`kappa_workers.vllm.measured_worker`). The announcement
travels with Ray Serve's routing statistics to `kappa_router.standalone`.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import structlog
from ray import serve
from ray.serve.llm.deployment import LLMServer

from kappa.hardware import NodeProfile, node_profile
from kappa.model_config import shape_from_config
from kappa.protocol import ANNOUNCEMENT_KEY, LOAD_KEY, Announcement
from kappa.settings.cluster import home
from kappa_workers.identity import Profile, ReplicaId, WorkerPlan, announce
from kappa_workers.measuring import Measuring
from kappa_workers.vllm.arguments import EngineLimits

log = structlog.get_logger(__name__)

_EXTENSION = "kappa_workers.vllm.measured_worker.MeasuredWorker"
# Measured rates replace its own.
_PRIOR = "h100-pcie5"
_READ_BACK = EngineLimits(0, 0, 0, 0, 0, 0, "")


class Announcing(Measuring):
    """A base class of an `LLMServer` with vLLM's engine, which stands before it among the bases."""

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        # Ray Serve awaits constructors.
        context = serve.get_replica_context()
        self._worker, self._rank = context.replica_id.unique_id, context.rank.rank
        self._announcement: dict[str, Any] = {}
        node = self.kappa_node()
        if node is None and not llm_config.engine_kwargs.get("worker_extension_cls"):
            llm_config.update_engine_kwargs(worker_extension_cls=_EXTENSION)
        await super().__init__(llm_config, **kwargs)  # type: ignore[call-arg, misc]
        try:
            self._announcement = (await self._announced(llm_config, node)).to_dict()
        except Exception as error:
            # It serves as well as any other.
            log.warning(
                "node_not_announced", worker=self._worker, error=repr(error),
                remedy="it is priced as the router's `node`; override `kappa_node` to give its own",
            )  # fmt: skip

    def kappa_node(self) -> NodeProfile | None:
        """The node of this replica, where a subclass knows it; None: it is measured."""
        return None

    async def _announced(self, llm_config: Any, node: NodeProfile | None) -> Announcement:
        vllm_config = self.engine._engine_client.vllm_config
        model, ranks = vllm_config.model_config, vllm_config.parallel_config.world_size
        name = str(llm_config.model_id)
        shape = shape_from_config(model.hf_config.to_dict(), name)
        here = node or replace(node_profile(_PRIOR), name=os.uname().nodename, reference="")
        gpus = 0 if vllm_config.device_config.device_type == "cpu" else ranks
        plan = WorkerPlan((here,), shape, shape, _READ_BACK, model.model, "", str(home()), "")
        self._plan, profile = replace(plan, gpus=gpus), Profile()
        if node is None:
            self._plan = self._given = await self._read_back()
            profile = await self._measure()
            if not profile.measured:
                raise RuntimeError(profile.error)
        replica = ReplicaId(self._worker, self._rank, name, "", "")
        # The rows of what was measured would travel again with every count of requests.
        return replace(announce(self._plan, replica, profile), measured={})

    async def record_routing_stats(self) -> dict[str, Any]:
        """Ray Serve's statistics, with the replica's announcement and its load."""
        stats = await super().record_routing_stats()  # type: ignore[misc]
        return {**stats, ANNOUNCEMENT_KEY: self._announcement, LOAD_KEY: self._load()}

    def _load(self) -> dict[str, Any]:
        """How many requests the engine has, and when; empty: not known."""
        count = self._unanswered()
        return {} if count is None else {"time_s": time.time(), "running": count}


class AnnouncingServer(Announcing, LLMServer):
    """Ray Serve LLM's server that announces its node and its load."""
