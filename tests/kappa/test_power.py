"""Power: the model against the paper's measurements, and caps that requests would not notice."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa import paper
from kappa.hardware import CATALOGUE
from kappa.power import (
    CLOCK_EXPONENT,
    GPUS,
    MARGIN,
    Advice,
    Waited,
    advise,
    modelled_w,
    prompt_power,
    table5_rows,
    tolerated_slowdown,
)
from kappa.shapes import model_shape

H100 = GPUS["H100-SXM5-80GB"]
MEMORY_BOUND = [Waited(0.2, 1.0, 0.05)] * 10
COMPUTE_BOUND = [Waited(0.2, 0.01, 1.0)] * 10


def test_a_prompt_that_loads_longer_than_it_computes_draws_little_and_costs_much():
    # Llama-3.1-70B on 8 H100 at 15 GB/s each: 3.2768 GB in 27.3067 ms. FLOPs: 100 tokens of
    # 141.107e9 and 1.005e6 pairs of 2.62144e6, 16.7453e12 at 7.912e15/s, 2.11645 ms; 40 such take
    # 84.658 ms, more than the 10.2 ms for reading weights and KV. So 70 + 630 * 84.658 / 1092.27.
    node = replace(CATALOGUE["h100-pcie5"], h2d_bytes_per_s=15e9)
    watts, joules = prompt_power(H100, model_shape("llama-3.1-70b"), node, (10_000, 100, 40), 8)
    assert watts == pytest.approx(118.83, abs=0.01)
    assert joules == pytest.approx(118.83 * 8 * 0.0273067, rel=1e-4)
    # Alone in its step it reads 141.107 GB of weights and 3.3096 GB of KV at 26.8 TB/s, 5.38865 ms.
    alone, _ = prompt_power(H100, model_shape("llama-3.1-70b"), node, (10_000, 100, 1), 8)
    waits = 0.5 * (5.38865 - 2.11645)
    assert alone == pytest.approx(70 + 630 * (2.11645 + waits) / 27.3067, abs=0.01)


def test_documents_draw_less_than_chats_and_cost_more_a_prompt_as_modelled():
    chats, documents = table5_rows()[::2]
    assert (chats["paper_w"], documents["paper_w"]) == (196, 152)
    assert documents["modelled_w"] < chats["modelled_w"] < chats["paper_w"]
    assert documents["modelled_j_per_prompt"] > 3 * chats["modelled_j_per_prompt"]


def test_every_node_of_the_catalogue_has_watts():
    assert all(node.gpu in GPUS for node in CATALOGUE.values())
    assert H100.cap_w == paper.H100_TDP_W


@pytest.mark.parametrize(
    ("busy", "computing", "least", "most"),
    [(0, 0, 70, 70), (1, 1, 700, 700), (1, 0, 300, 450), (0.4, 0.1, 180, 250)],
)
def test_draw_goes_with_what_is_done(busy, computing, least, most):
    assert least <= modelled_w(H100, 10, 10 * busy, 10 * computing) <= most


def test_a_memory_bound_node_draws_what_the_paper_measured():
    """The paper's GPUs draw 152 W on average on NarrativeQA, 196 W on ShareGPT: mostly waiting."""
    (_, narrative), (share, _) = paper.TABLE5_POWER_W[130], paper.TABLE5_POWER_W[70]
    waiting = modelled_w(H100, 1.0, 0.25, 0.01)
    assert narrative[0] * 0.8 < waiting < share[0] * 1.2
    assert share[1] < modelled_w(H100, 1.0, 1.0, 0.0) * 1.1


@given(st.floats(0, 20), st.floats(0, 20))
def test_a_draw_stays_between_idle_and_the_cap(step_s, compute_s):
    assert H100.idle_w <= modelled_w(H100, 10.0, step_s, compute_s) <= H100.cap_w


def test_memory_bound_requests_do_not_notice_a_low_cap_and_compute_bound_ones_do():
    low = advise(H100, 700.0, MEMORY_BOUND, 0.02)
    high = advise(H100, 700.0, COMPUTE_BOUND, 0.02)
    assert low.cap_w <= 400 and low.freed_w >= 300
    assert high.cap_w >= 670
    assert low.basis == high.basis == "model"


def test_the_advice_keeps_its_promise():
    """Slowed by what the advised cap costs, the mean TTFT grows by no more than was tolerated."""
    for requests in (MEMORY_BOUND, COMPUTE_BOUND, MEMORY_BOUND + COMPUTE_BOUND):
        for tolerance in (0.005, 0.02, 0.1):
            advised = advise(H100, 700.0, requests, tolerance)
            before = sum(r.ttft_s for r in requests)
            load, compute = sum(r.load_s for r in requests), sum(r.compute_s for r in requests)
            queue = sum(r.queue_s for r in requests)
            slowed = advised.slowdown
            after = load + compute * slowed + queue * ((load + compute * slowed) / (load + compute))
            assert after / before - 1 <= tolerance * 1.001
            assert advised.ttft_growth == pytest.approx(after / before - 1, abs=1e-6)


def test_a_measured_draw_makes_a_cap_that_changes_nothing():
    advised = advise(H100, 700.0, COMPUTE_BOUND, 0.0, highest_draw_w=310.0)
    assert advised == Advice(330.0, 370.0, 1.0, 0.0, "measured")
    assert advised.cap_w >= 310 * MARGIN


def test_a_cap_is_one_that_the_gpu_takes_and_never_above_the_present_one():
    assert advise(H100, 700.0, [Waited(0, 9, 0)], 0.01).cap_w == H100.least_cap_w
    assert advise(H100, 350.0, COMPUTE_BOUND, 0.01).cap_w == 350.0
    unchanged = advise(H100, 350.0, COMPUTE_BOUND, 0.0)
    assert (unchanged.freed_w, unchanged.slowdown, unchanged.ttft_growth) == (0.0, 1.0, 0.0)
    assert advise(H100, 700.0, COMPUTE_BOUND, 0.0).cap_w == 700.0


@given(
    st.lists(
        st.builds(Waited, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)), min_size=1
    ),
    st.floats(0, 0.5),
    st.one_of(st.none(), st.floats(1, 900)),
    st.floats(200, 700),
)  # fmt: skip
def test_advice_is_always_in_range(requests, tolerance, peak, cap_w):
    advised = advise(H100, cap_w, requests, tolerance, peak)
    assert H100.least_cap_w <= advised.cap_w <= cap_w
    assert advised.freed_w == cap_w - advised.cap_w
    assert advised.slowdown >= 1.0 and 0 <= advised.ttft_growth <= tolerance + 1e-9


def test_slowdown_is_unbounded_where_nothing_is_computed():
    assert tolerated_slowdown([Waited(0.1, 1.0, 0.0)], 0.01) == math.inf
    assert tolerated_slowdown(COMPUTE_BOUND, 0.0) == 1.0


def test_the_exponent_is_the_cautious_one():
    """A higher exponent would promise more watts for the same slowdown."""
    assert 1.0 < CLOCK_EXPONENT <= 2.0
