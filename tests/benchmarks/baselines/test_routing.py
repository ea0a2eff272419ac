from collections import Counter
from itertools import count

import numpy as np
import pytest

from kappa.host import ROUTING_POLICIES, installed
from kappa_benchmarks.baselines.routing.catalogue import BASELINES, baseline_named
from kappa_benchmarks.baselines.routing.dynamo import Dynamo
from kappa_benchmarks.baselines.routing.llm_d import LlmD
from kappa_router.policy import policy_named
from tests.benchmarks.baselines.prompts import BLOCK, chosen, offer

NUMBERS = count()
EVERY = [
    *BASELINES,
    "sglang_cache_aware:balance_abs=2,max_tree_tokens=320",
    "aibrix:imbalance_gap=2,max_blocks=20",
]


def made(spec, seed=0):
    return baseline_named(spec, seed)


def route(policy, estimates, row=None):
    """Choose (or take `row`) and remember; returns the row."""
    index = policy.choose(estimates).index if row is None else row
    policy.routed(estimates, index, f"r{next(NUMBERS)}")
    return index


def picks(policy, estimates, times=200):
    return Counter(policy.choose(estimates).index for _ in range(times))


# -- all of them ------------------------------------------------------------------------------


def stream(requests, workers, seed=5):
    """Estimates of a small mixed workload, on queues and caches drawn at random."""
    rng = np.random.default_rng(seed)
    size = len(workers)
    for i in range(requests):
        prompt = "abcdefgh"[rng.integers(8)] * int(rng.integers(1, 9)) + "xyz"[: rng.integers(4)]
        yield offer(
            rng.integers(0, 6, size),
            prompt,
            session=f"s{rng.integers(9)}" if i % 3 else "",
            workers=workers,
            waiting=rng.integers(0, 3, size),
            device_tokens=rng.integers(0, 2, size) * BLOCK,
            resident_tokens=rng.integers(0, 900, size),
        )


@pytest.mark.parametrize("spec", EVERY)
def test_a_seeded_run_is_repeatable(spec):
    def run(seed):
        policy = made(spec, seed)
        return [route(policy, o) for o in stream(150, ["a", "b", "c", "d"])]

    assert run(3) == run(3)
    assert set(run(3)) <= {0, 1, 2, 3}


@pytest.mark.parametrize("spec", EVERY)
def test_workers_come_and_go(spec):
    policy = made(spec, 0)
    fleets = [["a", "b", "c"], ["b", "c"], ["b", "c", "d"], ["d"], ["d", "a"]]
    known: set[str] = set()
    for fleet in fleets:
        for worker in sorted(known - set(fleet)):
            policy.left(worker)
        known = set(fleet)
        for estimates in stream(40, fleet):
            choice = policy.choose(estimates)
            assert 0 <= choice.index < len(fleet)
            assert choice.reason and " " not in choice.reason
            name = f"r{next(NUMBERS)}"
            policy.routed(estimates, choice.index, name)
            policy.progressed(name, estimates.now_s + 0.5, ended=False)
            policy.progressed(name, estimates.now_s + 1.0, ended=True)
    policy.left("never-there")


@pytest.mark.parametrize("spec", EVERY)
def test_a_prompt_shorter_than_a_block_is_placed(spec):
    policy = made(spec, 0)
    for _ in range(5):
        assert route(policy, offer([1, 0, 2])) in (0, 1, 2)


@pytest.mark.parametrize("spec", EVERY)
def test_the_estimates_are_left_as_they_were(spec):
    policy = made(spec, 0)
    for estimates in stream(30, ["a", "b", "c"]):
        rows, hashes = estimates.rows.copy(), estimates.prefix_hashes.copy()
        route(policy, estimates)
        assert np.array_equal(rows, estimates.rows)
        assert np.array_equal(hashes, estimates.prefix_hashes)


# -- round robin, power of two, sticky, consistent hash ------------------------------------------


