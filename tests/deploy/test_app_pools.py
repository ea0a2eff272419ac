"""A pool as a Serve deployment: its engine, its place, its number; and what cannot go together."""

import pytest
import ray

from deploy.app.build import build_app
from deploy.app.cluster import Cluster
from deploy.app.model import Model, StartError
from deploy.app.plan import pool_nodes, worker_plan
from deploy.app.pools import pool_config, pool_deployment
from deploy.app.ray_cluster import JoinedRay
from deploy.app.refusals import contradictions
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape

MODEL = Model("nowhere", model_shape("llama-3.1-8b"), "")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),
]


def cluster(*pools, **more):
    return load_settings(None, pools=[{"profile": "gh200-c2c", **pool} for pool in pools], **more)


def config_of(pool, **more):
    settings = cluster({"name": "a", **pool}, **more)
    return pool_config(settings, settings.all_pools[0], MODEL)


def test_a_worker_runs_where_the_pool_says_and_nowhere_else():
    config = config_of({"placement": {"gpus": 2, "cpus": 4, "resources": {"pool-a": 1}}})
    assert config.placement_group_config == {"bundles": [{"CPU": 1, "GPU": 1}] * 2}
    assert config.accelerator_config.kind == "gpu"
    assert config.engine_kwargs["tensor_parallel_size"] == 2
    options = config.deployment_config["ray_actor_options"]
    assert (options["num_cpus"], options["resources"]) == (4, {"pool-a": 1})


def test_engines_fetch_media_only_from_domains_that_the_operator_names():
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
    assert not any(name.startswith(("VLLM_CPU", "OMP_")) for name in on_gpu)
    assert on_cpu["OMP_NUM_THREADS"] == "1" and on_gpu.keys() < on_cpu.keys()


def test_labels_choose_machines():
    settings = cluster({"name": "a", "placement": {"labels": {"ray.io/node-group": "gh200"}}})
    (pool,) = settings.all_pools
    bound = pool_deployment(settings, pool, MODEL, pool_config(settings, pool, MODEL), "")
    made = bound._bound_deployment
    assert made.name == "KappaServer:a"
    assert made._replica_config.placement_group_bundle_label_selector == [
        {"ray.io/node-group": "gh200"}
    ]


def test_a_fixed_pool_and_one_that_scales():
    fixed = config_of({"replicas": 3}).deployment_config
    assert fixed["num_replicas"] == 3 and "autoscaling_config" not in fixed
    scaled = config_of(
        {"autoscaling": {"max_replicas": 4, "target_backlog_s": 2.0, "down_after_s": 60}}
    ).deployment_config
    assert "num_replicas" not in scaled
    asked = scaled["autoscaling_config"]
    assert (asked["min_replicas"], asked["max_replicas"]) == (1, 4)
    assert asked["downscale_delay_s"] == 60
    assert asked["policy"]["policy_kwargs"]["target_backlog_s"] == 2.0


def test_a_worker_that_goes_has_the_pools_time_to_end_its_streams():
    assert config_of({"drain_s": 90}).deployment_config["graceful_shutdown_timeout_s"] == 90


def test_workers_are_told_their_pool_and_what_it_changes():
    settings = cluster(
        {"name": "a", "engine": {"device_blocks": 300}, "replicas": 2, "cost_per_hour": 2.5},
        {"name": "b", "paced": True},
        dilation=7,
    )
    first, second = (worker_plan(settings, pool, MODEL, "") for pool in settings.all_pools)
    assert (first.pool, first.role, first.limits.device_blocks) == ("a", "both", 300)
    assert [node.name for node in first.nodes] == ["a-0", "a-1"]
    assert {node.cost_per_hour for node in first.nodes} == {2.5}
    assert {node.source for node in first.nodes} == {"catalogue"}
    assert second.limits.device_blocks == settings.engine.device_blocks
    assert (second.nodes[0].source, second.nodes[0].dilation) == ("paced", 7)
    assert first.transfer is None, "nobody hands over, so nobody is told how"


def test_roles_bring_the_transfer_to_every_worker():
    settings = cluster({"name": "a", "role": "prefill"}, {"name": "b"})
    plans = [worker_plan(settings, pool, MODEL, "") for pool in settings.all_pools]
    assert [plan.role for plan in plans] == ["prefill", "both"]
    assert {plan.transfer.folder for plan in plans} == {settings.transfer.folder}


def test_every_contradiction_is_told_at_once():
    settings = cluster(
        {"name": "a", "paced": True, "role": "prefill"}, {"name": "b"},
        engine="torch", scheduler={"name": "stock"},
    )  # fmt: skip
    found = contradictions(settings)
    assert len(found) == 3
    with pytest.raises(StartError) as caught:
        build_app(settings, MODEL)
    assert str(caught.value).splitlines() == found


@pytest.mark.parametrize(
    ("pools", "more", "says"),
    [
        ([{"name": "a", "paced": True, "placement": {"gpus": 1}}], {}, "has its own speed"),
        (
            [{"name": "a", "role": "prefill", "engine": {"host_bytes": 0}}, {"name": "b"}],
            {},
            "pool a hands KV over or takes it, which needs engine.host_bytes",
        ),
        (
            [{"name": "a", "role": "prefill"}, {"name": "b"}],
            {"transfer": {"connector": "nixl"}},
            "pool a has no GPU",
        ),
        (
            [{"name": "a", "role": "prefill"}, {"name": "b"}],
            {"engine": {"host_tier": "native"}},
            "needs engine.host_tier own",
        ),
    ],
)
def test_what_does_not_go_together_is_told_with_what_to_change(pools, more, says):
    assert any(says in fault for fault in contradictions(cluster(*pools, **more)))


def test_a_sound_cluster_has_no_contradiction():
    assert contradictions(load_settings()) == []
    sound = cluster({"name": "a", "role": "prefill"}, {"name": "b", "role": "decode"})
    assert contradictions(sound) == []


def test_names_of_a_pool_that_scales_are_bounded():
    settings = cluster({"name": "a", "autoscaling": {"max_replicas": 3}})
    nodes = pool_nodes(settings, settings.all_pools[0])
    assert [node.name for node in nodes] == ["a-0", "a-1", "a-2"]


def test_before_anything_starts_all_that_is_known_to_be_wrong_is_told():
    settings = cluster(
        {"name": "a", "placement": {"resources": {"pool-a": 1}}},
        {"name": "b", "placement": {"labels": {"zone": "x"}}},
        {"name": "c", "paced": True, "placement": {"gpus": 1}},
    )
    with pytest.raises(StartError) as caught, Cluster(settings):
        pass
    told = str(caught.value)
    assert "pools.0.placement: pool a fits none of 1 machine(s): this machine has pool-a" in told
    assert "pools.1.placement" in told and "label zone=(none), not x" in told
    assert "pools c have GPUs and are paced" in told
    assert not ray.is_initialized()


def test_rays_client_protocol_is_refused():
    with pytest.raises(StartError, match="HOST:PORT or auto"):
        Cluster(load_settings(), address="ray://somewhere:10001")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:many", "127.0.0.1:99999"])
def test_where_nobody_listens_nothing_is_joined(address):
    with pytest.raises(StartError, match=f"can be joined at {address}: .*HOST:PORT"):
        JoinedRay(address).start("WARNING")
    assert not ray.is_initialized()
