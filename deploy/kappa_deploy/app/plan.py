"""A pool as a Ray Serve deployment: engine, place, number of workers, and each worker's plan.

Settings are translated into Ray's and the workers' words; nothing is started here. Ray places the
workers on machines that offer what the pool demands; Serve's autoscaler asks our policy
(`kappa_workers.scaling_policy`) how many there should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from kappa.hardware import NodeProfile, node_profile
from kappa.model import ModelShape, kv_bytes, weight_bytes
from kappa.plans.clo import HeadProfile, read_heads
from kappa.settings.cluster import ClusterSettings, home
from kappa.settings.engine import EngineSettings
from kappa.settings.pools import PoolSettings, ScalingSettings
from kappa.settings.routing import FETCHING_POLICY
from kappa.silicon import silicon_figures
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.model import Model
from kappa_deploy.app.parsers import parser_arguments

ENGINE_CPUS = 1
"""Ray's CPUs for an engine's worker process, beside those of its replica."""

_ROUTER = "kappa_router.ray_router.KappaRouter"
_SCALING_POLICY = "kappa_workers.scaling_policy:BacklogPolicy"
# A domain that cannot exist: vLLM fetches from any where none is named.
_NO_MEDIA_DOMAINS = ["nowhere.invalid"]
# Adapters in one step of an engine: each takes device memory from its start on.
_ADAPTERS_AT_ONCE = 8
# Serve averages what workers report over so long; they report every 10 s.
_LOOK_BACK_S = 20.0
_GIB = 1 << 30


# -- the deployment -------------------------------------------------------------------------------


class Deferred:
    """A class or function by its name, `MODULE:NAME`, which the process that unpickles it imports,
    and calls with `args` if there are any.

    Serve pickles what a deployment runs. With names alone the command that starts a cluster imports
    neither vLLM nor Ray Serve LLM, which take ten seconds of a core and 400 MB.
    """

    def __init__(self, path: str, *args: Any) -> None:
        self.path, self.args = path, args
        self.__name__ = path.partition(":")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.path, self.args)

    def __call__(self) -> Any:  # Serve takes nothing that cannot be called
        return _made(self.path, self.args)


def _made(path: str, args: Sequence[Any]) -> Any:
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name)
    return found(*args) if args else found


def pool_config(
    settings: ClusterSettings, pool: PoolSettings, model: Model | None
) -> dict[str, Any]:
    """The arguments of Ray Serve LLM's `LLMConfig` of a pool, of a cluster with one model.

    model: None where a dry run knows nothing but its name.
    """
    engine, place = pool.engine_settings(settings.engine), pool.placement
    # vLLM's engines are processes beside their replica; ours run in it, so that it holds the GPU.
    beside = place.gpus if engine.kind == "vllm" else 0
    bundle = {"CPU": ENGINE_CPUS, **({"GPU": 1} if beside else {})}
    arguments: dict[str, Any] = {
        "enable_prompt_tokens_details": True,
        "allowed_media_domains": _NO_MEDIA_DOMAINS,
        **_model_arguments(settings, engine, model),
        **engine.extra,
    }
    if place.gpus and engine.kind == "vllm" and engine.weights.place == "host" and model:
        crossing = engine.host_weight_bytes(weight_bytes(model.shape), place.gpus)
        arguments["cpu_offload_gb"] = crossing / place.gpus / _GIB
    if place.gpus > 1:
        arguments["tensor_parallel_size"], _ = ranks_of(engine, place.gpus)
    source = str(settings.model.source) if model is None else model.source
    number: dict[str, Any] = {"num_replicas": pool.least}
    if pool.autoscaling is not None:
        number = {"autoscaling_config": autoscaling(pool.autoscaling)}
    return {
        "model_loading_config": {"model_id": settings.model.id, "model_source": source},
        "engine_kwargs": arguments,
        "accelerator_config": {"kind": "gpu" if beside else "cpu"},
        # A replica, its engine and all ranks talk over sockets of one machine, and end with it.
        "placement_group_config": {
            "bundles": [bundle] * max(place.gpus, 1),
            "strategy": "STRICT_PACK",
        },
        "deployment_config": {
            **number,
            "max_ongoing_requests": 4 * settings.router.max_queue,
            "max_constructor_retry_count": 2,
            "health_check_period_s": 2,
            "health_check_timeout_s": 10,
            "graceful_shutdown_timeout_s": pool.drain_s,
            "request_router_config": {
                "request_router_class": _ROUTER,
                "request_routing_stats_period_s": 1,
                "request_routing_stats_timeout_s": 10,
            },
            "ray_actor_options": {
                "num_cpus": place.cpus,
                **({"num_gpus": place.gpus} if place.gpus and not beside else {}),
                **({"resources": dict(place.resources)} if place.resources else {}),
            },
        },
        "callback_config": {"callback_class": "kappa_workers.no_download.NoDownload"},
        "runtime_env": {"env_vars": _environment(engine, place.gpus, source)},
        "log_engine_metrics": engine.metrics,
    }


def _environment(engine: EngineSettings, gpus: int, source: str) -> dict[str, str]:
    """Variables of a worker's processes; source: the model's folder, or its name on the hub."""
    from kappa_workers.vllm.arguments import CPU_ENV

    # On GPUs vLLM's queues spin as it likes: a nap there would be a bubble between steps.
    dropped = ("VLLM_CPU_", "OMP_", "KAPPA_QUEUE_SPIN") if gpus else ()
    if not engine.extra.get("enforce_eager", not gpus):
        dropped = (*dropped, "TORCH_COMPILE_")
    kept = {name: v for name, v in CPU_ENV.items() if not name.startswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1" if Path(source).exists() else "0"}


def _model_arguments(
    settings: ClusterSettings, engine: EngineSettings, model: Model | None
) -> dict[str, Any]:
    """vLLM's arguments that follow from the model: its parsers and all of its LoRA adapters, which
    are loaded when the engine starts."""
    if model is None:
        return {}
    parsers = parser_arguments(engine, model.family, model.chat_template)
    if not (adapters := settings.model.adapters):
        return parsers
    from vllm.config.lora import MaxLoRARanks
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath

    rank = model.adapter_rank
    return parsers | {
        "enable_lora": True,
        # vLLM's buffers have room for one of a few ranks; a rank beyond, it refuses itself.
        "max_lora_rank": next((each for each in get_args(MaxLoRARanks) if each >= rank), rank),
        "max_loras": min(len(adapters), _ADAPTERS_AT_ONCE),
        "max_cpu_loras": len(adapters),
        # Workers have working folders of their own.
        "lora_modules": [
            LoRAModulePath(name, str(Path(folder).absolute())) for name, folder in adapters.items()
        ],
    }


def pool_deployment(
    settings: ClusterSettings, pool: PoolSettings, model: Model, stream_host: str,
    front_secret: str = "",
) -> Any:  # fmt: skip
    """The pool's Serve deployment, bound; a contract test holds it against the one that Ray Serve
    LLM builds of the same configuration. front_secret: opens workers' own HTTP ports to fronts."""
    import ray
    from ray import serve

    config, labels = pool_config(settings, pool, model), dict(pool.placement.labels)
    options, placement = config["deployment_config"], config["placement_group_config"]
    actor = options["ray_actor_options"]
    # The replica is in the bundle of the first rank.
    first, *others = placement["bundles"]
    demand = {"CPU": actor["num_cpus"], "GPU": actor.get("num_gpus", 0)}
    demand |= actor.get("resources", {})
    both = {name: first.get(name, 0) + demand.get(name, 0) for name in first | demand}
    # Asking for the context starts Ray where none runs, as in tests.
    ours = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    environment = {**ours, **config["runtime_env"]}
    replica = Deferred("kappa_workers.replica:KappaServer")
    deployed = serve.deployment(
        replica,
        name=f"{replica.__name__}:{pool.name}",
        **options | {"ray_actor_options": actor | {"runtime_env": environment}},
        placement_group_bundles=[{n: count for n, count in both.items() if count}, *others],
        placement_group_strategy=placement["strategy"],
        **({"placement_group_bundle_label_selector": [labels]} if labels else {}),
    )
    plan = replace(worker_plan(settings, pool, model, stream_host), front_secret=front_secret)
    return deployed.bind(llm_config=config, plan=plan)


