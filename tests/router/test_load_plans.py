"""Workers that plan their loads are priced by their own planners, all others as before."""

from dataclasses import replace

import numpy as np
import pytest

from kappa.hardware import node_profile
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import Cached, Planning, kappa_eff, room_left
from kappa.plans.rates import FORMAT
from kappa_router.decision import ESTIMATE, RouteRequest
from kappa_router.load_plans import LoadPlanner, planner_of
from tests.router import building

SIZE = 16
TOKENS = np.arange(64 * SIZE + 5)


def rates(load_token_s=4e-7, token_s=3e-5):
    """Of 32 layers: a link and a gpu that take so long per token and layer, and per token."""
    new, context, sizes = [1, 64, 1024], [0, 1024, 8192], [128, 256, 512, 1024]
    return {
        "format": FORMAT, "device": "test", "model": "m", "dtype": "float16", "layers": 32,
        "kv_bytes_per_token": 131072, "activation_bytes_per_token": 262144,
        "load": {"tokens": sizes, "seconds": [load_token_s * n for n in sizes]},
        "project": {"tokens": sizes, "seconds": [1e-7 * n for n in sizes]},
        "grid": {
            "new_tokens": new, "context_tokens": context,
            "seconds": [[4e-3 + token_s * t for _ in context] for t in new],
        },
        "h2d_bytes_per_s": 40e9,
    }  # fmt: skip


def planning(worker="w", planner="", **figures):
    """A worker on a node of these rates, which plans its loads if it names a planner."""
    measured = rates(**figures)
    read = rates_from_measured(measured)
    node = replace(
        node_profile("h100-pcie5"), h2d_bytes_per_s=read.h2d_bytes_per_s, load_fixed_s=0.0
    )
    if not planner:
        return building.announcement(worker, node)
    plan = {"planner": planner, "act_share": 0.0, "rates": measured}
    return building.announcement(worker, node, step=read.step, engine="torch", load_plan=plan)


def replanned(made, rates=None, **plan):
    """A worker with other figures in its plan, and among its rates."""
    figures = {**made.load_plan["rates"], **(rates or {})}
    return replace(made, load_plan={**made.load_plan, "rates": figures, **plan})


def router(*announcements, forecast=0):
    made = building.router(*announcements, forecast_workers=forecast, planner_of=planner_of)
    for each in announcements:
        made.blocks([building.stored(each.worker, TOKENS, "host")])
    return made


def priced(made, worker="w"):
    decision = made.explain(RouteRequest("r", TOKENS, 8), 1.0)
    return next(c for c in decision.candidates if c.worker == worker)


def planned(name, **figures):
    return Planning(SIZE, rates_from_measured(rates(**figures))).named(name)(Cached(64 * SIZE, 5))


@pytest.mark.parametrize("name", ["kv", "recompute", "auto"])
@pytest.mark.parametrize("forecast", [0, 4])
def test_planned_worker_is_priced_by_its_own_plan(name, forecast):
    chosen, plan = priced(router(planning(planner=name), forecast=forecast)), planned(name)
    assert chosen.plan == plan.kind
    assert (chosen.load_s, chosen.compute_s) == pytest.approx((plan.load_s, plan.compute_s))
    assert chosen.ttft_s == pytest.approx(plan.ttft_s, rel=0.25)
    assert chosen.counts.cached_tokens == 64 * SIZE  # what it could load, however it does


def test_slow_link_is_relieved_by_computing_cached_tokens():
    slow = {"load_token_s": 4e-6, "token_s": 3e-5}
    auto, load = (priced(router(planning(planner=name, **slow))) for name in ("auto", "kv"))
    assert auto.plan == "recompute+load"
    assert auto.ttft_s < load.ttft_s and auto.load_s < load.load_s


def test_worker_without_a_plan_loads_first_and_computes_then():
    chosen = priced(router(planning()))
    assert chosen.plan == ""
    assert chosen.ttft_s >= chosen.load_s + chosen.compute_s


def test_planned_job_computes_what_it_does_not_load():
    made = router(planning(planner="recompute"), forecast=4)
    decision = made.route(RouteRequest("r", TOKENS, 8), 1.0)
    plan = decision.estimates.plans[0]
    assert plan.crossing_tokens == 0 and plan.hidden_s == pytest.approx(0.0)
    link_s, gpu_s = made.backlogs_s(1.0)["w"]
    assert link_s == 0.0
    assert gpu_s == pytest.approx(decision.chosen.compute_s, rel=0.25)


