"""Rollout modes: read strictly, a canary steers its share and keeps conversations together."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.settings import front
from kappa_router.rollout import PRESENT, RayServe, Rollout, ShadowDecision
from tests.router.offering import estimates


@pytest.mark.parametrize(("text", "arm"), [("shadow", "ray"), ("on", "kappa")])
def test_modes_without_a_share_have_one_arm(text, arm):
    rollout = Rollout.parse(text)
    assert {rollout.arm(str(i)) for i in range(50)} == {arm}


@pytest.mark.parametrize("percent", [1, 5, 12.5, 50, 99])
def test_canary_steers_about_its_share_of_the_conversations(percent):
    rollout = Rollout.parse(f"canary:{percent}")
    n = 20_000
    steered = sum(rollout.arm(f"conversation {i}") == "kappa" for i in range(n))
    spread = 4 * (n * percent / 100 * (1 - percent / 100)) ** 0.5
    assert abs(steered - n * percent / 100) < spread


@given(st.text())
def test_conversation_stays_in_its_arm_as_a_canary_grows(name):
    small, large = Rollout.parse("canary:10"), Rollout.parse("canary:40")
    assert small.arm(name) == Rollout.parse("canary:10").arm(name)
    if small.arm(name) == "kappa":
        assert large.arm(name) == "kappa"


def test_shadow_says_agreement_and_what_ours_would_save():
    other = ShadowDecision("w1", "c2c", "load", 1.0, "w2", "pcie", 3.5)
    assert other.agreed is False and other.saving_s == 2.5
    assert ShadowDecision("w1", "c2c", "load", 1.0, "w1", "c2c", 1.0).agreed is True


@pytest.mark.parametrize("name", ["\ud800", "alice \udfff", ""])
def test_name_that_is_no_text_has_an_arm_too(name):
    assert Rollout.parse("canary:50").arm(name) in ("kappa", "ray")


def test_balancer_url_is_named_and_thought_to_spread():
    rollout = Rollout.parse("canary:50", "http://balancer:80")
    assert rollout.balancer == "http://balancer:80" and rollout.present.name == "least-connections"
    assert not Rollout.parse("on").balancer and not Rollout.parse("on", "prefix-hash").balancer


@pytest.mark.parametrize("text", ["shadow", "canary:5", "on"])
def test_other_arm_is_the_present_balancers_where_one_is_set(text):
    rollout = Rollout.parse(text, "round-robin")
    arms = {rollout.arm(str(i)) for i in range(500)}
    assert arms == {"shadow": {"present"}, "on": {"kappa"}}.get(text, {"kappa", "present"})


# -- emulated present balancers --------------------------------------------------------------------


MOMENTS_S = count(1.0, 0.25)


def offer(*in_flight, workers="abc", hashes=(), session=""):
    load = in_flight or [0] * len(workers)
    return estimates(
        *({"in_flight": n} for n in load), names=list(workers), prefix_hashes=hashes,
        session=session, now_s=next(MOMENTS_S),
    )  # fmt: skip


def chosen(rule, *offers):
    return [each.workers[rule.choose(each).index] for each in offers]


def test_round_robin_takes_one_after_the_other():
    assert chosen(PRESENT["round-robin"](), *[offer()] * 5) == ["a", "b", "c", "a", "b"]


def test_least_connections_takes_the_fewest_and_ties_in_turn():
    rule = PRESENT["least-connections"]()
    assert chosen(rule, offer(2, 1, 3), offer(0, 1, 1)) == ["b", "a"]
    assert chosen(rule, *[offer(1, 1, 1)] * 4) == ["c", "a", "b", "c"]


def test_rays_rule_takes_the_shorter_of_two_random_queues():
    rule = RayServe()
    assert chosen(rule, *[offer(4, 1, workers="ab")] * 3, offer(7, workers="a")) == [*"bbba"]
    found = chosen(rule, *(offer(3, 2, 1) for _ in range(600)))
    assert found.count("a") == 0 and 150 < found.count("b") < 250
    one = offer(0, 0, 0)
    assert chosen(rule, one) == chosen(rule, one)


def test_prefix_hash_keeps_its_worker_and_moves_only_what_must():
    rule = PRESENT["prefix-hash"]()
    keys = range(1, 400)
    before = chosen(rule, *[offer(hashes=[k, 7]) for k in keys])
    assert before == chosen(PRESENT["prefix-hash"](), *[offer(hashes=[k]) for k in keys])
    assert all(before.count(worker) > 90 for worker in "abc")
    after = chosen(rule, *[offer(hashes=[k], workers="ab") for k in keys])
    assert all(now == then for now, then in zip(after, before, strict=True) if then != "c")


def test_prefix_hash_without_a_prompt_goes_by_the_session():
    rule = PRESENT["prefix-hash"]()
    assert len(set(chosen(rule, *[offer(session="\ud800 s")] * 5))) == 1
    assert set(chosen(rule, *[offer(session=str(k)) for k in range(60)])) == set("abc")


def test_settings_offer_the_balancers_that_can_be_emulated():
    assert tuple(PRESENT) == front._PRESENT


def test_other_is_the_rule_that_steers_where_ours_does_not():
    rollout = Rollout.parse("canary:50", "round-robin")
    for name in map(str, range(50)):
        steers = None if rollout.arm(name) == "kappa" else rollout.present
        assert rollout.other(name) is steers
