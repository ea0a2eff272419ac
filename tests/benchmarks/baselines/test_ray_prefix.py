"""The reimplemented prefix affinity decides as Ray's own tree says, if a letter is a block."""

from hashlib import blake2b
from random import Random

import pytest

from benchmarks.baselines.routing.ray_prefix import RayPrefix
from router.decision import Estimates
from tests.router.offering import estimates as estimates_of

pytestmark = pytest.mark.ray
WORKERS = [f"w{i}" for i in range(5)]


def offer(in_flight, prompt) -> Estimates:
    prefixes = [prompt[: i + 1].encode() for i in range(len(prompt))]
    ids = [int.from_bytes(blake2b(p, digest_size=8).digest()) for p in prefixes]
    return estimates_of(
        *({"in_flight": queue} for queue in in_flight), names=WORKERS,
        prompt_tokens=16 * len(prompt), prefix_hashes=ids,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(15))
def test_decisions_equal_those_of_rays_prefix_tree(seed):
    package = "ray.llm._internal.serve.routing_policies.prefix_aware"
    tree = pytest.importorskip(f"{package}.prefix_tree").PrefixTree()
    tree.add_tenants(WORKERS, 0.0)
    rng, policy = Random(seed), RayPrefix()
    for step in range(120):
        letters = "abc" if rng.random() < 0.3 else "aaaab"
        prompt = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 30)))
        queue = [rng.randrange(4) for _ in WORKERS]
        matched, candidates = tree.prefix_match(prompt, WORKERS)
        if len(matched) / len(prompt) < 0.1:
            candidates = tree.get_smallest_tenants()
        expected = min(candidates, key=lambda worker: queue[WORKERS.index(worker)])
        estimates = offer(queue, prompt)
        index = policy.choose(estimates).index
        assert WORKERS[index] == expected
        policy.routed(estimates, index)
        tree.insert(prompt, expected, float(step + 1))
