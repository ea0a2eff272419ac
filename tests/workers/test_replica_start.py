"""Before an engine's start: the folder of its host tier, who may share it, refusals in time."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kappa.hardware import node_profile
from kappa.settings.routing import ObservingSettings
from kappa.shapes import model_shape
from workers import host_memory, power_report
from workers.host_memory import HostBudget, HostBudgetError, prepare_host_memory
from workers.identity import Profile, ReplicaId, WorkerPlan, announce
from workers.power_report import power_reporter
from workers.replica import configure_logs
from workers.vllm.arguments import EngineLimits, TierChoice
from workers.vllm_plugin import LOG_ENV, log_as

pytestmark = pytest.mark.vllm


@pytest.fixture
def plan(tmp_path):
    return WorkerPlan(
        nodes=(node_profile("pcie"),), served=model_shape("qwen2.5-7b"),
        emulated=model_shape("llama-3.1-8b"),
        limits=EngineLimits(2048, 32, 100, 1 << 20, 512, 16, "float32"), model_source="/models/x",
        chat_template="{{ m }}", cache_dir="/nowhere", stream_host="127.0.0.1",
        handover_dir=str(tmp_path / "kept"), pool="p",
    )  # fmt: skip


def test_the_same_plan_adopts_and_any_that_means_other_blocks_does_not(plan):
    prepare_host_memory(plan).release()
    again = prepare_host_memory(plan)
    assert again.warm
    again.release()
    other = [
        replace(plan, model_source="/models/y"), replace(plan, chat_template="{{ other }}"),
        replace(plan, limits=replace(plan.limits, dtype="bfloat16")),
        replace(plan, limits=replace(plan.limits, block_tokens=16)),
        replace(plan, limits=replace(plan.limits, host_bytes=2 << 20)), replace(plan, pool="q"),
    ]  # fmt: skip
    for changed in other:
        folder = prepare_host_memory(changed)
        assert not folder.warm
        folder.release()


@pytest.mark.parametrize(
    "change",
    [{"handover_dir": ""}, {"kind": "torch"}, {"tier": TierChoice("lmcache")}],
)
def test_without_a_tier_of_ours_no_folder_is_claimed(plan, change):
    assert prepare_host_memory(replace(plan, **change)) is None


def test_a_tier_that_does_not_fit_is_refused_before_the_engine_starts(plan, monkeypatch):
    monkeypatch.setattr(host_memory, "host_budget", lambda _: HostBudget(cgroup_bytes=100 << 20))
    with pytest.raises(HostBudgetError, match="pod's memory limit"):
        prepare_host_memory(plan)
    assert prepare_host_memory(replace(plan, kind="emulated")) is None, "it keeps nothing"


def test_only_the_own_folder_counts_as_free_and_a_refused_worker_leaves_it(plan, monkeypatch):
    sibling = prepare_host_memory(plan)
    asked = []

    def budget(folder):
        asked.append(folder)
        return HostBudget(folder_bytes=1)

    monkeypatch.setattr(host_memory, "host_budget", budget)
    with pytest.raises(HostBudgetError, match="handover_dir has"):
        prepare_host_memory(plan)
    assert asked[0].parent == sibling.folder.parent and asked[0] != sibling.folder
    monkeypatch.undo()
    again = prepare_host_memory(plan)
    assert again.warm and again.folder == asked[0]
    again.release()
    sibling.release()


def test_a_shared_server_needs_no_memory_of_the_worker(plan, monkeypatch):
    monkeypatch.setattr(host_memory, "host_budget", lambda _: HostBudget(machine_bytes=0))
    own, shared = TierChoice("lmcache"), TierChoice("lmcache", server="tcp://elsewhere:5555")
    with pytest.raises(HostBudgetError, match="the machine has"):
        prepare_host_memory(replace(plan, tier=own))
    assert prepare_host_memory(replace(plan, tier=shared)) is None


def test_blocks_of_other_weights_in_the_same_folder_are_not_adopted(plan, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    plan = replace(plan, model_source=str(model))
    prepare_host_memory(plan).release()
    again = prepare_host_memory(plan)
    assert again.warm
    again.release()
    (model / "model.safetensors").write_bytes(b"two!")
    changed = prepare_host_memory(plan)
    assert not changed.warm
    changed.release()


def test_power_is_modelled_where_there_is_no_gpu(plan):
    announced = announce(plan, ReplicaId("w", 0, "m", "tcp://e", "tcp://s"), Profile())
    reporter = power_reporter(announced, gpus=0)
    from kappa.protocol import WorkerReport

    reporter(WorkerReport("w", 0.0))
    assert reporter(WorkerReport("w", 1.0)).power_source == "model"


@pytest.mark.parametrize(
    ("value", "gpus"),
    [("", None), ("0", [0]), ("2, 3", [2, 3]), ("GPU-6f1b", None), ("MIG-1,0", None)],
)
def test_gpus_by_their_index_where_the_environment_names_them_so(monkeypatch, value, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert power_report._visible_gpus() == gpus


def test_the_engines_processes_log_as_their_replica_does(plan, tmp_path, monkeypatch, capsys):
    import structlog

    before = structlog.get_config()
    monkeypatch.setenv(LOG_ENV, "")
    log_file = str(tmp_path / "a|b.jsonl")
    try:
        seen = ObservingSettings(log_format="json", log_file=log_file)
        configure_logs(replace(plan, observing=seen, log_level="INFO"))
        log_as(os.environ[LOG_ENV])
        structlog.get_logger("engine").info("hello", node="pcie")
    finally:
        structlog.configure(**before)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["event"] == "hello"
    assert json.loads(Path(log_file).read_text())["node"] == "pcie"
