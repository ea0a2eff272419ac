"""The bench of CPU attention: small runs end to end, what is predicted, and what is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.offload.cpu_offload import Share
from benchmarks.offload.goals import judge
from benchmarks.offload.needs import GIB, needs
from benchmarks.offload.offloading import fixed, planner
from benchmarks.offload.policies import Policies
from benchmarks.offload.run import Options, run
from benchmarks.offload.settings import SETTINGS, DecodeCell, OffloadCell
from kappa.plans.cpu_offload import LayerTimes, split_context
from kappa.plans.rates import LineFit
from tests.kappa.plans.test_predict import opt

TIMES = LayerTimes(
    0.2, 0.2, 0.2, 0.2, 1.0, qkv_bytes=12.0, out_bytes=4.0, fc1_bytes=16.0, fc2_bytes=16.0,
    values_bytes=2.0, link_bytes_per_s=16.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return run(["cpu-offload-smallest"], Options(only=("offload",)))


def test_every_share_says_the_same_and_moves_what_it_should(result) -> None:
    rows = {row["policy"]: row for row in result["rows"]}
    assert set(rows) == {"streamed", "mha", "alpha-50", "planned", "link-alone"}
    for name, row in rows.items():
        assert row["system"] == "cpu-offload" and row["cpu_threads"] == 1
        assert row["predicted_s"] > 0 and row["latency_s"] > 0
        assert row["tokens_equal"] == (None if name == "link-alone" else 1.0)
    # Three steps and a look ahead, three layers: two products of 256 by 64 in four bytes.
    ffn = 2 * 256 * 64 * 4
    layers = rows["mha"]["bytes_h2d"] / ffn
    assert layers == 3 * 3
    assert rows["alpha-50"]["bytes_h2d"] == layers * 0.75 * ffn
    assert rows["streamed"]["bytes_h2d"] > rows["mha"]["bytes_h2d"]
    assert rows["planned"]["chosen"] and "columns" in rows["planned"]["note"]
    assert rows["mha"]["end_to_end_tokens_per_s"] < rows["mha"]["tokens_per_s"] * 4 / 3


def test_shares_by_name() -> None:
    assert fixed("mha-o", 96)(1) == Share("mha-o")
    assert fixed("alpha-25", 96)(1) == Share("mha", 24)
    for name in ("alpha-101", "alpha", "beta-1", "gpu"):
        with pytest.raises(ValueError, match="no share named"):
            fixed(name, 96)


def test_the_planned_share_follows_the_length() -> None:
    """While attention fits beside the FFN weights the CPU takes columns; then it gives up."""
    plan = planner(lambda length: replace(TIMES, scores_s=0.2 * length, values_s=0.2 * length), 640)
    shares = [plan(length) for length in (1, 3, 5, 30)]
    assert shares[0].mode == "mha" and shares[0].columns > shares[1].columns > 0
    assert shares[0].columns % 64 == 0
    assert shares[-1].mode == "mha-av-o"


def test_a_share_of_the_context_is_predicted_and_chosen_by_its_step() -> None:
    rates = opt()
    rates = replace(rates, attend=LineFit("CPU attention", 0.5 * rates.load_token_s))
    names = ("kv-only", "cpu-50", "cpu-100", "cpu-paper", "cpu-ahead")
    cell = DecodeCell(8, 1024, 17, names)
    policies = Policies(cell, rates, 16, 0.0)
    seconds = {name: policies.predicted_s(policies.way(name)) for name in names}
    assert seconds["cpu-ahead"] == min(seconds.values())
    assert policies.choice() == "cpu-ahead"
    way = policies.way("cpu-ahead")
    assert way.cpu is not None and way.cpu(1024) == split_context(rates, 8, 1024, 16).cpu_tokens
    half = policies.way("cpu-50").cpu
    assert half is not None and half(1024) == 512
    assert policies.key(policies.way("cpu-50")) != policies.key(policies.way("kv-only"))
    slow = Policies(cell, replace(rates, attend=LineFit("a", 4 * rates.load_token_s)), 16, 0.0)
    assert slow.choice() == "kv-only"
    with pytest.raises(ValueError, match="cpu-gpu"):
        policies.way("cpu-gpu")


def test_without_measured_attention_its_ways_are_left_out_by_name(monkeypatch) -> None:
    monkeypatch.setattr("engine.profiling.attention", lambda *args: {})
    found = run(["cpu-offload-smallest"], Options(only=("row",)))
    assert {row["policy"] for row in found["rows"]} == {"kv-only", "link-alone"}
    assert any(
        "cpu-50" in one["what"] and "not measured" in one["why"] for one in found["left_out"]
    )


def test_settings_for_a_gpu_fit_the_machine_they_are_for() -> None:
    for name in ("cpu-offload-13b", "cpu-kv-1", "cpu-kv-15"):
        for group in SETTINGS[name].groups:
            wanted = needs(SETTINGS[name], group)
            assert wanted.device_bytes < 139 * GIB and wanted.host_bytes < 120 * GIB
    cells = [c for g in SETTINGS["cpu-offload-13b"].groups for c in g.cells]
    assert [c.batch for c in cells if isinstance(c, OffloadCell)] == [1, 10, 20, 30]


@pytest.mark.parametrize(
    ("batch", "gain", "met"), [(1, 1.7, True), (1, 1.5, False), (30, 0.97, False)]
)
def test_the_papers_table_is_judged_in_its_setting(batch, gain, met) -> None:
    row = {
        "setting": "cpu-offload-13b", "model": "opt-13b", "weights": "streamed", "batch": batch,
        "cell": f"offload-{batch}x512/32", "policy": "planned", "chosen": True, "speedup": gain,
        "end_to_end_speedup": gain, "note": "", "predicted_error": None, "alone_gbps": 0,
    }  # fmt: skip
    base = {**row, "policy": "streamed", "chosen": False, "speedup": 1.0}
    goals = [goal for goal in judge([base, row], "cuda") if "(002)" in goal["goal"]]
    assert [goal["met"] for goal in goals] == [met]
