"""Whether the pods of a RayService can run what its settings demand.

What worker pods offer to Ray is held against what the pools demand, as `kappa serve` does at a
start; memory and times against the engines' needs; the front pods against the needs of a decider,
its Envoy and their clients. Called by `kappa_deploy.checks.manifests`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from kappa.settings.cluster import ClusterSettings
from kappa_deploy import front_pod
from kappa_deploy.app.machine import Machine
from kappa_deploy.checks.facts import Worker
from kappa_deploy.checks.places import misfits

# What an engine needs of a pod's memory beside the host tier: weights while they are read, Ray's
# object store, Python.
_ENGINE_BYTES = 64 << 30
_TINY_ENGINE_BYTES = 2 << 30
# What vLLM's queues and NCCL take of /dev/shm beside the host tier.
_SHM_BYTES = 1 << 30
_DEFAULT_GRACE_S = 30  # Kubernetes' own
_UNITS = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6),
    "G": Decimal(10**9), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}  # fmt: skip

Document = Mapping[str, Any]


def unfit(document: Document, settings: ClusterSettings) -> Iterator[str]:
    """What a RayService lacks to run what its settings demand, one line each."""
    cluster, pools = document["spec"]["rayClusterConfig"], settings.all_pools
    everyone = cluster.get("workerGroupSpecs", [])
    fronts = [group for group in everyone if _fronts(group)]
    yield from _front_faults(document, fronts, settings)
    groups = [group for group in everyone if not _fronts(group)]
    pods = sum(group.get("replicas", 0) for group in groups)
    if pods != settings.workers:
        yield f"{pods} worker pods at start for {settings.workers} workers in args"
    yield from misfits(pools, _machines(groups, "replicas")).values()
    growing = ", ".join(pool.name for pool in pools if pool.most > pool.least)
    if growing and not cluster.get("enableInTreeAutoscaling"):
        yield (
            f"pools {growing} may grow, but enableInTreeAutoscaling is not set: no pod would come "
            "(components/autoscaling)"
        )
    elif growing:
        most = [p.model_copy(update={"replicas": p.most, "autoscaling": None}) for p in pools]
        for fault in misfits(most, _machines(groups, "maxReplicas")).values():
            yield f"with every pool at its most: {fault}"
    for group in groups:
        yield from (f"group {group['groupName']}: {fault}" for fault in _group(group, settings))


def _group(group: Document, settings: ClusterSettings) -> Iterator[str]:
    machine, pod = _machine_of(group), group["template"]["spec"]
    pools = [pool for pool in settings.all_pools if not machine.lacks(pool)]
    resources = pod["containers"][0].get("resources", {})
    limits = resources.get("limits", {})
    needs_bytes = [
        Worker(settings, pool, machine).tier_bytes
        + (_TINY_ENGINE_BYTES if pool.paced else _ENGINE_BYTES)
        for pool in pools
    ]
    if pools and quantity(limits.get("memory", "0")) < max(needs_bytes):
        yield (
            f"memory limit {limits.get('memory')} is less than the host tier and an engine need, "
            f"{max(needs_bytes) >> 20}Mi: it would be killed"
        )
    yield from _shared_memory(group, machine, settings)
    grace_s = pod.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    drain_s = max((pool.drain_s for pool in pools), default=0)
    if pools and grace_s <= drain_s:
        yield (
            f"terminationGracePeriodSeconds is {grace_s}, and its worker may take drain_s "
            f"{drain_s:g} to end its streams: give it more"
        )
    if limits != resources.get("requests", {}):
        yield ("requests differ from limits, so kubelet gives it no cores and no memory of its own")


def _shared_memory(group: Document, machine: Machine, settings: ClusterSettings) -> Iterator[str]:
    """What a pod lacks of /dev/shm, where vLLM maps the host tiers of GPU workers."""
    mapped_bytes = 0
    for pool in settings.all_pools:
        worker = Worker(settings, pool, machine)
        if worker.gpus and not machine.lacks(pool):
            workers = int(machine.offers["GPU"] // worker.gpus)
            mapped_bytes = max(mapped_bytes, workers * worker.mapped_bytes)
    if not mapped_bytes:
        return
    store = int(group.get("rayStartParams", {}).get("object-store-memory", 0))
    if not store:
        yield (
            "rayStartParams lacks object-store-memory: Ray would take 30 % of memory, in the same "
            "/dev/shm as the host tier"
        )
    pod = group["template"]["spec"]
    mounts = pod["containers"][0].get("volumeMounts", [])
    name = next((m["name"] for m in mounts if m["mountPath"] == "/dev/shm"), "")
    volume: Document = next((v for v in pod.get("volumes", []) if v["name"] == name), {})
    limit = quantity((volume.get("emptyDir") or {}).get("sizeLimit", "64Mi"))
    needed = mapped_bytes + store + _SHM_BYTES
    if limit < needed:
        yield (
            f"/dev/shm has {int(limit) >> 20}Mi, and the host tier ({mapped_bytes >> 20}Mi), Ray's "
            f"object store ({store >> 20}Mi) and queues need {needed >> 20}Mi: raise its sizeLimit"
        )


def _machines(groups: list[Document], count: str) -> list[Machine]:
    return [_machine_of(group) for group in groups for _ in range(group.get(count, 0))]


def _machine_of(group: Document) -> Machine:
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
    memory_bytes = int(quantity(limits.get("memory", "0")))
    return Machine(f"group {group['groupName']}", offers, group.get("labels", {}), memory_bytes)


def quantity(text: str | int | float) -> Decimal:
    """Kubernetes' quantity (`4Gi`, `500m`, `2`) as a number."""
    text = str(text)
    number = text.rstrip("KMGTikm")
    return Decimal(number) * _UNITS[text[len(number) :]]


