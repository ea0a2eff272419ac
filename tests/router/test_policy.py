"""Each policy on estimates made by hand: whom it picks and what it says."""

import math

import numpy as np
import pytest

from kappa.cost import TokenCounts
from kappa.hardware import NodeProfile
from kappa_router.decision import PricedWorker
from kappa_router.policy import Priced, _cheapest, fetch_externality_s, policy_named
from tests.router.offering import estimates

THRESHOLD, LITERAL, TTFT, BACKLOG, PRICED = (
    policy_named(n) for n in ("threshold", "threshold_literal", "ttft", "least_backlog", "priced")
)


def node(link=63e9, flops=1e15, cost=0.0):
    return {"h2d_bytes_per_s": link, "flops_per_s": flops, "cost_per_hour": cost}


def candidate(hardware=None, **parts):
    return {**(hardware or node()), "new_tokens": 100.0, "kappa_literal": 30.0, **parts}


SLOW, FAST = node(link=63e9), node(link=450e9)


def pick(policy, *candidates):
    choice = policy.choose(estimates(*candidates))
    return choice.index, choice.reason


@pytest.mark.parametrize(
    ("cached", "load_s", "compute_s", "kappa_crit", "bound"),
    [
        (2999, 0.2999, 0.3, 30.0, "compute"),
        (3000, 0.3, 0.3, 30.0, "memory"),
        (0, 0.0, 0.3, 30.0, "compute"),
        # Twice the context takes longer to attend to.
        (6000, 0.6, 0.4, 40.0, "memory"),
        # A plan that loads 1,000 of them, and one that loads none.
        (3000, 0.1, 0.5, 70.0, "compute"),
        (3000, 0.0, 0.6, 90.0, "compute"),
        # A fixed cost above all computing.
        (10, 0.801, 0.3, 0.0, "memory"),
    ],
)
def test_request_is_memory_bound_from_its_critical_ratio_up(
    cached, load_s, compute_s, kappa_crit, bound
):
    profile = NodeProfile("n", "gpu", "link", 63e9, 1e15, 3e12)
    counts = TokenCounts(0, cached, 100)
    worker = PricedWorker("w", profile, counts, 1e-4, 0, load_s, compute_s, 0, 0, 0, 0)
    assert (worker.bound, worker.kappa_crit) == (bound, pytest.approx(kappa_crit))
    assert (counts.ratio >= worker.kappa_crit) is (bound == "memory")


def test_critical_ratio_is_finite_where_the_link_takes_no_time():
    profile = NodeProfile("n", "gpu", "link", 63e9, 1e15, 3e12)
    worker = PricedWorker("w", profile, TokenCounts(0, 10, 1), 0.0, 0, 0.0, 0.3, 0, 0, 0, 0)
    assert math.isfinite(worker.kappa_crit) and worker.bound == "compute"


def holder(cached=50_000.0, new=100.0, load_s=0.1, compute_s=0.01, **parts):
    """By default loading takes ten times as long as computing: memory-bound."""
    request = {"cached_tokens": cached, "new_tokens": new, "load_s": load_s, "compute_s": compute_s}
    return candidate(**{**request, **parts})


def without_it(compute_s=2.0, **parts):
    return candidate(new_tokens=50_100.0, compute_s=compute_s, **parts)


def test_threshold_loads_at_the_holder_not_the_fastest_link():
    # 6.55 GB: 104 ms behind PCIe 5, 15 ms behind a C2C link that does not have them.
    choice = pick(THRESHOLD, holder(load_s=0.104), without_it(h2d_bytes_per_s=450e9))
    assert choice == (0, "memory_bound_soonest_load")
    assert pick(LITERAL, holder(), without_it(h2d_bytes_per_s=450e9))[0] == 1


def test_threshold_takes_the_soonest_holder_queue_included():
    quick, queued = holder(load_s=0.03), holder(load_s=0.015, link_backlog_s=0.02)
    assert pick(THRESHOLD, quick, queued)[0] == 0
    assert pick(THRESHOLD, quick, {**queued, "link_backlog_s": 0.014})[0] == 1
    # What a threshold leaves out: the queue for the gpu of a memory-bound request.
    assert pick(THRESHOLD, {**quick, "gpu_backlog_s": 9.0}, queued)[0] == 0


