"""Clusters by name and from files, and those that are refused."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from kappa.cost import load_s
from kappa.hardware import node_profile
from kappa.shapes import model_shape
from kappa.silicon import silicon_table
from kappa_simulator.clusters import (
    KINDS,
    ClusterError,
    NodeSpec,
    SimulatedCluster,
    check,
    cluster_named,
    kv_room,
    model_served,
    node_model,
    numbered,
    scaled,
)


def kinds(cluster):
    return dict(Counter(node.profile.gpu for node in cluster.nodes))


def test_the_built_in_clusters_have_their_mix_of_nodes():
    assert kinds(cluster_named("mixed")) == {"GH200": 4, "H100": 8, "A100": 8}
    assert kinds(cluster_named("small")) == {"GH200": 1, "H100": 3}
    assert kinds(cluster_named("UNIFORM")) == {"H100": 16}


def test_names_are_unique_and_a_scaled_cluster_keeps_the_mix(shape):
    large = scaled(cluster_named("mixed"), 1000)
    assert kinds(large) == {"GH200": 200, "H100": 400, "A100": 400}
    check(large, shape, 512)


def test_kv_room_is_what_the_weights_leave(shape):
    room = kv_room(KINDS["h100"], shape, 16)
    free = 0.9 * 80e9 - shape.params_total * 2
    assert room.device_blocks == int(free // (16 * 131_072))
    assert room.host_blocks == int(256e9 // (16 * 131_072))


def test_a_disk_needs_its_size_and_its_rate(tmp_path, shape):
    path = tmp_path / "disk.yaml"
    path.write_text("- {kind: h100, disk_bytes: 1.0e+12, disk_bytes_per_s: 4.0e+9}")
    (node,) = cluster_named(str(path)).nodes
    assert kv_room(node, shape, 16).disk_blocks == int(1e12 // (16 * 131_072))
    assert node_model(node, shape, 16).disk_block_s == pytest.approx(16 * 131_072 / 4e9)
    for changes in ({"disk_bytes": 0.0}, {"profile": replace(node.profile, disk_bytes_per_s=0.0)}):
        with pytest.raises(ClusterError, match="node h100-0: disk_bytes is"):
            kv_room(replace(node, **changes), shape, 16)


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_file_names_kinds_or_gives_figures(tmp_path, ending):
    rows = [
        {"kind": "h100", "count": 2},
        {"kind": "a100", "name": "old", "h2d_bytes_per_s": 12e9, "host_bytes": 64e9},
        {"name": "own", "gpu": "X", "link_name": "L", "h2d_bytes_per_s": 1e9, "flops_per_s": 1e14,
         "hbm_bytes_per_s": 1e12, "hbm_bytes": 48e9, "host_bytes": 1e11, "watts": 300},
    ]  # fmt: skip
    path = tmp_path / f"mine.{ending}"
    path.write_text(json.dumps({"nodes": rows} if ending == "yaml" else rows))
    cluster = cluster_named(str(path))
    assert [n.name for n in cluster.nodes] == ["h100-0", "h100-1", "old-0", "own-0"]
    assert cluster.nodes[2].profile.h2d_bytes_per_s == 12e9
    assert (cluster.nodes[2].host_bytes, cluster.nodes[3].watts) == (64e9, 300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no nodes"),
        ("nodes: {}", "no nodes"),
        ("{", "neither YAML nor JSON"),
        ("- h100", "node 1: expected a mapping"),
        ("- {kind: h1000}", "Did you mean 'h100'"),
        ("- {kind: h100, count: 0}", "count is 0"),
        ("- {kind: h100, h2d_bytes_per_s: 0}", r"node 1 \(h100\).*h2d_bytes_per_s is 0"),
        ("- {kind: h100, name: slow, flops_per_s: -1}", r"node 1 \(slow\).*flops_per_s"),
        ("- {kind: h100, flops_per_s: fast}", "give a number"),
        ("- {kind: h100, host_bytes: -1}", "host_bytes is -1"),
        ("- {kind: h100, host_bytes: [1]}", r"host_bytes is \[1\]: Input should be a valid number"),
        ("- {kind: h100, network_bytes_per_s: 0}", "network_bytes_per_s is 0"),
        ("- {kind: h100, watts: .inf}", "watts is inf: Input should be a finite number"),
        (
            "- {host_bytes: 1, gpu: X, link_name: L, h2d_bytes_per_s: 1, flops_per_s: 1, "
            "hbm_bytes_per_s: 1}",
            "neither a kind nor a name",
        ),
        ("- {kind: h100, bandwidth: 1}", "no key 'bandwidth'"),
        ("- {kind: h100, silicon: h100_sxm/llama-3.1-8b/tp9}", "no table of silicon named"),
        ("- {name: own, host_bytes: 1}", "flops_per_s"),
    ],
)
def test_a_bad_file_is_refused_with_the_node_and_the_reason(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message) as error:
        cluster_named(str(path))
    assert str(path) in str(error.value)


def test_node_of_silicon_lasts_by_its_table_and_tells_its_law(tmp_path, shape):
    path = tmp_path / "real.yaml"
    name = "h100_sxm/llama-3.1-8b/tp1"
    path.write_text(f"- {{kind: h100, silicon: {name}, cost_per_hour: 2.0}}")
    (node,) = cluster_named(str(path)).nodes
    model, table = node_model(node, shape, 16), silicon_table(name)
    # The host's 2 ms a step are the kind's, and so is the link.
    assert model.step == replace(table.law, fixed_s=2e-3)
    assert (node.profile.h2d_bytes_per_s, node.profile.cost_per_hour) == (55e9, 2.0)
    chunks = [(512, 4096)]
    assert model.step_s(chunks, 8, 8_000) == table.step_s(chunks, 8, 8_000) + 2e-3
    assert model.run(8, 8_000).seconds(1) == table.step_s([], 8, 8_000) + 2e-3
    with pytest.raises(ClusterError, match=r"node h100-0: .* another model than qwen3-32b"):
        node_model(node, model_shape("qwen3-32b"), 16)


def test_loads_take_what_copies_of_a_layers_block_reach(shape):
    # Of 16 tokens 65,536 bytes a layer, of 32 layers: 1.31258 us a copy at 54 GB/s, 0.5 us each.
    spec = NodeSpec(node_profile("h100-pcie5"), host_bytes=64e9)
    model = node_model(spec, shape, 16)
    assert model.load_block_s == pytest.approx(32 * 1.31258e-6, rel=1e-4)
    assert model.link_rates.load_s(32) == pytest.approx(13e-3 + 64 * 1.31258e-6, rel=1e-4)
    assert load_s(shape, spec.profile, 32) == pytest.approx(model.link_rates.load_s(32))


@pytest.mark.parametrize("name, gpus, model", [
    ("small-silicon", {"GB200-186GB": 1, "H100-SXM5-80GB": 3}, "llama-3.1-8b"),
    ("mixed-silicon", {
        "GB200-186GB": 4, "H200-SXM-141GB": 4, "H100-SXM5-80GB": 4, "A100-SXM4-80GB": 4,
        "L40S-48GB": 4,
    }, "llama-3.1-8b"),
    ("uniform-silicon", {"H100-SXM5-80GB": 16}, "llama-3.1-8b"),
    ("mixture-silicon", {
        "GB200-186GB": 2, "H200-SXM-141GB": 2, "H100-SXM5-80GB": 2, "A100-SXM4-80GB": 2,
    }, "qwen3-30b-a3b"),
])  # fmt: skip
def test_clusters_of_silicon_serve_the_model_of_their_tables(name, gpus, model):
    cluster = cluster_named(name)
    assert kinds(cluster) == gpus and model_served(cluster) == model
    check(cluster, model_shape(model), 16)
    for node in cluster.nodes:
        made = node_model(node, model_shape(model), 16)
        assert made.step == replace(silicon_table(node.profile.silicon).law, fixed_s=2e-3)
    links = {node.profile.gpu: node.profile.h2d_bytes_per_s for node in cluster.nodes}
    assert links["H100-SXM5-80GB"] == 55e9 and links.get("GB200-186GB", 172e9) == 172e9


def test_cluster_without_tables_serves_the_usual_model():
    assert model_served(cluster_named("mixed")) == "llama-3.1-8b"


def test_a_missing_file_and_an_unknown_name_are_refused():
    with pytest.raises(ClusterError, match="cannot read"):
        cluster_named("/nowhere/cluster.yaml")
    with pytest.raises(ClusterError, match="Did you mean 'uniform'"):
        cluster_named("unifrom")


def test_impossible_clusters_are_refused_by_name(shape):
    one = numbered(KINDS["h100"], 1)
    with pytest.raises(ClusterError, match="has no nodes"):
        check(SimulatedCluster("none", ()), shape, 16)
    with pytest.raises(ClusterError, match="node h100-0: the name is there twice"):
        check(SimulatedCluster("twins", (*one, *one)), shape, 16)
    tiny = replace(one[0], profile=replace(one[0].profile, name="tiny", hbm_bytes=10e9))
    with pytest.raises(ClusterError, match="node tiny"):
        check(SimulatedCluster("tiny", (tiny,)), shape, 16)
