"""What each worker gets before its engine starts: its node, its limits and its scheduler.

Pure translation of settings into the workers' own words; nothing is started here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.app.model import Model, StartError
from kappa.hardware import NodeProfile, node_profile
from kappa.plans.clo import CloConfig, read_heads
from kappa.settings.cluster import ClusterSettings, home
from kappa.settings.engine import EngineSettings
from kappa.settings.pools import PoolSettings


def worker_nodes(settings: ClusterSettings) -> tuple[NodeProfile, ...]:
    """One profile per worker, pool by pool: paced ones in dilated time, others as priors."""
    return tuple(node for pool in settings.all_pools for node in pool_nodes(settings, pool))


def pool_nodes(settings: ClusterSettings, pool: PoolSettings) -> tuple[NodeProfile, ...]:
    """One profile per worker that the pool may have, in rank order."""
    profile = replace(node_profile(pool.profile), source="catalogue")
    if pool.cost_per_hour is not None:
        profile = replace(profile, cost_per_hour=pool.cost_per_hour)
    if pool.paced:
        profile = replace(profile, source="paced", dilation=settings.dilation)
    return tuple(replace(profile, name=name) for name in pool.node_names)


def worker_plan(
    settings: ClusterSettings, pool: PoolSettings, model: Model, stream_host: str
) -> Any:
    """What each replica of a pool must know before its engine starts."""
    from workers.identity import WorkerPlan
    from workers.vllm.arguments import EngineLimits, TierChoice

    e = pool.engine_settings(settings.engine)
    return WorkerPlan(
        nodes=pool_nodes(settings, pool),
        served=model.shape,
        emulated=settings.model.emulated_shape,
        limits=EngineLimits(
            e.max_context_tokens, e.block_tokens, e.device_blocks, e.host_bytes,
            e.max_batch_tokens, e.max_sequences, e.dtype,
        ),
        model_source=model.source,
        chat_template=model.chat_template,
        cache_dir=str(home()),
        # Loopback in a cluster that we start: it is on one machine, nothing listens beyond it.
        stream_host=stream_host,
        scheduler=engine_scheduler(settings),
        kind=e.kind,
        planner=e.planner if e.kind == "torch" else "",
        act_share=e.act_share,
        cpu_threads=e.cpu_threads,
        cpu_room_share=e.cpu_room_share,
        approx=e.approx,
        sparse=_sparse(e, model),
        tier=TierChoice(
            e.host_tier, "kv" if e.planner == "kv" else "tail", e.lmcache.server or "",
            e.lmcache.timeout_s, e.lmcache.heartbeat_s, e.lmcache.retry_s,
        ),
        pool=pool.name,
        role=pool.role,
        gpus=pool.placement.gpus,
        transfer=_transfer(settings),
        handover_dir=str(Path(e.handover_dir).absolute()) if e.handover_dir else "",
        handover_wait_s=e.handover_wait_s,
        observing=settings.observing,
        log_level=settings.log_level,
    )  # fmt: skip


def _transfer(settings: ClusterSettings) -> Any:
    """How prompts are handed over, None where every worker keeps its own."""
    from workers.vllm.arguments import TransferChoice

    if all(pool.role == "both" for pool in settings.all_pools):
        return None
    t = settings.transfer
    return TransferChoice(
        t.connector, t.folder, t.most_bytes, t.wait_s, t.net_bytes_per_s, t.fixed_s
    )


def _sparse(engine: EngineSettings, model: Model) -> Any:
    """How workers decode approximately; reads the file of head importance, if there is one."""
    from engine.sparse.settings import SparseSettings
    from workers.identity import SparsePlan

    s = engine.sparse
    heads = None
    if engine.approx != "never" and s.heads:
        try:
            heads = read_heads(s.heads, model.shape)
        except ValueError as error:
            raise StartError(f"engine.sparse.heads: {error}") from None
    method = CloConfig(
        s.share, s.sink_tokens, s.recent_tokens, s.eta, s.power, s.epsilon, s.code_bits
    )
    settings = SparseSettings(
        method, s.lanes, retriever=s.retriever, prefetch=s.prefetch, max_age=s.max_age,
        chunk_tokens=s.chunk_tokens,
    )  # fmt: skip
    return SparsePlan(settings, heads, s.persistent_heads)


def engine_scheduler(settings: ClusterSettings) -> Any:
    """What every engine schedules by."""
    from workers.vllm.arguments import EngineScheduler

    s = settings.scheduler
    return EngineScheduler(
        rule=s.name,
        config={
            "weights": dict(settings.tenants.weights), "max_skips": s.max_skips,
            "due_after_s": s.due_after_s, "window": s.window, "slack_s": s.slack_s,
            "credit": s.credit, "reserve": s.reserve,
        },
        link={
            "duplex": s.duplex, "order": s.link_order, "store_backlog_s": s.store_backlog_s,
        },
        # Replicas have working folders of their own.
        log=str(Path(s.log).absolute()) if s.log else None,
    )  # fmt: skip