def test_round_robin_takes_turns():
    policy = made("round_robin")
    assert [policy.choose(offer([9, 0, 0])).index for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_power_of_two_avoids_the_longest_queue_over_all_pairs():
    counts = picks(made("power_of_two"), offer([0, 1, 2]), 600)
    # Two of the three pairs hold worker 0, one holds only 1 and 2.
    assert counts[2] == 0
    assert counts[0] / 600 == pytest.approx(2 / 3, abs=0.06)


def test_power_of_two_splits_level_queues_evenly():
    counts = picks(made("power_of_two"), offer([4, 4]), 600)
    assert counts[0] / 600 == pytest.approx(1 / 2, abs=0.07)
    assert made("power_of_two").choose(offer([4])).index == 0


def test_sticky_goes_to_the_longest_prefix_however_busy():
    policy = made("sticky")
    held = {"device_tokens": [0, 16, 0], "cached_tokens": [16, 32, 0]}
    assert policy.choose(offer([0, 99, 0], "abcd", **held)).index == 1
    level = {"cached_tokens": [32, 32, 16]}
    assert policy.choose(offer([5, 4, 0], "abcd", **level)).index == 1
    assert policy.choose(offer([5, 4, 3], "abcd")).index == 2


def test_a_session_keeps_its_place_on_the_ring():
    policy = made("consistent_hash")
    names = [f"w{i}" for i in range(8)]
    sessions = [f"s{i}" for i in range(400)]

    def owners(workers):
        queue = [0] * len(workers)
        return {
            s: workers[policy.choose(offer(queue, session=s, workers=workers)).index]
            for s in sessions
        }

    before = owners(names)
    assert owners(names[::-1]) == before
    assert min(Counter(before.values()).values()) > 400 / 8 / 2.5
    policy.left("w3")
    after = owners([name for name in names if name != "w3"])
    moved = [s for s in sessions if after[s] != before[s]]
    assert set(moved) == {s for s in sessions if before[s] == "w3"}
    assert owners(names) == before


def test_without_a_session_any_worker_serves():
    counts = picks(made("consistent_hash"), offer([0, 0, 0]), 300)
    assert min(counts[row] for row in range(3)) > 50


# -- Ray ------------------------------------------------------------------------------------------


def test_ray_follows_the_longest_prefix_whatever_the_queue():
    policy = made("ray_prefix")
    route(policy, offer([0, 0, 0], "aaaa"), row=1)
    route(policy, offer([0, 0, 0], "aaaabbbb"), row=2)
    assert chosen(policy, [0, 0, 50], "aaaabbbbcc") == (2, "prefix_match")
    # Both were sent the first half of this one: the lower queue.
    assert policy.choose(offer([0, 3, 50], "aaaacccc")).index == 1
    # A match within a run counts for the worker that was sent the run.
    assert policy.choose(offer([0, 3, 50], "aaaabb")).index == 2


def test_ray_sends_strangers_to_the_smallest_tree():
    policy = made("ray_prefix")
    route(policy, offer([0, 0, 0], "aaaa"), row=0)
    route(policy, offer([0, 0, 0], "bb"), row=1)
    route(policy, offer([0, 0, 0], "ccc"), row=2)
    assert chosen(policy, [0, 9, 0], "dddd") == (1, "smallest_tree")
    route(policy, offer([0, 0, 0], "bbb"), row=1)
    assert policy.choose(offer([0, 9, 0], "dddd")).index == 2


def test_ray_needs_a_tenth_of_the_prompt():
    policy = made("ray_prefix")
    route(policy, offer([0, 0], "a"), row=0)
    assert policy.choose(offer([0, 0], "a" + "b" * 9)).reason == "prefix_match"
    assert policy.choose(offer([0, 0], "a" + "b" * 10)).reason == "smallest_tree"


# -- SGLang ---------------------------------------------------------------------------------------


def test_sglang_needs_more_than_the_threshold():
    policy = made("sglang_cache_aware")
    route(policy, offer([0, 0], "abc"), row=1)
    assert policy.choose(offer([0, 5], "abc1234567")).reason == "shortest_queue"
    assert chosen(policy, [0, 5], "abc123456") == (1, "prefix_match")


def test_sglang_is_imbalanced_only_if_both_tests_say_so():
    policy = made("sglang_cache_aware")
    route(policy, offer([0, 0], "abc"), row=1)
    assert policy.choose(offer([0, 64], "abc")).index == 1
    assert policy.choose(offer([0, 65], "abc")).reason == "imbalanced"
    assert policy.choose(offer([130, 195], "abc")).index == 1
    assert policy.choose(offer([130, 196], "abc")).index == 0


def test_sglang_prefers_the_first_worker_sent_the_last_piece():
    policy = made("sglang_cache_aware")
    route(policy, offer([0, 0, 0], "abcd"), row=2)
    route(policy, offer([0, 0, 0], "abcd"), row=0)
    assert policy.choose(offer([0, 0, 9], "abcd")).index == 2
    policy.left("w2")
    workers = ["w0", "w1"]
    assert policy.choose(offer([9, 0], "abcd", workers=workers)).index == 0


def test_sglang_sends_lone_strangers_to_the_first_worker():
    policy = made("sglang_cache_aware")
    assert [route(policy, offer([0, 0], prompt * 3)) for prompt in "abcdef"] == [0] * 6


def test_sglang_takes_the_first_worker_without_its_match():
    policy = made("sglang_cache_aware")
    route(policy, offer([0, 0, 0], "abcd"), row=1)
    assert chosen(policy, [5, 0], "abcd", workers=["w0", "w2"]) == (0, "match_not_on_offer")


@pytest.mark.parametrize(
    ("spec", "forgotten"),
    [
        ("sglang_cache_aware:max_tree_tokens=160", "shortest_queue"),
        ("aibrix:max_blocks=10", "fewest_requests"),
    ],
)
def test_bounded_memory_forgets_the_oldest_prompt(spec, forgotten):
    policy = made(spec)
    route(policy, offer([0, 0], "abcdefgh"), row=1)
    route(policy, offer([0, 0], "stuvwxyz"), row=1)
    assert policy.choose(offer([0, 0], "abcdefgh")).reason == forgotten
    assert policy.choose(offer([0, 0], "stuvwxyz")).reason == "prefix_match"


# -- Dynamo ---------------------------------------------------------------------------------------


def test_dynamo_cost_by_hand():
    # Blocks: prompt 8; device 4, 0, 0; host 2, 4, 0; nothing queued or active.
    arrays = {"device_tokens": [64, 0, 0], "cached_tokens": [32, 64, 0]}
    estimates = offer([1, 2, 3], "abcdefgh", **arrays)
    assert Dynamo().cost(estimates).tolist() == [8 - 5.5 + 8, 8 - 3 + 8, 8 + 8]
    tuned = Dynamo(host_credit=0.5, device_credit=2.0, overlap_weight=3.0)
    assert tuned.cost(estimates).tolist() == [0 + 8, 3 * 6 + 8, 3 * 8 + 8]


def test_dynamo_queues_what_caches_leave_and_part_of_host():
    policy = Dynamo()
    held = {"device_tokens": [16, 0], "cached_tokens": [32, 0]}
    policy.routed(offer([0, 0], "stuvwx", **held), 0, "long")
    policy.routed(offer([1, 0], "mn"), 0, "short")
    # Queued at worker 0: 6 - 1 - 0.75 · 2 = 3.5 blocks, then 2; active there: 8.
    estimates = offer([2, 0], "ab")
    assert policy.cost(estimates).tolist() == [5.5 + 2 + 8 + 2, 2 + 2]
    # The later one is prefilled first, then it ends; the other still waits for its prefill.
    policy.progressed("short", 1.0, ended=False)
    assert policy.cost(estimates).tolist() == [3.5 + 2 + 8 + 2, 2 + 2]
    policy.progressed("short", 2.0, ended=True)
    assert policy.cost(estimates).tolist() == [3.5 + 2 + 6 + 2, 2 + 2]
    policy.progressed("long", 3.0, ended=True)
    policy.progressed("another router's", 3.0, ended=True)
    assert policy.cost(estimates).tolist() == [2 + 2, 2 + 2]


def test_dynamo_counts_a_request_that_is_tried_elsewhere_once():
    policy = Dynamo()
    policy.routed(offer([0, 0], "abcdef"), 0, "r")
    policy.routed(offer([0, 0], "abcdef"), 1, "r")
    assert policy.cost(offer([0, 0], "xy")).tolist() == [2 + 2, 6 + 2 + 6 + 2]


def test_dynamo_counts_what_active_requests_share_once():
    policy = Dynamo()
    policy.routed(offer([0, 0], "abcdef"), 0, "r")
    estimates = offer([1, 0], "abcdxy")
    # Worker 0: 6 queued, 6 blocks active, 2 more; worker 1: all 6.
    assert policy.cost(estimates).tolist() == [6 + 6 + 8, 6 + 6]
    policy.progressed("r", 1.0, ended=False)
    assert policy.cost(estimates).tolist() == [6 + 8, 6 + 6]
    policy.progressed("r", 2.0, ended=True)
    assert policy.cost(estimates).tolist() == [12, 12]


def test_dynamo_breaks_ties_at_random():
    assert min(picks(Dynamo(seed=1), offer([0, 0, 0], "ab")).values()) > 40
    estimates = offer([0, 0], "abcd", cached_tokens=[16, 0])
    assert picks(Dynamo(seed=1), estimates) == {0: 200}


# -- llm-d ----------------------------------------------------------------------------------------


def test_llm_d_score_by_hand():
    estimates = offer(
        [0, 0, 0],
        "abcdefgh",
        device_tokens=[64, 0, 0],
        cached_tokens=[0, 128, 0],
        resident_tokens=[500, 250, 2000],
        waiting=[4, 2, 0],
    )
    expected = [2 * 0.5 + 0.5 + 0, 2 * 0.8 + 0.75 + 0.5, 0 + 0 + 1]
    assert LlmD().score(estimates).tolist() == pytest.approx(expected)
    tuned = LlmD(prefix_weight=1, kv_weight=0, queue_weight=0, host_weight=0.25)
    assert tuned.score(estimates).tolist() == pytest.approx([0.5, 0.25, 0])


def test_llm_d_takes_turns_among_equals():
    policy = LlmD()
    estimates = offer([0, 0, 0], "ab", waiting=[1, 1, 5])
    assert [policy.choose(estimates).index for _ in range(4)] == [0, 1, 0, 1]
    level = offer([0, 0], "ab", waiting=[3, 3], resident_tokens=[10, 0])
    best = policy.choose(level)
    assert (best.index, best.reason) == (1, "highest_score")
    assert policy.choose(estimates).index == 0, "a choice that was no tie took no turn"
    assert policy.score(level).tolist() == pytest.approx([1.99, 2.0])


# -- AIBrix ---------------------------------------------------------------------------------------


def test_aibrix_takes_the_longest_match_that_is_not_too_busy():
    policy = made("aibrix")
    route(policy, offer([0] * 4, "abcdefgh"), row=0)
    route(policy, offer([0] * 4, "abcd"), row=1)
    # mean 2.25, sample sigma 0.5: worker 0 may have up to 2.75 requests.
    assert policy.choose(offer([2, 3, 2, 2], "abcdefgh")).index == 0
    # mean 1.25, sigma 0.5: the best match has 2 requests, the next 1.
    assert chosen(policy, [2, 1, 1, 1], "abcdefgh") == (1, "prefix_match")
    wide = made("aibrix:sigmas=3")
    route(wide, offer([0] * 4, "abcdefgh"), row=0)
    assert wide.choose(offer([2, 1, 1, 1], "abcdefgh")).index == 0


def test_aibrix_takes_equal_matches_by_requests():
    policy = made("aibrix")
    for row in (0, 1, 2):
        route(policy, offer([0] * 4, "abcd"), row=row)
    assert policy.choose(offer([3, 2, 3, 0], "abcd")).index == 1
    assert set(picks(policy, offer([2, 2, 3, 9], "abcd"))) == {0, 1}


def test_aibrix_without_a_match_takes_the_fewest_requests():
    policy = made("aibrix")
    assert set(picks(policy, offer([1, 0, 0], "abcd"))) == {1, 2}


def test_aibrix_gate_leaves_only_the_idlest_to_match():
    policy = made("aibrix:sigmas=9")
    route(policy, offer([0] * 4, "abcd"), row=0)
    # max 8 > 2 · (2 + 1), gap 8: worker 0 may not match.
    index, reason = chosen(policy, [8, 0, 0, 0], "abcd")
    assert (index != 0, reason) == (True, "fewest_requests")
    assert policy.choose(offer([7, 0, 0, 0], "abcd")).index == 0
    # 8 > 2 · (2.75 + 1), but the gap is 7.
    assert policy.choose(offer([8, 1, 1, 1], "abcd")).index == 0
    route(policy, offer([0] * 4, "ab"), row=2)
    assert chosen(policy, [8, 0, 0, 0], "abcd") == (2, "prefix_match")


# -- production-stack -----------------------------------------------------------------------------


def test_production_stack_picks_among_the_longest_matches():
    policy = made("production_stack")
    route(policy, offer([0] * 4, "abcd"), row=1)
    route(policy, offer([0] * 4, "abcdef"), row=3)
    assert set(picks(policy, offer([0] * 4, "abcdxx"))) == {1, 3}
    assert set(picks(policy, offer([0, 0, 0, 99], "abcdefgh"))) == {3}
    assert set(picks(policy, offer([0] * 4, "zz"))) == {0, 1, 2, 3}


# -- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "stranger"),
    [
        ("ray_prefix", "smallest_tree"),
        ("sglang_cache_aware", "shortest_queue"),
        ("aibrix", "fewest_requests"),
        ("production_stack", "any"),
    ],
)
def test_what_a_worker_was_sent_is_forgotten_with_it(spec, stranger):
    policy = made(spec)
    route(policy, offer([0, 0], "abcd"), row=1)
    assert policy.choose(offer([0, 0], "abcd")).reason == "prefix_match"
    policy.left("w1")
    # Back with the same name, but empty.
    assert policy.choose(offer([0, 0], "abcd")).reason == stranger


