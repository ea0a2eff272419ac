"""The reimplemented prefix affinity decides as Ray's own tree says, if a letter is a block."""

from random import Random

import pytest

from kappa_benchmarks.baselines.routing.ray_prefix import RayPrefix
from tests.benchmarks.baselines.prompts import offer

pytestmark = pytest.mark.ray
WORKERS = [f"w{i}" for i in range(5)]


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
