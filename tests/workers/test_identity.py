"""What a worker announces, from its plan, its node and its measurements."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest

from kappa.cost import StepModel, step_model
from kappa.hardware import node_profile
from kappa.model import gemm_flops, kv_bytes_per_token
from kappa.plans.measured import as_measured
from kappa.plans.rates import rates_from_law
from kappa.protocol import Announcement
from kappa.settings.engine import EngineSettings
from kappa.shapes import model_shape
from kappa_workers.identity import (
    Profile,
    ReplicaId,
    WorkerPlan,
    announce,
    configure_vllm,
    measured_node,
    of_all_ranks,
)
from kappa_workers.vllm.arguments import Endpoints, EngineLimits, EngineTier
from kappa_workers.vllm.options import LinkRules, PeerOptions
from tests.workers.plans import EMULATED, paced, worker_plan

ON_GPUS = EngineSettings(host_bytes=64 << 20).on(gpus=1)
MEASURED = {
    "device": "cpu", "threads": 1, "h2d_bytes_per_s": 9e9, "d2h_bytes_per_s": 8e9,
    "hbm_bytes_per_s": 2e10, "flops_per_s": 5e10,
}  # fmt: skip


def said(of: WorkerPlan, rank: int = 0, measured=MEASURED, error: str = "") -> Announcement:
    return announce(
        of, ReplicaId(f"w{rank}", rank, "m", "tcp://e", "tcp://s"), Profile(measured, error)
    )


@pytest.mark.parametrize("planner", ["tail", "kv"])
def test_announcement_gives_the_overlap_of_loads_by_layers(planner) -> None:
    ahead = worker_plan(paced("pcie"), engine=EngineSettings(planner=planner))
    layers = dataclasses.replace(ahead, link=LinkRules(by_layer=True))
    rates = layers.engine_tier(0, {}).rates
    assert (rates is None) == (planner == "kv")
    found = announce(layers, ReplicaId("w", 0, "m", "", ""), Profile(), tail=rates).load_plan
    # Qwen2.5-7B, which runs here as if it were a Llama of 32 layers, has 28.
    assert (found["planner"], found["rates"]["overlap"]) == (planner, 27 / 28)
    rates = ahead.engine_tier(0, {}).rates
    found = announce(ahead, ReplicaId("w", 0, "m", "", ""), Profile(), tail=rates).load_plan
    assert found == {} if rates is None else found["rates"]["overlap"] == 0.0


def test_announcement_has_no_loads_by_layers_if_layers_differ() -> None:
    windowed = dataclasses.replace(model_shape("qwen2.5-7b"), attention_layers=7)
    some = worker_plan(paced("pcie"), served=windowed, link=LinkRules(by_layer=True))
    assert said(some).load_plan == {}


def test_each_rank_takes_its_node_and_a_surplus_rank_starts_over() -> None:
    pair = worker_plan(paced("pcie"), paced("c2c"))
    assert [pair.node(rank).name for rank in range(3)] == ["pcie", "c2c", "pcie"]


def test_announcement_of_a_paced_node_prices_the_emulated_model() -> None:
    announcement = said(worker_plan(paced("pcie"), paced("c2c")), rank=1)
    assert announcement.node.source == "paced"
    assert announcement.emulated_model == "llama-3.1-8b"
    assert announcement.measured["h2d_bytes_per_s"] == 9e9
    shape = model_shape("llama-3.1-8b")
    critical = (
        announcement.step.token_s
        * announcement.node.h2d_bytes_per_s
        / announcement.kv_bytes_per_token
    )
    assert critical == pytest.approx(
        gemm_flops(shape) / kv_bytes_per_token(shape) * 375e9 / 400e12, rel=1e-6
    )


@pytest.mark.parametrize("kind", ["own", "native", "lmcache"])
def test_the_host_tier_that_runs_is_announced(kind) -> None:
    assert said(worker_plan(paced("pcie"), engine=EngineSettings(host_tier=kind))).tier == kind


def test_an_unpaced_node_takes_the_measured_figures() -> None:
    announcement = said(worker_plan())
    assert announcement.node.source == "measured"
    assert announcement.node.h2d_bytes_per_s == 9e9
    assert announcement.emulated_model == ""


STEP = {
    "token_s": 2e-3, "pair_s": 1e-7, "weights_s": 0.02, "context_token_s": 1e-6, "fixed_s": 4e-3,
    "dilation": 1.0, "r2": 0.991, "steps": 31, "error": 0.03, "prior_error": 0.9,
}  # fmt: skip
ENGINE = MEASURED | {
    "step": STEP, "unmeasured": [], "load_fixed_s": 5e-4, "load_line_error": 0.04,
    "store_line_error": 0.1,
}  # fmt: skip


def test_announcement_carries_the_steps_and_loads_measured() -> None:
    announcement = said(worker_plan(), measured=ENGINE)
    node, step = announcement.node, announcement.step
    assert step == StepModel(2e-3, 1e-7, 0.02, 1e-6, 4e-3)
    assert (node.load_fixed_s, node.step_fixed_s, announcement.profile_error) == (5e-4, 4e-3, "")
    # The rates that would make these steps, for whoever plans by rates.
    assert node.flops_per_s == pytest.approx(gemm_flops(model_shape("qwen2.5-7b")) / 2e-3)
    by_rates = step_model(model_shape("qwen2.5-7b"), node)
    assert (by_rates.token_s, by_rates.pair_s) == pytest.approx((2e-3, 1e-7))
    assert said(worker_plan(paced("pcie")), measured=ENGINE).step != step


def test_fit_with_a_tenth_of_a_kind_far_off_is_not_used() -> None:
    errors = {"prefill": [0.05, 0.12], "decode": [0.1, 0.31]}
    measured = ENGINE | {"step": STEP | {"errors": errors}}
    announcement = said(worker_plan(node_profile("pcie")), measured=measured)
    assert (
        "off by more than 31% in one of ten decode steps, above 25%" in announcement.profile_error
    )
    assert announcement.step.token_s != 2e-3
    held = ENGINE | {"step": STEP | {"errors": errors | {"decode": [0.1, 0.25]}}}
    assert said(worker_plan(node_profile("pcie")), measured=held).step.token_s == 2e-3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": STEP | {"r2": 0.95}}, r"R² 0\.950 over 31 steps, below 0\.98; half .* than 3%$"),
        ({"load_line_error": 0.11}, "line of loads is off by up to 11%"),
        ({"store_line_error": 0.3}, "line of stores is off by up to 30%"),
        ({"unmeasured": ["a step: KeyError()"]}, r"not measured: a step: KeyError\(\)"),
    ],
)
def test_what_fits_badly_is_used_and_said(changes, why) -> None:
    announcement = said(worker_plan(), measured=ENGINE | changes)
    assert re.search(why, announcement.profile_error)
    assert announcement.step.token_s == 2e-3


def test_a_fit_worse_than_the_prior_is_not_used() -> None:
    poor = ENGINE | {"step": STEP | {"r2": 0.4, "error": 0.9}}
    announcement = said(worker_plan(), measured=poor)
    assert announcement.profile_error.endswith("the prior is nearer and is used")
    assert announcement.step == step_model(model_shape("qwen2.5-7b"), announcement.node)
    assert announcement.node.flops_per_s == 5e10


def test_engine_request_is_empty_for_paced_and_own_engines() -> None:
    real = worker_plan()
    request = real.engine_request(0)
    assert StepModel.from_dict(request["prior"]).token_s > 0 and request["budget_s"] <= 20
    assert worker_plan(paced("pcie")).engine_request(0) == {}
    assert replace(real, engine=EMULATED).engine_request(0) == {}


def test_catalogue_link_is_announced_as_copies_reach_it() -> None:
    # Blocks of 32 tokens: of Llama-3.1-8B, which is emulated, 131,072 bytes of a layer; of
    # Qwen2.5-7B, which runs, 2,048 a token, half of them. √((n / 54 GB/s)² + 0.5²) us each.
    h100 = node_profile("h100-pcie5")
    emulated = said(worker_plan(replace(h100, source="paced")), measured={}).node
    run = said(worker_plan(h100), measured={}).node
    assert emulated.h2d_bytes_per_s == pytest.approx(52.89e9, rel=1e-3)
    assert run.h2d_bytes_per_s == pytest.approx(49.93e9, rel=1e-3)
    assert emulated.load_fixed_s == run.load_fixed_s == 13e-3
    measured = said(worker_plan(h100), measured=ENGINE).node
    assert measured.h2d_bytes_per_s == measured.peak_link_bytes_per_s == ENGINE["h2d_bytes_per_s"]


def test_announcement_keeps_the_catalogue_when_a_profile_failed() -> None:
    announcement = said(worker_plan(), measured={}, error="profile failed: boom")
    assert announcement.node == node_profile("pcie")
    assert announcement.node.source == "catalogue"
    assert "boom" in announcement.profile_error


def test_measuring_does_not_change_a_paced_profile() -> None:
    assert measured_node(paced("pcie"), MEASURED) == paced("pcie")


def test_an_announcement_survives_its_journey() -> None:
    announcement = said(worker_plan(paced("pcie")))
    assert Announcement.from_dict(announcement.to_dict()) == announcement


CHOSEN = {
    "max_context_tokens": 131072, "block_tokens": 16, "device_blocks": 30000,
    "max_batch_tokens": 8192, "max_sequences": 256, "dtype": "bfloat16", "kv_dtype": "fp8",
    "graphs": "FULL_AND_PIECEWISE",
}  # fmt: skip


def test_what_the_engine_chose_is_what_is_announced() -> None:
    asked = worker_plan(limits=EngineLimits.of(ON_GPUS), gpus=2)
    assert asked.limits.missing == [
        "max_context_tokens", "block_tokens", "device_blocks", "max_batch_tokens",
        "max_sequences", "dtype",
    ]  # fmt: skip
    served = asked.served
    rank = {**CHOSEN, "kv_token_bytes": 14_336.0, "weight_bytes": served.params_total / 2}
    started = asked.started([rank, rank])
    assert started.limits.missing == []
    announcement = said(started)
    for name in ("max_context_tokens", "block_tokens", "device_blocks", "max_batch_tokens"):
        assert getattr(announcement, name) == CHOSEN[name]
    assert (announcement.max_sequences, announcement.graphs) == (256, "FULL_AND_PIECEWISE")
    # Of both ranks together, weights of one byte each and KV of eight bits.
    assert announcement.kv_bytes_per_token == 28_672
    assert announcement.host_blocks == (64 << 20) // (28_672 * 16)
    assert announcement.step.context_token_s == 28_672 / announcement.node.hbm_bytes_per_s
    assert announcement.step.weights_s == pytest.approx(
        (served.params_total - served.lookup_params) / announcement.node.hbm_bytes_per_s
    )
    assert started.profile_request()["dtype"] == "bfloat16"
    sixteen = asked.started([{**rank, "kv_dtype": ""}] * 2)
    assert said(sixteen).fingerprint != announcement.fingerprint, "other bytes in the same blocks"


def test_a_model_whose_bytes_nobody_knows_keeps_its_prior() -> None:
    asked = worker_plan()
    none = {**CHOSEN, "kv_token_bytes": 0.0, "weight_bytes": 0}
    served = asked.started([none]).served
    assert served.weight_dtype_bytes == asked.served.weight_dtype_bytes
    assert kv_bytes_per_token(served) == kv_bytes_per_token(asked.served)


def test_ranks_that_measured_at_once_are_one_node_of_their_sum() -> None:
    fast = {**MEASURED, "flops_per_s": 7e10}
    together = of_all_ranks([MEASURED, fast])
    assert (together["h2d_bytes_per_s"], together["flops_per_s"]) == (18e9, 12e10)
    assert (together["device"], together["threads"]) == ("cpu", 1)


class Config:
    """Ray Serve LLM's, as far as an engine's arguments go."""

    def __init__(self, **given: object) -> None:
        self.engine_kwargs = dict(given)

    def update_engine_kwargs(self, **arguments: object) -> None:
        self.engine_kwargs.update(arguments)


def test_configure_vllm_prefers_the_users_engine_arguments() -> None:
    config = Config(enforce_eager=False, max_num_seqs=7)
    ends = Endpoints("ipc://s", "ipc://k")
    configure_vllm(config, worker_plan(), 0, ends, EngineTier())
    given = config.engine_kwargs
    assert (given["enforce_eager"], given["max_num_seqs"]) == (False, 7)
    assert (given["max_model_len"], given["enable_prefix_caching"]) == (8192, True)
    assert given["worker_cls"].endswith("MeteredCPUWorker")


def test_an_engine_serves_its_peers_where_the_announcement_says():
    place = PeerOptions("10.0.0.1", 4711, "secret", "/somewhere/layout")
    config, of = Config(), worker_plan(paced("pcie"), peers=True)
    configure_vllm(config, of, 0, Endpoints("s", "k", place), EngineTier())
    options = config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]["kappa_peers"]
    # A byte of the emulated model takes 30 times as long as on 12.5 GB/s.
    token_s = 30 * kv_bytes_per_token(model_shape("llama-3.1-8b")) / 12.5e9
    assert options == {
        "host": "10.0.0.1", "port": 4711, "token": "secret", "layout": "/somewhere/layout",
        "wait_s": 5.0, "token_s": pytest.approx(token_s), "fixed_s": pytest.approx(0.03),
    }  # fmt: skip
    replica = ReplicaId("w", 0, "m", "e", "s", place.endpoint)
    announced = announce(of, replica, Profile({}))
    assert announced.peer == "10.0.0.1:4711/secret" and announced.net_bytes_per_s == 12.5e9
    assert said(of).net_bytes_per_s == 0.0


@pytest.mark.parametrize("loss", [0.06, None])
def test_announcement_tells_approximate_answers_and_their_loss(loss):
    engine = EngineSettings(kind="torch", approx="ask", sparse={"loss": loss})
    of, replica = worker_plan(paced("pcie"), engine=engine), ReplicaId("w", 0, "m", "e", "s")
    rates = as_measured(rates_from_law(model_shape("opt-6.7b"), node_profile("pcie")), "m", "d")
    announced = announce(of, replica, Profile({}), rates).load_plan
    assert (announced["approx"], announced.get("loss")) == ("ask", loss)
    exact = announce(replace(of, engine=EMULATED), replica, Profile({}), rates)
    assert not {"approx", "loss"} & set(exact.load_plan)
