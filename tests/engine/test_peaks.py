"""The profiler measures real copies and products; only their shape and sense are checked."""

import time

import pytest

from kappa_engine.peaks import machine_peaks

REQUEST = {
    "sizes_bytes": [1 << 12, 1 << 16],
    "hidden": 32,
    "intermediate": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def measured():
    return machine_peaks(REQUEST)


def test_every_size_is_measured_in_every_way(measured):
    for way in ("h2d", "d2h"):
        assert [row["bytes"] for row in measured[way]] == REQUEST["sizes_bytes"]
    assert [row["tokens"] for row in measured["gemm"]] == [16, 128, 512]
    assert measured["threads"] >= 1 and measured["device"]
    assert 0 <= time.time() - measured["at_s"] < 600


def test_rates_are_positive_and_links_are_of_the_largest_size(measured):
    rows = [*measured["h2d"], *measured["d2h"]]
    assert all(row["bytes_per_s"] > 0 and row["spread"] >= 0 for row in rows)
    for way in ("h2d", "d2h"):
        largest = max(measured[way], key=lambda row: row["bytes"])
        assert measured[f"{way}_bytes_per_s"] == largest["bytes_per_s"]
    assert measured["flops_per_s"] == max(row["flops_per_s"] for row in measured["gemm"])
    assert measured["hbm_bytes_per_s"] > 0
    # What an engine reaches is put in their place; the peaks stay.
    assert measured["peaks"] == {name: measured[name] for name in measured["peaks"]}
    assert len(measured["peaks"]) == 4
