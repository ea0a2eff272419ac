"""The profiler measures real copies and products; only their shape and sense are checked."""

import pytest

from workers.profiler import measure

REQUEST = {
    "sizes_bytes": [1 << 12, 1 << 16],
    "block_bytes": 1 << 10,
    "hidden": 32,
    "intermediate": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def measured():
    return measure(REQUEST)


def test_every_size_is_measured_in_every_way(measured):
    for way in ("h2d", "d2h", "scatter"):
        assert [row["bytes"] for row in measured[way]] == REQUEST["sizes_bytes"]
    assert [row["tokens"] for row in measured["gemm"]] == [16, 128, 512]
    assert measured["threads"] >= 1 and measured["device"]


def test_rates_are_positive_and_the_largest_size_speaks_for_the_link(measured):
    rows = [*measured["h2d"], *measured["d2h"], *measured["scatter"]]
    assert all(row["bytes_per_s"] > 0 and row["spread"] >= 0 for row in rows)
    for way in ("h2d", "d2h"):
        largest = max(measured[way], key=lambda row: row["bytes"])
        assert measured[f"{way}_bytes_per_s"] == largest["bytes_per_s"]
    assert measured["flops_per_s"] == max(row["flops_per_s"] for row in measured["gemm"])
    assert measured["hbm_bytes_per_s"] > 0


def test_sizes_below_a_block_have_no_scattered_rate():
    rows = measure(REQUEST | {"block_bytes": 1 << 14})["scatter"]
    assert [row["bytes"] for row in rows] == [1 << 16]


@pytest.mark.parametrize("sizes", [[], [0], [1 << 12, -1]])
def test_sizes_that_cannot_be_moved_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes_bytes"):
        measure(REQUEST | {"sizes_bytes": sizes})
