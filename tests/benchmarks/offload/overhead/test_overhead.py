"""The microbenchmark's points and fits, on requests made by the law with known constants."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.offload.overhead.law_fit import ModelFacts, fit_law, one_arm_rates
from benchmarks.offload.overhead.points import (
    ARMS,
    Limits,
    Point,
    Sample,
    check_points,
    parse_points,
)
from benchmarks.offload.overhead.result import fit_overhead
from kappa.cost import kappa_crit, ttft_s
from kappa.hardware import node_profile
from kappa.shapes import model_shape

SHAPE = model_shape("llama-3.1-8b")
FACTS = ModelFacts.of(SHAPE)
LIMITS = Limits(32768, 512, 4096, 65536, 100_000)
FLOP_BOUND = parse_points("192:1024,192:16384,256:8192,512:1024,512:4096,768:8192")
WITH_FLOOR = (*parse_points("16:2048,32:4096,64:16384"), *FLOP_BOUND)


def fitted(samples, seed=0):
    return fit_law(samples, FACTS, seed, resamples=60)


def measured(
    node, points=WITH_FLOOR, requests=40, noise=0.02, fixed_s=1.5e-3, prompt_token_s=1e-7,
    late=0.03, seed=0,
):  # fmt: skip
    """Requests of an engine that obeys `kappa.model`, with its own costs and a few late ones."""
    rng = np.random.default_rng(seed)
    samples = []
    for point in points:
        for arm in ARMS:
            cached, new = point.cached_tokens * (arm != "new"), point.new_tokens
            where = {"device_tokens": 0.0, "cached_tokens": float(cached)}
            if arm == "device":
                where = {"device_tokens": float(cached), "cached_tokens": 0.0}
            idle_s = ttft_s(SHAPE, node, new_tokens=new, **where)
            for _ in range(requests):
                seconds = idle_s * (1 + noise * rng.standard_normal())
                seconds += fixed_s + prompt_token_s * cached
                seconds += rng.exponential(20e-3) if rng.random() < late else 0.0
                loaded = cached if arm == "host" else 0
                on_device = cached if arm == "device" else 0
                samples.append(Sample(point, arm, seconds, new, loaded, loaded * 512, on_device))
    return samples


@pytest.mark.parametrize("name", ["pcie", "c2c", "h100-pcie5"])
@pytest.mark.parametrize("points", [FLOP_BOUND, WITH_FLOOR], ids=["flop-bound", "with floor"])
def test_known_constants_are_recovered(name, points):
    node = node_profile(name)
    fit = fitted(measured(node, points))
    true = {
        "link_bytes_per_s": node.h2d_bytes_per_s, "flops_per_s": node.flops_per_s,
        "kappa_crit": kappa_crit(SHAPE, node),
    }  # fmt: skip
    if points is WITH_FLOOR:
        true["hbm_bytes_per_s"] = node.hbm_bytes_per_s
    for name, value in true.items():
        assert fit.constants[name].value == pytest.approx(value, rel=0.08), name
        assert fit.constants[name].low < fit.constants[name].value < fit.constants[name].high
    assert fit.r_squared > 0.7 and fit.cells_r_squared > 0.99


def test_the_floor_is_found_where_it_is_and_only_there():
    node = node_profile("pcie")
    assert fitted(measured(node, FLOP_BOUND)).read_bound == ()
    assert fitted(measured(node)).read_bound == ("16:2048", "32:4096", "64:16384")


def test_exact_times_give_exact_constants():
    """Attention on its own rate, fixed costs on load and request: each goes to its own term."""
    node = replace(
        node_profile("pcie"), load_fixed_s=2e-3, step_fixed_s=1e-3, attention_flops_per_s=250e12
    )
    fit = fitted(measured(node, noise=0.0, late=0.0, requests=2))
    true = {
        "link_bytes_per_s": 55e9, "flops_per_s": 400e12, "attention_flops_per_s": 250e12,
        "hbm_bytes_per_s": 3.35e12, "load_fixed_s": 2e-3, "request_fixed_s": 2.5e-3,
        "prompt_token_s": 1e-7,
    }  # fmt: skip
    for name, value in true.items():
        assert fit.constants[name].value == pytest.approx(value, rel=1e-6), name


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    node = node_profile("pcie")
    held = 0
    for seed in range(10):
        found = fitted(
            measured(node, FLOP_BOUND, requests=10, late=0.0, seed=seed), seed
        ).constants["link_bytes_per_s"]
        held += found.low <= node.h2d_bytes_per_s <= found.high
    assert held >= 7


def test_same_seed_same_fit():
    samples = measured(node_profile("c2c"), FLOP_BOUND, requests=5)
    assert fitted(samples, 3).constants == fitted(samples, 3).constants


def test_late_requests_do_not_move_the_fit():
    node = node_profile("pcie")
    found = fitted(measured(node, late=0.2)).constants["link_bytes_per_s"].value
    assert found == pytest.approx(node.h2d_bytes_per_s, rel=0.1)


def test_one_arm_alone_takes_the_handling_of_prompts_for_link_time():
    node = node_profile("c2c")
    samples = measured(node, prompt_token_s=1e-7, late=0.0, noise=0.0, requests=2)
    fit = fitted(samples)
    link, flops = one_arm_rates(samples, fit)
    true_s = FACTS.kv_token_bytes / node.h2d_bytes_per_s
    assert link == pytest.approx(FACTS.kv_token_bytes / (true_s + 1e-7), rel=1e-6)
    assert flops == pytest.approx(node.flops_per_s, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "points", "sign"),
    [("c2c", FLOP_BOUND, -1), ("pcie", parse_points("8:512,16:2048,32:4096,64:4096"), +1)],
    ids=["attention counted as link", "weights read counted as compute"],
)
def test_the_papers_method_is_biased_even_without_noise(name, points, sign):
    node = node_profile(name)
    samples = measured(node, points, requests=1, noise=0.0, late=0.0, fixed_s=0, prompt_token_s=0)
    bias = fit_overhead(samples).kappa_crit / kappa_crit(SHAPE, node) - 1
    assert bias * sign > 0.25


def test_the_papers_method_holds_where_its_assumptions_do():
    """No attention, no floor, no fixed cost: Eq. 8 is then exact."""
    node = replace(node_profile("pcie"), attention_flops_per_s=1e30, hbm_bytes_per_s=1e30)
    samples = measured(
        node, FLOP_BOUND, requests=1, noise=0.0, late=0.0, fixed_s=0.0, prompt_token_s=0.0
    )
    fit = fit_overhead(samples)
    assert fit.kappa_crit == pytest.approx(kappa_crit(SHAPE, node), rel=1e-3)
    assert fit.r_squared == pytest.approx(1.0)


def test_a_device_baseline_takes_attention_out():
    node = node_profile("c2c")
    samples = measured(node, FLOP_BOUND, requests=1, noise=0.0, late=0.0, fixed_s=0.0)
    true = kappa_crit(SHAPE, node)
    against_new = fit_overhead(samples).kappa_crit
    against_device = fit_overhead(samples, "device").kappa_crit
    assert abs(against_device - true) < abs(against_new - true)


def test_a_request_is_judged_by_what_it_moved_and_computed():
    host = Sample(Point(16, 512), "host", 0.1, 16, 512, 512, 0)
    assert host.fault == ""
    assert "loaded 3 of 512" in replace(host, loaded_tokens=3, device_tokens=509).fault
    assert "computed 528 of 16" in replace(host, computed_tokens=528, loaded_tokens=0).fault
    assert replace(host, arm="device").fault == "loaded 512 of 0 tokens, device 0 of 512 tokens"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("256", "NEW:CACHED"),
        ("256:x", "256:x"),
        ("0:512", "at least 1 new token"),
        ("-4:512", "at least 1 new token"),
        ("16:100", "multiple of 512"),
        ("16:0", "at least one block"),
        ("5000:512", "4096 new tokens"),
        ("64:32768", "context limit is 32768"),
        ("64:512,128:512,256:1024", "cannot tell the terms"),
        ("64:512,128:1024,256:2048,512:4096", "cannot tell the terms"),
        ("1:30720,2:30720,3:30720,4:30720", "host tier holds 100000"),
        ("4096:1024,2048:8192,4096:8192,4000:512", "17920 of prefixes and 82944 of new tokens"),
    ],
)
def test_bad_points_are_refused_by_name(text, words):
    with pytest.raises(ValueError, match=words):
        check_points(parse_points(text), LIMITS)


def test_good_points_pass():
    check_points(FLOP_BOUND, LIMITS)


def test_a_device_that_is_too_small_is_named():
    with pytest.raises(ValueError, match="device limit is 2048"):
        check_points(FLOP_BOUND, replace(LIMITS, device_tokens=2048))


def test_experts_and_latent_attention_are_refused():
    with pytest.raises(ValueError, match="dense models"):
        ModelFacts.of(model_shape("qwen3-30b-a3b"))
    with pytest.raises(ValueError, match="dense models"):
        ModelFacts.of(model_shape("deepseek-v3"))
