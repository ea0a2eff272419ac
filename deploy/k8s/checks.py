"""Checks a rendered manifest without a cluster: schemas, and what our own settings demand of it.

Built-in kinds against Kubernetes' schemas (strictly: an unknown field is a fault), the RayService
against KubeRay's CRD and its pods against Kubernetes', the Serve configuration inside against Ray's
schema, and its `args` against ours. Kinds of the Prometheus operator have no schema here; what they
select is checked. What worker pods offer to Ray is held against what the pools demand, as
`kappa serve` does at a start. Called by `deploy.k8s.render` and the tests.
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.app.fits import misfits
from deploy.app.machine import Machine
from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings
from kappa.settings.engine import share_bytes
from kappa.settings.pools import PoolSettings

CRD = Path(__file__).parent / "crd" / "ray.io_rayservices.yaml.gz"
KUBERNETES = "1.32"
IMPORT_PATH = "deploy.serve_app:app"

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

Document = dict[str, Any]


def faults(documents: Iterable[Document]) -> list[str]:
    """Everything that is wrong, one line each: kind, name, place and reason."""
    found = []
    all_documents = list(documents)
    for document in all_documents:
        kind = document.get("kind")
        if kind in ("ServiceMonitor", "PrometheusRule"):
            continue
        check = _ray_service if kind == "RayService" else _built_in
        where = f"{kind}/{document.get('metadata', {}).get('name')}"
        found += [f"{where}: {fault}" for fault in check(document)]
    return found + list(_selections(all_documents))


def _built_in(document: Document) -> Iterator[str]:
    import kubernetes_validate

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{_path(error.path)}: {error.message[:200]}"
    except (kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        yield f"no schema: {error}"


def _path(parts: Iterable[Any]) -> str:
    return ".".join(str(part) for part in parts) or "(top)"


def _selections(documents: list[Document]) -> Iterator[str]:
    """Services, monitors, policies and budgets that select nothing."""
    pods = [
        template.get("metadata", {}).get("labels", {})
        for document in documents
        if document["kind"] == "RayService"
        for _, template in _templates(document)
    ]
    services = [d["metadata"].get("labels", {}) for d in documents if d["kind"] == "Service"]
    places = {
        "Service": ("selector", pods), "ServiceMonitor": ("selector", services),
        "PodDisruptionBudget": ("selector", pods), "NetworkPolicy": ("podSelector", pods),
    }  # fmt: skip
    for document in documents:
        key, among = places.get(document["kind"], ("", []))
        if not key:
            continue
        selector = document["spec"].get(key) or {}
        labels = selector if document["kind"] == "Service" else selector["matchLabels"]
        if not any(labels.items() <= one.items() for one in among):
            yield f"{document['kind']}/{document['metadata']['name']}: selects nothing: {labels}"


# -- the RayService -------------------------------------------------------------------------------


def _ray_service(document: Document) -> Iterator[str]:
    from jsonschema import Draft202012Validator

    misshapen = list(Draft202012Validator(_crd_schema()).iter_errors(document))
    yield from (f"{_path(error.absolute_path)}: {error.message[:200]}" for error in misshapen)
    if misshapen:
        return
    for group, template in _templates(document):
        # The CRD does not say all that Kubernetes demands of a pod.
        metadata = {"name": group, **template.get("metadata", {})}
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}
        yield from (f"group {group}: {fault}" for fault in _built_in(pod))
    yield from _serve_config(document)


def _templates(document: Document) -> Iterator[tuple[str, Document]]:
    """The pod templates of a RayService, with the names of their groups."""
    cluster = document.get("spec", {}).get("rayClusterConfig", {})
    yield "head", cluster.get("headGroupSpec", {}).get("template", {})
    for group in cluster.get("workerGroupSpecs", []):
        yield group.get("groupName", "?"), group.get("template", {})


def _serve_config(document: Document) -> Iterator[str]:
    from pydantic import ValidationError
    from ray.serve import schema

    from deploy.serve_app import settings_of

    try:
        data = yaml.safe_load(document.get("spec", {}).get("serveConfigV2", ""))
        found = schema.ServeDeploySchema.model_validate(data)
    except (yaml.YAMLError, ValidationError, TypeError) as error:
        yield f"serveConfigV2: {error}"
        return
    # Ray's schema passes over keys that it does not know; here they are faults.
    parts: list[tuple[str, Any, Any]] = [
        ("", schema.ServeDeploySchema, data),
        ("http_options.", schema.HTTPOptionsSchema, data.get("http_options", {})),
    ]
    for application in data.get("applications", []):
        where = f"applications.{application.get('name')}."
        parts.append((where, schema.ServeApplicationSchema, application))
        for deployment in application.get("deployments", []):
            parts.append((f"{where}deployments.", schema.DeploymentSchema, deployment))
    for where, model, part in parts:
        unknown = part.keys() - model.model_fields.keys()
        yield from (f"serveConfigV2.{where}{key}: unknown" for key in unknown)
    for application in found.applications:
        where = f"serveConfigV2.applications.{application.name}"
        if application.import_path != IMPORT_PATH:
            yield f"{where}.import_path: is {application.import_path}, not {IMPORT_PATH}"
        if application.runtime_env:
            yield f"{where}.runtime_env: the image holds everything; install nothing at start"
        try:
            settings = settings_of(_without_files(application.args))
        except SettingsError as error:
            yield f"{where}.args: {error}"
        else:
            yield from _unfit(document, settings)


def _without_files(args: dict[str, Any]) -> dict[str, Any]:
    """`args` with the tenants' keys file, which is on the cluster only, replaced by a key."""
    tenants = dict(args.get("tenants") or {})
    if tenants.pop("keys_file", None):
        named = {"default", *(n for key in ("weights", "limits", "operators")
                              for n in tenants.get(key, ()))}  # fmt: skip
        keys = {f"a-key-of-the-file-{i}": name for i, name in enumerate(sorted(named))}
        tenants["by_key"] = {**tenants.get("by_key", {}), **keys}
    return {**args, "tenants": tenants} if tenants else args


