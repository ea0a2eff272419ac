"""The pipeline's closed form against a simulator that runs it layer by layer."""

from __future__ import annotations

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel
from kappa.plans.rates import LineFit, PlanRates
from kappa.plans.split import Backlog, Costs, Split
from tests.kappa.plans.layer_simulator import Layer, even, simulate
from tests.kappa.plans.profiles import Case, random_cases


def splits(case: Case, seed: int) -> list[Split]:
    rng = default_rng(seed)
    front = int(rng.integers(0, case.cached + 1))
    taken = int(rng.integers(0, case.cached - front + 1))
    return [Split(), Split(front), Split(front, tail=True), Split(front, taken), Split(0, taken)]


def test_closed_form_is_the_simulated_pipeline() -> None:
    compared = 0
    for seed, case in enumerate(random_cases(1_000, seed=11)):
        if case.rates.overlap is not None:
            continue  # then the pipeline is not one of layers
        costs, backlog = case.costs, case.backlog
        for split in splits(case, seed):
            load_s, compute_s = costs.load_s(split), costs.compute_s(split)
            layers = even(load_s, compute_s, case.rates.layers)
            if load_s == 0:
                layers = [Layer((), ((compute_s / case.rates.layers, 0),))] * case.rates.layers
            simulated_s = simulate(
                layers, link_free_s=backlog.link_s if load_s else 0.0, gpu_free_s=backlog.gpu_s
            )
            assert costs.of(split) == pytest.approx(simulated_s, rel=1e-9)
            compared += 1
    assert compared > 1_000


def test_two_buffers_are_enough() -> None:
    """Bounding the loads ahead to one layer changes nothing where all layers are alike."""
    for case in random_cases(200, seed=12):
        costs = case.costs
        layers = even(costs.load_s(Split()), costs.plain_s, case.rates.layers)
        assert simulate(layers, buffers=2) == pytest.approx(simulate(layers))


def test_no_better_order_within_a_layer_saves_more_than_the_fill() -> None:
    """Activations first, projected while KV loads: at most the closed form, less one layer."""
    compared = 0
    for seed, case in enumerate(random_cases(500, seed=13)):
        rates = case.rates
        if rates.overlap is not None or case.backlog != Backlog():
            continue
        costs = case.costs
        split = splits(case, seed)[4]
        load_s, compute_s = costs.load_s(split), costs.compute_s(split)
        loaded_s = rates.load_token_s * (case.cached - split.activations)
        project_s = rates.project.seconds(split.activations)
        n = rates.layers
        layer = Layer(
            ((load_s - loaded_s) / n, loaded_s / n),
            ((project_s / n, 1), ((compute_s - project_s) / n, 2)),
        )
        simulated_s = simulate([layer] * n)
        closed_s = costs.of(split)
        assert simulated_s <= closed_s * (1 + 1e-9)
        assert closed_s - simulated_s <= (load_s + compute_s) / n
        compared += 1
    assert compared > 50


def test_overlap_runs_from_load_first_to_all_hidden() -> None:
    """Eq. 3 and 4 of paper 001: load + compute - overlap · min."""
    for overlap, expected in ((0.0, 5.0), (0.5, 4.0), (1.0, 3.0)):
        rates = simple_rates(overlap=overlap)
        costs = Costs(rates, 20, 3)
        assert (costs.load_s(Split()), costs.compute_s(Split())) == (2.0, 3.0)
        assert costs.of(Split()) == expected


def simple_rates(overlap: float | None = None) -> PlanRates:
    return PlanRates(
        name="simple", layers=4, kv_bytes=8.0, activation_bytes=4.0,
        load=LineFit("load", 0.1), project=LineFit("KV projection", 0.25),
        step=StepModel(token_s=1.0, pair_s=0.0, weights_s=0.0, context_token_s=0.0),
        overlap=overlap,
    )  # fmt: skip


def test_what_each_kind_costs() -> None:
    costs = Costs(simple_rates(), 20, 3)
    assert costs.load_s(Split(4)) == pytest.approx(1.6)
    assert costs.compute_s(Split(4)) == 7.0
    assert costs.load_s(Split(4, 10)) == pytest.approx(1.1)
    assert costs.compute_s(Split(4, 10)) == 9.5


def test_attention_counts_the_pairs_there_are() -> None:
    step = StepModel(token_s=0.0, pair_s=1.0, weights_s=0.0, context_token_s=0.0)
    rates = simple_rates()
    rates = PlanRates(rates.name, 4, 8.0, 4.0, rates.load, rates.project, step, overlap=1.0)
    costs = Costs(rates, cached_tokens=20, new_tokens=4, device_tokens=10)
    new = 4 * (30 + 2)
    assert costs.compute_s(Split()) == new
    assert costs.compute_s(Split(6)) == new + 6 * (10 + 3)  # six behind ten on the device
    assert costs.compute_s(Split(6, tail=True)) == 10 * (24 + 5)  # ten behind 24
    everything = 24 * (10 + 12)
    assert costs.compute_s(Split(20)) == costs.compute_s(Split(20, tail=True)) == everything


def test_a_plan_that_loads_nothing_waits_for_no_link() -> None:
    costs = Costs(simple_rates(), 20, 3, backlog=Backlog(link_s=1_000.0, gpu_s=2.0))
    assert costs.of(Split(20)) == 2.0 + 23.0
    assert costs.of(Split(19)) > 1_000.0


@pytest.mark.parametrize("counts", [(-1, 1, 0), (1, -1, 0), (1, 1, -1)])
def test_negative_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="counts of 0 or more"):
        Costs(simple_rates(), *counts)


def test_negative_backlog_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Backlog of -1\.0"):
        Backlog(-1.0, 0.0)
