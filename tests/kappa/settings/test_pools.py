"""Pools: workers alike, how many, and what differs in their engine."""

from pathlib import Path

import pytest
import yaml

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings
from kappa.settings.pools import PoolSettings, ScalingSettings
from tests.kappa.settings.faults import fault, named


def pool(**changes):
    return {"name": "a", "profile": "pcie", **changes}


def test_a_node_is_a_pool_of_one():
    pools = load_settings().all_pools
    assert [(p.name, p.profile, p.paced, p.least, p.most) for p in pools] == [
        ("pcie", "pcie", True, 1, 1), ("c2c", "c2c", True, 1, 1),
    ]  # fmt: skip
    assert {p.role for p in pools} == {"both"}


def test_pools_take_the_place_of_the_demos_nodes():
    settings = load_settings(None, pools=[pool(replicas=3), pool(name="b")])
    assert settings.nodes == () and [p.name for p in settings.all_pools] == ["a", "b"]
    assert settings.workers == 4
    assert settings.all_pools[0].node_names == ("a-0", "a-1", "a-2")
    assert settings.all_pools[1].node_names == ("b",)
    assert not any(p.paced for p in settings.all_pools)


def test_a_pool_that_scales_starts_with_its_least():
    scaled = load_settings(None, pools=[pool(autoscaling={"min_replicas": 2, "max_replicas": 5})])
    (one,) = scaled.all_pools
    assert (one.least, one.most, scaled.workers, len(one.node_names)) == (2, 5, 2, 5)


def test_pool_overrides_only_the_engine_settings_that_it_names():
    settings = load_settings(
        None,
        engine={"device_blocks": 400, "max_sequences": 32},
        pools=[pool(engine={"device_blocks": 300}), pool(name="b")],
    )
    engines = [p.engine_settings(settings.engine) for p in settings.all_pools]
    assert [(e.device_blocks, e.max_sequences) for e in engines] == [(300, 32), (400, 32)]


def test_unpaced_reaches_pools():
    settings = load_settings(None, pools=[pool(paced=True)])
    assert not settings.unpaced().all_pools[0].paced


SILICON = "h100_sxm/llama-3.1-8b/tp1"


def test_a_node_or_pool_lasts_by_a_table_unless_unpaced():
    nodes = [{"name": "a", "profile": "pcie", "silicon": SILICON}]
    for settings in (load_settings(nodes=nodes), load_settings(pools=[pool(**P, paced=True)])):
        assert settings.all_pools[0].silicon == SILICON
        assert settings.unpaced().all_pools[0].silicon is None


P = {"silicon": SILICON}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"nodes": [pool(silicon="l4/llama-3.1-8b/tp1")]},
            f"nodes.0.silicon: .*no table of .*{SILICON}",
        ),
        ({"pools": [pool(**P)]}, "pools.0.silicon: only a paced worker lasts by a table"),
        (
            {"nodes": [pool(**P)], "model": {"emulate": "qwen3-32b"}},
            "nodes.0.silicon: model.emulate is qwen3-32b, and .*: choose one of its own",
        ),
        (
            {"nodes": [pool(**P)], "model": {"emulate": "gemma-3-27b"}},
            "emulate is gemma-3-27b, and .*: it has none, so name no table",
        ),
    ],
)
def test_a_table_that_does_not_go_there_is_refused(data, says):
    with pytest.raises(SettingsError, match=says) as error:
        load_settings(**data)
    assert "1 fault(s)" in str(error.value)


def test_one_worker_of_a_cluster_is_a_cluster():
    assert [p.name for p in load_settings().first_worker().all_pools] == ["pcie"]
    pools = [pool(role="prefill", replicas=3), pool(name="b")]
    (one,) = load_settings(None, pools=pools).first_worker().all_pools
    assert (one.name, one.most, one.role) == ("a", 1, "both")


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"replica": 2}, ".0.replica", "not permitted"),
        ({"name": "a b"}, ".0.name", "pattern"),
        ({"profile": "warp"}, ".0.profile", "warp"),
        ({"role": "draft"}, ".0.role", "prefill"),
        ({"role": "prefill"}, "", "nobody would decode"),
        ({"role": "decode"}, "", "nobody hands over"),
        ({"replicas": 1, "autoscaling": {"max_replicas": 2}}, ".0", "and autoscaling are both"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, ".0.autoscaling", "replicas 3"),
        ({"placement": {"resources": {"x": 0}}}, ".0.placement.resources.x", "greater than 0"),
        ({"engine": {"block_tokens": 64}}, ".0.engine.block_tokens", "the same in all pools"),
        ({"engine": {"blocks": 64}}, ".0.engine.blocks", "not permitted"),
        ({"engine": {"device_blocks": 8}}, ".0.engine", "device_blocks * block_tokens"),
    ],
)
def test_each_fault_of_a_pool_is_named_with_its_place(changes, key, says):
    message = fault(pools=[pool(**changes)])
    assert named(message, f"pools{key}", says), message


@pytest.mark.parametrize(
    ("data", "key", "says"),
    [
        ({"pools": [pool(), pool()]}, "pools.1.name", "pool 0 is called 'a', too"),
        ({"pools": [pool()], "nodes": [{"name": "x", "profile": "pcie"}]}, "nodes", "drop one"),
        ({"nodes": []}, "nodes", "at least one node, or pools"),
        ({"nodes": [{"name": "a/b", "profile": "pcie"}]}, "nodes.0.name", "pattern"),
        ({"transfer": {"connector": "ucx"}}, "transfer.connector", "nixl"),
    ],
)
def test_each_fault_is_named_with_its_place(data, key, says):
    message = fault(**data)
    assert named(message, key, says), message


