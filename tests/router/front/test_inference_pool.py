"""The servers of an InferencePool, followed through a Kubernetes API that a test plays."""

import asyncio
import contextlib
import json
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
from aiohttp import web

from kappa.settings.front import load_front_settings
from kappa_router.front import inference_pool
from kappa_router.front.gateway import picking
from kappa_router.front.inference_pool import (
    DELETION_COST,
    PRODUCT_LABEL,
    KubernetesApi,
    profile_of,
)
from kappa_router.live.decision_records import Records
from tests.router.front.conftest import QUICK
from tests.router.front.gie import BODY, asking
from tests.router.front.offering import FakeServer, serving
from tests.router.patience import until

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
PODS = "/api/v1/namespaces/llm/pods"
LABEL = "kappa-serve/profile"


class FakeApi:
    """A pool, its pods and nodes. down: the status of every answer instead, 0 for none; refused:
    a pod that must not be annotated."""

    def __init__(self, *ports):
        self.ports, self.pods, self.nodes, self.down = list(ports), {}, {}, 0
        self.refused = ""
        self.version, self.watches, self.tokens, self.costs = 1, [], set(), []

    def pod(self, name, profile=None, node="", ready=True):
        labels = {} if profile is None else {LABEL: profile}
        self.pods[name] = {
            "metadata": {"name": name, "uid": f"{name}-0123456789", "labels": labels},
            "spec": {"nodeName": node},
            "status": {
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": str(ready)}],
            },
        }
        self.change()

    def change(self):
        self.version += 1
        for queue in self.watches:
            queue.put_nowait({"type": "MODIFIED"})

    async def patched(self, request):
        assert request.headers["content-type"] == "application/merge-patch+json"
        (cost,) = (await request.json())["metadata"]["annotations"].items()
        self.costs.append((request.path, *cost))
        refused = request.path == f"{PODS}/{self.refused}"
        return web.json_response({}, status=self.down or (403 if refused else 200))

    async def answer(self, request):
        self.tokens.add(request.headers["authorization"])
        if self.down:
            return web.Response(status=self.down)
        if "watch" in request.query:
            return await self._watched(request)
        about = {"resourceVersion": str(self.version)}
        if request.path.startswith("/api/v1/nodes/"):
            labels = {PRODUCT_LABEL: self.nodes[request.path.rsplit("/", 1)[1]]}
            return web.json_response({"metadata": {"labels": labels}})
        if request.path == PODS:
            assert request.query["labelSelector"] == "app=vllm"
            return web.json_response({"metadata": about, "items": list(self.pods.values())})
        assert request.path == f"{POOLS}/chat"
        ports = [{"number": port} for port in self.ports]
        spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": ports}
        return web.json_response({"metadata": about, "spec": spec})

    async def _watched(self, request):
        answer, events = web.StreamResponse(), asyncio.Queue()
        await answer.prepare(request)
        self.watches.append(events)
        try:
            if int(request.query["resourceVersion"]) < self.version:
                events.put_nowait({"type": "MODIFIED"})
            while True:
                await answer.write(json.dumps(await events.get()).encode() + b"\n")
        finally:
            self.watches.remove(events)


@contextlib.asynccontextmanager
async def pooled(api, tmp_path, **pool):
    """A picker whose servers are those of the pool."""
    app = web.Application()
    app.router.add_get("/{path:.*}", api.answer)
    app.router.add_patch("/{path:.*}", api.patched)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    token = tmp_path / "token"
    token.write_text("a-token\n")
    reached = KubernetesApi(f"http://127.0.0.1:{port}", token, None)
    epp = {"port": 0, "pool": {"name": "llm/chat", **pool}}
    settings = load_front_settings(None, epp=epp, http={"port": 0}, probe=QUICK)
    try:
        with mock.patch.object(KubernetesApi, "in_cluster", return_value=reached):
            async with picking(settings) as here, asking(here.gateway.port) as (open_one, _):
                yield SimpleNamespace(
                    here=here, live=here.front.live, front=here.front, conversation=open_one
                )
    finally:
        await runner.cleanup()


def known(picker, count):
    return until(lambda: picker.live.choosable == len(picker.here.scene.endpoints) == count)


def profiles(picker):
    return sorted(one.settings.profile for one in picker.front.backends.values() if one.usable)


async def test_each_port_of_each_ready_pod_is_a_server(tmp_path):
    async with serving(FakeServer(), FakeServer()) as servers:
        api = FakeApi(*(one.port for one in servers))
        api.pod("a", "h100-pcie5")
        api.pod("b", "h100-pcie5", ready=False)
        async with pooled(api, tmp_path) as picker:
            await known(picker, 2)
            picked, _ = await picker.conversation().picked()
            assert sorted(picked) == sorted(f"127.0.0.1:{one.port}" for one in servers)
            assert [name[-2:] for name in picker.front.backends] == ["-0", "-1"]
            assert api.tokens == {"Bearer a-token"}


