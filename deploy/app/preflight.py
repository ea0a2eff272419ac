"""What is wrong with a cluster before anything of it starts: settings, model and machines. Pure.

Each check is a function of `_CHECKS`: given one worker of a pool and the machine that it would run
on, it yields a sentence a fault, with the figures and the remedy. A fact that is not known refuses
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, get_args

from deploy.app.fits import contradictions, misfits
from deploy.app.machine import Machine
from deploy.app.model import Model
from kappa.hardware import node_profile
from kappa.model import ModelShape, kv_bytes
from kappa.settings.cluster import ClusterSettings
from kappa.settings.engine import EngineSettings, share_bytes
from kappa.settings.pools import PoolSettings
from workers.host_memory import HostBudget

CUDA = 13
"""Major version of the CUDA that the GPU lock brings; a test holds it against the lock."""

# NVIDIA's CUDA release notes, table of minor version compatibility: from this driver on (Linux).
_LEAST_DRIVER = {12: (525, 60, 13), 13: (580, 65, 6)}
# vLLM's default of gpu_memory_utilization; a contract test holds it.
GPU_SHARE = 0.92

_DTYPES = frozenset({"dtype", "kv_cache_dtype", "quantization"})

Check = Callable[[ClusterSettings, PoolSettings, Model | None, Machine], Iterator[str]]


def all_problems(
    settings: ClusterSettings, models: Sequence[Model | None], machines: Sequence[Machine]
) -> dict[str, list[str]]:
    """Every fault by pool, under "" those between settings; a pool is held to the machine of
    those with a place for it that has the fewest.

    models: in the order of `settings.by_model()`; None: not on disk yet. machines: none where they
    are not known yet.
    """
    unplaced = misfits(settings.all_pools, machines) if machines else {}
    found, engines_bytes = {"": contradictions(settings)}, 0.0
    for of_one, model in zip(settings.by_model(), models, strict=True):
        for pool in of_one.all_pools:
            here = [problems(of_one, pool, model, m) for m in machines if not m.lacks(pool)]
            faults = [unplaced[pool.name]] if pool.name in unplaced else []
            found[pool.name] = faults + min(here, key=len, default=[])
            if model is not None and settings.engine.kind != "emulated":
                engine = pool.engine_settings(of_one.engine)
                engines_bytes += pool.least * _engine_bytes(engine, pool, model.shape)
    if len(machines) == 1:
        found[""] += _together(settings, machines[0], engines_bytes)
    return {name: faults for name, faults in found.items() if faults}


def problems(
    settings: ClusterSettings, pool: PoolSettings, model: Model | None, machine: Machine
) -> list[str]:
    """What keeps one worker of the pool from running on the machine, beside its place in Ray.

    model: None where it is not on disk yet.
    """
    return [fault for check in _CHECKS for fault in check(settings, pool, model, machine)]


def _of_the_build(
    settings: ClusterSettings, pool: PoolSettings, _model: Model | None, machine: Machine
) -> Iterator[str]:
    gpus, build = pool.placement.gpus, machine.engine_build
    if settings.engine.kind == "emulated" or not build or (build == "cuda") == bool(gpus):
        return
    if gpus:
        yield (
            f"pool {pool.name}: placement.gpus is {gpus}, and the vLLM installed here is its CPU "
            "build: set up with 'KAPPA_EXTRA=gpu ./dev setup'"
        )
    elif settings.engine.kind == "vllm":
        yield (
            f"pool {pool.name}: placement.gpus is 0, and the vLLM installed here is its CUDA "
            "build, which runs on GPUs alone: give placement.gpus 1 or more, or set up with "
            "'KAPPA_EXTRA=cpu ./dev setup'"
        )


def _of_dtypes(
    settings: ClusterSettings, pool: PoolSettings, _model: Model | None, _machine: Machine
) -> Iterator[str]:
    extra = pool.engine_settings(settings.engine).extra
    if settings.engine.kind != "vllm" or not extra.keys() & _DTYPES:
        return
    from vllm.config.cache import CacheDType
    from vllm.config.model import ModelDType
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    known = {
        "dtype": get_args(ModelDType),
        "kv_cache_dtype": get_args(CacheDType),
        "quantization": QUANTIZATION_METHODS,
    }
    for name, names in known.items():
        if extra.get(name) is not None and extra[name] not in names:
            yield (
                f"pool {pool.name}: engine.extra.{name} is {extra[name]!r}, which vLLM does not "
                f"know: use one of {', '.join(names)}"
            )


def _of_the_driver(
    _settings: ClusterSettings, pool: PoolSettings, _model: Model | None, machine: Machine
) -> Iterator[str]:
    fault = old_driver(machine)
    if pool.placement.gpus and fault:
        yield f"pool {pool.name}: {fault}: update NVIDIA's driver"


def old_driver(machine: Machine) -> str:
    """In what a machine's driver is older than the lock's CUDA needs; empty: in nothing."""
    least = _LEAST_DRIVER[CUDA]
    old = next((g for g in machine.gpus or () if g.driver and _parts(g.driver) < least), None)
    if old is None:
        return ""
    needed = ".".join(f"{part:02}" for part in least)
    return (
        f"the driver of {machine.name} is {old.driver}, and CUDA {CUDA}, which the GPU lock "
        f"brings, needs {needed} or newer"
    )


def _parts(driver: str) -> tuple[int, ...]:
    return tuple(int(part) for part in driver.split(".") if part.isdigit())


def _of_the_weights(
    settings: ClusterSettings, pool: PoolSettings, model: Model | None, _machine: Machine
) -> Iterator[str]:
    engine = pool.engine_settings(settings.engine)
    # Other loaders have formats of their own, or make weights up.
    needed = engine.kind != "emulated" and "load_format" not in engine.extra
    if model is not None and model.no_weights and needed:
        yield (
            f"pool {pool.name}: the model's folder {model.source} lacks {model.no_weights}; copy "
            "the model there whole"
        )


def _of_gpu_memory(
    settings: ClusterSettings, pool: PoolSettings, model: Model | None, machine: Machine
) -> Iterator[str]:
    gpus = pool.placement.gpus
    if not gpus or model is None or settings.engine.kind == "emulated":
        return
    engine, shape = pool.engine_settings(settings.engine), model.shape
    sizes = [(gpu.memory_bytes, gpu.name) for gpu in machine.gpus or () if gpu.memory_bytes]
    prior = node_profile(pool.profile)
    size, name = min(sizes, default=(int(prior.hbm_bytes), f"a GPU as in profile {prior.name}"))
    share = float(engine.extra.get("gpu_memory_utilization", GPU_SHARE))
    # vLLM's own choice is the model's context, and it refuses a cache that cannot hold one.
    given = engine.max_context_tokens or engine.extra.get("max_model_len")
    tokens = given if isinstance(given, int) and given > 0 else shape.max_context_tokens
    shape = _in_the_dtypes_of(engine.extra, model.shape)
    weights, kv = _bytes_per_gpu(shape, tokens, gpus)
    weights -= float(engine.extra.get("cpu_offload_gb", 0)) * (1 << 30)
    if not size or weights + kv <= share * size:
        return
    enough = [n for n in (2, 4, 8, 16) if sum(_bytes_per_gpu(shape, tokens, n)) <= share * size]
    remedies = [f"give placement.gpus {enough[0]}"] if enough else []
    room = share * size - weights
    if room > 0:
        remedies.append(f"lower engine.max_context_tokens to {int(tokens * room / kv)}")
    yield (
        f"pool {pool.name}: weights of {_gb(weights)} and KV of one sequence of {tokens} tokens, "
        f"{_gb(kv)}, do not fit {name}, of whose {_gb(size)} vLLM takes {share:g}: "
        f"{' or '.join(remedies) or 'take a larger GPU or a smaller dtype'}"
    )


def _in_the_dtypes_of(extra: Mapping[str, Any], shape: ModelShape) -> ModelShape:
    """The shape as vLLM holds it where its arguments quantise; what is not FP8 counts as 4 bits,
    the least that any method takes."""

    def held(name: str, bytes_each: float) -> float:
        kind = str(extra.get(name) or "auto")
        if kind in ("auto", "float16", "bfloat16"):
            return bytes_each
        return min(bytes_each, 1.0 if "fp8" in kind or "int8" in kind else 0.5)

    return replace(
        shape,
        weight_dtype_bytes=held("quantization", shape.weight_dtype_bytes),
        kv_dtype_bytes=held("kv_cache_dtype", shape.kv_dtype_bytes),
    )


def _bytes_per_gpu(shape: ModelShape, tokens: int, gpus: int) -> tuple[float, float]:
    """Of weights, and of one sequence's KV, on each of `gpus` tensor-parallel ranks."""
    weights = shape.params_total * shape.weight_dtype_bytes
    return weights / gpus, kv_bytes(shape, tokens, gpus) / gpus