# -- front pods -----------------------------------------------------------------------------------


def _fronts(group: Document) -> float:
    """How many deciders one of a group's pods has room for."""
    return _machine_of(group).offers.get(front_pod.RESOURCE, 0.0)


def _front_faults(
    document: Document, groups: list[Document], settings: ClusterSettings
) -> Iterator[str]:
    pods, wanted = sum(group.get("replicas", 0) for group in groups), settings.http.replicas
    if pods != wanted:
        yield f"{pods} front pods (that offer {front_pod.RESOURCE}) for http.replicas {wanted}"
    service = document["spec"].get("serveService", {}).get("spec", {})
    target = next((one.get("targetPort") for one in service.get("ports", [])), None)
    for group in groups:
        where, pod = f"group {group['groupName']}", group["template"]["spec"]
        if _fronts(group) != 1:
            yield f"{where}: one decider for each Envoy: {front_pod.RESOURCE} must be 1"
        named = [
            (container, port["containerPort"])
            for container in pod["containers"]
            for port in container.get("ports", ())
            if port.get("name") == target
        ]
        if [number for _, number in named] == [settings.http.port]:
            yield from (f"{where}: {fault}" for fault in _envoy(named[0][0], settings))
        else:
            yield (
                f"{where}: serveService's targetPort {target!r} is no port of one container, or "
                f"not http.port {settings.http.port}"
            )
        yield from (f"{where}: {fault}" for fault in _drains(pod, settings))


def _envoy(container: Document, settings: ClusterSettings) -> Iterator[str]:
    tls = settings.http.tls
    scheme = "HTTP" if tls is None else "HTTPS"
    if container.get("readinessProbe", {}).get("httpGet", {}).get("scheme", "HTTP") != scheme:
        yield f"readinessProbe's scheme must be {scheme}, as http.tls has it"
    mounts = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
    pair = () if tls is None else (Path(tls.cert), Path(tls.key))
    for path in (front_pod.FOLDER, *pair):
        if mounts.isdisjoint(map(str, path.parents)):
            yield f"container {container['name']} mounts nothing that holds {path}"


def _drains(pod: Document, settings: ClusterSettings) -> Iterator[str]:
    """What keeps a front pod's streams from lasting as long as those of workers."""
    drain_s = max(pool.drain_s for pool in settings.all_pools)
    grace_s = pod.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    given_s = []
    for container in pod["containers"]:
        ran = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        drains = ran[1:4] == ["-m", "kappa_deploy.front_pod", "drain"]
        given_s.append(float(ran[4]) if drains else 0.0)
    if min(given_s) < drain_s or max(given_s) >= grace_s:
        yield (
            f"each container's preStop drains for drain_s ({drain_s:g}) or longer, within "
            f"terminationGracePeriodSeconds ({grace_s}); theirs: {given_s}"
        )