def test_threshold_compares_load_and_computing_of_each_worker():
    # The same prefix: loading takes longer behind PCIe, computing behind C2C. Each has a queue on
    # the other side, which does not count.
    pcie = holder(5000, load_s=0.06, compute_s=0.02, gpu_backlog_s=9.0)
    c2c = holder(5000, load_s=0.01, compute_s=0.02, link_backlog_s=9.0)
    assert pick(THRESHOLD, pcie, c2c) == (1, "compute_bound_cheap_compute")
    assert pick(THRESHOLD, pcie, {**c2c, "compute_s": 0.07}) == (0, "memory_bound_soonest_load")
    # From equal seconds on it is the link that counts.
    assert pick(THRESHOLD, {**c2c, "load_s": 0.02})[1] == "memory_bound_soonest_load"
    # The constant of paper 001 does not count.
    assert pick(THRESHOLD, {**pcie, "kappa_literal": 1e9})[1] == "memory_bound_soonest_load"


def test_threshold_recomputes_only_where_loading_is_slower():
    assert pick(THRESHOLD, holder(load_s=1.99), without_it(compute_s=2.0))[0] == 0
    jammed = holder(load_s=0.1, link_backlog_s=2.0)
    assert pick(THRESHOLD, jammed, without_it()) == (1, "compute_bound_cheap_compute")
    assert pick(THRESHOLD, jammed, without_it(gpu_backlog_s=0.2))[0] == 0


def test_threshold_computes_at_the_least_price_times_seconds():
    # 0.2 s at 9 an hour cost as much as 0.9 s at 2.
    costly, cheap = without_it(0.2, cost_per_hour=9.0), without_it(0.89, cost_per_hour=2.0)
    assert pick(THRESHOLD, costly, cheap) == (1, "compute_bound_cheap_compute")
    assert pick(THRESHOLD, costly, {**cheap, "compute_s": 0.91})[0] == 0
    assert pick(THRESHOLD, costly, {**cheap, "cost_per_hour": 0.0})[0] == 0


def test_threshold_takes_a_device_holder_when_compute_bound():
    resident = candidate(device_tokens=50_000, new_tokens=100, compute_s=0.01)
    assert pick(THRESHOLD, holder(), resident) == (1, "compute_bound_cheap_compute")


def test_threshold_keeps_the_fast_link_free_on_a_tie():
    fast = without_it(h2d_bytes_per_s=450e9)
    assert pick(THRESHOLD, fast, without_it())[0] == 1
    assert pick(THRESHOLD, holder(in_flight=1), holder())[0] == 1


def test_literal_threshold_sends_memory_bound_to_the_fast_link():
    slow, fast = candidate(SLOW, cached_tokens=9000), candidate(FAST, gpu_backlog_s=99.0)
    assert pick(LITERAL, slow, fast) == (1, "memory_bound_fast_link")


def test_literal_threshold_sends_compute_bound_to_the_cheapest():
    costly, cheap = candidate(node(FAST["h2d_bytes_per_s"], cost=9)), candidate(node(cost=2))
    assert pick(LITERAL, costly, cheap) == (1, "compute_bound_cheap_compute")
    twice_as_fast = candidate(node(flops=2e15, cost=3))
    assert pick(LITERAL, cheap, twice_as_fast)[0] == 1


def test_literal_threshold_takes_the_ratio_of_the_best_holder():
    # Memory-bound on the fast node, which holds little; compute-bound where most is cached.
    little = candidate(FAST, cached_tokens=500, kappa_literal=1.0)
    most = candidate(SLOW, cached_tokens=2000, kappa_literal=50.0)
    assert pick(LITERAL, little, most)[1] == "compute_bound_cheap_compute"
    assert pick(LITERAL, little, {**most, "kappa_literal": 20.0})[1] == "memory_bound_fast_link"


@pytest.mark.parametrize("cached", [0, 9000])
def test_literal_threshold_ties_go_by_backlog_then_requests(cached):
    busy = candidate(cached_tokens=cached, gpu_backlog_s=2.0)
    idle = candidate(cached_tokens=cached, gpu_backlog_s=1.0, in_flight=5)
    assert pick(LITERAL, busy, idle)[0] == 1
    assert pick(LITERAL, idle, {**idle, "in_flight": 4})[0] == 1


def test_literal_threshold_counts_a_single_new_token_as_one():
    # 300 cached tokens for 1 new one: a ratio of 300, above the critical 200.
    one = {"cached_tokens": 300, "new_tokens": 1, "kappa_literal": 200}
    chosen = policy_named("threshold_literal").choose(
        estimates(one, {**one, "h2d_bytes_per_s": 450e9})
    )
    assert (chosen.index, chosen.reason) == (1, "memory_bound_fast_link")


