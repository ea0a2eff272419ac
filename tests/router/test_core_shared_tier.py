"""The router, and workers that share an LMCache server: what one has stored all are priced with."""

from dataclasses import replace

import numpy as np

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from kappa.shapes import model_shape
from router.core import Router, RouterConfig
from router.decision import RouteRequest
from router.index.kv_events import BlocksRemoved, BlocksStored
from router.policies import policy_named

SIZE, BLOCKS = 16, 20
TOKENS = np.arange(BLOCKS * SIZE + 5)


def said(worker, server):
    node = node_profile("h100-pcie5")
    return Announcement(
        worker=worker, model="m", node=node, step=step_model(model_shape("llama-3.1-8b"), node),
        kv_bytes_per_token=131072.0, emulated_model="", fingerprint="f", block_tokens=SIZE,
        device_blocks=20_001, host_blocks=1000, max_batch_tokens=8192, max_context_tokens=200_000,
        events_endpoint="", snapshot_endpoint="", tier="lmcache" if server else "own",
        shared_tier=server,
    )  # fmt: skip


def cached(*servers, remove=0):
    """Tokens that each of the workers is priced with; the first has told of the prompt."""
    router = Router(RouterConfig(policy=policy_named("ttft"), secret=1, forecast_workers=0))
    names = [f"w{i}" for i in range(len(servers))]
    for name, server in zip(names, servers, strict=True):
        router.join(said(name, server), 0.0)
    hashes, tokens = tuple(range(BLOCKS)), TOKENS[: BLOCKS * SIZE]
    router.blocks([BlocksStored("w0", "device", hashes, None, tokens, SIZE, salt=0)])
    router.blocks([BlocksStored("w0", "host", hashes, None, tokens, SIZE, salt=None)])
    router.blocks([BlocksRemoved("w0", "device", hashes)])
    if remove:
        router.blocks([BlocksRemoved("w0", "host", hashes[-remove:])])
    candidates = router.explain(RouteRequest("r", TOKENS, 8), 1.0).candidates
    return {c.worker: c.counts.cached_tokens for c in candidates}


def test_a_worker_that_never_saw_a_prompt_is_priced_with_what_its_server_has():
    assert cached("s", "s", "") == {"w0": 320, "w1": 320, "w2": 0}


def test_what_left_the_server_counts_for_nobody():
    assert cached("s", "s", remove=5) == {"w0": 240, "w1": 240}


def test_a_worker_that_leaves_its_server_is_on_its_own():
    router = Router(RouterConfig(policy=policy_named("ttft"), secret=1, forecast_workers=0))
    for name in ("w0", "w1"):
        router.join(said(name, "s"), 0.0)
    router.join(replace(said("w1", ""), tier="own"), 0.0)
    assert len(router.view.shared_tiers) == 1
    router.leave("w0")
    assert len(router.view.shared_tiers) == 0
