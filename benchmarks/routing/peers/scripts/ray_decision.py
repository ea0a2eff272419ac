"""Times the work of Ray Serve's own routers, in our environment, without a cluster.

JSON on stdin: {"lengths", "repeats", "workers"}. The last line of stdout is a list of {"router",
"tokens", "us": {"p50", "p99"}}: `prefix_tree` is what PrefixCacheAffinityRouter asks its tree for
one request (match, then insert) without the two calls to the tree's actor; `pow_2` is
PowerOfTwoChoicesRequestRouter's choice with queue lengths that are answered at once. A token is
four characters.
"""

import json
import random
import sys
import time

import uvloop
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest

CHARACTERS_PER_TOKEN = 4
WARM_UP = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Replica:
    """What Ray's router needs of a replica, idle."""

    def __init__(self, replica_id):
        self.replica_id = replica_id
        self.actor_id = replica_id.unique_id
        self.node_id = self.availability_zone = None
        self.multiplexed_model_ids = set()
        self.max_ongoing_requests = 1_000_000

    async def get_queue_len(self, *, deadline_s):
        """None of its requests is running."""
        return 0

    def push_proxy_handle(self, handle):
        """It has no use for one."""


def quantiles(taken_ns):
    """p50 and p99 in microseconds, after the warm-up."""
    us = sorted(ns / 1e3 for ns in taken_ns[WARM_UP:])
    last = len(us) - 1
    return {"p50": us[last // 2], "p99": us[round(0.99 * last)]}


def tree_row(tokens, repeats, workers):
    """Match and insert of prompts that are all new."""
    rng = random.Random(tokens)
    tenants = [f"replica-{worker}" for worker in range(workers)]
    tree = PrefixTree()
    tree.add_tenants(tenants, 0.0)
    taken_ns = []
    for number in range(repeats + WARM_UP):
        text = "".join(rng.choices(LETTERS, k=tokens * CHARACTERS_PER_TOKEN))
        start_ns = time.perf_counter_ns()
        tree.prefix_match(text, tenants)
        tree.insert(text, tenants[number % workers], float(number))
        taken_ns.append(time.perf_counter_ns() - start_ns)
    return {"router": "prefix_tree", "tokens": tokens, "us": quantiles(taken_ns)}


async def pow_2_us(repeats, workers):
    """Choices between idle replicas."""
    deployment = DeploymentID("measured", "app")
    router = PowerOfTwoChoicesRequestRouter(
        deployment_id=deployment, handle_source=DeploymentHandleSource.REPLICA
    )
    router.update_replicas([Replica(ReplicaID(f"r{w}", deployment)) for w in range(workers)])
    taken_ns = []
    for number in range(repeats + WARM_UP):
        pending = PendingRequest([], {}, RequestMetadata(f"r{number}", f"i{number}"))
        start_ns = time.perf_counter_ns()
        await router._choose_replica_for_request(pending)
        taken_ns.append(time.perf_counter_ns() - start_ns)
    return quantiles(taken_ns)


def main(request):
    """Every length through both."""
    lengths, repeats, workers = request["lengths"], request["repeats"], request["workers"]
    rows = [tree_row(tokens, repeats, workers) for tokens in lengths]
    us = uvloop.run(pow_2_us(repeats, workers))
    return [*rows, *({"router": "pow_2", "tokens": tokens, "us": us} for tokens in lengths)]


print(json.dumps(main(json.load(sys.stdin))))