async def test_pods_come_go_and_come_back(tmp_path):
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        async with pooled(api, tmp_path) as picker:
            talk = picker.conversation()
            await talk.head()
            await talk.body(BODY)
            assert (await talk.refused())[0] == 503
            for ready in (True, False, True):
                api.pod("a", "gh200-c2c", ready=ready)
                await known(picker, int(ready))
            await picker.conversation().picked()
            del api.pods["a"]
            api.change()
            await known(picker, 0)
            api.change()
            await until(lambda: not picker.front.backends)


async def test_profile_is_that_of_the_nodes_product(tmp_path):
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        api.nodes["n"] = "NVIDIA-GH200-480GB"
        api.pod("a", node="n")
        async with pooled(api, tmp_path) as picker:
            await known(picker, 1)
            assert profiles(picker) == ["gh200-c2c"]


async def test_label_that_names_no_profile_leaves_the_others(tmp_path, capsys):
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        api.pod("bad", "h1000")
        async with pooled(api, tmp_path, profiles={"big": "h100-pcie5"}) as picker:
            await until(lambda: "pod_not_used" in capsys.readouterr().out)
            api.pods.clear()
            api.pod("good", "big")
            await known(picker, 1)
            assert profiles(picker) == ["h100-pcie5"]


async def test_pods_are_annotated_with_what_their_caches_spare(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_pool, "_COST_S", 0.05)
    async with serving(FakeServer(), FakeServer()) as servers:
        api = FakeApi(*(one.port for one in servers))
        api.pod("a", "h100-pcie5")
        async with pooled(api, tmp_path, deletion_costs=True) as picker:
            await known(picker, 2)
            await until(lambda: api.costs == [(f"{PODS}/a", DELETION_COST, "0")])
            spared = dict.fromkeys(picker.front.backends, 1_234)
            monkeypatch.setattr(Records, "reused_tokens", lambda records: Counter(spared))
            # Two ranks, to two digits; then nothing has changed.
            await until(lambda: len(api.costs) == 2)
            assert api.costs[1] == (f"{PODS}/a", DELETION_COST, "2500")
            await asyncio.sleep(0.2)
            assert len(api.costs) == 2


async def test_pods_that_may_not_be_annotated_are_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inference_pool, "_COST_S", 0.05)
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        api.pod("a", "h100-pcie5")
        api.refused = "a"
        async with pooled(api, tmp_path, deletion_costs=True) as picker:
            await known(picker, 1)
            await until(lambda: len(api.costs) > 2)
            assert capsys.readouterr().out.count("pods_not_annotated") == 1
            assert picker.live.choosable == 1


async def test_pod_that_may_not_be_annotated_leaves_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inference_pool, "_COST_S", 0.05)
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        api.pod("a", "h100-pcie5")
        api.pod("b", "h100-pcie5")
        api.pods["b"]["status"]["podIP"] = "127.0.0.2"
        api.refused = "a"
        async with pooled(api, tmp_path, deletion_costs=True):
            await until(lambda: len(api.costs) > 4)
            paths = [path for path, *_ in api.costs]
            assert paths.count(f"{PODS}/b") == 1 and paths[:2] == [f"{PODS}/a", f"{PODS}/b"]
            said = capsys.readouterr().out
            assert said.count("pods_not_annotated") == 1 and f"{PODS}/a" in said


async def test_pods_are_left_alone_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(inference_pool, "_COST_S", 0.02)
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        api.pod("a", "h100-pcie5")
        async with pooled(api, tmp_path) as picker:
            await known(picker, 1)
            await asyncio.sleep(0.2)
            assert not api.costs


async def test_servers_stay_while_the_api_is_away(tmp_path, capsys):
    async with serving(FakeServer()) as (server,):
        api = FakeApi(server.port)
        api.pod("a", "h100-pcie5")
        async with pooled(api, tmp_path) as picker:
            await known(picker, 1)
            api.down = 403
            api.change()
            await until(lambda: "inference_pool_not_read" in capsys.readouterr().out)
            await picker.conversation().picked()
            api.down = 0
            api.pods.clear()
            await known(picker, 0)


@pytest.mark.parametrize(
    ("told", "profile"),
    [
        ("NVIDIA-H100-80GB-HBM3", "h100-pcie5"),
        ("NVIDIA-A100-SXM4-80GB", "a100-pcie4"),
        ("GH200-C2C", "gh200-c2c"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", None),
        ("NVIDIA-T4", None),
        ("profile.json", None),
        ("", None),
    ],
)
def test_product_is_a_profile_where_the_catalogue_has_it(told, profile):
    assert profile_of(told) == profile


def test_pool_needs_a_cluster_and_no_backends(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(OSError, match="no Kubernetes here"):
        KubernetesApi.in_cluster()
    one = {"url": "http://a:1", "profile": "h100-pcie5"}
    for backends, epp in (([one], {"pool": {"name": "a/b"}}), ([], {})):
        with pytest.raises(ValueError, match="at least one server"):
            load_front_settings(None, backends=backends, epp=epp)
