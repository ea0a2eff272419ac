"""The routers of 2026, each decision by hand."""

from collections import Counter

import numpy as np
import pytest

from kappa_benchmarks.baselines.routing.catalogue import baseline_named as made
from kappa_benchmarks.baselines.routing.dynamo import DynamoJsew
from kappa_benchmarks.baselines.routing.learner import Ridge, features
from tests.benchmarks.baselines.prompts import chosen, offer

# -- LMetric ---------------------------------------------------------------------------------------


def test_lmetric_takes_the_least_product_and_the_first_of_equals():
    policy = made("lmetric:window=1")
    # 10 blocks of 16: worker 1 computes 2 of them, 32 * 4 = 128 against 160 * 1; then 32 * 5 = 160.
    assert chosen(policy, [0, 3], "a" * 10, device_tokens=[0, 128])[0] == 1
    assert chosen(policy, [0, 4], "a" * 10, device_tokens=[0, 128])[0] == 0
    assert chosen(policy, [0, 3], "a" * 10, cached_tokens=[0, 128])[0] == 1
    half = made("lmetric:host_credit=0.5")
    # Half of 8 host blocks: 160 - 64 = 96, times 2 = 192.
    assert chosen(half, [0, 1], "a" * 10, cached_tokens=[0, 128])[0] == 0


def test_lmetric_compares_requests_when_all_hold_the_prompt():
    assert chosen(made("lmetric"), [3, 1], "abc", device_tokens=[48, 48])[0] == 1


def test_lmetric_leaves_out_the_holder_of_a_hot_prefix():
    policy = made("lmetric:class_blocks=2,window=4")
    held = {"device_tokens": [160, 0, 0, 0]}
    # All of the window is of this class, one of four holds it: 1 * 3 > 0 * 1.
    found = [chosen(policy, [2, 1, 1, 1], "a" * 10, **held) for _ in range(2)]
    assert found == [(0, "least_product"), (1, "hot_spot")]
    # Of another class, which no worker holds.
    assert chosen(policy, [2, 1, 1, 1], "b" * 10)[1] == "least_product"


def test_lmetric_keeps_a_prefix_that_is_not_hot_at_its_holders():
    policy = made("lmetric:class_blocks=2,window=4")
    for _ in range(6):
        # Half of the requests, half of the workers: 1/2 * 2 is not more than 1/2 * 2.
        assert chosen(policy, [2, 2, 1, 1], "a" * 10, device_tokens=[160, 160, 0, 0])[0] == 0
        policy.choose(offer([2, 2, 1, 1], "b" * 10))


# -- Dynamo ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_flight", "device", "expected"),
    [
        # Six of ten blocks is more than half, five is not.
        ([0, 4], [0, 96], (1, "prefix_match")),
        ([0, 4], [0, 80], (0, "fewest_requests")),
        # 40 apart and more than 1.1 times; 64 apart, but 704 is 1.1 * 640.
        ([0, 40], [0, 160], (0, "imbalanced")),
        ([640, 704], [0, 160], (1, "prefix_match")),
        ([640, 705], [0, 160], (0, "imbalanced")),
        ([3, 2, 2], [96, 96, 96], (1, "prefix_match")),
    ],
)
def test_two_tiers_ask_for_load_then_for_the_cache(in_flight, device, expected):
    policy = made("dynamo_two_tier")
    assert chosen(policy, in_flight, "a" * 10, device_tokens=device) == expected


def test_two_tiers_do_not_see_the_host_tier():
    assert chosen(made("dynamo_two_tier"), [0, 1], "abcd", cached_tokens=[0, 64])[0] == 0


def test_jsew_bends_decode_blocks_by_load_and_expected_work():
    policy = DynamoJsew(
        work_scale=2.0, footprint_weight=1.0, ema_alpha=0.5, load_exponent=2.0, share_exponent=0.5
    )
    policy.routed(offer([0, 0], "abcdef"), 0, "r")
    policy.progressed("r", 1.0, ended=False)
    estimates = offer([4, 0], "xy", device_tokens=[16, 0])
    policy.choose(estimates)
    # Active there with it: 8 * sqrt(4) = 16 blocks, and 2; mean 9; charged 16 * 16/9 and 2 * 2/9.
    # Expected: one of its two blocks, so 1 + 2 * 1/2 = 2 of these.
    assert policy.cost(estimates).tolist() == pytest.approx([1 + 2 * 256 / 9, 2 + 2 * 4 / 9])
    policy.choose(offer([0, 0], "uvw"))
    # The average of 1 and 3 blocks is 2 of two: 1 + 2 * 1.
    assert policy.cost(estimates).tolist() == pytest.approx([1 + 3 * 256 / 9, 2 + 3 * 4 / 9])


