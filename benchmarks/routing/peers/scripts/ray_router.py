"""Ray Serve's own router classes, in our environment, without a cluster.

First line of stdin: {"nodes": [{"name"}], "router": "pow_2" or "prefix_affinity"}. The classes are
Ray's, with their defaults; replicas answer with the exact number of their requests in flight, and
the prefix tree is Ray's own, called in this process instead of through an actor. Both are kinder to
Ray than a cluster would be: no probe is late, and no call blocks. "time" is answered with
microseconds of decisions: "prefix_tree" is what the prefix router asks its tree for one request
(match, then insert), "pow_2" the other router's choice. A token is four characters there.
"""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[1]))

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
from wire import prompt_text, quantiles_us, serve  # type: ignore[import-not-found]

DEPLOYMENT = DeploymentID("emulated", "app")
WARM_UP = 10


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


async def chooser(hello):
    """Handles the bench's lines."""
    replicas = [Replica(node["name"]) for node in hello["nodes"]]
    router = router_named(hello["router"], replicas)
    placed, choose = {}, router.choose_replicas
    ranks: list = []

    async def noted(*args, **kwargs):
        ranks[:] = await choose(*args, **kwargs)
        return ranks

    router.choose_replicas = noted

    async def handle(message):
        if message["op"] == "time":
            return {"rows": await decision_rows(message["lengths"], message["repeats"])}
        request = message["request"]
        if message["op"] == "route":
            body = SimpleNamespace(prompt=prompt_text(message["blocks"], request))
            pending = PendingRequest([body], {}, RequestMetadata(request, request))
            chosen = await router._choose_replica_for_request(pending)
            chosen.in_flight += 1
            placed[request] = chosen
            router.on_request_routed(pending, chosen.replica_id, None)
            return {"worker": chosen.actor_id, "among": [each.actor_id for each in ranks[0]]}
        if message["op"] == "done":
            placed.pop(request).in_flight -= 1
        return None

    return handle


async def decision_rows(lengths, repeats):
    """Every length through both."""
    names = [f"r{worker}" for worker in range(4)]
    router = router_named("pow_2", [Replica(name) for name in names])
    taken_ns = []
    for number in range(repeats + WARM_UP):
        pending = PendingRequest([], {}, RequestMetadata(f"q{number}", f"i{number}"))
        start_ns = time.perf_counter_ns()
        await router._choose_replica_for_request(pending)
        taken_ns.append(time.perf_counter_ns() - start_ns)
    us = quantiles_us(taken_ns, WARM_UP)
    trees = [tree_row(tokens, repeats, names) for tokens in lengths]
    return [*trees, *({"router": "pow_2", "tokens": tokens, "us": us} for tokens in lengths)]


def tree_row(tokens, repeats, names):
    """Match and insert of prompts that are all new."""
    rng = random.Random(tokens)
    tree = PrefixTree()
    tree.add_tenants(names, 0.0)
    taken_ns = []
    for number in range(repeats + WARM_UP):
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=4 * tokens))
        start_ns = time.perf_counter_ns()
        tree.prefix_match(text, names)
        tree.insert(text, names[number % len(names)], float(number))
        taken_ns.append(time.perf_counter_ns() - start_ns)
    return {"router": "prefix_tree", "tokens": tokens, "us": quantiles_us(taken_ns, WARM_UP)}


uvloop.run(serve(chooser))
