"""The Ray Serve replica that owns one engine. Replicas of one deployment share their arguments, so
each picks its node by its rank, gives its engine endpoints and pace, has the engine's worker
process measure the machine, and announces the results through Serve's routing statistics."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import structlog
from msgspec import structs
from ray import serve
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from kappa.host import free_port, memory_bytes
from kappa.logging import configure
from kappa.protocol import (
    ANNOUNCEMENT_KEY,
    ENGINE_HEADER,
    PROFILE_PATH,
    Announcement,
    EngineDiedError,
)
from kappa_workers.host_memory import check_host_memory
from kappa_workers.http_gate import WorkerGate
from kappa_workers.http_port import WorkerPort
from kappa_workers.identity import Profile, ReplicaId, WorkerPlan, announce, configure_vllm
from kappa_workers.measuring import Measuring
from kappa_workers.nvml import power_reporter
from kappa_workers.paced.one_process import OneProcessEngine
from kappa_workers.reaper import (
    HangWatch,
    fence,
    hang_patience_s,
    own_engines,
    process_age_s,
    watch_engine,
)
from kappa_workers.report_stream import ReportStream
from kappa_workers.scaling import BACKLOG_KEY, DEMAND_KEY
from kappa_workers.vllm.arguments import LMCACHE, STOCK_TIER, Endpoints, EngineTier
from kappa_workers.vllm.lmcache.server import LmcacheServer, prepare_lmcache
from kappa_workers.vllm.options import PeerOptions
from kappa_workers.vllm_plugin import LOG_ENV, log_setting

log = structlog.get_logger(__name__)

# Of the requests that an engine took with it, in the error and in the log: the youngest.
_IN_FLIGHT_NAMED = 16
# A replica on a busy machine may not run for so long, and be well.
_LEAST_SILENT_S = 5.0


def configure_logs(plan: WorkerPlan) -> None:
    """This process' log, and by the environment that of the engine's processes."""
    seen = plan.observing
    configure(seen.log_format, seen.log_file, plan.log_level)
    os.environ[LOG_ENV] = log_setting(seen.log_format, seen.log_file, plan.log_level)


class KappaServer(Measuring, LLMServer):
    """An `LLMServer` on a node that the router knows."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, llm_config: Mapping[str, Any], *, plan: WorkerPlan
    ) -> None:
        """`llm_config`: arguments of Ray Serve LLM's `LLMConfig`, which the deployer cannot
        import."""
        configure_logs(plan)
        config = LLMConfig(**llm_config)
        if plan.gpus:
            plan = plan.sized(memory_bytes(), gpus_here())
        context = serve.get_replica_context()
        self._plan = self._given = plan
        self._worker = context.replica_id.unique_id
        self._rank = context.rank.rank
        # Abstract Unix sockets: they vanish with the processes, no file is left behind.
        sockets = f"ipc://@kappa-{os.getpid()}-{self._worker}"
        self._endpoints = Endpoints(f"{sockets}-stats", f"{sockets}-kv")
        self._tier = EngineTier()
        self._lmcache: LmcacheServer | None = None
        check_host_memory(plan)
        host = plan.stream_host or ray.util.get_node_ip_address()
        if plan.peers:
            self._endpoints = self._endpoints._replace(peers=self._peer_place(host))
        engine_cls = self._configure_engine(config)
        self._stream = ReportStream(self._worker, host, *self._endpoints[:2])
        self._stream.start()
        self._announcement: dict[str, Any] = {}
        self._start_s = 0.0
        self._hang: HangWatch | None = None
        self._death = ""
        own_engines()
        await super().__init__(config, engine_cls=engine_cls)
        assert self.engine is not None
        self._watch = asyncio.create_task(watch_engine(self.check_health))
        self._plan = plan = await self._read_back()
        profile = await self._measure()
        self._port = await self._open_port(host)
        self._start_s = process_age_s()
        announced = self._announce(profile)
        self._stream.complete = power_reporter(announced, plan.gpus)
        # A stock engine says nothing of its own.
        if plan.engine.kind != "vllm" or plan.tier != STOCK_TIER:
            self._hang = HangWatch(hang_patience_s(announced), time.monotonic())
        node = announced.node
        paced = node.silicon or node.source == "paced"
        log.info("worker_ready", worker=self._worker, node=node.name, paced=paced)
        if announced.profile_error:
            log.warning("profile_poor", worker=self._worker, reason=announced.profile_error)

    # -- what the engine is started with ------------------------------------------------------

    def _configure_engine(self, llm_config: LLMConfig) -> Callable[[LLMConfig], Any] | None:
        """Put the engine's arguments into `llm_config`; what makes the engine if Ray does not."""
        from kappa_workers.vllm import output_collector

        output_collector.install()
        plan, endpoints = self._plan, self._endpoints
        if plan.engine.kind != "vllm":
            from kappa_workers.own_engine.server import OwnPlan
            from kappa_workers.own_engine.torch_engine import TorchEngine
            from kappa_workers.paced.emulated_engine import EmulatedEngine

            made = TorchEngine if plan.engine.kind == "torch" else EmulatedEngine
            return partial(made, own=OwnPlan(plan, self._worker, self._rank, endpoints))
        self._tier = self._prepare_tier()
        scheduler = structs.replace(plan.scheduler, profile=str(self._profile_path()))
        plan = replace(plan, scheduler=scheduler)
        configure_vllm(llm_config, plan, self._rank, endpoints, self._tier)
        return None if plan.gpus or plan.tier == STOCK_TIER else OneProcessEngine

    def _prepare_tier(self) -> EngineTier:
        """The engine's host tier; an LMCache server is started if the worker is to have its own."""
        plan, server = self._plan, ""
        if plan.tier == LMCACHE and plan.limits.host_bytes:
            self._lmcache = prepare_lmcache(
                plan.cache_dir,
                plan.engine.lmcache.server or "",
                plan.limits.block_tokens,
                plan.limits.host_bytes,
                Path(plan.cache_dir) / "logs" / f"lmcache-{self._worker}.log",
            )
            server = self._lmcache.url if self._lmcache is not None else ""
        return plan.engine_tier(self._rank, self._cached_profile(), server)

    def _peer_place(self, host: str) -> PeerOptions:
        """Where the engine serves its peers: on a port that is free now."""
        layout = Path(self._plan.cache_dir) / "peers" / f"{self._worker}-{os.getpid()}"
        return PeerOptions(host, free_port(host), secrets.token_hex(16), str(layout))

    async def _open_port(self, host: str) -> WorkerPort:
        """Serve the engine's application on a port of this worker's own."""
        assert self.engine is not None
        app = await self.engine.build_asgi_app()
        fence(max(self._plan.silent_s, _LEAST_SILENT_S))
        client = getattr(self.engine, "_engine_client", None)
        if client is not None:
            from kappa_workers.vllm import incremental_prompts

            await asyncio.to_thread(incremental_prompts.install, client.renderer)
        in_flight, secret = self._stream.in_flight, self._plan.front_secret
        own = {PROFILE_PATH: self.profile}
        # Messages and responses have no field for it.
        marks = {ENGINE_HEADER: "emulated"} if self._plan.engine.kind == "emulated" else {}
        return WorkerPort(WorkerGate(app, secret, in_flight, self.check_health, own, marks), host)

    # -- what the cluster learns --------------------------------------------------------------

    def _announce(self, profile: Profile) -> Announcement:
        replica = ReplicaId(
            self._worker,
            self._rank,
            self._llm_config.model_id,
            self._stream.events_endpoint,
            self._stream.snapshot_endpoint,
            self._endpoints.peers.endpoint if self._endpoints.peers is not None else "",
        )
        rates = getattr(self.engine, "rates", None)
        announced = announce(self._plan, replica, profile, rates, self._tier.rates)
        announced = replace(announced, start_s=self._start_s, http=self._port.endpoint)
        self._announcement = announced.to_dict()
        return announced

    async def record_routing_stats(self) -> dict[str, Any]:
        """Ray Serve's statistics with this worker's announcement added."""
        rank = serve.get_replica_context().rank.rank
        if self._announcement and rank != self._rank:
            # Ray Serve closes ranks when a pool shrinks; names follow, so that none is there twice.
            self._rank = rank
            node = {**self._announcement["node"], "name": self._plan.node(rank).name}
            self._announcement = {**self._announcement, "node": node}
        return {**await super().record_routing_stats(), ANNOUNCEMENT_KEY: self._announcement}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `kappa_workers.scaling` decides by: seconds that wait here, and demand."""
        here = self._stream.in_flight
        return {
            BACKLOG_KEY: max(here.backlog_s()),
            DEMAND_KEY: here.demand(time.monotonic(), self._plan.limits.max_sequences),
        }

    async def profile(self) -> dict[str, Any]:
        """Measure the machine again, and announce the result."""
        self._announce(await self._measure(again=True))
        return self._announcement

    # -- life and death -----------------------------------------------------------------------

    async def check_health(self) -> None:
        """As Ray's.

        Raises:
            EngineDiedError: the engine is dead, or hangs; names the requests that were in it.
        """
        if not self._death:
            try:
                await super().check_health()
                if self._hang is not None:
                    messages = self._stream.totals.engine_messages
                    self._hang.look(time.monotonic(), self._unanswered() or 0, messages)
            except Exception as error:
                last = self._stream.in_flight.last(_IN_FLIGHT_NAMED)
                self._death = f"worker {self._worker}: {error!r}; last of its requests: {last}"
        if self._death:
            raise EngineDiedError(self._death)

    async def _start_engine(self) -> None:
        # As Ray's, without its usage report: that starts one more actor of some 400 MB.
        assert self.engine is not None
        await self.engine.start()

    async def __del__(self) -> None:
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.cancel()
        port = getattr(self, "_port", None)
        if port is not None:
            # Ray counts no request that came past it: it would not wait for them.
            cut = await port.close(self._plan.drain_s)
            if cut:
                log.warning("requests_cut", worker=self._worker, count=cut)
        await super().__del__()
        for name in ("_stream", "_lmcache"):
            owned = getattr(self, name, None)
            if owned is not None:
                owned.close()


def gpus_here() -> float:
    here = ray.get_runtime_context().get_node_id()
    return sum(float(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["NodeID"] == here)