def test_worker_that_came_back_without_a_plan_has_none():
    made = router(planning(planner="kv"))
    assert made.workers["w"].planner.kappa_eff > 0
    made.join(planning(), 1.0)
    assert made.workers["w"].planner is None and priced(made).plan == ""


def test_router_without_planners_refuses_workers_that_plan():
    made = building.router("a")
    with pytest.raises(ValueError, match=r"worker w plans its loads.*planner_of"):
        made.join(planning(planner="kv"), 0.0)
    assert list(made.workers) == ["a"]


def test_ratio_that_is_never_reached_is_none_and_not_infinity():
    assert LoadPlanner(planning(planner="auto", load_token_s=1e-25)).kappa_eff is None


def test_rates_that_cannot_be_used_are_refused_at_the_door():
    bad = planning(planner="kv")
    poor = {"load": {"tokens": [1, 2, 3, 4], "seconds": [5, 1, 4, 2]}}
    with pytest.raises(ValueError, match="load"):
        LoadPlanner(replanned(bad, poor))
    with pytest.raises(ValueError, match="no planner 'best'"):
        LoadPlanner(replanned(bad, planner="best"))


def tailed(dilation=1.0, load_token_s=4e-6, planner="tail"):
    """A worker with an engine of vLLM on a slow link, which computes the back of a hit."""
    made = planning(planner=planner, load_token_s=load_token_s)
    paced = {"source": "paced", "dilation": dilation} if dilation > 1 else {}
    step = replace(made.step, dilation=dilation)
    node = replace(made.node, **paced)
    return replanned(replace(made, node=node, step=step, engine="vllm"), {"overlap": 0.0})


@pytest.mark.parametrize("forecast", [0, 4])
def test_computed_tail_is_not_loaded_and_is_priced_so(forecast):
    tail = priced(router(tailed(), forecast=forecast))
    load = priced(router(tailed(planner="kv"), forecast=forecast))
    measured = rates_from_measured({**rates(load_token_s=4e-6), "overlap": 0.0})
    plan = Planning(SIZE, measured).named("tail")(Cached(64 * SIZE, 5))
    assert plan.crossing_tokens < 64 * SIZE
    assert tail.plan == plan.kind
    assert tail.load_s == pytest.approx(plan.load_s)
    assert tail.ttft_s < load.ttft_s
    assert tail.ttft_s == pytest.approx(plan.ttft_s, rel=0.05)


def test_row_of_a_tail_stays_on_a_fast_link():
    fast = tailed(load_token_s=1e-8)
    tail, plain = (priced(router(each)) for each in (fast, replace(fast, load_plan={})))
    assert tail == plain


def test_paced_workers_plan_is_in_its_dilated_seconds():
    one, slow = (priced(router(tailed(dilation))) for dilation in (1.0, 10.0))
    assert slow.load_s == pytest.approx(10 * one.load_s)
    assert slow.ttft_s == pytest.approx(10 * one.ttft_s, rel=0.02)


def test_tail_has_an_effective_ratio():
    ratio = LoadPlanner(tailed()).kappa_eff
    assert ratio is not None and ratio > 0


@pytest.mark.parametrize("forecast", [0, 4])
@pytest.mark.parametrize("dilation", [1.0, 8.0])
def test_loads_beside_the_prompt_hide_behind_it_in_real_seconds(forecast, dilation):
    made = tailed(dilation)
    layers = priced(router(replanned(made, {"overlap": 31 / 32}), forecast=forecast))
    ahead = priced(router(made, forecast=forecast))
    measured = rates_from_measured({**rates(load_token_s=4e-6), "overlap": 31 / 32})
    plan = Planning(SIZE, measured).named("tail")(Cached(64 * SIZE, 5))
    assert 0 < plan.crossing_tokens < 64 * SIZE
    assert layers.load_s == pytest.approx(dilation * plan.load_s)
    assert layers.ttft_s == pytest.approx(dilation * plan.ttft_s, rel=0.05)
    assert layers.ttft_s < ahead.ttft_s


