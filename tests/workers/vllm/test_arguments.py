"""The arguments of a vLLM engine: its pace, its rule, its host tier, its transfers."""

import dataclasses

import pytest

from kappa.settings.engine import NOT_IN_EXTRA, VLLM_LIMITS, EngineSettings
from kappa.shapes import model_shape
from kappa_workers.vllm.arguments import (
    Endpoints,
    EngineLimits,
    EngineTier,
    Pace,
    engine_kwargs,
    fingerprint,
    transfer_config,
)
from kappa_workers.vllm.options import LinkRules, SchedulerOptions
from tests.workers.plans import LIMITS, paced

ENDPOINTS = Endpoints("ipc://s", "ipc://k")
RATES = {"format": "f"}
SERVER = "tcp://127.0.0.1:1234"


def extra(config):
    return config["kv_connector_extra_config"]


def tier_config(kind="own", **fields):
    tier = EngineTier(kind, EngineSettings(lmcache=fields), RATES, SERVER, host_blocks=77)
    return transfer_config(tier, 1 << 20, "ipc://s")


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"block_tokens": 64}], ids=lambda c: next(iter(c))
)
def test_fingerprints_tell_pools_apart(change):
    other = dataclasses.replace(LIMITS, **change)
    assert fingerprint("m", "t", LIMITS, "s") != fingerprint("m", "t", other, "s")
    assert fingerprint("m", "t", LIMITS, "s") != fingerprint("m", "another template", LIMITS, "s")


def test_engine_arguments_carry_the_pace_of_both_resources():
    node = paced("pcie", dilation=20.0)
    arguments = engine_kwargs(LIMITS, ENDPOINTS, Pace(model_shape("llama-3.1-8b"), node))
    tier = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    assert tier["kappa_pace"]["token_s"] == pytest.approx(20 * 131072 / node.h2d_bytes_per_s)
    assert arguments["additional_config"]["kappa_pace"]["dilation"] == 20.0
    assert arguments["num_gpu_blocks_override"] == LIMITS.device_blocks


def test_without_a_pace_or_a_host_tier_nothing_is_emulated():
    limits = dataclasses.replace(LIMITS, host_bytes=0)
    arguments = engine_kwargs(limits, ENDPOINTS, None)
    assert "kv_transfer_config" not in arguments
    assert "kappa_pace" not in arguments["additional_config"]


@pytest.mark.parametrize("host_bytes", [0, 1 << 30])
def test_stock_engine_publishes_events_without_classes_of_ours(host_bytes):
    limits = dataclasses.replace(LIMITS, host_bytes=host_bytes)
    tier = EngineTier("stock", rates=RATES)
    given = engine_kwargs(limits, ENDPOINTS, None, SchedulerOptions("stock"), tier, gpus=1)
    assert "kappa" not in str(given) and "workers." not in str(given)
    assert given["kv_events_config"]["endpoint"] == ENDPOINTS.kv_events
    assert ("kv_transfer_config" in given) == bool(host_bytes)
    if host_bytes:
        assert given["kv_transfer_config"] == {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
        }


def test_an_engine_schedules_by_a_rule_or_by_its_own():
    own = engine_kwargs(LIMITS, ENDPOINTS, None)
    assert "scheduler_cls" not in own and "kappa_scheduler" not in own["additional_config"]
    fair = engine_kwargs(LIMITS, ENDPOINTS, None, SchedulerOptions("fair"))
    assert fair["scheduler_cls"] == "kappa_workers.vllm.scheduler.FairScheduler"
    options = fair["additional_config"]["kappa_scheduler"]
    assert (options["rule"], options["stats"], options["link"]) == ("fair", "ipc://s", None)
    assert options["tenant_required"] is False, "only a replica behind our decider demands one"


def test_paced_engines_link_is_in_dilated_seconds():
    node = paced("pcie", dilation=30.0)
    pace = Pace(model_shape("llama-3.1-8b"), node)
    given = engine_kwargs(LIMITS, ENDPOINTS, pace, SchedulerOptions("fair"))
    link = given["additional_config"]["kappa_scheduler"]["link"]
    assert link["token_s"] == pytest.approx(30.0 * 131072 / node.h2d_bytes_per_s)
    assert set(link) == {"token_s", "fixed_s"}


def test_each_rank_has_its_own_log_and_the_configured_link_order():
    scheduler = SchedulerOptions("fair", log="/logs/iterations.jsonl")
    tier = EngineTier(link=LinkRules("half"))
    given = engine_kwargs(LIMITS, ENDPOINTS, None, scheduler.for_rank(2), tier)
    assert given["additional_config"]["kappa_scheduler"]["log"] == "/logs/iterations-2.jsonl"
    extra = given["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["kappa_link"]["duplex"] == "half"


@pytest.mark.parametrize("kind", ["own", "lmcache", "native"])
def test_every_tier_plans_reports_and_recomputes_failed_loads(kind):
    made = tier_config(kind)
    assert made["kv_role"] == "kv_both"
    assert made["kv_load_failure_policy"] == "recompute"
    assert extra(made)["kappa_stats"] == "ipc://s"
    assert extra(made)["kappa_plan"] == RATES


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("own", {"kappa_link", "kappa_pace", "spec_name", "cpu_bytes_to_use"}),
        ("native", {"kappa_link", "spec_name", "cpu_bytes_to_use"}),
        ("lmcache", {"kappa_pace", "kappa_lmcache"}),
    ],
)
def test_each_kind_of_tier_is_configured_with_what_it_reads(kind, keys):
    tier = EngineTier(kind, server=SERVER)
    pace = Pace(model_shape("llama-3.1-8b"), paced("pcie"))
    given = engine_kwargs(LIMITS, ENDPOINTS, pace, SchedulerOptions("fair"), tier)
    config = given["kv_transfer_config"]
    every = {"kappa_link", "kappa_pace", "kappa_lmcache", "spec_name", "cpu_bytes_to_use"}
    assert every & set(extra(config)) == keys
    connectors = {"own": "CpuHostTierConnector", "native": "HostTierConnector"}
    assert config["kv_connector"] == connectors.get(kind, "LmcacheConnector")


