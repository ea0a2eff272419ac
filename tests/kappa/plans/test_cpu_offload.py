"""Paper 002: what the CPU computes while weights cross, against every share, and its Table 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
from numpy.random import Generator, default_rng

from kappa.plans.cpu_offload import Division, LayerTimes, busy_s, divide, fc1_share, layer_times
from kappa.plans.planners import Cached, Planning, host_planners
from kappa.plans.rates import LineFit, PlanRates
from tests.kappa.plans.profiles import log_uniform, random_rates

# OPT-30B: 48 layers of width 7168, two bytes a weight; FC1 is a third of a layer.
_LAYER_BYTES = 12 * 7168**2 * 2
_LAYERS, _STEPS = 48, 32
# Batch, and of FlexGen (0-100), FlexGen (20-80) and CPU offload: tokens/s, prefill and decoding s.
TABLE_1 = [
    (1, (0.204, 5.1, 151.6), (0.213, 4.8, 145.1), (0.328, 5.3, 92.1)),
    (10, (1.711, 8.2, 178.8), (1.825, 8.1, 167.2), (1.928, 12.3, 153.6)),
    (20, (2.931, 12.4, 205.9), (3.106, 12.4, 193.6), (2.818, 19.7, 207.4)),
    (30, (3.827, 18.5, 232.3), (4.011, 18.5, 220.8), (3.761, 25.2, 230.1)),
]


def random_times(rng: Generator) -> LayerTimes:
    load = [log_uniform(rng, 1e-4, 1e-2) for _ in range(4)]
    cpu = [one * log_uniform(rng, 0.05, 5.0) for one in load[:3]]
    return LayerTimes(log_uniform(rng, 1e-5, 1e-1), *cpu, *load, log_uniform(rng, 1e-6, 1e-2))


def test_share_of_fc1_is_the_best_of_every_share() -> None:
    inside = 0
    rng = default_rng(2)
    for _ in range(400):
        times = random_times(rng)
        share = fc1_share(times)
        seconds = [max(busy_s(times, Division(("qkv", "out"), a / 200))) for a in range(201)]
        assert max(busy_s(times, Division(("qkv", "out"), share))) <= min(seconds) * (1 + 1e-12)
        inside += 0 < share < 1
    assert inside > 60


def test_small_batches_divide_fc1_and_large_ones_attention() -> None:
    times = LayerTimes(1.0, 3.0, 1.0, 4.0, 6.0, 2.0, 8.0, 8.0)
    found = divide(times)
    # Of 16 s of the MLP's weights attention hides 5; each column's load is 8, its product 4.
    assert found == Division(("qkv", "out"), 11 / 12)
    assert busy_s(times, found) == pytest.approx((16 - 8 * 11 / 12, 5 + 4 * 11 / 12))
    large = replace(times, attend_s=16.0)
    assert divide(large) == Division(("qkv",)) and busy_s(large, divide(large)) == (18.0, 19.0)
    assert divide(replace(times, attend_s=40.0)) == Division(())
    # The CPU is as fast as the device, and a hundredth sooner with less to do between them.
    equal = LayerTimes(96.0, 0.9, 0.9, 0.9, 6.0, 2.0, 8.0, 8.0, device_s=6.0)
    assert max(busy_s(equal, divide(equal))) == 102.0 and divide(equal) == Division(())
    assert max(busy_s(equal, Division(("qkv", "out"), 1.0))) == pytest.approx(100.7)


def test_device_multiplies_by_the_weights_that_cross() -> None:
    # A tenth of what these weights take to cross: 24 s.
    times = LayerTimes(1.0, 3.0, 1.0, 4.0, 6.0, 2.0, 8.0, 8.0, device_s=2.4)
    assert busy_s(times, Division(())) == pytest.approx((24.0, 1.0 + 2.4))
    assert busy_s(replace(times, other_s=0.5), Division(())) == pytest.approx((24.0, 3.9))
    assert busy_s(times, Division(("qkv", "out"))) == pytest.approx((16.0, 5.0 + 1.6))
    # A whole FC1 takes the CPU 4 s and spares the device 0.8.
    assert fc1_share(times) == pytest.approx((16.0 - 6.6) / (8.0 + 4.0 - 0.8))
    assert fc1_share(replace(times, fc1_s=0.7)) == 1.0, "the device would be slower"


def test_table_1_is_its_own_quotient() -> None:
    for batch, *systems in TABLE_1:
        for tokens_per_s, prefill_s, decode_s in systems:
            assert batch * _STEPS / (prefill_s + decode_s) == pytest.approx(tokens_per_s, abs=1e-3)


def test_table_1_gives_back_its_gain_by_the_rates_it_implies() -> None:
    """FlexGen's decoding at batch 1 is the weights over the link: 12.5 GB/s. With 18 % less beside
    the CPU, and weights that the CPU reads at 20.7 GB/s in float32, half of FC1 is its share."""
    link = _LAYERS * _LAYER_BYTES * _STEPS / 151.6
    assert link == pytest.approx(12.5e9, rel=0.01)
    load = [size * _LAYER_BYTES / 12 / (0.82 * link) for size in (3, 1, 4, 4)]
    cpu = [2 * size * _LAYER_BYTES / 12 / 20.7e9 for size in (3, 1, 4)]
    times = LayerTimes(0.0, *cpu, *load)
    assert fc1_share(times) == pytest.approx(0.51, abs=0.01)
    decode_s = _STEPS * _LAYERS * max(busy_s(times, divide(times)))
    assert decode_s == pytest.approx(92.1, rel=0.02)
    assert _STEPS / (5.3 + decode_s) / 0.204 == pytest.approx(0.328 / 0.204, rel=0.02)


def measured(rng: Generator) -> PlanRates:
    rates = random_rates(rng)
    return replace(
        rates, weights_s=1.0, attend=rates.load.scaled(0.5),
        multiply=LineFit("FC1 on the CPU", 0.01, 0.2), matrix_bytes=(3.0, 1.0, 4.0, 4.0),
    )  # fmt: skip


def test_times_of_a_layer_are_the_rates_by_bytes() -> None:
    rates = measured(default_rng(3))
    times = layer_times(rates, 10, 100)
    assert rates.layers * times.fc1_load_s == pytest.approx(4 / 12)
    assert rates.layers * times.fc1_s == pytest.approx(0.3)
    device_s = rates.layers * (times.device_s + times.other_s)
    assert device_s == pytest.approx(max(rates.decode_gpu_s(10, 0), rates.step.fixed_s))
    assert times.qkv_s == pytest.approx(3 * times.out_s) == pytest.approx(0.75 * times.fc1_s)
    # Each of ten contexts has the line's fixed cost: 10 (0.02 + 100 · 0.001) s.
    rates = replace(rates, attend=LineFit("CPU attention", 0.001, 0.02))
    assert rates.layers * layer_times(rates, 10, 100).attend_s == pytest.approx(1.2)
    with pytest.raises(ValueError, match="products of the CPU are not measured"):
        layer_times(replace(rates, multiply=None), 10, 100)


def test_planner_host_cpu_predicts_its_step() -> None:
    rates = measured(default_rng(3))
    planning = Planning(16, rates, cpu=True, host=host_planners("host-cpu", 0.0))
    times = layer_times(rates, 1, 160)
    assert planning.division(1, 160) == divide(times)
    plan = planning.named("host-cpu")(Cached(160, 8))
    assert plan.step_s == pytest.approx(rates.layers * max(busy_s(times, divide(times))))
    assert Planning(16).division(1, 160) == Division(("qkv", "out"))
