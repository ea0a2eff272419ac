"""What a new prefix's follow-ups are expected to cost, as learnt from what was routed."""

import pytest

from router.placement import FutureLoads, is_first
from router.policies import policy_named
from tests.router.offering import offers

FIRST = {"new_tokens": 1000.0}
LOADED = {"new_tokens": 100.0, "cached_tokens": 900.0}
ON_DEVICE = {"new_tokens": 100.0, "device_tokens": 900.0}


def learnt(*follow_ups, firsts=10):
    future = FutureLoads()
    for _ in range(firsts):
        future.routed(offers(FIRST), 0)
        for row in follow_ups:
            future.routed(offers(row), 0)
    return future


def test_a_prompt_is_first_if_nobody_holds_half_of_it():
    assert is_first(offers({"new_tokens": 501.0}, {"new_tokens": 1000.0}))
    assert not is_first(offers(FIRST, {"new_tokens": 499.0}))


def test_loads_are_follow_ups_by_the_share_that_was_loaded():
    assert learnt(LOADED, LOADED).loads == pytest.approx(2.0, rel=0.02)
    assert learnt(LOADED, ON_DEVICE).loads == pytest.approx(1.0, rel=0.02)
    assert learnt(ON_DEVICE).loads == 0.0


def test_nothing_is_charged_before_anything_is_known():
    assert FutureLoads().loads == learnt(LOADED, firsts=3).loads == 0.0


def test_a_first_request_prefers_the_fast_link_that_its_follow_ups_will_use():
    policy = policy_named("priced_place")
    slow = {**FIRST, "ttft_s": 1.0, "load_token_s": 1e-3}
    fast = {**FIRST, "ttft_s": 1.5, "load_token_s": 1e-4}
    assert policy.choose(offers(slow, fast)).index == 0
    for _ in range(10):
        policy.routed(offers(FIRST), 0)
        policy.routed(offers(LOADED), 0)
    assert policy.choose(offers(slow, fast)).index == 1
    # A follow-up goes by what it costs itself.
    assert policy.choose(offers({**slow, **LOADED}, {**fast, **LOADED})).index == 0
