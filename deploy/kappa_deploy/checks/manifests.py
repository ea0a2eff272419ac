"""Whether rendered manifests meet their schemas, and our settings in them. Needs no cluster.

Built-in kinds are checked against Kubernetes' schemas (strictly: an unknown field is a fault), the
RayService against KubeRay's CRD and its pods against Kubernetes', the Serve configuration inside
against Ray's schema, and its `args` against ours. Kinds of the Prometheus operator have no schema
here; their selectors are checked. `kappa_deploy.checks.pods` says whether the pods can run the
settings.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import Finding
from kappa_deploy.checks.pods import unfit

CRD = Path(__file__).parents[1] / "k8s" / "crd" / "ray.io_rayservices.yaml.gz"
KUBERNETES = "1.32"
IMPORT_PATH = "kappa_deploy.serve_app:app"

Document = Mapping[str, Any]


def schemas(facts: Facts) -> Iterator[Finding]:
    """Each document against its kind's schema, a RayService against our settings, too."""
    for document in facts.documents:
        kind = document.get("kind")
        if kind not in ("PrometheusRule", "ScrapeConfig", "ServiceMonitor"):
            check = _ray_service if kind == "RayService" else _built_in
            yield from (_finding(document, fault) for fault in check(document))


def _finding(document: Document, fault: str) -> Finding:
    where = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
    return Finding("fail", f"{where}: {fault}", where=where)


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


def selections(facts: Facts) -> Iterator[Finding]:
    """Services, monitors, policies and budgets that select nothing."""
    documents = facts.documents
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
            yield _finding(document, f"selects nothing: {labels}")


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

    try:
        data = yaml.safe_load(document.get("spec", {}).get("serveConfigV2", ""))
        # Ray itself passes over keys that it does not know.
        found = schema.ServeDeploySchema.model_validate(data, extra="forbid")
    except (yaml.YAMLError, ValidationError, TypeError) as error:
        yield f"serveConfigV2: {error}"
        return
    if found.proxy_location != "Disabled":
        yield "serveConfigV2.proxy_location: clients reach the front pods' Envoys: say Disabled"
    for application in found.applications:
        where = f"serveConfigV2.applications.{application.name}"
        if application.import_path != IMPORT_PATH:
            yield f"{where}.import_path: is {application.import_path}, not {IMPORT_PATH}"
        if application.runtime_env:
            yield f"{where}.runtime_env: the image holds everything; install nothing at start"
        try:
            settings = settings_in(document)
        except SettingsError as error:
            yield f"{where}.args: {error}"
        else:
            yield from unfit(document, settings)


def settings_in(ray_service: Document) -> ClusterSettings:
    """The settings in the `args` of a RayService's application.

    Raises:
        SettingsError: there is no one application, or its `args` are no settings.
    """
    from kappa_deploy.serve_app import settings_of

    try:
        (application,) = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"]
        args = dict(application.get("args") or {})
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"not one application with args: {error!r}") from None
    return settings_of(_without_files(args))


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
    made: dict[str, Any] = {}
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