# -- by name --------------------------------------------------------------------------------------


def test_every_baseline_says_where_it_comes_from():
    for name, cls in BASELINES.items():
        assert cls.name == name
        assert cls.source
        assert "Reimplemented" in (cls.__doc__ or "") or name == "sticky"


def test_a_spec_sets_parameters_and_is_the_name():
    policy = made("dynamo:host_credit=0.5, overlap_weight=2")
    assert policy.name == "dynamo:host_credit=0.5, overlap_weight=2"
    estimates = offer([0], "abcd", cached_tokens=[32])
    assert policy.cost(estimates).tolist() == [2 * (4 - 1) + 4]
    assert made("dynamo").host_credit == 0.75
    assert made("dynamo").name == "dynamo"


def test_every_baseline_is_installed_under_its_name():
    assert [*installed(ROUTING_POLICIES)] == sorted(BASELINES)
    for name in BASELINES:
        assert type(policy_named(name)) is BASELINES[name]
    assert policy_named("dynamo:host_credit=0.5", seed=3).name == "dynamo:host_credit=0.5"


@pytest.mark.parametrize("spec", ["nobody", "nobody:c=1"])
def test_an_unknown_policy_is_refused_with_those_installed(spec):
    with pytest.raises(ValueError, match=r"unknown policy 'nobody.*'aibrix'.*'priced'.*'sticky'"):
        policy_named(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("dynamo:host=1", "no parameter 'host'; .*host_credit=0.75"),
        ("round_robin:c=1", "no parameter 'c'; parameters and defaults: none"),
        ("dynamo:", "is not key=value; .*overlap_weight=1.0"),
        ("dynamo:host_credit", "is not key=value"),
        ("dynamo:host_credit=", "is not key=value"),
        ("dynamo:host_credit=1,host_credit=1", "given twice"),
        ("dynamo:host_credit=lots", "host_credit must be a number, got 'lots'"),
        ("dynamo:host_credit=nan", "host_credit must be a number"),
        ("dynamo:host_credit=-1", "'dynamo:host_credit=-1': host_credit must be at least 0"),
        ("consistent_hash:virtual_nodes=1.5", "virtual_nodes must be a whole number"),
        ("consistent_hash:virtual_nodes=0", "virtual_nodes must be at least 1"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(spec, says):
    with pytest.raises(ValueError, match=says):
        baseline_named(spec, 0)
