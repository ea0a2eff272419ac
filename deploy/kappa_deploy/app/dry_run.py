"""A start without starting: what it would ask of vLLM, Ray and the machine, and its faults.

The functions of a real start make it (`kappa_deploy.app.plan`,
`kappa_workers.identity.configure_vllm`). Names stand in for what only a start knows: sockets, the
port of an LMCache server, rates once measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kappa.settings.cluster import ClusterSettings
from kappa.settings.pools import PoolSettings
from kappa.shapes import model_shape
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.machine import Machine
from kappa_deploy.app.model import Model, models_here
from kappa_deploy.app.plan import pool_config, worker_demand, worker_plan
from kappa_deploy.app.ray_cluster import OwnRay
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import of_place
from kappa_deploy.checks.table import findings

_STREAM = "tcp://WORKER"
_LMCACHE = "tcp://127.0.0.1:0"
_SECRET = ("hf_token",)


def dry_run(settings: ClusterSettings, elsewhere: Sequence[Machine] = ()) -> dict[str, Any]:
    """`{"pools": [...], "machines": [...], "problems": [...], "notes": [...]}`, JSON-ready.

    elsewhere: other machines than this one; a folder that is not here is then no problem.
    """
    machines = elsewhere or OwnRay(sum(pool.most for pool in settings.all_pools)).foreseen()
    unread: list[str] = []
    notes: list[str] = []
    models: list[Model | None] = []
    for of_one, (model, why) in zip(settings.by_model(), models_here(settings), strict=True):
        if why:
            (notes if elsewhere else unread).append(why)
        elif model is None:
            notes.append(f"model.source {of_one.model.source!r} is not on disk: a start fetches it")
        if model is None and (model := _built_in(of_one)) is not None:
            notes.append(f"sizes are those of the built-in shape {model.shape.name}")
        elif model is None:
            notes.append("nothing that depends on the model's shape is checked")
        models.append(model)
    notes += [
        f"the memory of {machine.name} is not given: host tiers are neither sized nor checked there"
        for machine in machines
        if machine.memory_bytes is None
    ]
    found = findings("start", Facts(settings, models, unread, machines))
    return {
        "pools": [
            _pool(of_one, pool, model, machines, of_place(found, pool.name))
            for of_one, model in zip(settings.by_model(), models, strict=True)
            for pool in of_one.all_pools
        ],
        "machines": [asdict(machine) for machine in machines],
        "problems": of_place(found, ""),
        "notes": notes,
    }


def faults_of(found: Mapping[str, Any]) -> list[str]:
    """Every fault of a dry run: of the settings, then of each pool."""
    return [*found["problems"], *(fault for pool in found["pools"] for fault in pool["problems"])]


def _built_in(settings: ClusterSettings) -> Model | None:
    """The built-in shape of a model that is not on disk; None: its name is not known."""
    try:
        shape = model_shape(str(settings.model.source).rstrip("/"))
    except ValueError:
        return None
    return Model(str(settings.model.source), shape, "")


def _pool(
    settings: ClusterSettings,
    pool: PoolSettings,
    model: Model | None,
    machines: Sequence[Machine],
    wrong: Sequence[str],
) -> dict[str, Any]:
    wrong, place = list(wrong), pool.placement
    config = pool_config(settings, pool, model)
    tier = "off"
    arguments: dict[str, Any] = {}
    crossing: dict[str, float] = {}
    try:
        if model is not None:
            plan = worker_plan(settings, pool, model, "")
            node = plan.node(0)
            if size := node.host_weight_bytes:
                crossing = {"bytes": size, "least_step_s": size / node.h2d_bytes_per_s}
            # As the machine looks now; the worker goes by its memory in all.
            where = next((m for m in machines if not m.lacks(pool)), None)
            if where is not None and where.memory_bytes is not None:
                plan = plan.sized(where.memory_bytes, where.offers.get("GPU", 0))
            tier, arguments = _engine(config, plan)
    except (StartError, ValueError) as error:
        # What was found already may be why.
        wrong = wrong or [f"pool {pool.name}: {error}"]
    return {
        "name": pool.name,
        "model": settings.model.id,
        "workers": {"least": pool.least, "most": pool.most},
        "device": "cuda" if place.gpus else "cpu",
        "silicon": pool.silicon,
        "host_tier": tier,
        "host_weights": crossing,
        "engine_args": arguments,
        "ray": {
            "worker": worker_demand(pool),
            "bundles": config["placement_group_config"]["bundles"],
            "labels": dict(place.labels),
        },
        "environment": config["runtime_env"]["env_vars"],
        "problems": wrong,
    }


def _engine(given: Mapping[str, Any], plan: Any) -> tuple[str, dict[str, Any]]:
    """The host tier of a worker's engine, and its arguments as vLLM, or ours, is given them."""
    from ray.serve.llm import LLMConfig

    from kappa_workers.identity import configure_vllm
    from kappa_workers.vllm.arguments import LMCACHE, Endpoints

    tier = plan.tier if plan.limits.host_bytes else "off"
    tier += " and disk" if plan.engine.disk_bytes else ""
    kind = plan.engine.kind
    if kind != "vllm":
        planner = plan.engine.planner if kind == "torch" else ""
        return tier, {"kind": kind, "planner": planner, **asdict(plan.limits)}
    server = _LMCACHE if plan.tier == LMCACHE else ""
    endpoints = Endpoints(f"{_STREAM}-stats", f"{_STREAM}-kv")
    config = LLMConfig(**given)
    configure_vllm(config, plan, 0, endpoints, plan.engine_tier(0, {}, server))
    arguments: Mapping[str, Any] = config.get_engine_config().get_initialization_kwargs()
    return tier, {name: "(hidden)" if name in _SECRET else v for name, v in arguments.items()}