def _of_memory(
    settings: ClusterSettings, pool: PoolSettings, model: Model | None, machine: Machine
) -> Iterator[str]:
    if settings.engine.kind == "emulated":
        return
    tier, mapped = _tier(settings, pool, machine)
    engine, beside = pool.engine_settings(settings.engine), 0.0
    if model is not None:
        beside = _engine_bytes(engine, pool, model.shape)
    faults = _budget(machine).faults([tier], tier * mapped, engines_bytes=beside)
    yield from (f"pool {pool.name} on {machine.name}: {fault}" for fault in faults)


def _of_disk(
    settings: ClusterSettings, pool: PoolSettings, _model: Model | None, machine: Machine
) -> Iterator[str]:
    engine = pool.engine_settings(settings.engine)
    free = machine.folder_bytes(engine.disk_dir or "") if engine.disk_bytes else None
    if free is not None and engine.disk_bytes > free:
        yield (
            f"pool {pool.name}: engine.disk_bytes of {_gb(engine.disk_bytes)}, and engine.disk_dir "
            f"{engine.disk_dir} of {machine.name} has {_gb(free)} that this user may write: lower "
            "it, or name another folder"
        )


def _together(settings: ClusterSettings, machine: Machine, engines_bytes: float) -> list[str]:
    """Why the host tiers of all workers, and what their engines hold in its memory beside them, do
    not fit the only machine of a cluster."""
    tiers = [
        _tier(settings, pool, machine) for pool in settings.all_pools for _ in range(pool.least)
    ]
    if len(tiers) == 1:
        return []
    mapped_bytes = sum(tier for tier, mapped in tiers if mapped)
    sizes = [tier for tier, _ in tiers]
    return _budget(machine).faults(sizes, mapped_bytes, engines_bytes=engines_bytes)


