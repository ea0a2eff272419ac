"""What settings become: tenants, deployments of pools, what each worker must know."""

import json
import pickle
import subprocess
import sys
from collections import OrderedDict
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from kappa.hardware import node_profile
from kappa.model import kv_bytes_per_token
from kappa.plans.clo import FORMAT
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape
from kappa_deploy.app.build import own_digests, own_headers
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.model import Model
from kappa_deploy.app.plan import (
    Deferred,
    engine_scheduler,
    pool_config,
    pool_deployment,
    pool_nodes,
    worker_plan,
)
from kappa_router.api.start import tenants_table
from kappa_scheduler.config import FairConfig
from kappa_workers.vllm.arguments import EngineLimits
from kappa_workers.vllm.options import LinkRules

MODEL = Model("nowhere", model_shape("llama-3.1-8b"), "")
KEYED = {"by_key": {"sk-alice-0123456": "alice"}, "weights": {"alice": 2.0}}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("no_ray_starts"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),
]


def cluster(*pools, **more):
    return load_settings(None, pools=[{"profile": "gh200-c2c", **pool} for pool in pools], **more)


def config_of(pool, **more):
    settings = cluster({"name": "a", **pool}, **more)
    return SimpleNamespace(**pool_config(settings, settings.all_pools[0], MODEL))


def plans_of(settings):
    return [worker_plan(settings, pool, MODEL, "") for pool in settings.all_pools]


def table(settings):
    return tenants_table(settings.tenants, own_digests(settings))


def test_the_decider_gets_the_tenants_and_not_their_keys():
    tenants = table(load_settings(None, tenants={**KEYED, "unknown": "refuse"}))
    assert tenants.find(["sk-alice-0123456"]).weight == 2.0
    assert tenants.find(["sk-bob-012345678"]) is None
    assert b"sk-alice-0123456" not in pickle.dumps(tenants)


def test_without_keys_nobody_is_refused():
    tenants = table(load_settings())
    assert tenants.find(["anything"]).name == "default"


def test_our_own_requests_carry_a_key_only_where_one_is_needed():
    assert own_headers(load_settings()) == {}
    assert own_headers(load_settings(None, tenants=KEYED)) == {}
    refusing = load_settings(None, tenants={**KEYED, "unknown": "refuse"})
    scheme, key = own_headers(refusing)["authorization"].split()
    assert scheme == "Bearer" and key != "sk-alice-0123456"
    assert table(refusing).find([key]).operator
    assert not table(refusing).find(["sk-alice-0123456"]).operator


def test_plan_takes_rule_weights_and_link_from_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(
        tenants={"by_key": {"k" * 16: "a"}, "weights": {"a": 2.0}},
        scheduler={"window": 7, "duplex": "half", "log": "it.jsonl"},
    )
    scheduler = engine_scheduler(settings)
    config = FairConfig(**scheduler.config)
    assert (scheduler.rule, config.window, config.weights) == ("fair", 7, {"a": 2.0})
    plan = plans_of(settings)[0]
    assert plan.link == LinkRules("half", "loads_first", 10.0) and plan.scheduler == scheduler
    assert scheduler.log == str(tmp_path / "it.jsonl")


def test_a_worker_runs_in_its_pools_place_and_nowhere_else():
    config = config_of({"placement": {"gpus": 2, "cpus": 4, "resources": {"pool-a": 1}}})
    # All on one machine: replica, engine and ranks talk over its sockets.
    assert config.placement_group_config == {
        "bundles": [{"CPU": 1, "GPU": 1}] * 2, "strategy": "STRICT_PACK",
    }  # fmt: skip
    assert config.accelerator_config["kind"] == "gpu"
    assert config.engine_kwargs["tensor_parallel_size"] == 2
    options = config.deployment_config["ray_actor_options"]
    assert (options["num_cpus"], options["resources"]) == (4, {"pool-a": 1})


def test_engine_fetches_media_only_from_domains_named_in_extra():
    from vllm.multimodal.media.connector import MediaConnector

    def allowed(**engine):
        return config_of({}, engine=engine).engine_kwargs["allowed_media_domains"]

    connector = MediaConnector(allowed_media_domains=allowed())
    for address in ("http://169.254.169.254/latest/meta-data", "https://example.com/a.png"):
        with pytest.raises(ValueError, match="must be from one of the allowed domains"):
            connector.fetch_image(address)
    with pytest.raises(RuntimeError, match="allowed-local-media-path"):
        connector.fetch_image("file:///etc/passwd")
    named = ["images.example.com"]
    assert allowed(extra={"allowed_media_domains": named}) == named


