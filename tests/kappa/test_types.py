"""The data types refuse what no model or node has, and say how to put it right."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kappa.cost import TokenCounts
from kappa.hardware import NodeProfile
from kappa.model import ModelShape

SHAPE: dict[str, Any] = {
    "name": "tiny", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "params_active": 1e6, "params_total": 1e6, "attention": "gqa",
}  # fmt: skip
NODE: dict[str, Any] = {
    "name": "n", "gpu": "g", "link_name": "l", "h2d_bytes_per_s": 5e10, "flops_per_s": 4e14,
    "hbm_bytes_per_s": 3e12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("head_dim", -1),
        ("params_active", float("nan")),
        ("params_active", 2e6),
        ("kv_heads", 8),
        ("attention", "linear"),
        ("attention", "mla"),
        ("experts_active", 2),
        ("experts", 8),
        ("kv_dtype_bytes", 0.0),
    ],
)
def test_shape_names_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"ModelShape\.\w+ is .+: \w+"):
        ModelShape(**{**SHAPE, field: value})


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


def test_only_a_paced_node_dilates() -> None:
    assert NodeProfile(**NODE, source="paced", dilation=20.0).dilation == 20.0


def test_profile_survives_json() -> None:
    profile = NodeProfile(**NODE, link_group="numa0", source="paced", dilation=4.0)
    assert NodeProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_profile_takes_integers_from_json() -> None:
    assert NodeProfile.from_dict({**NODE, "flops_per_s": 400}).flops_per_s == 400


def test_profile_names_unknown_and_missing_keys() -> None:
    with pytest.raises(ValueError, match="'pcie_gen'"):
        NodeProfile.from_dict({**NODE, "pcie_gen": 5})
    with pytest.raises(ValueError, match=r"lacks \['gpu'\]"):
        NodeProfile.from_dict({k: v for k, v in NODE.items() if k != "gpu"})


def test_store_rate_defaults_to_the_load_rate() -> None:
    assert NodeProfile(**NODE).store_bytes_per_s == 5e10
    assert NodeProfile(**NODE, d2h_bytes_per_s=4e10).store_bytes_per_s == 4e10


def test_ratio_counts_neither_device_tokens_nor_less_than_one_new() -> None:
    assert TokenCounts(1000, 800, 8).ratio == 100
    assert TokenCounts(0, 800, 0).ratio == 800
    assert TokenCounts(1000, 800, 8).total_tokens == 1808


def test_counts_refuse_negatives() -> None:
    with pytest.raises(ValueError, match=r"TokenCounts\.cached_tokens"):
        TokenCounts(0, -1, 1)


def test_types_are_frozen_and_slotted() -> None:
    counts = TokenCounts(0, 1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        counts.new_tokens = 2  # type: ignore[misc]  # the assignment is the test
    assert not hasattr(counts, "__dict__")