def test_settings_name_all_value_faults_then_those_of_sections():
    message = fault(
        pools=[pool(replicas=-1), pool(name="b", wieght=1)],
        tenants={"keys_file": "/nowhere/keys.yaml"},
        router={"max_queue": 0},
        scedular={},
    )
    for said in (
        "pools.0.replicas: ", "pools.1.wieght: ", "/nowhere/keys.yaml: cannot be read",
        "router.max_queue: ", "scedular: ",
    ):  # fmt: skip
        assert said in message, (said, message)
    assert "5 fault(s)" in message
    message = fault(
        pools=[pool(), pool(), pool(name="b", engine={"dtype": "float16", "max_sequences": 0})],
        nodes=[{"name": "x", "profile": "pcie"}],
        http={"host": "0.0.0.0"},
    )
    for said in (
        "pools.1.name: ", "pools.2.engine.dtype: ", "pools.2.engine.max_sequences: ", "nodes: ",
        "(file): http.host listens on 0.0.0.0",
    ):  # fmt: skip
        assert said in message, (said, message)
    assert "5 fault(s)" in message


def test_an_unreadable_secret_brings_no_faults_of_its_own_making():
    message = fault(
        tenants={"keys_file": "/nowhere/k.yaml", "unknown": "refuse", "weights": {"alice": 2}}
    )
    assert "1 fault(s)" in message and "cannot be read" in message


def test_fault_of_the_shared_engine_is_named_once_at_its_place():
    message = fault(engine={"max_sequences": 0}, pools=[pool(engine={"device_blocks": 300})])
    assert "1 fault(s)" in message and "  engine.max_sequences: " in message


def test_pools_can_be_given_as_they_are():
    scaling = ScalingSettings(max_replicas=2)
    one = PoolSettings(name="a", profile="pcie", autoscaling=scaling)
    assert load_settings(None, pools=(one,)).all_pools == (one,)
    assert "names must differ" in fault(pools=(one, one))


def test_the_documented_file_is_sound(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "cluster-file.md").read_text()
    data = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-r-0123456789a: research\n")
    data["tenants"]["keys_file"] = str(keys)
    settings = load_settings(None, **data)
    assert [(p.name, p.least, p.most) for p in settings.all_pools] == [
        ("gh200", 2, 8), ("a100", 2, 2),
    ]  # fmt: skip


# -- several models -------------------------------------------------------------------------------

OTHER = {"id": "other", "source": "/models/other"}


def test_by_model_gives_pools_without_a_model_the_clusters():
    settings = load_settings(
        None,
        model={"id": "m", "adapters": {"fine": "/adapters/fine"}},
        pools=[pool(), pool(name="b", model=OTHER), pool(name="c"), pool(name="d", model=OTHER)],
    )
    parts = settings.by_model()
    assert [(p.model.id, [each.name for each in p.all_pools]) for p in parts] == [
        ("m", ["a", "c"]), ("other", ["b", "d"]),
    ]  # fmt: skip
    assert parts[0].model.adapters == {"fine": "/adapters/fine"}
    assert [len(part.by_model()) for part in parts] == [1, 1]
    first = load_settings(None, pools=[pool(model=OTHER)]).first_worker()
    assert first.model.id == "other"
    assert load_settings().by_model() == (load_settings(),)


def adapted(name):
    return {**OTHER, "adapters": {name: "/a"}}


@pytest.mark.parametrize(
    ("first", "second", "where", "why"),
    [
        ({"model": OTHER}, {"model": {**OTHER, "source": "/elsewhere"}}, ".1.model.source",
         "pool 0 calls its model 'other', too, and there source is '/models/other', here "
         "'/elsewhere'"),
        ({}, {"model": {"id": "m", "seed": 3}}, ".1.model.seed", "pool 0 calls its model 'm', too"),
        ({"model": adapted("other")}, None, ".0.model", "'other' has the name of its model"),
        ({}, {"model": adapted("m")}, ".1.model.adapters", "'m' has the name of model 'm'"),
        ({"model": {"id": "x", "adapters": {"f": "/a"}}}, {"model": adapted("f")},
         ".1.model.adapters", "adapter 'f' has the name of an adapter of model 'x'"),
        ({}, {"model": OTHER, "role": "prefill"}, "", "role of model other is prefill"),
        ({}, {"model": OTHER, "role": "decode"}, "", "role of model other is decode"),
    ],
)  # fmt: skip
def test_settings_refuse_conflicting_models_in_one_message(first, second, where, why):
    pools = [pool(**first)] if second is None else [pool(**first), pool(name="b", **second)]
    found = fault(model={"id": "m"}, pools=pools)
    assert f"pools{where}: " in found and why in found
    assert found.count("\n") == 1, found


def test_block_tokens_may_differ_between_models_not_within_one():
    own = {"engine": {"block_tokens": 64, "dtype": "bfloat16"}}
    pools = [pool(), pool(name="b", model=OTHER, **own), pool(name="c", model=OTHER, **own)]
    settings = load_settings(None, pools=pools)
    engine = settings.all_pools[1].engine_settings(settings.engine)
    assert (engine.block_tokens, engine.dtype) == (64, "bfloat16")
    pools[2] = pool(name="c", model=OTHER, engine={"block_tokens": 32})
    found = fault(pools=pools)
    assert "pools.1.engine.block_tokens: is the same" in found
    assert "pools.2.engine.block_tokens: is the same" in found
    assert "kind: is the same" in fault(pools=[pool(model=OTHER, engine={"kind": "torch"})])
