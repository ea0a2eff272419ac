"""How much of a hit vLLM loads: by the router's own planner, at block ends, as rates say."""

from dataclasses import replace

import pytest

from kappa.hardware import node_profile
from kappa.model import gemm_flops, kv_bytes_per_token
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import Cached, Planning
from kappa.plans.rates import rates_from_law
from kappa.shapes import model_shape
from kappa_workers.vllm.tail_recompute import TailRecompute, tail_rates

SHAPE = model_shape("llama-3.1-8b")
BLOCK = 32


def node(critical):
    """A node that loads `critical` tokens while it computes one."""
    profile = node_profile("pcie")
    token_s = gemm_flops(SHAPE) / profile.flops_per_s
    return replace(profile, h2d_bytes_per_s=kv_bytes_per_token(SHAPE) * critical / token_s)


def tail(critical, layers=0):
    return TailRecompute(tail_rates(SHAPE, node(critical), layers), BLOCK)


def test_tail_computes_the_tokens_that_reading_weights_hides():
    rates = rates_from_law(SHAPE, node(1.0), overlap=0.0)
    free_tokens = rates.step.weights_s / rates.step.token_s
    computed = 512 - tail(1.0).loaded_tokens(0, 512, 16)
    assert free_tokens / 2 - BLOCK < computed <= free_tokens + BLOCK and computed > 0


@pytest.mark.parametrize(
    ("critical", "hit", "new", "loaded"),
    [
        (10.0, 4096, 1024, 4096),  # far beyond what reading the weights hides
        (1.0, 8192, 16, 8192),  # gains less than prediction errs by
        (0.2, 2048, 64, 0),
        (0.2, 0, 16, 0),
    ],
)
def test_a_fast_link_loads_all_and_a_slow_one_nothing(critical, hit, new, loaded):
    assert tail(critical).loaded_tokens(0, hit, new) == loaded


@pytest.mark.parametrize("critical", [0.2, 0.5, 1.0, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("device", [0, 320])
def test_tail_loads_whole_blocks_and_is_never_later_than_kv(critical, device):
    planning = Planning(
        BLOCK, rates_from_law(SHAPE, node(critical), overlap=0.0), activations=False
    )
    planner = tail(critical)
    for new in (1, 33, 500):
        for hit in (BLOCK, 5 * BLOCK, 100 * BLOCK):
            loaded = planner.loaded_tokens(device, hit, new)
            assert loaded % BLOCK == 0 and 0 <= loaded <= hit
            chosen = planning.named("tail")(Cached(hit, new, device))
            everything = planning.named("kv")(Cached(hit, new, device))
            assert chosen.crossing_tokens == loaded
            assert chosen.ttft_s <= everything.ttft_s


@pytest.mark.parametrize(("critical", "loaded"), [(1.0, 2048), (10.0, 3712)])
def test_by_layers_a_tail_is_computed_while_the_rest_is_loaded(critical, loaded):
    planner = tail(critical, layers=SHAPE.layers)
    assert planner.loaded_tokens(0, 4096, 16) == 4096
    # Loading one takes as long as computing `critical`; attention and a floor move the crossing.
    crossing = planner.loaded_tokens(0, 4096, 16, by_layer=True)
    assert abs(crossing - loaded) <= 8 * BLOCK
    layered = rates_from_law(SHAPE, node(critical))
    assert (
        crossing
        == Planning(BLOCK, layered, activations=False)
        .named("tail")(Cached(4096, 16))
        .crossing_tokens
    )


def test_without_rates_and_for_those_who_ask_so_all_is_loaded():
    assert TailRecompute(None, BLOCK).loaded_tokens(0, 640, 5) == 640
    assert tail(0.2).loaded_tokens(0, 640, 5, "kv") == 640
    assert tail(0.2).loaded_tokens(0, 640, 5, "tail") == 0


@pytest.mark.parametrize(
    ("count", "loaded"),
    [
        ("320", 320), ("339", 320), ("0", 0), ("31", 0), ("32", 32), ("63", 32), ("9999", 640),
        ("64".zfill(18), 64), ("64".zfill(19), 640), ("9" * 5000, 640), ("", 640), ("-32", 640),
        ("1e2", 640), ("many", 640),
    ],
)  # fmt: skip
def test_tail_obeys_a_named_load_and_loads_all_for_nonsense(count, loaded):
    assert TailRecompute(None, BLOCK).loaded_tokens(0, 640, 5, f"load={count}") == loaded


def test_announced_rates_give_router_and_engine_the_same_plan():
    read = rates_from_measured(tail_rates(SHAPE, node(1.0)))
    assert read.overlap == 0.0  # vLLM loads first and computes then
    made = rates_from_law(SHAPE, node(1.0), overlap=0.0)
    for cached, new in ((4096, 16), (1024, 300), (320, 1)):
        one, other = (Planning(BLOCK, r).named("tail")(Cached(cached, new)) for r in (read, made))
        assert one.crossing_tokens == other.crossing_tokens
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=0.02)


def test_rates_of_another_format_are_refused():
    with pytest.raises(ValueError, match="profile again"):
        TailRecompute({"format": "other"}, BLOCK)


def test_answers_that_are_forgotten_come_back_the_same():
    planner = tail(1.0)
    asked = [(BLOCK * (i % 50 + 1), i) for i in range(1, 100)]
    first = [planner.loaded_tokens(0, hit, new) for hit, new in asked]
    for i in range(4200):  # more than is remembered
        planner.loaded_tokens(0, BLOCK, i)
    assert first == [planner.loaded_tokens(0, hit, new) for hit, new in asked]


def test_a_request_without_new_tokens_computes_its_last_one():
    assert tail(1.0).loaded_tokens(0, 512, 0) == tail(1.0).loaded_tokens(0, 512, 1)
