"""Routes with Ray Serve's own router classes, without a cluster, for `kappa bench peers`.

First line of stdin: {"nodes": [{"name"}], "router": "pow_2" | "prefix_affinity"}. The classes are
Ray's, with their defaults; replicas answer with the exact number of their requests in flight, and
the prefix tree is Ray's own, called in this process instead of through an actor. Both are kinder to
Ray than a cluster would be: no probe is late, and no call blocks.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

import json

import uvloop
from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest
from wire import answer, prompt_text, read_stdin, serve_lines  # type: ignore[import-not-found]

DEPLOYMENT = DeploymentID("emulated", "app")


class Replica:
    """What Ray's router needs of a replica."""

    def __init__(self, name):
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.actor_id = name
        self.node_id = self.availability_zone = None
        self.multiplexed_model_ids = set()
        self.max_ongoing_requests = 1_000_000
        self.in_flight = 0

    async def get_queue_len(self, *, deadline_s):
        """Its requests in flight."""
        return self.in_flight

    def push_proxy_handle(self, handle):
        """It has no use for one."""


class InProcess:
    """An actor's handle whose calls are plain calls; `ray.get` of their results is the result."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        """`handle.method.remote(...)`."""
        return SimpleNamespace(remote=getattr(self._target, name))


def router_named(name, replicas):
    """One of Ray's routers with its defaults, which knows the replicas."""
    kinds = {
        "pow_2": PowerOfTwoChoicesRequestRouter,
        "prefix_affinity": prefix_aware_router.PrefixCacheAffinityRouter,
    }
    router = kinds[name](deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    if name == "prefix_affinity":
        prefix_aware_router.ray = SimpleNamespace(get=lambda result: result)
        router.initialize_state(tree_actor=InProcess(PrefixTree()))
    router.update_replicas(replicas)
    return router


class Chooser:
    """A router of Ray's and the requests it has placed."""

    def __init__(self, hello):
        self.replicas = {node["name"]: Replica(node["name"]) for node in hello["nodes"]}
        self.router = router_named(hello["router"], list(self.replicas.values()))
        self.placed = {}

    async def handle(self, message):
        """One line."""
        request = message["request"]
        if message["op"] == "route":
            body = SimpleNamespace(prompt=prompt_text(message["blocks"], request))
            pending = PendingRequest([body], {}, RequestMetadata(request, request))
            chosen = await self.router._choose_replica_for_request(pending)
            chosen.in_flight += 1
            self.placed[request] = chosen
            self.router.on_request_routed(pending, chosen.replica_id, None)
            return {"worker": chosen.actor_id}
        if message["op"] == "done":
            self.placed.pop(request).in_flight -= 1
        return None


async def main():
    """Serve until stdin ends."""
    reader = await read_stdin()
    chooser = Chooser(json.loads(await reader.readline()))
    answer({"ready": True})
    await serve_lines(reader, chooser.handle)


uvloop.run(main())
