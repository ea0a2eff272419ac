"""What the microbenchmark reports of a node, and its picture."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.offload.bench_overhead import draw
from benchmarks.offload.overhead.points import ARMS, Sample, parse_points
from benchmarks.offload.overhead.result import node_result
from kappa.cost import kappa_crit, ttft_s
from kappa.hardware import node_profile
from kappa.shapes import model_shape

SHAPE = model_shape("llama-3.1-8b")
NODE = node_profile("pcie")
POINTS = parse_points("32:4096,192:1024,192:16384,256:8192,512:1024,512:4096")


def request(point, arm, rng):
    cached = point.cached_tokens * (arm != "new")
    loaded, on_device = (cached, 0) if arm == "host" else (0, cached)
    seconds = ttft_s(SHAPE, NODE, loaded, point.new_tokens, on_device)
    seconds *= 1 + 0.01 * rng.standard_normal()
    return Sample(point, arm, seconds, point.new_tokens, loaded, loaded * 512, on_device)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(1)
    return [request(p, arm, rng) for _ in range(8) for p in POINTS for arm in ARMS]


@pytest.fixture(scope="module")
def row(samples):
    # A host hit that loaded nothing and was fast for it: it must not count.
    cheat = replace(samples[2], ttft_s=1e-6, loaded_tokens=0, device_tokens=4096, overruns=1)
    return node_result([*samples, cheat, cheat], SHAPE, NODE)


def test_recovered_stands_beside_configured(row):
    assert row["configured"]["link_bytes_per_s"] == 55e9
    for name in ("link_bytes_per_s", "flops_per_s", "kappa_crit", "hbm_bytes_per_s"):
        found = row["recovered"][name]
        assert abs(found["error"]) < 0.1
        assert found["value"] == pytest.approx(row["configured"][name] * (1 + found["error"]))
    assert row["recovered"]["kappa_crit"]["value"] == pytest.approx(
        kappa_crit(SHAPE, NODE), rel=0.1
    )
    assert "error" not in row["recovered"]["load_fixed_s"]


def test_faulty_requests_are_counted_and_left_out(row, samples):
    assert (row["requests"], row["left_out"]) == (len(samples) + 2, 2)
    assert row["faults"] == {"loaded 0 of 4096 tokens, device 4096 of 0 tokens": 2}
    cell = row["cells"][2]
    assert (cell["arm"], cell["requests"], cell["left_out"]) == ("host", 8, 2)
    assert cell["ttft_median_s"] > 1e-3
    assert row["overrun_share"] == pytest.approx(2 / (len(samples) + 2))


def test_the_paper_is_compared_with_what_was_configured(row):
    paper = row["paper_fit"]
    assert paper["bias"] == pytest.approx(paper["kappa_crit"] / kappa_crit(SHAPE, NODE) - 1)
    assert paper["low"] <= paper["kappa_crit"] <= paper["high"]
    for point in paper["points"]:
        share = point["kappa"] / (point["kappa"] + point["kappa_crit"])
        assert share == pytest.approx(point["overhead"])
    # The errors of single points have either sign: few new tokens and many.
    implied = {p["new_tokens"]: p["kappa_crit"] for p in paper["points"]}
    assert implied[32] > kappa_crit(SHAPE, NODE) > implied[256]


def test_it_is_plain_json(row):
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_an_arm_without_sound_requests_is_named(samples):
    lame = [
        replace(s, loaded_tokens=0, device_tokens=s.point.cached_tokens)
        if s.arm == "host" and s.point == POINTS[1]
        else s
        for s in samples
    ]
    with pytest.raises(ValueError, match="192:1024 has no request in the arm 'host'"):
        node_result(lame, SHAPE, NODE)


def test_the_picture_is_drawn(row, tmp_path):
    path = draw([row, row], tmp_path / "new folder" / "overhead.png")
    assert path.read_bytes().startswith(b"\x89PNG")
