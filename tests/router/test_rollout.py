"""Rollout modes: read strictly, a canary steers its share and keeps conversations together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.rollout import Rollout, ShadowDecision


@pytest.mark.parametrize(
    ("text", "decides", "arm"),
    [("ray", False, "ray"), ("shadow", True, "ray"), ("on", True, "kappa")],
)
def test_modes_without_a_share(text, decides, arm):
    rollout = Rollout.parse(text)
    assert rollout.decides == decides
    assert {rollout.arm(str(i)) for i in range(50)} == {arm}


@pytest.mark.parametrize(
    "text", ["", "off", "canary", "canary:", "canary:0", "canary:100", "canary:x", "canary:nan",
             "Canary:5", "on:5", "canary:-1", "canary:inf"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match=r"ray, shadow, canary:N with 0 < N < 100"):
        Rollout.parse(text)


@pytest.mark.parametrize("percent", [1, 5, 12.5, 50, 99])
def test_a_canary_steers_about_its_share_of_the_conversations(percent):
    rollout = Rollout.parse(f"canary:{percent}")
    assert rollout.decides
    n = 20_000
    steered = sum(rollout.arm(f"conversation {i}") == "kappa" for i in range(n))
    spread = 4 * (n * percent / 100 * (1 - percent / 100)) ** 0.5
    assert abs(steered - n * percent / 100) < spread


@given(st.text())
def test_a_conversation_stays_in_its_arm_and_a_larger_canary_keeps_what_a_smaller_steered(name):
    small, large = Rollout.parse("canary:10"), Rollout.parse("canary:40")
    assert small.arm(name) == Rollout.parse("canary:10").arm(name)
    if small.arm(name) == "kappa":
        assert large.arm(name) == "kappa"


def test_a_shadow_says_whether_both_agreed_and_what_ours_would_have_saved():
    other = ShadowDecision("w1", "c2c", "load", 1.0, "w2", "pcie", 3.5)
    assert other.agreed is False and other.saving_s == 2.5
    assert ShadowDecision("w1", "c2c", "load", 1.0, "w1", "c2c", 1.0).agreed is True


@pytest.mark.parametrize("name", ["\ud800", "alice \udfff", ""])
def test_a_name_that_is_no_text_has_an_arm_too(name):
    assert Rollout.parse("canary:50").arm(name) in ("kappa", "ray")
