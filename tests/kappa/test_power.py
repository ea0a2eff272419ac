"""Power: the model against the paper's measurements, and caps that requests would not notice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa import paper
from kappa.cost import step_model
from kappa.hardware import CATALOGUE, REACHED, node_profile
from kappa.power import (
    CLOCK_EXPONENT,
    GPUS,
    USE_EXPONENT,
    PowerReporter,
    modelled_w,
    node_power,
    prompt_power,
    table5_rows,
    unnoticed_cap,
)
from kappa.protocol import Announcement, WorkerReport
from kappa.shapes import model_shape

H100 = GPUS["H100-SXM5-80GB"]
MEMORY_BOUND = [(0.2, 1.0, 0.05)] * 10
COMPUTE_BOUND = [(0.2, 0.01, 1.0)] * 10


def test_prompt_power_is_low_when_loading_outlasts_computing():
    # Llama-3.1-70B on 8 H100 at their peaks and 15 GB/s each: 3.2768 GB in 27.3067 ms. FLOPs: 100
    # tokens of 136.905e9 and 1.005e6 pairs of 2.62144e6, 16.3250e12 at 7.912e15/s, 2.06332 ms; 40
    # such take 82.533 ms, more than reading weights and KV, of 1092.27.
    besides = "exposed", "peer_bytes_per_s", "peer_fixed_s", "load_fixed_s", "copy_fixed_s"
    bare = dict.fromkeys((*REACHED, *besides), 0.0)
    node = replace(CATALOGUE["h100-pcie5"], h2d_bytes_per_s=15e9, **bare)
    watts, joules = prompt_power(H100, model_shape("llama-3.1-70b"), node, (10_000, 100, 40), 8)
    assert watts == pytest.approx(153.6 + 546.4 * (82.533 / 1092.27) ** 1.22, abs=0.01)
    assert joules == pytest.approx(watts * 8 * 0.0273067, rel=1e-4)
    # Alone in its step it reads 139.006 GB of weights at 26.8 TB/s, 5.18679 ms, and attends for
    # 0.33298 ms, longer than it reads 3.3096 GB of KV: 5.51977 ms.
    alone, _ = prompt_power(H100, model_shape("llama-3.1-70b"), node, (10_000, 100, 1), 8)
    waits = 0.5 * (5.51977 - 2.06332)
    assert alone == pytest.approx(153.6 + 546.4 * ((2.06332 + waits) / 27.3067) ** 1.22, abs=0.01)


def test_the_model_is_fitted_to_table_5():
    """Idle watts and exponent are the least squares of relative errors over its eight rows."""
    rows = table5_rows()
    measured_w = np.array([row["paper_w"] for row in rows])
    assert measured_w.tolist() == [196, 192, 196, 192, 152, 152, 152, 152]
    modelled_w = np.array([row["modelled_w"] for row in rows])
    use = ((modelled_w - H100.idle_w) / (700 - H100.idle_w)) ** (1 / USE_EXPONENT)

    def fit(exponent):
        """(squared error, idle watts) of the best idle watts beside an exponent."""
        above = use**exponent
        idle_share, rest = (1 - above) / measured_w, 700 * above / measured_w - 1
        idle_w = -(idle_share @ rest) / (idle_share @ idle_share)
        return float(np.square(idle_share * idle_w + rest).sum()), float(idle_w)

    exponents = np.arange(0.5, 2.5, 0.01)
    best = min(exponents, key=lambda exponent: fit(exponent)[0])
    assert best == pytest.approx(USE_EXPONENT, abs=0.011)
    assert fit(best)[1] == pytest.approx(H100.idle_w, abs=0.5)
    off = [row["off"] for row in rows]
    assert (min(off), max(off)) == pytest.approx((-0.109, 0.064), abs=0.002)


def test_modelled_documents_draw_less_and_cost_more_than_chats():
    chats, documents = table5_rows()[::4]
    assert (chats["workload"], documents["workload"]) == ("ShareGPT", "NarrativeQA")
    assert documents["modelled_w"] < chats["modelled_w"]
    assert documents["modelled_j"] > 2.5 * chats["modelled_j"]


def test_every_node_of_the_catalogue_has_watts():
    assert all(node.gpu in GPUS for node in CATALOGUE.values())
    assert H100.cap_w == paper.H100_TDP_W


@pytest.mark.parametrize(
    ("busy", "computing", "least", "most"),
    [(0, 0, 153.6, 153.6), (1, 1, 700, 700), (1, 0, 300, 450), (0.4, 0.1, 230, 270)],
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


# -- caps ----------------------------------------------------------------------------------------


def test_unnoticed_cap_is_low_for_memory_bound_requests_only():
    assert unnoticed_cap(H100, MEMORY_BOUND, 0.02)[0] <= 430
    assert unnoticed_cap(H100, COMPUTE_BOUND, 0.02)[0] >= 670


def test_the_cap_keeps_its_promise():
    """Slowed by the cap, the mean TTFT grows by the figure told, at most as tolerated."""
    for requests in (MEMORY_BOUND, COMPUTE_BOUND, MEMORY_BOUND + COMPUTE_BOUND):
        for tolerance in (0.005, 0.02, 0.1):
            cap_w, growth = unnoticed_cap(H100, requests, tolerance)
            slowed = ((700.0 - H100.idle_w) / (cap_w - H100.idle_w)) ** (1 / CLOCK_EXPONENT)
            queue, load, compute = (sum(parts) for parts in zip(*requests, strict=True))
            before = queue + load + compute
            after = load + compute * slowed + queue * ((load + compute * slowed) / (load + compute))
            assert after / before - 1 <= tolerance * 1.001
            assert growth == pytest.approx(after / before - 1, abs=1e-6)


def test_unnoticed_cap_is_settable_and_at_most_the_present_one():
    assert unnoticed_cap(H100, [(0, 9, 0)], 0.01) == (H100.least_cap_w, 0.0)
    low = node_power("H100-SXM5-80GB", 350.0)
    assert unnoticed_cap(low, COMPUTE_BOUND, 0.01)[0] == 350.0
    assert unnoticed_cap(low, COMPUTE_BOUND, 0.0) == (350.0, 0.0)
    assert unnoticed_cap(H100, COMPUTE_BOUND, 0.0) == (700.0, 0.0)


def test_node_power_sums_gpus_and_is_none_for_unknown_ones():
    four = node_power("H100-SXM5-80GB", 2800.0)
    assert (four.cap_w, four.least_cap_w, four.idle_w) == (2800.0, 800.0, 614.4)
    assert node_power("abacus", 300.0) is node_power("H100-SXM5-80GB", 0.0) is None
    assert node_power("H100-SXM5-80GB", 150.0) is None, "less than it takes"


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)), min_size=1),
    st.floats(0, 0.5),
    st.floats(200, 700),
)  # fmt: skip
def test_a_cap_is_always_in_range(requests, tolerance, present_w):
    cap_w, growth = unnoticed_cap(replace(H100, cap_w=present_w), requests, tolerance)
    assert H100.least_cap_w <= cap_w <= present_w
    assert 0 <= growth <= tolerance + 1e-9


def test_the_exponent_is_the_cautious_one():
    """A higher exponent would promise more watts for the same slowdown."""
    assert 1.0 < CLOCK_EXPONENT <= 2.0


# -- in a worker's reports -----------------------------------------------------------------------

LLAMA = model_shape("llama-3.1-8b")


def announced(**changes):
    node = replace(node_profile("h100-pcie5"), **changes)
    return Announcement(
        "w", "m", node, step_model(LLAMA, node), 131072.0, "", "f", 32, 100, 100, 1024, 8192, "", ""
    )


def reports(reporter, *moments):
    """(time, step seconds, tokens) -> reports with power."""
    return [
        reporter(
            WorkerReport(
                "w", t_s, steps_total=i, step_seconds_total=step_s, step_tokens_total=tokens
            )
        )
        for i, (t_s, step_s, tokens) in enumerate(moments)
    ]


def test_without_nvml_an_idle_and_a_busy_second_are_modelled():
    h100, step = GPUS["H100-SXM5-80GB"], announced().step
    full = round(1 / step.token_s)
    first, idle, busy = reports(PowerReporter(announced()), (0, 0, 0), (1, 0, 0), (2, 1.0, full))
    assert (first.power_source, first.power_w) == ("", 0.0)
    assert (idle.power_w, idle.power_cap_w, idle.power_source) == (h100.idle_w, 700.0, "model")
    assert busy.power_w == pytest.approx(h100.cap_w, rel=0.001)
    assert busy.energy_j_total == pytest.approx(h100.idle_w + h100.cap_w, rel=0.001)


def test_a_paced_node_uses_energy_in_its_own_time():
    node = announced(source="paced", dilation=10.0)
    *_, last = reports(PowerReporter(node), (0, 0, 0), (10, 10, 0))
    idle, cap = GPUS["H100-SXM5-80GB"].idle_w, 700.0
    assert last.power_source == "paced"
    assert last.power_w == pytest.approx(idle + (cap - idle) * 0.5**USE_EXPONENT)
    assert last.modelled_j_total == last.energy_j_total
    assert last.energy_j_total == pytest.approx(last.power_w * 1.0)


def test_an_engine_that_started_anew_uses_no_negative_energy():
    teller = PowerReporter(announced())
    reports(teller, (0, 0, 0), (1, 1, 100))
    before = teller(WorkerReport("w", 2.0, steps_total=5, step_seconds_total=1.5)).energy_j_total
    teller(WorkerReport("w", 3.0, steps_total=0))
    after = teller(WorkerReport("w", 4.0, steps_total=1, step_seconds_total=0.1))
    assert before <= after.energy_j_total < before + 700
