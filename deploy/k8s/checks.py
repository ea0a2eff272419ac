"""Checks a rendered manifest without a cluster: schemas, and what our own settings demand of it.

Built-in kinds against Kubernetes' schemas (strictly: an unknown field is a fault), the RayService
against KubeRay's CRD and its pods against Kubernetes', the Serve configuration inside against Ray's
schema, and its `args` against ours. Kinds of the Prometheus operator have no schema here; what they
select is checked. Called by `deploy.k8s.render` and the tests.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s.fits import unfit

CRD = Path(__file__).parent / "crd" / "ray.io_rayservices.yaml.gz"
KUBERNETES = "1.32"
IMPORT_PATH = "deploy.serve_app:app"

_OPERATOR_KINDS = {"ServiceMonitor", "PrometheusRule"}

Document = dict[str, Any]


def faults(documents: Iterable[Document]) -> list[str]:
    """Everything that is wrong, one line each: kind, name, place and reason."""
    found = []
    all_documents = list(documents)
    for document in all_documents:
        where = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
        check = _check_of(document)
        found += [f"{where}: {fault}" for fault in check(document)]
    return found + _selections(all_documents)


def _check_of(document: Document) -> Any:
    if document.get("kind") == "RayService":
        return _ray_service
    if document.get("kind") in _OPERATOR_KINDS:
        return lambda _: ()
    return _built_in


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


def _ray_service(document: Document) -> Iterator[str]:
    from jsonschema import Draft202012Validator

    misshapen = list(Draft202012Validator(_crd_schema()).iter_errors(document))
    yield from (f"{_path(error.absolute_path)}: {error.message[:200]}" for error in misshapen)
    if misshapen:
        return
    for group, template in _templates(document):
        # The CRD does not say all that Kubernetes demands of a pod.
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
        pod["metadata"] = {"name": group, **template.get("metadata", {})}
        yield from (f"group {group}: {fault}" for fault in _built_in(pod))
    yield from _serve_config(document)


def _serve_config(document: Document) -> Iterator[str]:
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from deploy.serve_app import settings_of
    from kappa.settings.base import SettingsError

    try:
        data = yaml.safe_load(document.get("spec", {}).get("serveConfigV2", ""))
        schema = ServeDeploySchema.model_validate(data)
    except (yaml.YAMLError, ValidationError, TypeError) as error:
        yield f"serveConfigV2: {error}"
        return
    yield from (f"serveConfigV2.{fault}" for fault in _unknown_serve_keys(data))
    for application in schema.applications:
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
            yield from unfit(document, settings)


def _unknown_serve_keys(data: Document) -> Iterator[str]:
    """Ray's schema passes over keys that it does not know; here they are faults."""
    from ray.serve import schema

    parts: list[tuple[str, Any, Any]] = [
        ("", schema.ServeDeploySchema, data),
        ("http_options.", schema.HTTPOptionsSchema, data.get("http_options", {})),
    ]
    for application in data.get("applications", []):
        where = f"applications.{application.get('name')}."
        parts.append((where, schema.ServeApplicationSchema, application))
        parts += [
            (f"{where}deployments.", schema.DeploymentSchema, deployment)
            for deployment in application.get("deployments", [])
        ]
    for where, model, part in parts:
        yield from (f"{where}{key}: unknown" for key in part if key not in model.model_fields)


def _without_files(args: dict[str, Any]) -> dict[str, Any]:
    """`args` with the tenants' keys file, which is on the cluster only, replaced by a key."""
    tenants = dict(args.get("tenants") or {})
    if tenants.pop("keys_file", None):
        named = {*tenants.get("weights", ()), *tenants.get("limits", ()), "default"}
        named |= {*tenants.get("operators", ())}
        keys = {f"a-key-of-the-file-{i}": name for i, name in enumerate(sorted(named))}
        tenants["by_key"] = {**tenants.get("by_key", {}), **keys}
    return {**args, "tenants": tenants} if tenants else args


def _selections(documents: list[Document]) -> list[str]:
    """Services, monitors, policies and budgets that select nothing."""
    pods = [
        template.get("metadata", {}).get("labels", {})
        for document in documents
        if document["kind"] == "RayService"
        for _, template in _templates(document)
    ]
    services = [d["metadata"].get("labels", {}) for d in documents if d["kind"] == "Service"]
    wanted = {
        "Service": (lambda spec: spec.get("selector"), pods),
        "ServiceMonitor": (lambda spec: spec["selector"]["matchLabels"], services),
        "PodDisruptionBudget": (lambda spec: spec["selector"]["matchLabels"], pods),
        "NetworkPolicy": (lambda spec: spec["podSelector"]["matchLabels"], pods),
    }
    found = []
    for document in documents:
        if document["kind"] in wanted:
            select, among = wanted[document["kind"]]
            labels = select(document["spec"]) or {}
            if not any(labels.items() <= one.items() for one in among):
                found.append(
                    f"{document['kind']}/{document['metadata']['name']}: selects nothing: {labels}"
                )
    return found


def _templates(document: Document) -> Iterator[tuple[str, Document]]:
    """The pod templates of a RayService, with the names of their groups."""
    cluster = document.get("spec", {}).get("rayClusterConfig", {})
    yield "head", cluster.get("headGroupSpec", {}).get("template", {})
    for group in cluster.get("workerGroupSpecs", []):
        yield group.get("groupName", "?"), group.get("template", {})


@cache
def _crd_schema() -> Document:
    """The CRD's schema of `v1`, made strict: unknown fields are faults."""
    crd = yaml.load(gzip.decompress(CRD.read_bytes()), Loader=yaml.CSafeLoader)
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")
    return _strict(version["schema"]["openAPIV3Schema"], at_root=True)


def _strict(schema: Document, at_root: bool = False) -> Document:
    """A CRD's OpenAPI schema as JSON Schema: structural, so objects with properties are closed."""
    made: Document = {}
    for key, value in schema.items():
        if key == "properties":
            made[key] = {name: _strict(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            made[key] = _strict(value)
        elif not key.startswith("x-kubernetes") and key not in ("nullable", "format", "default"):
            made[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not is_open:
        made["additionalProperties"] = False
    if at_root:
        # The API server, not the CRD, says what metadata holds.
        made["properties"]["metadata"] = {"type": "object"}
    return made


def _path(parts: Iterable[Any]) -> str:
    return ".".join(str(part) for part in parts) or "(top)"
