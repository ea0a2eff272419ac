"""Which prompts are computed by a prefill worker: compute-bound ones, if it is faster for them."""

from dataclasses import replace

import numpy as np
import pytest

from kappa.cost import StepModel, TokenCounts
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from router.decision import Candidate, RouteRequest
from router.index.prefix_hash import secret_from_seed
from router.ingress.roles import Network, hands_over, prefill_only
from router.policies import policy_named
from router.recording import _request_in, _request_out
from router.router import Router, RouterConfig

NETWORK = Network(bytes_per_s=1e9, fixed_s=0.01, min_new_tokens=100)


def said(worker, role="both", dilation=1.0):
    return Announcement(
        worker=worker, model="m",
        node=replace(node_profile("pcie"), dilation=dilation, source="paced"),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=100, host_blocks=0, max_batch_tokens=512,
        max_context_tokens=1024, events_endpoint="e", snapshot_endpoint="s", role=role,
    )  # fmt: skip


def offer(ttft_s, cached=0.0, new=1000.0, kappa_crit=10.0):
    return Candidate(
        worker="w", node=node_profile("pcie"), counts=TokenCounts(0, int(cached), int(new)),
        kappa_crit=kappa_crit, queue_s=0.0, load_s=0.0, compute_s=ttft_s, ttft_s=ttft_s,
        tpot_impact_s=0.0, backlog_s=0.0, in_flight=0,
    )  # fmt: skip


def test_only_workers_of_role_prefill_never_decode():
    assert prefill_only([said("a"), said("b", "prefill"), said("c", "decode")]) == {"b"}


def test_a_transfer_costs_its_bytes_in_the_nodes_own_time():
    assert NETWORK.seconds(1000, said("a")) == pytest.approx(0.01 + 1000 * 1e5 / 1e9)
    assert NETWORK.seconds(1000, said("a", dilation=10)) == pytest.approx(1.1)


def test_a_compute_bound_prompt_goes_where_its_first_token_comes_sooner():
    assert hands_over(offer(1.0), offer(0.5), 0.4, NETWORK)
    assert not hands_over(offer(1.0), offer(0.5), 0.6, NETWORK)


def test_a_memory_bound_prompt_stays_with_its_kv():
    memory_bound = offer(1.0, cached=20_000.0)
    assert memory_bound.bound == "memory"
    assert not hands_over(memory_bound, offer(0.0), 0.0, NETWORK)


def test_a_short_prompt_is_not_worth_it():
    assert not hands_over(offer(1.0, new=99.0), offer(0.0), 0.0, NETWORK)


def test_what_is_handed_over_need_not_be_computed_and_is_recorded():
    router = Router(RouterConfig(policy=policy_named("ttft"), secret=secret_from_seed("s")))
    router.join(said("a"), 0.0)
    tokens = np.arange(640)
    fresh = router.explain(RouteRequest("r", tokens), 0.0).chosen
    request = RouteRequest("r", tokens, handed_tokens=640)
    handed = router.explain(request, 0.0).chosen
    # An engine computes at least the last token, so the last block is not used.
    assert (handed.counts.device_tokens, handed.counts.new_tokens) == (624, 16)
    assert (fresh.counts.device_tokens, fresh.counts.new_tokens) == (0, 640)
    assert handed.ttft_s < fresh.ttft_s
    recorded = _request_in(_request_out(request))
    assert recorded.handed_tokens == 640
