"""How much of a hit vLLM loads: by the router's own planner, at block ends, as rates say."""

from dataclasses import replace

import pytest

from kappa.hardware import node_profile
from kappa.model import kv_bytes_per_token
from kappa.plans.planners import Cached, Planning
from kappa.plans.rates import rates_from_law, rates_from_measured
from kappa.shapes import model_shape
from workers.vllm.tail_recompute import TailOptions, TailRecompute, tail_rates

SHAPE = model_shape("llama-3.1-8b")
BLOCK = 32


def node(critical):
    """A node that loads `critical` tokens while it computes one."""
    profile = node_profile("pcie")
    token_s = 2.0 * SHAPE.params_active / profile.flops_per_s
    return replace(profile, h2d_bytes_per_s=kv_bytes_per_token(SHAPE) * critical / token_s)


def tail(critical, planner="tail"):
    return TailRecompute(TailOptions(planner, tail_rates(SHAPE, node(critical))), BLOCK)


def test_a_fast_link_loads_a_long_prefix_whole_when_the_gpu_is_busy_anyway():
    # 1,024 new tokens: far beyond what reading the weights hides.
    assert tail(10.0).loaded_tokens(0, 4096, 1024) == 4096


def test_what_reading_the_weights_hides_is_computed_rather_than_loaded():
    rates = rates_from_law(SHAPE, node(1.0), overlap=0.0)
    free_tokens = rates.step.weights_s / rates.step.token_s
    loaded = tail(1.0).loaded_tokens(0, 512, 16)
    computed = 512 - loaded
    assert 0 < computed <= free_tokens + BLOCK
    assert computed > free_tokens / 2 - BLOCK


def test_what_gains_less_than_prediction_errs_by_is_not_done():
    assert tail(1.0).loaded_tokens(0, 8192, 16) == 8192


def test_a_slow_link_loads_nothing():
    assert tail(0.2).loaded_tokens(0, 2048, 64) == 0


@pytest.mark.parametrize("critical", [0.2, 0.5, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("device", [0, 320])
@pytest.mark.parametrize("new", [1, 33, 500])
def test_answers_are_whole_blocks_of_the_hit_and_never_predicted_later(critical, device, new):
    rates = rates_from_law(SHAPE, node(critical), overlap=0.0)
    planning = Planning(BLOCK, rates, activations=False)
    for hit in (BLOCK, 5 * BLOCK, 100 * BLOCK):
        loaded = tail(critical).loaded_tokens(device, hit, new)
        assert loaded % BLOCK == 0 and 0 <= loaded <= hit
        chosen = planning.named("tail")(Cached(hit, new, device))
        everything = planning.named("kv")(Cached(hit, new, device))
        assert chosen.crossing_tokens == loaded
        assert chosen.ttft_s <= everything.ttft_s


def test_without_rates_and_for_those_who_ask_so_all_is_loaded():
    assert TailRecompute(TailOptions("tail"), BLOCK).loaded_tokens(0, 640, 5) == 640
    assert tail(0.2, "kv").loaded_tokens(0, 640, 5) == 640
    assert tail(0.2).loaded_tokens(0, 640, 5, "kv") == 640
    assert tail(0.2).loaded_tokens(0, 640, 5, "tail") == 0
    assert TailRecompute.from_config({}, BLOCK).loaded_tokens(0, 640, 5) == 640


def test_an_experiment_may_say_how_much_to_load():
    asked = TailRecompute(TailOptions("kv"), BLOCK)
    assert asked.loaded_tokens(0, 640, 5, "load=320") == 320
    assert asked.loaded_tokens(0, 640, 5, "load=339") == 320  # at a block's end
    assert asked.loaded_tokens(0, 640, 5, "load=0") == 0
    assert asked.loaded_tokens(0, 640, 5, "load=9999") == 640
    assert asked.loaded_tokens(0, 640, 5, "load=-1") == asked.loaded_tokens(0, 640, 5, "?") == 640


def test_the_router_reads_the_rates_as_the_engine_does():
    given = tail_rates(SHAPE, node(1.0))
    read = rates_from_measured(given)
    assert read.overlap == 0.0  # vLLM loads first and computes then
    made = rates_from_law(SHAPE, node(1.0), overlap=0.0)
    for cached, new in ((4096, 16), (1024, 300), (320, 1)):
        asked = Cached(cached, new)
        one, other = (Planning(BLOCK, r).named("tail")(asked) for r in (read, made))
        assert one.crossing_tokens == other.crossing_tokens
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=0.02)


def test_what_no_engine_of_vllm_has_is_refused_by_name():
    for given, reason in (
        ({"planner": "kvpr"}, r"kappa_plan: Invalid enum value 'kvpr' - at `\$.planner`"),
        ({"speed": 1}, "kappa_plan: .*unknown field `speed`"),
        ({"rates": {"format": "other"}}, "profile anew"),
    ):
        with pytest.raises(ValueError, match=reason):
            TailRecompute.from_config({"kappa_plan": given}, BLOCK)


def test_answers_that_are_forgotten_come_back_the_same():
    asked = tail(1.0)
    first = [asked.loaded_tokens(0, BLOCK * (i % 50 + 1), i) for i in range(1, 200)]
    for i in range(5000):  # more than is remembered
        asked.loaded_tokens(0, BLOCK, i)
    assert first == [asked.loaded_tokens(0, BLOCK * (i % 50 + 1), i) for i in range(1, 200)]


@pytest.mark.parametrize("count", ["9" * 5000, "9" * 19])
def test_a_count_of_absurd_length_loads_all_and_harms_no_engine(count):
    assert tail(0.2).loaded_tokens(0, 2048, 64, f"load={count}") == 2048


def test_a_request_without_new_tokens_computes_its_last_one():
    asked = tail(1.0)
    assert asked.loaded_tokens(0, 512, 0) == asked.loaded_tokens(0, 512, 1)
    assert asked.loaded_tokens(0, 0, 16) == asked.loaded_tokens(0, 0, 16, "load=64") == 0


def test_rates_alone_mean_the_planner_that_reads_them():
    extra = {"kappa_plan": {"rates": tail_rates(SHAPE, node(0.2))}}
    assert TailRecompute.from_config(extra, BLOCK).loaded_tokens(0, 2048, 64) == 0


def test_a_count_of_as_many_digits_as_any_has_is_read():
    asked = TailRecompute(TailOptions("kv"), BLOCK)
    assert asked.loaded_tokens(0, 640, 5, "load=" + "64".zfill(18)) == 64
    assert asked.loaded_tokens(0, 640, 5, "load=" + "64".zfill(19)) == 640
    assert [asked.loaded_tokens(0, 640, 5, f"load={n}") for n in (31, 32, 63)] == [0, 32, 32]