def test_literal_threshold_keeps_the_fast_link_free_on_a_tie():
    assert pick(LITERAL, candidate(FAST), candidate(SLOW))[0] == 1


def test_missing_price_is_not_a_price_of_zero():
    priced = candidate(node(cost=2.0))
    unpriced = candidate(node(), gpu_backlog_s=5.0)
    assert pick(LITERAL, unpriced, priced)[0] == 1


@pytest.mark.parametrize(
    ("part", "reason"),
    [("ttft_s", "shorter_queue"), ("load_s", "faster_load"), ("compute_s", "less_compute")],
)
def test_ttft_takes_the_least_and_names_what_set_it_apart(part, reason):
    rest = {"load_s": 1.0, "compute_s": 1.0, "ttft_s": 3.0}
    worse = candidate(**{**rest, "ttft_s": 7.0, part: {"ttft_s": 7.0}.get(part, 5.0)})
    better = candidate(**rest)
    assert pick(TTFT, worse, better) == (1, reason)
    assert pick(TTFT, better, worse) == (0, reason)


def test_ttft_counts_the_delay_of_others():
    selfish, kind = candidate(ttft_s=1.0, tpot_impact_s=5.0), candidate(ttft_s=2.0)
    assert pick(TTFT, selfish, kind) == (1, "less_harm")


def test_ttft_is_compared_with_the_second_best():
    best = candidate(ttft_s=2.0, load_s=1.0, compute_s=1.0)
    second = candidate(ttft_s=3.0, load_s=2.0, compute_s=1.0)
    far = candidate(ttft_s=90.0, load_s=1.0, compute_s=1.0)
    assert pick(TTFT, far, second, best) == (2, "faster_load")


def test_ttft_ties_go_to_fewer_requests_then_the_faster_link():
    a, b = candidate(SLOW, in_flight=2), candidate(SLOW, in_flight=1)
    assert pick(TTFT, a, b) == (1, "tie")
    assert pick(TTFT, b, candidate(FAST, in_flight=1)) == (1, "tie")


def test_tie_of_sums_is_a_tie_whatever_the_parts():
    loads = candidate(ttft_s=3.0, load_s=2.0, compute_s=1.0)
    computes = candidate(ttft_s=3.0, load_s=1.0, compute_s=2.0, in_flight=1)
    assert pick(TTFT, loads, computes) == (0, "tie")


def test_least_backlog_looks_at_nothing_else():
    quick = candidate(FAST, ttft_s=0.1, gpu_backlog_s=2.0)
    assert pick(BACKLOG, quick, candidate(ttft_s=9.0, gpu_backlog_s=1.0)) == (1, "least_backlog")
    assert pick(BACKLOG, {**quick, "in_flight": 3}, quick)[0] == 1


@pytest.mark.parametrize("policy", [THRESHOLD, LITERAL, TTFT, BACKLOG])
def test_single_worker_is_chosen_with_a_reason(policy):
    index, reason = pick(policy, candidate(cached_tokens=50, ttft_s=1.0))
    assert index == 0 and reason
    assert policy is not TTFT or reason == "only_worker"


def test_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'fastest'.*least_backlog.*threshold.*ttft"):
        policy_named("fastest")


def busy(**parts):
    return candidate(prefills_per_s=1.0, gpu_use=0.5, **parts)


def test_priced_waits_for_its_cache_where_ttft_recomputes():
    holder = busy(ttft_s=4.0, new_tokens=100, work_s=0.01)
    other = busy(ttft_s=3.0, new_tokens=50_000, work_s=3.0)
    assert pick(TTFT, holder, other)[0] == 1
    assert pick(PRICED, holder, other)[0] == 0


def test_priced_recomputes_when_waiting_costs_more_than_waste():
    holder = busy(ttft_s=90.0, new_tokens=100, work_s=0.01)
    other = busy(ttft_s=3.0, new_tokens=50_000, work_s=3.0)
    assert pick(PRICED, holder, other)[0] == 1


def test_priced_charges_nothing_for_work_that_must_be_done():
    rng = np.random.default_rng(3)
    for _ in range(50):
        rows = [
            busy(ttft_s=t, new_tokens=5000, work_s=t / 2, gpu_backlog_s=t / 3)
            for t in rng.uniform(0.1, 2.0, 5)
        ]
        assert pick(PRICED, *rows)[0] == pick(TTFT, *rows)[0]


# -- the price by hand: own wait, waste that others wait for, decoding beside others -------------

