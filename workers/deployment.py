"""The Ray Serve replica that owns one engine: `LLMServer` with a node, a report stream, a profile.

Replicas of one deployment share their arguments, so each picks its node by its replica rank before
its engine starts, gives the engine its own endpoints and pace, measures the machine inside the
engine's worker process, and announces all of it through Ray Serve's routing statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import structlog
from ray import serve
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from kappa.model import kv_bytes_per_token
from kappa.report import Announcement
from kappa.step import step_model
from kappa.types import ModelShape, NodeProfile
from workers.report_stream import ReportStream
from workers.vllm_engine import EngineLimits, Pace, engine_kwargs, fingerprint

log = structlog.get_logger(__name__)

_PROFILE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a replica must know before its engine starts.

    nodes: one profile per rank; a `paced` one is paced, any other is a prior until measured.
    served: the shape of the model that runs; emulated: the shape that paced nodes act as.
    stream_host: address for the report stream; empty: this machine's address in Ray's cluster.
    """

    nodes: tuple[NodeProfile, ...]
    served: ModelShape
    emulated: ModelShape
    limits: EngineLimits
    chat_template: str
    cache_dir: str
    stream_host: str


class KappaServer(LLMServer):
    """An `LLMServer` on a node that the router knows."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, llm_config: LLMConfig, *, plan: WorkerPlan
    ) -> None:
        context = serve.get_replica_context()
        self._plan = plan
        self._worker = context.replica_id.unique_id
        self._node = plan.nodes[context.rank.rank % len(plan.nodes)]
        sockets = Path(tempfile.mkdtemp(prefix="kappa-"))
        stats_endpoint, kv_endpoint = f"ipc://{sockets}/stats", f"ipc://{sockets}/kv"
        paced = self._node.source == "paced"
        pace = Pace(plan.emulated, self._node) if paced else None
        llm_config.update_engine_kwargs(
            **engine_kwargs(plan.limits, stats_endpoint, kv_endpoint, pace)
        )
        host = plan.stream_host or ray.util.get_node_ip_address()
        self._stream = ReportStream(self._worker, host, stats_endpoint, kv_endpoint)
        self._stream.start()
        self._announcement: dict[str, Any] = {}
        await super().__init__(llm_config)
        measured, error = await self._measure()
        self._announcement = self._announce(measured, error).to_dict()
        log.info("worker_ready", worker=self._worker, node=self._node.name, paced=paced)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Ray Serve's statistics with this worker's announcement added."""
        return {**await super().record_routing_stats(), "kappa": self._announcement}

    async def profile(self, _body: None = None, _pin: Any = None) -> dict[str, Any]:
        """Measure again, now, and announce the result; the arguments only carry the pin."""
        measured, error = await self._measure(cached=False)
        self._announcement = self._announce(measured, error).to_dict()
        return self._announcement

    async def _start_engine(self) -> None:
        # As Ray's, without its usage report: that starts one more actor of some 400 MB.
        assert self.engine is not None
        await self.engine.start()

    def _batch_output_stream(
        self, generator: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[list[Any], None]:
        # Ray holds the first token back until its batching interval is over; time to first token
        # is what this project is about, so the first item goes out at once.
        return _first_at_once(generator, super()._batch_output_stream)

    async def _measure(self, *, cached: bool = True) -> tuple[dict[str, Any], str]:
        path = self._profile_path()
        if cached and path.exists():
            with contextlib.suppress(OSError, ValueError):
                return json.loads(path.read_text()), ""
        request = {
            "sizes_bytes": [1 << 20, 1 << 23, 1 << 26],
            "block_bytes": int(kv_bytes_per_token(self._plan.served))
            * self._plan.limits.block_tokens,
            "hidden": self._plan.served.hidden,
            "intermediate": 4 * self._plan.served.hidden,
            "dtype": self._plan.limits.dtype,
        }
        try:
            results = await asyncio.wait_for(
                self.collective_rpc("kappa_profile", args=(request,)), _PROFILE_TIMEOUT_S
            )
            measured: dict[str, Any] = results[0]
        except Exception as error:
            log.warning("profile_failed", node=self._node.name, error=repr(error))
            return {}, f"profile failed, serving with the catalogue's figures: {error!r}"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(measured))
        return measured, ""

    def _profile_path(self) -> Path:
        served, limits = self._plan.served, self._plan.limits
        machine = f"{os.uname().nodename}-{os.uname().machine}-{os.cpu_count()}"
        key = f"{machine}-{served.name}-{served.hidden}-{limits.dtype}-{limits.block_tokens}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return Path(self._plan.cache_dir) / "profiles" / f"{digest}.json"

    def _announce(self, measured: dict[str, Any], error: str) -> Announcement:
        plan, node = self._plan, self._node
        paced = node.source == "paced"
        shape = plan.emulated if paced else plan.served
        if measured and not paced:
            node = replace(
                node,
                source="measured",
                gpu=measured["device"],
                link_name="memcpy" if measured["device"] == "cpu" else node.link_name,
                h2d_bytes_per_s=measured["h2d_bytes_per_s"],
                d2h_bytes_per_s=measured["d2h_bytes_per_s"],
                hbm_bytes_per_s=measured["hbm_bytes_per_s"],
                flops_per_s=measured["flops_per_s"],
            )
        limits = plan.limits
        block_bytes = kv_bytes_per_token(plan.served) * limits.block_tokens
        return Announcement(
            worker=self._worker,
            model=self._llm_config.model_id,
            node=node,
            step=step_model(shape, node),
            kv_bytes_per_token=kv_bytes_per_token(shape),
            emulated_model=shape.name if paced else "",
            fingerprint=fingerprint(
                str(self._llm_config.model_loading_config.model_source),
                plan.chat_template,
                limits,
                plan.served.name,
            ),
            block_tokens=limits.block_tokens,
            device_blocks=limits.device_blocks,
            host_blocks=int(limits.host_bytes / block_bytes),
            max_batch_tokens=limits.max_batch_tokens,
            max_context_tokens=limits.max_context_tokens,
            events_endpoint=self._stream.events_endpoint,
            snapshot_endpoint=self._stream.snapshot_endpoint,
            profile_error=error,
            measured=measured,
        )


async def _first_at_once(
    generator: AsyncGenerator[Any, None], batched: Any
) -> AsyncGenerator[list[Any], None]:
    try:
        async for first in generator:
            yield [first]
            break
        async for items in batched(generator):
            yield items
    finally:
        await generator.aclose()
