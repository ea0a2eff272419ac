"""What the product shows to its users: commands, HTTP, metrics, settings, manifests."""

import ast
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

import typer
import yaml

ROOT = Path(__file__).parents[2]
PRODUCT = ("kappa", "router", "scheduler", "workers", "engine", "deploy")
CHAT = {"messages": [{"role": "user", "content": "hello hello"}], "max_tokens": 2}


def commands():
    """Every command of `kappa` with its arguments and options, by name."""
    from kappa_deploy.cli import app

    return _command(typer.main.get_command(app))


def _command(command):
    options = sorted(
        " ".join([*param.opts, *param.secondary_opts])
        for param in command.params
        if param.name not in ("help", "install_completion", "show_completion")
    )
    if not hasattr(command, "list_commands"):
        return options
    context = typer.Context(command)
    names = sorted(command.list_commands(context))
    found = {name: _command(command.get_command(context, name)) for name in names}
    return {"": options, **found} if options else found


def metrics():
    """Kind, labels and buckets of every metric."""
    from kappa import metrics as module

    found = [value for value in vars(module).values() if isinstance(value, module.Metric)]
    return {
        metric.name: {
            "kind": metric.kind, "labels": list(metric.labels), "buckets": list(metric.buckets),
        }
        for metric in sorted(found, key=lambda metric: metric.name)
    }  # fmt: skip


def settings():
    """The schema of a cluster file: names, types, bounds and defaults, without the prose."""
    from kappa.settings.cluster import ClusterSettings

    return _without_prose(ClusterSettings.model_json_schema())


def _without_prose(schema):
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_prose(value)
        for key, value in sorted(schema.items())
        # A field may be called "title": then it has a schema and is no prose.
        if not (key in ("title", "description") and isinstance(value, str))
    }


def manifests():
    """A digest of every rendered Kubernetes object but Envoy's configuration, which has its own
    tests; None without a Kustomize here."""
    from kappa_deploy.k8s import render

    if not (shutil.which("kubectl") or shutil.which("kustomize")):
        return None
    digests = {}
    for overlay in render.overlays():
        text = render.render(render.OVERLAYS / overlay)
        text = re.sub(f"({render.FRONT_CONFIG})-[0-9a-f]{{10}}", r"\1", text)
        for document in yaml.safe_load_all(text):
            kind, name = document["kind"], document["metadata"]["name"]
            if (kind, name) != ("ConfigMap", render.FRONT_CONFIG):
                whole = json.dumps(document, sort_keys=True).encode()
                digests[f"{overlay}/{kind}/{name}"] = hashlib.sha256(whole).hexdigest()[:16]
    return digests


def http():
    """Paths, methods, keys of answers and names of headers, of the real decider application over
    two emulated engines."""
    from kappa_router.api.render import PromptRenderer
    from kappa_workers.tiny_model import make_tiny_model
    from tests.conformance.conftest import MODEL, Serving

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", ["hello world " * 20])
        with Serving(PromptRenderer(str(model))) as stack:
            chat = {"model": MODEL, **CHAT}
            answer = stack.http.post("/v1/chat/completions", json=chat)
            stream = stack.http.post("/v1/chat/completions", json={**chat, "stream": True})
            request_id = stack.http.get("/v1/decisions").json()["decisions"][-1]["request_id"]
            return {
                "operations": _operations(stack.http.get("/openapi.json").json()),
                "headers": _header_names(),
                "response headers": {
                    "chat": _named(answer.headers), "streamed chat": _named(stream.headers),
                },
                "keys": {
                    "POST /v1/chat/completions": _keys(answer.json()),
                    "POST /v1/route": _keys(stack.http.post("/v1/route", json=chat).json()),
                    "GET /v1/nodes": _keys(stack.http.get("/v1/nodes").json()),
                    "GET /v1/decisions": _keys(stack.http.get("/v1/decisions").json()),
                    "GET /v1/decisions/{request_id}": _keys(
                        stack.http.get(f"/v1/decisions/{request_id}").json()
                    ),
                    "GET /v1/tenants": _keys(stack.http.get("/v1/tenants").json()),
                    "GET /ready": _keys(stack.http.get("/ready").json()),
                },
            }  # fmt: skip


def _operations(document):
    return {
        f"{method.upper()} {path}": {
            "parameters": sorted(p["name"] for p in operation.get("parameters", ())),
            "responses": sorted(operation["responses"]),
        }
        for path, methods in sorted(document["paths"].items())
        for method, operation in sorted(methods.items())
    }


def _header_names():
    """Every `x-kappa-*` that stands in the product as a text of its own."""
    found = set()
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.update(re.findall(r"\Ax-kappa-[a-z-]+\Z", node.value))
    return sorted(found)


def _named(headers):
    return sorted(name for name in headers if name.startswith("x-") or name == "content-type")


def _keys(value, at=""):
    """Paths of keys; of lists, those of all items together."""
    if isinstance(value, list):
        return sorted({key for item in value for key in _keys(item, f"{at}[]")}) or [f"{at}[]"]
    if isinstance(value, dict) and value:
        paths = (_keys(inner, f"{at}.{key}" if at else key) for key, inner in value.items())
        return sorted({key for found in paths for key in found})
    return [at]