SHORT = {
    "ttft_s": 1.0, "new_tokens": 100, "work_s": 0.1, "gpu_use": 0.2, "prefills_per_s": 3.0,
    "gpu_backlog_s": 0.3, "in_flight": 2, "interference_s": 0.1,
}  # fmt: skip
LONG = {
    "ttft_s": 2.0, "new_tokens": 200, "work_s": 0.4, "gpu_use": 0.6, "prefills_per_s": 5.0,
    "gpu_backlog_s": 0.5, "in_flight": 3, "interference_s": 0.21,
}  # fmt: skip


def score(*workers):
    score = np.empty(len(workers))
    _cheapest(estimates(*workers).rows, score)
    return score


def test_wasted_work_costs_the_wait_that_it_causes():
    # Means over both: use 0.4, 4 prompts a second, a queue of 0.4 s; a price of 4 / 0.6 = 6.667.
    # Short: computes no more than it must: 1 + 0.1 = 1.1.
    # Long: half of its 0.4 s is waste: 0.2 x (0.2 + 0.4) x 6.667 = 0.8; those beside it
    # 0.21; 2 + 0.8 + 0.21 = 3.01.
    assert score(SHORT, LONG) == pytest.approx([1.1, 3.01])


def test_price_of_waste_rises_no_more_beyond_full_use():
    # Use of 0.95 at most: 4 / 0.05 = 80, so the waste costs 0.12 x 80 = 9.6 instead of 0.8.
    fuller = score({**SHORT, "gpu_use": 0.95}, {**LONG, "gpu_use": 0.95})
    assert fuller == pytest.approx([1.1, 3.01 - 0.8 + 9.6])
    assert score({**SHORT, "gpu_use": 3.0}, {**LONG, "gpu_use": 7.0}) == pytest.approx(fuller)


def test_transfer_costs_those_who_fetch_after_it():
    # 2 loads a second on average: 2 s moved behind 0.5 s of queue cost 2 x 2 x (0.5 + 2) = 10 s.
    made = estimates(
        {"loads_per_s": 1.0, "net_backlog_s": 0.5}, {"loads_per_s": 3.0, "net_backlog_s": 9.0}
    )
    made.fetch_s = np.array([2.0, math.inf])
    assert fetch_externality_s(made).tolist() == [10.0, 0.0], "one that is impossible costs nothing"


def fetching(tokens, ttft_s, fetch_s=0.1, **others):
    """Two workers; the second, costly by itself, could first fetch `tokens` on top of 500."""
    made = estimates(SHORT, {**LONG, "cached_tokens": 500}, now_s=0.0)
    made.fetching = estimates(
        SHORT, {**LONG, "ttft_s": ttft_s, "cached_tokens": 500 + tokens} | others
    )
    made.fetching.ttft_s[0] = math.inf
    made.fetching.fetch_s = np.array([fetch_s, fetch_s])
    made.fetching.fetch_from = "w0"
    return made


def test_fetch_is_chosen_when_cheaper_than_every_worker():
    # Without: 1.1 and 3.01. With: 0.5 + 0.21 = 0.71 and no other loads.
    chosen = Priced(fetches=True).choose(fetching(tokens=256, ttft_s=0.5))
    assert (chosen.index, chosen.reason) == (1, "peer_fetch")
    assert chosen.fetch is not None
    assert (chosen.fetch.source_worker, chosen.fetch.tokens) == ("w0", 256)


@pytest.mark.parametrize(
    "offered",
    [
        pytest.param(fetching(tokens=0, ttft_s=0.5), id="of nothing"),
        # 0.9 + 0.21 = 1.11, more than 1.1.
        pytest.param(fetching(tokens=256, ttft_s=0.9), id="that costs more in all"),
        pytest.param(fetching(256, math.inf, fetch_s=math.inf), id="for which there is no room"),
        # 0.5 + 0.6 s on the network: the request itself gains nothing.
        pytest.param(fetching(tokens=256, ttft_s=0.5, fetch_s=0.6), id="longer than what it saves"),
        # 3 loads a second: 0.21 + 0.5 + 0.2 x 3 x (0.5 + 0.2) = 1.13, more than 1.1.
        pytest.param(
            fetching(tokens=256, ttft_s=0.5, fetch_s=0.2, loads_per_s=6.0, net_backlog_s=0.5),
            id="that makes others wait",
        ),
    ],
)
def test_fetch_is_not_chosen_when_it_gains_nothing(offered):
    chosen = Priced(fetches=True).choose(offered)
    assert chosen.index == 0 and chosen.fetch is None