def test_a_gpu_pool_does_not_get_the_environment_of_a_cpu_engine():
    on_gpu = config_of({"placement": {"gpus": 1}}).runtime_env["env_vars"]
    on_cpu = config_of({}).runtime_env["env_vars"]
    assert not any(name.startswith(("VLLM_CPU", "OMP_", "KAPPA_QUEUE")) for name in on_gpu)
    assert on_cpu["OMP_NUM_THREADS"] == "1" and on_gpu.keys() < on_cpu.keys()


def test_labels_choose_machines():
    settings = cluster({"name": "a", "placement": {"labels": {"ray.io/node-group": "gh200"}}})
    (pool,) = settings.all_pools
    bound = pool_deployment(settings, pool, MODEL, "")
    made = bound._bound_deployment
    assert made.name == "KappaServer:a"
    assert made._replica_config.placement_group_bundle_label_selector == [
        {"ray.io/node-group": "gh200"}
    ]


@pytest.mark.parametrize(
    ("pool", "more"),
    [
        ({}, {}),
        ({"placement": {"gpus": 2, "cpus": 4, "resources": {"pool-a": 1}}}, {}),
        ({"placement": {"gpus": 1}}, {"engine": "torch"}),
    ],
)
def test_pool_deployment_equals_what_ray_serve_llm_builds(pool, more):
    from ray.serve.llm import LLMConfig, build_llm_deployment

    settings = cluster({"name": "a", **pool}, **more)
    (only,) = settings.all_pools
    ours = pool_deployment(settings, only, MODEL, "")._bound_deployment
    config = LLMConfig(**pool_config(settings, only, MODEL))
    theirs = build_llm_deployment(config, name_prefix="")._bound_deployment
    assert ours._deployment_config == theirs._deployment_config
    ours, theirs = ours._replica_config, theirs._replica_config
    # The hook, which does nothing, has every process import Ray Serve LLM before it must.
    hook = theirs.ray_actor_options["runtime_env"].pop("worker_process_setup_hook")
    assert hook == "ray.llm._internal.serve._worker_process_setup_hook"
    assert ours.ray_actor_options == theirs.ray_actor_options
    bundles = [{n: x for n, x in b.items() if x} for b in theirs.placement_group_bundles]
    assert ours.placement_group_bundles == bundles
    assert ours.placement_group_strategy == theirs.placement_group_strategy


def test_what_is_deployed_is_named_here_and_made_where_it_runs():
    def made(deferred):
        return pickle.loads(pickle.dumps(deferred))

    assert made(Deferred("collections:OrderedDict")) is OrderedDict
    assert made(Deferred("fractions:Fraction", 3, 4)) == Fraction(3, 4)


_BUILT = """
import sys
import ray
from pathlib import Path
from kappa_deploy.app.build import build_app
from kappa_deploy.app.front_door import front_door_spec
from kappa_deploy.app.model import Model
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape
settings = load_settings()
door = front_door_spec(settings, Path("nowhere"))
build_app(settings, [Model("nowhere", model_shape("llama-3.1-8b"), "")], door)
print([name for name in ("vllm", "torch", "ray.llm") if name in sys.modules])
print(ray.is_initialized())
"""


def test_build_app_imports_no_engine_and_starts_no_ray():
    command = [sys.executable, "-c", _BUILT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "False"]


def test_a_fixed_pool_and_one_that_scales():
    fixed = config_of({"replicas": 3}).deployment_config
    assert fixed["num_replicas"] == 3 and "autoscaling_config" not in fixed
    scaled = config_of(
        {"autoscaling": {"max_replicas": 4, "target_backlog_s": 2.0, "down_after_s": 60}}
    ).deployment_config
    assert "num_replicas" not in scaled
    policy = scaled["autoscaling_config"]
    assert (policy["min_replicas"], policy["max_replicas"]) == (1, 4)
    assert policy["downscale_delay_s"] == 60
    assert policy["policy"]["policy_kwargs"]["target_backlog_s"] == 2.0


def test_deployment_gives_a_leaving_worker_the_pools_drain_time():
    assert config_of({"drain_s": 90}).deployment_config["graceful_shutdown_timeout_s"] == 90


def test_a_worker_knows_its_pool_and_what_that_changes():
    settings = cluster(
        {"name": "a", "engine": {"device_blocks": 300}, "replicas": 2, "cost_per_hour": 2.5},
        {"name": "b", "paced": True},
        dilation=7,
    )
    first, second = plans_of(settings)
    assert second.limits == EngineLimits(8192, 32, 264, 64 << 20, 1024, 64, "float32")
    assert (first.pool, first.role, first.limits.device_blocks) == ("a", "both", 300)
    assert [node.name for node in first.nodes] == ["a-0", "a-1"]
    assert {node.cost_per_hour for node in first.nodes} == {2.5}
    assert {node.source for node in first.nodes} == {"catalogue"}
    assert (second.nodes[0].source, second.nodes[0].dilation) == ("paced", 7)
    assert not (first.nixl or first.peers)


