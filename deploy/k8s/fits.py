"""Whether a manifest's worker pods can hold the pools of its settings: places, numbers and memory.

What each worker group's pods offer to Ray (CPUs, GPUs, custom resources, labels) is read from the
group as KubeRay passes it on; the pools' demands are those that `kappa serve` checks at a start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from deploy.app.placing import Machine, misfits
from kappa.settings.cluster import ClusterSettings
from kappa.settings.pools import PoolSettings

# What an engine needs of a pod's memory beside the host tier: weights while they are read, Ray's
# object store, Python.
_ENGINE_BYTES = 64 << 30
_TINY_ENGINE_BYTES = 2 << 30
# Kubernetes' own.
_DEFAULT_GRACE_S = 30

_UNITS = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6),
    "G": Decimal(10**9), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}  # fmt: skip

Document = dict[str, Any]


def unfit(document: Document, settings: ClusterSettings) -> Iterator[str]:
    """What a RayService lacks to run what its settings demand, one line each."""
    cluster = document["spec"]["rayClusterConfig"]
    groups = cluster.get("workerGroupSpecs", [])
    yield from _numbers(groups, settings, autoscaled=bool(cluster.get("enableInTreeAutoscaling")))
    for group in groups:
        yield from _memory(group, settings)
        yield from _grace(group, settings)
        resources = group["template"]["spec"]["containers"][0].get("resources", {})
        if resources.get("limits", {}) != resources.get("requests", {}):
            yield (
                f"group {group['groupName']}: requests differ from limits, so kubelet gives it "
                "no cores and no memory of its own"
            )


def machine_of(group: Document) -> Machine:
    """What one pod of a worker group offers to Ray."""
    parameters = group.get("rayStartParams", {})
    limits = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    offers = {
        "CPU": float(parameters.get("num-cpus", quantity(limits.get("cpu", "0")))),
        "GPU": float(parameters.get("num-gpus", quantity(limits.get("nvidia.com/gpu", "0")))),
        # KubeRay puts the parameter on a command line, hence its outer quotes.
        **json.loads(str(parameters.get("resources", "{}")).strip("'\"").replace('\\"', '"')),
        **{name: float(quantity(value)) for name, value in group.get("resources", {}).items()},
    }
    return Machine(f"group {group['groupName']}", offers, group.get("labels", {}))


def _numbers(groups: list[Document], settings: ClusterSettings, autoscaled: bool) -> Iterator[str]:
    pods = sum(group.get("replicas", 0) for group in groups)
    if pods != settings.workers:
        yield f"{pods} worker pods at start for {settings.workers} workers in args"
    yield from misfits(settings.all_pools, _machines(groups, "replicas"))
    growing = [pool for pool in settings.all_pools if pool.most > pool.least]
    if growing and not autoscaled:
        names = ", ".join(pool.name for pool in growing)
        yield (
            f"pools {names} may grow, but enableInTreeAutoscaling is not set: no pod would come "
            "(components/autoscaling)"
        )
    elif growing:
        at_most = [_all_of(pool) for pool in settings.all_pools]
        for fault in misfits(at_most, _machines(groups, "maxReplicas")):
            yield f"with every pool at its most: {fault}"


def _all_of(pool: PoolSettings) -> PoolSettings:
    return pool.model_copy(update={"replicas": pool.most, "autoscaling": None})


def _machines(groups: list[Document], count: str) -> list[Machine]:
    return [machine_of(group) for group in groups for _ in range(group.get(count, 0))]


def _memory(group: Document, settings: ClusterSettings) -> Iterator[str]:
    """The pinned host tier of the pool that runs there must leave the engine enough."""
    machine = machine_of(group)
    needs = [
        pool.engine_settings(settings.engine).host_bytes
        + (_TINY_ENGINE_BYTES if pool.paced else _ENGINE_BYTES)
        for pool in settings.all_pools
        if not machine.lacks(pool)
    ]
    limits = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    if needs and quantity(limits.get("memory", "0")) < max(needs):
        yield (
            f"group {group['groupName']}: memory limit {limits.get('memory')} is less than the "
            f"host tier and an engine need, {max(needs) >> 20}Mi: it would be killed"
        )


def _grace(group: Document, settings: ClusterSettings) -> Iterator[str]:
    """A pod that is taken away must live as long as its worker may need to end its streams."""
    machine = machine_of(group)
    drains = [pool.drain_s for pool in settings.all_pools if not machine.lacks(pool)]
    grace_s = group["template"]["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if drains and grace_s <= max(drains):
        yield (
            f"group {group['groupName']}: terminationGracePeriodSeconds is {grace_s}, and its "
            f"worker may take drain_s {max(drains):g} to end its streams: give it more"
        )


def quantity(text: str | int | float) -> Decimal:
    """Kubernetes' quantity (`4Gi`, `500m`, `2`) as a number."""
    text = str(text)
    number = text.rstrip("KMGTikm")
    return Decimal(number) * _UNITS[text[len(number) :]]
