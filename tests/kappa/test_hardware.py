"""The catalogue is dense, one-way and sourced; profiles load from files with clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kappa.cost import kappa_eff
from kappa.hardware import CATALOGUE, DEMO_NODES, NODE_RATES, REACHED, NodeProfile, node_profile
from kappa.shapes import model_shape


def test_catalogue_has_the_nodes_we_promise() -> None:
    assert set(CATALOGUE) == {
        "a100-pcie4", "h100-pcie5", "h200-pcie5", "b200-pcie5", "b300-pcie5", "gh200-c2c",
        "gb200-c2c", "gb300-c2c", "l40s-pcie4", "l4-pcie4", "rtx-pro-6000-pcie5", "mi300x-pcie5",
        "unified-hbm", *DEMO_NODES,
    }  # fmt: skip


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_node_is_sourced_and_plausible(name: str) -> None:
    node = CATALOGUE[name]
    assert node.name == name
    assert node.reference
    assert node.source == "catalogue"
    assert node.h2d_bytes_per_s <= node.hbm_bytes_per_s
    # Dense FP16, not the sparse peaks of paper 001's Table 2.
    assert node.flops_per_s <= 2500e12
    assert node.hbm_bytes >= 24e9
    # What steps reach is below the peaks, where it is known.
    assert all(getattr(node, reached) < node.flops_per_s for reached in REACHED[:2])
    assert all(getattr(node, reached) < node.hbm_bytes_per_s for reached in REACHED[2:])
    assert (node.gemm_flops_per_s > 0) == ("docs/silicon.md" in node.reference)
    if node.link_bytes_per_s:
        assert max(node.h2d_bytes_per_s, node.d2h_bytes_per_s) < node.link_bytes_per_s
        assert 0 < node.copy_fixed_s < node.load_fixed_s


def test_gpus_as_one_add_rates_and_keep_their_own_links() -> None:
    one = node_profile("h100-pcie5")
    four = one.times(2).times(2)
    assert four.gpus == 4 and four.peer_bytes_per_s == one.peer_bytes_per_s
    assert all(getattr(four, name) == 4 * getattr(one, name) for name in NODE_RATES)
    assert [one.gemm_speedup(size) for size in (2.0, 1.0, 0.5)] == [1.0, 2.0, 1.0]
    assert node_profile("gb200-c2c").gemm_speedup(0.5) == 4.0


def test_demo_nodes_differ_in_the_link_alone() -> None:
    pcie, c2c = (node_profile(name) for name in DEMO_NODES)
    assert (pcie.flops_per_s, pcie.hbm_bytes_per_s) == (c2c.flops_per_s, c2c.hbm_bytes_per_s)
    shape = model_shape("llama-3.1-8b")
    # Of a question of 128 tokens, for which the weights are read.
    assert kappa_eff(shape, pcie, 128) == pytest.approx(15.8, abs=0.1)
    assert kappa_eff(shape, c2c, 128) == pytest.approx(193, abs=1)


def test_c2c_counts_one_direction() -> None:
    assert CATALOGUE["gh200-c2c"].peak_link_bytes_per_s == 450e9
    assert CATALOGUE["c2c"].peak_link_bytes_per_s == 375e9


def test_the_gpus_of_one_grace_have_half_its_link_each() -> None:
    for name in ("gb200-c2c", "gb300-c2c"):
        node = CATALOGUE[name]
        assert (node.link_group, node.peak_link_bytes_per_s) == ("grace", 225e9)
        # What both reach together is below the 450 GB/s of their CPU.
        assert 2 * node.h2d_bytes_per_s < 450e9 and 2 * node.d2h_bytes_per_s < 450e9


def test_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CATALOGUE["h200-pcie5"].to_dict()), encoding="utf-8")
    assert node_profile(path) == CATALOGUE["h200-pcie5"]


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'h100-pcie5'\?.*a100-pcie4"):
        node_profile("h100-pcie")


def test_files_that_hold_no_profile_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json: .*lacks \['gpu'"):
        node_profile(path)
    with pytest.raises(ValueError, match=r"absent\.json: cannot read the node profile"):
        node_profile(tmp_path / "absent.json")


NODE: dict[str, Any] = {
    "name": "n", "gpu": "g", "link_name": "l", "h2d_bytes_per_s": 5e10, "flops_per_s": 4e14,
    "hbm_bytes_per_s": 3e12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("h2d_bytes_per_s", 0.0),
        ("h2d_bytes_per_s", "fast"),
        ("flops_per_s", float("inf")),
        ("hbm_bytes_per_s", True),
        ("load_fixed_s", -1e-3),
        ("source", "guess"),
        ("dilation", 0.5),
        ("dilation", 20.0),
    ],
)
def test_profile_names_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"NodeProfile\.{field} is .+: \w+"):
        NodeProfile(**{**NODE, field: value})


def test_profile_survives_json() -> None:
    profile = NodeProfile(**NODE, link_group="numa0", source="paced", dilation=4.0)
    assert NodeProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_profile_names_unknown_and_missing_keys() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['pcie_gen'\]"):
        NodeProfile.from_dict({**NODE, "pcie_gen": 5})
    with pytest.raises(ValueError, match=r"lacks \['gpu'\]"):
        NodeProfile.from_dict({k: v for k, v in NODE.items() if k != "gpu"})
    assert NodeProfile.from_dict({**NODE, "flops_per_s": 400}).flops_per_s == 400


def test_store_rate_defaults_to_the_load_rate() -> None:
    assert NodeProfile(**NODE).store_bytes_per_s == 5e10
    assert NodeProfile(**NODE, d2h_bytes_per_s=4e10).store_bytes_per_s == 4e10