@cache
def _crd_schema() -> Document:
    """The CRD's schema of `v1`, made strict: unknown fields are faults."""
    crd = yaml.load(gzip.decompress(CRD.read_bytes()), Loader=yaml.CSafeLoader)
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")
    made = _strict(version["schema"]["openAPIV3Schema"])
    # The API server, not the CRD, says what metadata holds.
    made["properties"]["metadata"] = {"type": "object"}
    return made


def _strict(schema: Document) -> Document:
    """A CRD's OpenAPI schema as JSON Schema: structural, so objects with properties are closed."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made: Document = {}
    for key, value in schema.items():
        if key == "properties":
            made[key] = {name: _strict(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            made[key] = _strict(value)
        elif not key.startswith("x-kubernetes") and key not in ("nullable", "format", "default"):
            made[key] = value
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not is_open:
        made["additionalProperties"] = False
    return made


# -- whether its pods can hold the pools ----------------------------------------------------------


def _unfit(document: Document, settings: ClusterSettings) -> Iterator[str]:
    """What a RayService lacks to run what its settings demand, one line each."""
    cluster, pools = document["spec"]["rayClusterConfig"], settings.all_pools
    groups = cluster.get("workerGroupSpecs", [])
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
        _host_bytes(group, machine, pool, settings)
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
        engine, gpus = pool.engine_settings(settings.engine), pool.placement.gpus
        if engine.tier_on(gpus) in ("native", "stock") and gpus and not machine.lacks(pool):
            workers = int(machine.offers["GPU"] // gpus)
            size = _host_bytes(group, machine, pool, settings)
            mapped_bytes = max(mapped_bytes, workers * size)
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


def _host_bytes(
    group: Document, machine: Machine, pool: PoolSettings, settings: ClusterSettings
) -> int:
    """The host tier of a pool's worker in one of a group's pods."""
    size = pool.engine_settings(settings.engine).host_bytes
    if size is not None:
        return size
    resources = group["template"]["spec"]["containers"][0].get("resources", {})
    memory = quantity(resources.get("limits", {}).get("memory", "0"))
    return share_bytes(float(memory), machine.offers["GPU"], pool.placement.gpus)


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
    return Machine(f"group {group['groupName']}", offers, group.get("labels", {}))


def quantity(text: str | int | float) -> Decimal:
    """Kubernetes' quantity (`4Gi`, `500m`, `2`) as a number."""
    text = str(text)
    number = text.rstrip("KMGTikm")
    return Decimal(number) * _UNITS[text[len(number) :]]
