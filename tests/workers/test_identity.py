"""What a worker announces, from its plan, its node and its measurements."""

from __future__ import annotations

import dataclasses

import pytest

from kappa.cost import kappa_crit
from kappa.hardware import NodeProfile, node_profile
from kappa.protocol import Announcement
from kappa.shapes import model_shape
from workers.identity import WorkerPlan, announce, measured_node
from workers.vllm.arguments import EngineLimits, EngineScheduler, Pace, engine_kwargs, fingerprint

LIMITS = EngineLimits(8192, 32, 264, 64 << 20, 1024, 64, "float32")
MEASURED = {
    "device": "cpu",
    "threads": 1,
    "h2d_bytes_per_s": 9e9,
    "d2h_bytes_per_s": 8e9,
    "hbm_bytes_per_s": 2e10,
    "flops_per_s": 5e10,
}


def paced(name: str, dilation: float = 30.0) -> NodeProfile:
    return dataclasses.replace(node_profile(name), source="paced", dilation=dilation)


def plan(*nodes: NodeProfile) -> WorkerPlan:
    return WorkerPlan(
        nodes=nodes,
        served=model_shape("qwen2.5-7b"),
        emulated=model_shape("llama-3.1-8b"),
        limits=LIMITS,
        model_source="/models/x",
        chat_template="{{ messages }}",
        cache_dir="/nowhere",
        stream_host="127.0.0.1",
    )


def said(of: WorkerPlan, rank: int = 0, measured=MEASURED, error: str = "") -> Announcement:
    return announce(of, rank, f"w{rank}", "m", ("tcp://e", "tcp://s"), measured, error)


def test_each_rank_takes_its_node_and_a_surplus_rank_starts_over() -> None:
    pair = plan(paced("pcie"), paced("c2c"))
    assert [pair.node(rank).name for rank in range(3)] == ["pcie", "c2c", "pcie"]


def test_a_paced_node_prices_the_emulated_model_and_shows_the_machine_beside() -> None:
    announcement = said(plan(paced("pcie"), paced("c2c")), rank=1)
    assert announcement.node.source == "paced"
    assert announcement.emulated_model == "llama-3.1-8b"
    assert announcement.measured["h2d_bytes_per_s"] == 9e9
    critical = (
        announcement.step.token_s
        * announcement.node.h2d_bytes_per_s
        / announcement.kv_bytes_per_token
    )
    assert critical == pytest.approx(
        kappa_crit(model_shape("llama-3.1-8b"), node_profile("c2c")), rel=1e-6
    )


def test_an_unpaced_node_takes_the_measured_figures() -> None:
    announcement = said(plan(node_profile("pcie")))
    assert announcement.node.source == "measured"
    assert announcement.node.h2d_bytes_per_s == 9e9
    assert announcement.emulated_model == ""


def test_a_failed_profile_leaves_the_catalogue_and_says_so() -> None:
    announcement = said(plan(node_profile("pcie")), measured={}, error="profile failed: boom")
    assert announcement.node == node_profile("pcie")
    assert announcement.node.source == "catalogue"
    assert "boom" in announcement.profile_error


def test_measuring_does_not_change_a_paced_profile() -> None:
    assert measured_node(paced("pcie"), MEASURED) == paced("pcie")


def test_an_announcement_survives_its_journey() -> None:
    announcement = said(plan(paced("pcie")))
    assert Announcement.from_dict(announcement.to_dict()) == announcement


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"block_tokens": 64}], ids=lambda c: next(iter(c))
)
def test_fingerprints_tell_pools_apart(change) -> None:
    other = dataclasses.replace(LIMITS, **change)
    assert fingerprint("m", "t", LIMITS, "s") != fingerprint("m", "t", other, "s")
    assert fingerprint("m", "t", LIMITS, "s") != fingerprint("m", "another template", LIMITS, "s")


def test_engine_arguments_carry_the_pace_of_both_resources() -> None:
    node = paced("pcie", dilation=20.0)
    arguments = engine_kwargs(LIMITS, "ipc://s", "ipc://k", Pace(model_shape("llama-3.1-8b"), node))
    tier = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    assert tier["kappa_pace"]["token_s"] == pytest.approx(20 * 131072 / node.h2d_bytes_per_s)
    assert arguments["additional_config"]["kappa_pace"]["dilation"] == 20.0
    assert arguments["num_gpu_blocks_override"] == LIMITS.device_blocks


def test_without_a_pace_or_a_host_tier_nothing_is_emulated() -> None:
    limits = dataclasses.replace(LIMITS, host_bytes=0)
    arguments = engine_kwargs(limits, "ipc://s", "ipc://k", None)
    assert "kv_transfer_config" not in arguments
    assert "kappa_pace" not in arguments["additional_config"]


def test_an_engine_schedules_by_a_rule_or_by_its_own() -> None:
    own = engine_kwargs(LIMITS, "ipc://s", "ipc://k", None)
    assert "scheduler_cls" not in own and "kappa_scheduler" not in own["additional_config"]
    fair = engine_kwargs(LIMITS, "ipc://s", "ipc://k", None, EngineScheduler("fair"))
    assert fair["scheduler_cls"] == "workers.vllm.scheduler.FairScheduler"
    options = fair["additional_config"]["kappa_scheduler"]
    assert (options["rule"], options["stats"], options["link"]) == ("fair", "ipc://s", None)
    assert options["tenant_required"] is False, "only a replica behind our ingress demands one"


def test_a_paced_engine_is_told_what_its_loads_take_in_its_own_seconds() -> None:
    node = paced("pcie", dilation=30.0)
    pace = Pace(model_shape("llama-3.1-8b"), node)
    given = engine_kwargs(LIMITS, "ipc://s", "ipc://k", pace, EngineScheduler("fair"))
    link = given["additional_config"]["kappa_scheduler"]["link"]
    assert link["token_s"] == pytest.approx(30.0 * 131072 / node.h2d_bytes_per_s)
    assert set(link) == {"token_s", "fixed_s"}


def test_every_rank_writes_a_log_of_its_own_and_orders_its_link_as_told() -> None:
    scheduler = EngineScheduler("fair", link={"duplex": "half"}, log="/logs/iterations.jsonl")
    given = engine_kwargs(LIMITS, "ipc://s", "ipc://k", None, scheduler, rank=2)
    assert given["additional_config"]["kappa_scheduler"]["log"] == "/logs/iterations-2.jsonl"
    extra = given["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["kappa_link"] == {"duplex": "half"}