def ranks_of(engine: EngineSettings, gpus: int) -> tuple[int, int]:
    """Ranks that divide each layer of a worker, and stages that divide its layers."""
    stages = int(engine.extra.get("pipeline_parallel_size", 1))
    return int(engine.extra.get("tensor_parallel_size", max(gpus // stages, 1))), stages


def worker_demand(pool: PoolSettings) -> dict[str, float]:
    """What one worker of the pool demands of Ray, all its processes together."""
    place = pool.placement
    return {
        "CPU": place.cpus + ENGINE_CPUS * max(place.gpus, 1),
        **({"GPU": float(place.gpus)} if place.gpus else {}),
        **place.resources,
    }


def autoscaling(scaling: ScalingSettings) -> dict[str, Any]:
    """Ray Serve's autoscaling of a pool, by our policy."""
    return {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": scaling.up_after_s,
        "downscale_delay_s": scaling.down_after_s,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": {
            "policy_function": _SCALING_POLICY,
            "policy_kwargs": {
                "target_backlog_s": scaling.target_backlog_s,
                "target_utilisation": scaling.target_utilisation,
            },
        },
    }


# -- its workers ----------------------------------------------------------------------------------


def pool_nodes(settings: ClusterSettings, pool: PoolSettings) -> tuple[NodeProfile, ...]:
    """One profile per worker that the pool may have, in rank order."""
    profile = replace(node_profile(pool.profile), source="catalogue", silicon="")
    figures = silicon_figures(pool.silicon) if pool.silicon else {}
    profile = replace(profile.times(figures.get("gpus", max(pool.placement.gpus, 1))), **figures)
    if pool.cost_per_hour is not None:
        profile = replace(profile, cost_per_hour=pool.cost_per_hour)
    if pool.paced:
        profile = replace(profile, source="paced", dilation=settings.dilation)
    return tuple(replace(profile, name=name) for name in pool.node_names)


def _nodes(
    settings: ClusterSettings, pool: PoolSettings, engine: EngineSettings, served: ModelShape
) -> tuple[NodeProfile, ...]:
    """The pool's nodes with what they keep of their model in host memory; `StartError` where that
    is of vLLM on a CPU, which has all there."""
    shape = settings.model.emulated_shape if pool.paced else served
    crossing = engine.host_weight_bytes(weight_bytes(shape), pool.placement.gpus)
    if crossing and engine.kind == "vllm" and not (pool.paced or pool.placement.gpus):
        raise StartError(
            f"pool {pool.name}: {crossing / 1e9:.3g} GB of weights in host memory (engine.weights "
            "or cpu_offload_gb) need placement.gpus, or paced: vLLM on a CPU has them all there"
        )
    if crossing and pool.silicon:
        raise StartError(
            f"pool {pool.name}: {pool.silicon} has no steps of an engine with weights in host "
            "memory: drop silicon, or engine.weights and cpu_offload_gb"
        )
    return tuple(replace(one, host_weight_bytes=crossing) for one in pool_nodes(settings, pool))


def worker_plan(
    settings: ClusterSettings, pool: PoolSettings, model: Model, stream_host: str
) -> Any:
    """What each replica of a pool must know before its engine starts; of a cluster with one model.

    stream_host: loopback in a cluster that we start, which is on one machine.
    """
    from kappa_workers.identity import WorkerPlan
    from kappa_workers.vllm.arguments import EngineLimits
    from kappa_workers.vllm.options import LinkRules

    e, s = pool.engine_settings(settings.engine), settings.scheduler
    tp, _ = ranks_of(e, pool.placement.gpus)
    # Until the engine says: KV heads that its ranks hold more than once count as often.
    served = replace(model.shape, kv_token_bytes=kv_bytes(model.shape, 1, tp))
    hands_over = any(each.role != "both" for each in settings.all_pools)
    by_nixl = settings.transfer.connector == "nixl"
    return WorkerPlan(
        nodes=_nodes(settings, pool, e, model.shape),
        served=served if tp > 1 else model.shape,
        emulated=settings.model.emulated_shape,
        limits=EngineLimits.of(e),
        model_source=model.source,
        chat_template=model.chat_template,
        cache_dir=str(home()),
        stream_host=stream_host,
        scheduler=engine_scheduler(settings),
        link=LinkRules(s.duplex, s.link_order, s.store_backlog_s, by_layer=e.load == "layers"),
        engine=e.model_copy(update={"act_share": _act_share(e, model)}),
        heads=_heads(e, model),
        pool=pool.name,
        role=pool.role,
        gpus=pool.placement.gpus,
        transfer=settings.transfer,
        nixl=hands_over and by_nixl,
        peers=settings.router.policy == FETCHING_POLICY or (hands_over and not by_nixl),
        observing=settings.observing,
        log_level=settings.log_level,
        drain_s=pool.drain_s,
        silent_s=settings.router.stale_after_s,
    )


def _act_share(engine: EngineSettings, model: Model) -> float:
    """The share of stored blocks that are kept as activations; StartError where a context would be
    larger as activations than as KV."""
    shape = model.shape
    ratio = shape.hidden / (2 * shape.kv_heads * shape.head_dim)
    if engine.planner in ("host-kvpr", "host-hybrid") and ratio >= 1:
        raise StartError(
            f"engine.planner is {engine.planner}, but with {shape.kv_heads} KV heads a token's "
            f"activations are {ratio:g} times its KV: use host-kv"
        )
    return 1.0 if engine.planner == "host-kvpr" else engine.act_share


def _heads(engine: EngineSettings, model: Model) -> HeadProfile | None:
    """Scores of the model's heads, for answers that may be approximate, where a file gives them."""
    if engine.approx == "never" or not engine.sparse.heads:
        return None
    try:
        return read_heads(engine.sparse.heads, model.shape)
    except ValueError as error:
        raise StartError(f"engine.sparse.heads: {error}") from None


def engine_scheduler(settings: ClusterSettings) -> Any:
    """The rule of every engine, as a `kappa_workers.vllm.options.SchedulerOptions`."""
    from kappa_workers.vllm.options import SchedulerOptions

    s = settings.scheduler
    names = "max_skips", "due_after_s", "window", "slack_s", "credit", "class_s", "step_factor"
    config = {name: getattr(s, name) for name in (*names, "reserve")}
    weights = dict(settings.tenants.weights)
    return SchedulerOptions(s.name, config | {"weights": weights}, log=s.log)