def test_jsew_without_its_exponents_is_dynamo():
    neutral = "dynamo_jsew:work_scale=0,footprint_weight=1,load_exponent=1,share_exponent=0"
    one, other = made(neutral), made("dynamo")
    estimates = offer([3, 1], "abcd", device_tokens=[16, 32], cached_tokens=[16, 0])
    assert one.cost(estimates).tolist() == other.cost(estimates).tolist()


# -- llm-d -----------------------------------------------------------------------------------------


def test_llm_d_affinity_keeps_to_the_holders_until_they_are_late():
    policy = made("llm_d_affinity:max_penalty_s=1,prefill_tokens_per_s=100")
    held = {"device_tokens": [64, 0], "cached_tokens": [64, 0], "new_tokens": [32, 160]}
    assert chosen(policy, [0, 0], "a" * 10, queued_tokens=[100, 0], **held)[0] == 0
    assert chosen(policy, [0, 0], "a" * 10, queued_tokens=[101, 0], **held)[0] == 0
    # More than a second behind, and 129 + 32 is more than 160.
    assert chosen(policy, [0, 0], "a" * 10, queued_tokens=[129, 0], **held)[0] == 1
    # Seven of ten blocks is under the threshold.
    less = {"device_tokens": [112, 0], "new_tokens": [48, 160]}
    assert chosen(policy, [0, 0], "a" * 10, queued_tokens=[113, 0], **less)[0] == 1


def test_llm_d_latency_weighs_idle_and_holders_by_ttft():
    policy = made("llm_d_latency:warm_up=0", seed=1)
    policy.model_of("any")._weights[:] = [0, 1, 0, 0, 1, 0, 0, 0]
    new = {"new_tokens": [1000, 2000, 3000]}

    def share(times=3000, **arrays):
        busy = {"in_flight": [1, 1, 1], "prompt": "a" * 10, **new, **arrays}
        found = Counter(policy.choose(offer(**busy)).index for _ in range(times))
        return [found[row] / times for row in range(3)]

    # 1, 2 and 3 s: weights 101, 51 and 1 of 153.
    assert share() == pytest.approx([101 / 153, 51 / 153, 1 / 153], abs=0.03)
    assert share(100, in_flight=[1, 0, 1]) == [0, 1, 0]
    assert share(100, device_tokens=[0, 0, 160]) == [0, 0, 1]
    # The holder is 5.5 s later than the best of the others.
    late = share(device_tokens=[0, 0, 160], queued_tokens=[0, 0, 3500])
    assert late[2] < 0.05


# -- learners --------------------------------------------------------------------------------------


def test_least_squares_find_the_seconds_of_each_feature():
    rng, model = np.random.default_rng(0), Ridge(memory=1e9)
    true = np.array([0.1, 0.5, 0.02, 0, 0.3, 0, 0, 0.01])
    rows = rng.uniform(0, 5, (800, 8))
    for row in rows:
        model.learn(row, float(row @ true))
    assert model.seconds(rows[:5]) == pytest.approx(rows[:5] @ true, rel=0.02)


def test_no_feature_makes_a_first_token_sooner():
    rng, model = np.random.default_rng(0), Ridge(memory=1e9)
    for row in rng.uniform(0, 5, (400, 8)):
        model.learn(row, float(10 - row[1] + row[4]))
    assert (model._weights >= 0).all()
    assert model._weights[1] == pytest.approx(0.0, abs=1e-6)


def test_features_are_of_the_request_and_of_the_queue():
    estimates = offer(
        [3], "a", new_tokens=[1000], cached_tokens=[2000], device_tokens=[500], waiting=[2],
        queued_tokens=[4000], resident_tokens=[9000],
    )  # fmt: skip
    assert features(estimates).tolist() == [[1, 1, 2, 0.5, 4, 9, 2, 3]]


def served(policy, estimates, number, seconds):
    """Route one request and let its first token come."""
    index = policy.choose(estimates).index
    policy.routed(estimates, index, f"r{number}")
    policy.progressed(f"r{number}", seconds[index], ended=False)
    policy.progressed(f"r{number}", seconds[index] + 1.0, ended=True)
    return index


def test_lodestar_learns_a_slow_worker_and_its_recovery():
    policy = made("lodestar:explore=0.1,memory=50,warm_up=8", seed=2)
    estimates = offer([0, 0], "abcd", new_tokens=[64, 64])

    def shares(seconds, times=300):
        for number in range(times):
            served(policy, estimates, number, seconds)
        found = Counter(served(policy, estimates, number, seconds) for number in range(200))
        return found[0] / 200

    assert shares([1.0, 3.0]) > 0.85
    assert shares([3.0, 1.0]) < 0.15


def test_a_learner_forgets_requests_of_a_worker_that_left():
    policy = made("lodestar:warm_up=1")
    policy.routed(offer([0, 0], "ab"), 1, "r")
    policy.left("w1")
    policy.progressed("r", 5.0, ended=False)
    assert policy.model_of("w1").samples == 0
