"""Times Ray Serve's own router classes, in our environment, without a cluster.

    python -I ray_router.py '[[512, 4096], 200]'     # lengths in tokens, repeats

The classes are Ray's, with their defaults; replicas answer with the exact number of their requests
in flight, and the prefix tree is called in this process instead of through an actor. Both are
kinder to Ray than a cluster would be: no probe is late, and no call blocks. "prefix_tree" is what
the prefix router asks its tree for one request (match, then insert), "pow_2" the other router's
choice. A token is four characters there.
"""

import asyncio
import json
import random
import sys
import time

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest

DEPLOYMENT = DeploymentID("emulated", "app")
WARM_UP = 10
NAMES = [f"r{worker}" for worker in range(4)]


class Replica:
    """What Ray's router needs of a replica."""

    def __init__(self, name):
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.actor_id = name
        self.node_id = self.availability_zone = None
        self.multiplexed_model_ids = set()
        self.max_ongoing_requests = 1_000_000

    async def get_queue_len(self, *, deadline_s):
        """Its requests in flight."""
        return 0

    def push_proxy_handle(self, handle):
        """It has no use for one."""


async def decision_rows(lengths, repeats):
    """Every length through both."""
    router = PowerOfTwoChoicesRequestRouter(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA
    )
    router.update_replicas([Replica(name) for name in NAMES])
    taken_ns = []
    for number in range(repeats + WARM_UP):
        pending = PendingRequest([], {}, RequestMetadata(f"q{number}", f"i{number}"))
        start_ns = time.perf_counter_ns()
        await router._choose_replica_for_request(pending)
        taken_ns.append(time.perf_counter_ns() - start_ns)
    trees = [{"router": "prefix_tree", "tokens": n, "ns": tree_ns(n, repeats)} for n in lengths]
    return [*trees, *({"router": "pow_2", "tokens": n, "ns": taken_ns[WARM_UP:]} for n in lengths)]


def tree_ns(tokens, repeats):
    """Match and insert of prompts that are all new."""
    rng = random.Random(tokens)
    tree = PrefixTree()
    tree.add_tenants(NAMES, 0.0)
    taken_ns = []
    for number in range(repeats + WARM_UP):
        text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=4 * tokens))
        start_ns = time.perf_counter_ns()
        tree.prefix_match(text, NAMES)
        tree.insert(text, NAMES[number % len(NAMES)], float(number))
        taken_ns.append(time.perf_counter_ns() - start_ns)
    return taken_ns[WARM_UP:]


print(json.dumps(asyncio.run(decision_rows(*json.loads(sys.argv[1])))))
