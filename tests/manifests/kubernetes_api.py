"""As much of Kubernetes' API as Helm asks for: discovery, and objects kept as they come."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

# Of each group and version: kind to the plural of its path, and whether it lies in a namespace.
KINDS = {
    "v1": {
        "ConfigMap": ("configmaps", True), "Namespace": ("namespaces", False),
        "Secret": ("secrets", True), "Service": ("services", True),
        "ServiceAccount": ("serviceaccounts", True),
    },
    "apps/v1": {"Deployment": ("deployments", True)},
    "keda.sh/v1alpha1": {"ScaledObject": ("scaledobjects", True)},
    "monitoring.coreos.com/v1": {
        "PrometheusRule": ("prometheusrules", True), "ServiceMonitor": ("servicemonitors", True),
    },
    "monitoring.coreos.com/v1alpha1": {"ScrapeConfig": ("scrapeconfigs", True)},
    "networking.k8s.io/v1": {"NetworkPolicy": ("networkpolicies", True)},
    "policy/v1": {"PodDisruptionBudget": ("poddisruptionbudgets", True)},
    "ray.io/v1": {"RayService": ("rayservices", True)},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": ("clusterroles", False), "Role": ("roles", True),
        "ClusterRoleBinding": ("clusterrolebindings", False), "RoleBinding": ("rolebindings", True),
    },
}  # fmt: skip


class KubernetesApi:
    """Objects by their path. `url` is where it listens."""

    def __init__(self, url):
        self.url, self.objects = url, {}

    def kinds(self):
        """What lies there."""
        return sorted(one["kind"] for one in self.objects.values())

    def found(self, path, query):
        """(status, body) of a GET."""
        groups = {version for version in KINDS if "/" in version}
        if path == "/version":
            return 200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            listed = [{"groupVersion": one, "version": one.split("/")[1]} for one in groups]
            return 200, {
                "kind": "APIGroupList",
                "groups": [
                    {"name": one["groupVersion"].split("/")[0], "versions": [one]} for one in listed
                ],
            }
        if path.startswith("/openapi/v3"):
            return 200, _openapi(path.removeprefix("/openapi/v3").removeprefix("/"))
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in KINDS:
            verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
            resources = [
                {"name": plural, "kind": kind, "namespaced": inside, "verbs": verbs}
                for kind, (plural, inside) in KINDS[version].items()
            ]
            listed = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
            return 200, listed
        if path in self.objects:
            return 200, self.objects[path]
        plurals = {kind[0] for kinds in KINDS.values() for kind in kinds.values()}
        if path.rsplit("/", 1)[1] not in plurals:
            return 404, _status(404, "NotFound", path)
        wanted = dict(
            one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if one
        )
        items = [
            one
            for at, one in self.objects.items()
            if at.startswith(f"{path}/") and wanted.items() <= one["metadata"]["labels"].items()
        ]
        return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}

    def changed(self, method, path, body):
        """(status, body) of a POST, PUT, PATCH (taken as server-side apply) or DELETE."""
        if method == "DELETE":
            gone = self.objects.pop(path, None)
            return (200, gone) if gone else (404, _status(404, "NotFound", path))
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, _status(409, "AlreadyExists", path)
        body["metadata"].setdefault("labels", {})
        self.objects[path] = body
        return (201 if method == "POST" else 200), body


def _openapi(version):
    """Says that the server validates fields itself, of one version, or where each version is."""
    if not version:
        paths = {f"api{'s' * ('/' in one)}/{one}": f"/openapi/v3/{one}" for one in KINDS}
        return {"paths": {path: {"serverRelativeURL": at} for path, at in paths.items()}}
    group, _, number = version.rpartition("/")
    paths = {}
    for kind in KINDS[version]:
        about = {"group": group, "version": number, "kind": kind}
        patch = {"x-kubernetes-group-version-kind": about, "x-kubernetes-action": "patch"}
        patch["parameters"] = [{"name": "fieldValidation", "in": "query"}]
        paths[f"/{kind}"] = {"patch": patch | {"responses": {}}}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "1"}, "paths": paths}


def _status(code, reason, path):
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": f"{path}: {reason}",
    }  # fmt: skip


@contextmanager
def kubernetes_api():
    """One that runs on a thread until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            at, size = urlsplit(self.path), int(self.headers.get("content-length") or 0)
            body = self.rfile.read(size)
            if self.command == "GET":
                status, found = api.found(at.path, parse_qs(at.query))
            else:
                status, found = api.changed(self.command, at.path, json.loads(body or b"null"))
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api = KubernetesApi(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
