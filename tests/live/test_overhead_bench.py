"""The offload microbenchmark on a real paced engine: the arms do what they say, by its counters."""

import pytest

pytestmark = [pytest.mark.live, pytest.mark.vllm]


@pytest.mark.usefixtures("fresh_environment")
async def test_every_arm_moves_and_computes_what_it_asked_for():
    from benchmarks.offload.overhead.points import Limits, check_points, parse_points, rounds
    from benchmarks.offload.overhead.vllm_runs import TINY_TOKEN_BYTES, OverheadNode
    from kappa.hardware import node_profile
    from kappa.shapes import model_shape

    # As little room as is accepted: what is asked once must not push the prefixes out of the host
    # tier, nor be found again.
    limits = Limits(8192, 512, 1024, 8192, 18_944)
    points = parse_points("1:512,100:4096,600:1024,512:7168")
    check_points(points, limits)
    heard = []
    node = OverheadNode(node_profile("pcie"), model_shape("llama-3.1-8b"), 2.0, limits, seed=3)
    try:
        await node.fill(points)
        await rounds([node], points, 6, 0, 0, lambda _, __, sample: heard.append(sample))
    finally:
        node.close()
    assert len(heard) == 6 * 4 * 3
    assert {sample.fault for sample in heard} == {""}
    for sample in heard:
        assert sample.loaded_bytes == sample.loaded_tokens * TINY_TOKEN_BYTES
    by_arm = {
        arm: min(s.ttft_s for s in heard if (s.arm, s.point) == (arm, points[-1]))
        for arm in ("new", "device", "host")
    }
    # Paced: no load of 7,168 tokens is faster than the node's link.
    assert by_arm["host"] >= 7168 * 131_072 / 55e9