def _budget(machine: Machine) -> HostBudget:
    return HostBudget(machine_bytes=machine.memory_bytes, shm_bytes=machine.shm_bytes)


def _tier(settings: ClusterSettings, pool: PoolSettings, machine: Machine) -> tuple[int, bool]:
    """Bytes of a worker's host tier on its machine, and whether vLLM maps them in /dev/shm."""
    engine = pool.engine_settings(settings.engine)
    kind = engine.tier_on(pool.placement.gpus)
    if engine.kind == "emulated" or (kind == "lmcache" and engine.lmcache.server):
        return 0, False
    size = engine.host_bytes
    if size is None:
        gpus = machine.offers.get("GPU", 0)
        size = share_bytes(machine.memory_bytes or 0, gpus, pool.placement.gpus)
    return size, kind in ("native", "stock")


def _engine_bytes(engine: EngineSettings, pool: PoolSettings, shape: ModelShape) -> float:
    """Host memory of an engine beside its tier: on a CPU its weights and its device cache."""
    if pool.placement.gpus:
        return 0.0
    cache = kv_bytes(shape, (engine.device_blocks or 0) * (engine.block_tokens or 0))
    return shape.params_total * shape.weight_dtype_bytes + cache


def _gb(count: float) -> str:
    return f"{count / 1e9:,.4g} GB"


def _of_extra(
    settings: ClusterSettings, pool: PoolSettings, _model: Model | None, _machine: Machine
) -> Iterator[str]:
    given = pool.engine_settings(settings.engine).extra
    if not given or settings.engine.kind != "vllm":
        return
    # Ray divides them between these two.
    from ray.llm._internal.serve.engines.vllm.vllm_models import AsyncEngineArgs, FrontendArgs

    known = [each.name for record in (AsyncEngineArgs, FrontendArgs) for each in fields(record)]
    for name in sorted(given.keys() - set(known)):
        near = get_close_matches(name, known, 1)
        yield (
            f"pool {pool.name}: engine.extra.{name} is no argument of the vLLM installed here"
            + (f"; did you mean {near[0]}?" if near else ": take it out")
        )


_CHECKS: tuple[Check, ...] = (
    _of_extra,
    _of_the_build,
    _of_dtypes,
    _of_the_driver,
    _of_the_weights,
    _of_gpu_memory,
    _of_memory,
    _of_disk,
)