def test_lmcache_has_its_server_and_its_bounds():
    given = extra(tier_config("lmcache", timeout_s=0.5, heartbeat_s=2.0, retry_s=7.0))
    assert (given["lmcache.mp.host"], given["lmcache.mp.port"]) == ("tcp://127.0.0.1", 1234)
    assert (given["lmcache.mp.mq_timeout"], given["lmcache.mp.heartbeat_interval"]) == (0.5, 2.0)
    assert given["kappa_lmcache"] == {"timeout_s": 0.5, "retry_s": 7.0, "most_blocks": 77}


def test_a_shared_server_goes_before_one_of_the_workers_own():
    given = extra(tier_config("lmcache", server="tcp://[::1]:99"))
    assert (given["lmcache.mp.host"], given["lmcache.mp.port"]) == ("tcp://[::1]", 99)
    assert given["kappa_lmcache"]["most_blocks"] > 77
    assert not EngineSettings(lmcache={"server": "tcp://[::1]:99"}).shared_server


def test_without_rates_nothing_is_planned():
    assert "kappa_plan" not in extra(transfer_config(EngineTier(), 1, ""))


LIMIT_NAMES = {
    "dtype", "max_model_len", "block_size", "num_gpu_blocks_override", "max_num_batched_tokens",
    "max_num_seqs", "enforce_eager",
}  # fmt: skip


def vllm_arguments(engine, gpus, **given):
    """vLLM's own record of a worker's requests, and its state without any."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    limits = EngineLimits.of(EngineSettings(**engine).on(gpus))
    asked = engine_kwargs(limits, ENDPOINTS, None, SchedulerOptions("fair"), gpus=gpus)
    return AsyncEngineArgs(model="m", **{**asked, **given}), AsyncEngineArgs(model="m")


@pytest.mark.vllm
def test_on_a_gpu_vllm_chooses_every_limit_that_is_not_given():
    made, default = vllm_arguments({}, gpus=1)
    for name in LIMIT_NAMES:
        assert getattr(made, name) == getattr(default, name), name
    assert made.enforce_eager is False, "with its graphs"
    assert made.worker_cls.endswith("MeteredGPUWorker")


@pytest.mark.vllm
def test_what_is_given_reaches_vllm_under_its_names():
    figures = {
        "max_context_tokens": 32768, "block_tokens": 64, "device_blocks": 900,
        "max_batch_tokens": 4096, "max_sequences": 128, "dtype": "bfloat16",
    }  # fmt: skip
    made, _ = vllm_arguments(figures, gpus=4)
    assert (made.max_model_len, made.block_size, made.num_gpu_blocks_override) == (32768, 64, 900)
    assert (made.max_num_batched_tokens, made.max_num_seqs, made.dtype) == (4096, 128, "bfloat16")


@pytest.mark.vllm
def test_on_a_cpu_the_figures_are_those_of_a_small_machine():
    made, _ = vllm_arguments({}, gpus=0)
    assert (made.max_model_len, made.block_size, made.num_gpu_blocks_override) == (8192, 32, 264)
    assert (made.max_num_batched_tokens, made.max_num_seqs, made.dtype) == (1024, 64, "float32")
    assert made.enforce_eager is True


@pytest.mark.vllm
def test_every_argument_that_settings_name_is_one_of_vllms():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    assert {argument for argument, _ in VLLM_LIMITS.values()} <= known
    assert set(NOT_IN_EXTRA) <= known | {each.name for each in dataclasses.fields(FrontendArgs)}
    assert set(engine_kwargs(LIMITS, ENDPOINTS, None, SchedulerOptions("fair"))) <= known


def test_limits_take_figures_from_extra_but_not_vllms_choices():
    extra = {
        "block_size": 64, "max_model_len": -1, "max_num_seqs": "many", "dtype": "auto",
        "kv_cache_dtype": "fp8_e5m2",
    }  # fmt: skip
    limits = EngineLimits.of(EngineSettings(extra=extra).on(gpus=1))
    assert (limits.block_tokens, limits.max_context_tokens, limits.max_sequences) == (64, 0, 0)
    assert (limits.dtype, limits.kv_dtype) == ("", "fp8_e5m2")
    assert limits.arguments() == {"block_size": 64}
    other = EngineLimits.of(EngineSettings(extra={**extra, "kv_cache_dtype": "fp8"}).on(gpus=1))
    assert fingerprint("m", "t", limits, "s") != fingerprint("m", "t", other, "s")