def test_roles_make_every_worker_a_peer_unless_vllm_hands_over():
    settings = cluster({"name": "a", "role": "prefill"}, {"name": "b"})
    plans = plans_of(settings)
    assert [plan.role for plan in plans] == ["prefill", "both"]
    assert [(plan.peers, plan.nixl) for plan in plans] == [(True, False)] * 2
    roles = {"name": "a", "role": "prefill"}, {"name": "b"}
    plan, _ = plans_of(cluster(*roles, transfer={"connector": "nixl"}))
    assert plan.nixl and not plan.peers
    (plan,) = plans_of(cluster({"name": "a"}, router={"policy": "priced_fetch"}))
    assert plan.peers and not plan.nixl


def test_names_of_a_pool_that_scales_are_bounded():
    settings = cluster({"name": "a", "autoscaling": {"max_replicas": 3}})
    nodes = pool_nodes(settings, settings.all_pools[0])
    assert [node.name for node in nodes] == ["a-0", "a-1", "a-2"]


def planned(tmp_path, engine):
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"engine": engine}))
    return plans_of(load_settings(path))[0]


def heads(tmp_path, layers):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"format": FORMAT, "importance": [[0.25] * 32] * layers}))
    return str(path)


def test_plan_carries_the_sparse_settings_and_the_head_scores(tmp_path):
    sparse = {"lanes": 7, "heads": heads(tmp_path, 32)}
    plan = planned(tmp_path, {"kind": "torch", "approx": "ask", "sparse": sparse})
    assert plan.engine.sparse.lanes == 7
    assert np.array_equal(plan.heads.importance, np.full((32, 32), 0.25))


def test_without_approximation_no_file_of_heads_is_read(tmp_path):
    plan = planned(tmp_path, {"kind": "torch", "sparse": {"heads": "/nowhere"}})
    assert plan.engine.approx == "never" and plan.heads is None


def test_scores_of_another_model_stop_the_start(tmp_path):
    sparse = {"heads": heads(tmp_path, 3)}
    with pytest.raises(StartError, match=r"^engine\.sparse\.heads: .*give 32 layers of 32"):
        planned(tmp_path, {"kind": "torch", "approx": "always", "sparse": sparse})


@pytest.mark.parametrize("planner", ["host-kvpr", "host-hybrid"])
def test_plan_refuses_activations_larger_than_kv_with_the_ratio(tmp_path, planner):
    with pytest.raises(StartError, match=r"8 KV heads .* are 2 times its KV: use host-kv"):
        planned(tmp_path, {"kind": "torch", "planner": planner})
    assert planned(tmp_path, {"kind": "torch", "planner": "host-kv"}).engine.act_share == 0.0


def test_several_gpus_are_one_worker_of_their_seconds_and_bytes():
    (plan,) = plans_of(cluster({"name": "a", "placement": {"gpus": 16}}))
    one = node_profile("gh200-c2c")
    assert plan.nodes[0].h2d_bytes_per_s == 16 * one.h2d_bytes_per_s
    assert plan.nodes[0].flops_per_s == 16 * one.flops_per_s
    # Eight KV heads on sixteen ranks: each is there twice.
    assert kv_bytes_per_token(plan.served) == 2 * kv_bytes_per_token(MODEL.shape)
    (single,) = plans_of(cluster({"name": "a", "placement": {"gpus": 1}}))
    assert single.served == MODEL.shape


def test_stages_and_ranks_share_a_workers_gpus():
    def asked(gpus, **extra):
        pool = {"placement": {"gpus": gpus}, "engine": {"extra": extra}}
        return config_of(pool).engine_kwargs

    assert asked(8, pipeline_parallel_size=2)["tensor_parallel_size"] == 4
    assert asked(8, tensor_parallel_size=8)["tensor_parallel_size"] == 8
    assert "tensor_parallel_size" not in asked(1)


def test_an_engine_of_ours_holds_its_gpu_itself():
    torch = config_of({"placement": {"gpus": 1}}, engine="torch")
    assert torch.placement_group_config["bundles"] == [{"CPU": 1}]
    assert torch.deployment_config["ray_actor_options"]["num_gpus"] == 1
    assert torch.accelerator_config["kind"] == "cpu"
    vllm = config_of({"placement": {"gpus": 1}})
    assert "num_gpus" not in vllm.deployment_config["ray_actor_options"]