@pytest.mark.parametrize(
    ("in_flight", "budget", "ttft_s"),
    [
        (0, 8192, 1.1),  # the longer, and a layer of the other: 1.0 + 0.4 / 4
        (1, 8192, 1.4),  # a step that waits holds the others up: 1.0 + 0.4
        (0, 50, 1.25),  # of two steps the first alone waits: 1.4 - 3/4 of 0.2
    ],
)
def test_lone_request_waits_for_the_longer_and_one_layer(in_flight, budget, ttft_s):
    measured = {**rates(), "layers": 4, "overlap": 3 / 4}
    made = replace(
        planning(), max_batch_tokens=budget, engine="vllm",
        load_plan={"planner": "kv", "act_share": 0.0, "rates": measured},
    )  # fmt: skip
    row = np.zeros(1, ESTIMATE)[0]
    row["cached_tokens"], row["new_tokens"], row["in_flight"] = 1024, 100, in_flight
    row["load_s"], row["compute_s"], row["ttft_s"] = 1.0, 0.4, 1.4
    planned = LoadPlanner(made)(row)
    assert row["ttft_s"] == pytest.approx(ttft_s)
    assert (row["load_s"], row["compute_s"]) == (1.0, 0.4)
    assert (planned.hidden_s if planned else 0.0) == pytest.approx(1.4 - ttft_s)


@pytest.mark.parametrize("forecast", [0, 4])
def test_second_request_beside_a_layered_load_pays_as_ahead(forecast):
    measured = {**rates(load_token_s=4e-6), "overlap": 31 / 32}
    plan = {"planner": "kv", "act_share": 0.0, "rates": measured}
    layers = replace(planning(load_token_s=4e-6), engine="vllm", load_plan=plan)
    ahead = replace(layers, load_plan={})
    one, other = (router(each, forecast=forecast) for each in (layers, ahead))
    first = priced(one)
    hidden_s = 31 / 32 * min(first.load_s, first.compute_s)
    assert first.ttft_s == pytest.approx(priced(other).ttft_s - hidden_s)
    for made in (one, other):
        made.route(RouteRequest("first", TOKENS, 8), 1.0)
    assert priced(one).ttft_s == pytest.approx(priced(other).ttft_s)


def test_blocks_without_room_stay_in_host_as_in_the_engine():
    sizes = [128, 256, 512, 1024]
    measured = rates()
    measured["attend"] = {
        "tokens": sizes, "seconds": [4e-7 * n for n in sizes], "h2d_bytes_per_s": 32e9,
        "share_while_loading": 0.9,
    }  # fmt: skip
    announced = planning(planner="auto")
    tight = replanned(announced, measured, cpu_room_share=600 / 20_001)
    fits, stays = priced(router(announced)), priced(router(replace(tight, device_blocks=800)))
    assert (fits.plan, stays.plan) == ("recompute+load", "cpu+load")
    # The first token waits for what loading takes: what stays crosses once, too.
    loaded = priced(router(planning(planner="kv")))
    assert stays.ttft_s == pytest.approx(loaded.ttft_s, rel=0.01)
    assert priced(router(tight)).plan == fits.plan
    in_engine = Planning(SIZE, rates_from_measured(measured), cpu=True)
    room = room_left(int(600 / 20_001 * 800) * SIZE, 0, 5)
    assert in_engine.named("auto")(Cached(64 * SIZE, 5, room=room)).kind == "cpu+load"
    assert priced(router(replanned(tight, planner="cpu"))).plan == "cpu"
    with pytest.raises(ValueError, match="cpu_threads"):
        LoadPlanner(planning(planner="cpu"))


@pytest.mark.parametrize(("act_share", "policy"), [(0.99, "recompute"), (1.0, "mixed")])
def test_ratio_counts_activations_only_where_all_have_them(act_share, policy):
    made = planning(planner="auto", load_token_s=4e-6)
    made = replanned(made, {"activation_bytes_per_token": 32768}, act_share=act_share)
    read = rates_from_measured(made.load_plan["rates"])
    assert LoadPlanner(made).kappa_eff == pytest.approx(kappa_eff(read, policy, 128))
    assert kappa_eff(read, "mixed", 128) > 1.1 * kappa_eff(read, "recompute", 128)
