"""Whether a worker can run on a machine that has a place for it. Pure.

Each check yields a sentence a fault, with the figures and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, get_args

from kappa.hardware import node_profile
from kappa.model import ModelShape, kv_bytes
from kappa_deploy.checks.facts import Facts, Worker
from kappa_deploy.checks.findings import Finding
from kappa_deploy.checks.machine import old_driver
from kappa_workers.host_memory import HostBudget

# vLLM's default of gpu_memory_utilization; a contract test holds it.
GPU_SHARE = 0.92

_DTYPES = frozenset({"dtype", "kv_cache_dtype", "quantization"})


def workers_alone(facts: Facts) -> Iterator[Finding]:
    """Each pool's faults, on the machine where it has the fewest of those with a place for it."""
    by_pool: dict[str, list[list[str]]] = {}
    for machine in facts.machines:
        for worker in facts.workers(machine):
            if not machine.lacks(worker.pool):
                by_pool.setdefault(worker.pool.name, []).append(problems(worker))
    for name, here in by_pool.items():
        yield from (Finding("fail", fault, where=name) for fault in min(here, key=len))


def workers_together(facts: Facts) -> Iterator[Finding]:
    """Why all workers do not fit the memory of a cluster's only machine together."""
    if len(facts.machines) == 1:
        workers = [w for w in facts.workers(facts.machines[0]) for _ in range(w.pool.least)]
        if len(workers) > 1:
            yield from (Finding("fail", fault) for fault in _memory_faults(workers))


def problems(w: Worker) -> list[str]:
    """What keeps one worker from running on its machine, beside its place in Ray."""
    who = f"pool {w.pool.name}"
    on_host = [] if w.kind == "emulated" else _memory_faults([w])
    return [
        *(f"{who}: {fault}" for check in _OF_A_WORKER for fault in check(w)),
        *(f"{who} on {w.machine.name}: {fault}" for fault in on_host),
    ]


def _memory_faults(workers: Sequence[Worker]) -> list[str]:
    """Why host tiers, and the engines beside them, do not fit the workers' one machine."""
    machine = workers[0].machine
    return HostBudget(machine_bytes=machine.memory_bytes, shm_bytes=machine.shm_bytes).faults(
        [w.tier_bytes for w in workers],
        sum(w.mapped_bytes for w in workers),
        engines_bytes=sum(w.engine_bytes for w in workers),
    )


def _arguments(w: Worker) -> Iterator[str]:
    if not w.engine.extra or w.kind != "vllm":
        return
    # Ray divides them between these two.
    from ray.llm._internal.serve.engines.vllm.vllm_models import AsyncEngineArgs, FrontendArgs

    known = [each.name for record in (AsyncEngineArgs, FrontendArgs) for each in fields(record)]
    for name in sorted(w.engine.extra.keys() - set(known)):
        near = get_close_matches(name, known, 1)
        remedy = f"; did you mean {near[0]}?" if near else ": take it out"
        yield f"engine.extra.{name} is no argument of the vLLM installed here{remedy}"


def _build(w: Worker) -> Iterator[str]:
    build = w.machine.engine_build
    if w.kind == "emulated" or not build or (build == "cuda") == bool(w.gpus):
        return
    if w.gpus:
        yield (
            f"placement.gpus is {w.gpus}, and the vLLM installed here is its CPU build: set up "
            "with 'KAPPA_EXTRA=gpu ./dev setup'"
        )
    elif w.kind == "vllm":
        yield (
            "placement.gpus is 0, and the vLLM installed here is its CUDA build, which runs on "
            "GPUs alone: give placement.gpus 1 or more, or set up with 'KAPPA_EXTRA=cpu ./dev "
            "setup'"
        )


def _dtypes(w: Worker) -> Iterator[str]:
    given = w.engine.extra
    if w.kind != "vllm" or not given.keys() & _DTYPES:
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
        if given.get(name) is not None and given[name] not in names:
            yield (
                f"engine.extra.{name} is {given[name]!r}, which vLLM does not know: use one of "
                f"{', '.join(names)}"
            )


def _driver(w: Worker) -> Iterator[str]:
    if w.gpus and (fault := old_driver(w.machine)):
        yield f"{fault}: update NVIDIA's driver"


def _weights(w: Worker) -> Iterator[str]:
    # Other loaders have formats of their own, or make weights up.
    needed = w.engine.kind != "emulated" and "load_format" not in w.engine.extra
    if w.model is not None and w.model.no_weights and needed:
        yield (
            f"the model's folder {w.model.source} lacks {w.model.no_weights}; copy the model there "
            "whole"
        )


def _gpu_memory(w: Worker) -> Iterator[str]:
    if not w.gpus or w.model is None or w.kind == "emulated":
        return
    extra = w.engine.extra
    sizes = [(gpu.memory_bytes, gpu.name) for gpu in w.machine.gpus or () if gpu.memory_bytes]
    prior = node_profile(w.pool.profile)
    size, name = min(sizes, default=(int(prior.hbm_bytes), f"a GPU as in profile {prior.name}"))
    share = float(extra.get("gpu_memory_utilization", GPU_SHARE))
    # vLLM's own choice is the model's context, and it refuses a cache that cannot hold one.
    given = w.engine.max_context_tokens or extra.get("max_model_len")
    tokens = given if isinstance(given, int) and given > 0 else w.model.shape.max_context_tokens
    shape = _in_the_dtypes_of(extra, w.model.shape)
    weights, kv = _bytes_per_gpu(shape, tokens, w.gpus)
    weights -= w.host_weight_bytes / w.gpus
    if not size or weights + kv <= share * size:
        return
    enough = [n for n in (2, 4, 8, 16) if sum(_bytes_per_gpu(shape, tokens, n)) <= share * size]
    remedies = [f"give placement.gpus {enough[0]}"] if enough else []
    room = share * size - weights
    if room > 0:
        remedies.append(f"lower engine.max_context_tokens to {int(tokens * room / kv)}")
    yield (
        f"weights of {_gb(weights)} and KV of one sequence of {tokens} tokens, {_gb(kv)}, do not "
        f"fit {name}, of whose {_gb(size)} vLLM takes {share:g}: "
        f"{' or '.join(remedies) or 'take a larger GPU or a smaller dtype'}"
    )


def _in_the_dtypes_of(extra: Mapping[str, Any], shape: ModelShape) -> ModelShape:
    """The shape as vLLM holds it where its arguments quantise; a format that is not FP8 counts as
    4 bits, the least that any method takes."""

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
    """Bytes of weights and of one sequence's KV on each of `gpus` tensor-parallel ranks."""
    weights = shape.params_total * shape.weight_dtype_bytes
    return weights / gpus, kv_bytes(shape, tokens, gpus) / gpus


def _disk(w: Worker) -> Iterator[str]:
    engine = w.engine
    free = w.machine.folder_bytes(engine.disk_dir or "") if engine.disk_bytes else None
    if free is not None and engine.disk_bytes > free:
        yield (
            f"engine.disk_bytes of {_gb(engine.disk_bytes)}, and engine.disk_dir {engine.disk_dir} "
            f"of {w.machine.name} has {_gb(free)} that this user may write: lower it, or name "
            "another folder"
        )


def _gb(count: float) -> str:
    return f"{count / 1e9:,.4g} GB"


_OF_A_WORKER = (_arguments, _build, _dtypes, _driver, _weights, _gpu_memory, _disk)
