"""Who is refused: those that would start too late, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kappa.hardware import node_profile
from router.admission import Admission
from router.core import Router, RouterConfig
from router.decision import NoWorkerError, OverloadedError
from router.demand import Asked, Demand
from router.policies import policy_named
from tests.router.test_core import announcement, ask


def router(admission, *workers, stale_after_s=10.0):
    config = RouterConfig(
        policy=policy_named("ttft"), secret=7, admission=admission, stale_after_s=stale_after_s
    )
    made = Router(config)
    for worker in workers or ("a", "b"):
        made.join(announcement(worker), 0.0)
    return made


def flood(made, limit=200):
    """Send long prompts at once until one is refused; returns how many were let in."""
    for i in range(limit):
        try:
            made.route(ask(f"r{i}", tokens=20_000, seed=i), 1.0)
        except OverloadedError as error:
            return i, error
    return limit, None


def test_without_admission_everybody_is_let_in():
    assert flood(router(None), limit=60) == (60, None)


def test_a_queue_longer_than_the_objective_is_refused_with_a_time_to_come_back():
    count, error = flood(router(Admission()))
    # Two nodes, five times the idle TTFT each: at most five on each; VRAM holds fewer at once.
    assert 4 <= count <= 10
    assert error.retry_after_s > 0 and "too l" in str(error)
    assert isinstance(error, NoWorkerError)


def test_a_refusal_reserves_nothing():
    made = router(Admission())
    count, _ = flood(made)
    assert made.reservations == count


def test_the_floor_lets_short_prompts_in_whatever_their_multiple():
    strict = Admission(floor_s=0.0, ttft_factor=1.5)
    assert flood(router(strict))[0] < flood(router(Admission(floor_s=10.0, ttft_factor=1.5)))[0]


def test_one_that_was_let_in_and_lost_its_worker_is_not_refused():
    made = router(Admission())
    flood(made)
    made.route(ask("again", tokens=20_000, seed=1, exclude=frozenset({"a"}), retry=True), 1.0)


def test_an_uninformed_request_is_not_judged():
    made = router(Admission())
    flood(made)
    assert made.route(ask("blind", tokens=None), 1.0).reason == "uninformed_least_backlog"


@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_the_floor_is_in_dilated_time(dilation):
    made = Router(RouterConfig(policy=policy_named("ttft"), secret=7))
    node = replace(node_profile("h100-pcie5"), source="paced", dilation=dilation)
    made.join(replace(announcement("a"), node=node), 0.0)
    offers = made.explain(ask(), 1.0).offers
    idle_s = made.state.fleet.idle_ttft_s(offers.slots, offers.prompt_tokens, 0.0)[0]
    _, limit_s = Admission().idle_and_limit_s(made.state.fleet, offers)
    assert limit_s == max(0.5 * dilation, 5 * idle_s)


def test_a_node_with_many_streams_is_too_slow_per_token():
    made = router(Admission(ttft_factor=1e9), "a", stale_after_s=1e9)
    let_in, error = 0, None
    for i in range(2000):
        try:
            # So far apart that no prompt is in another's way.
            made.route(ask(f"r{i}", tokens=2000, seed=i), 20.0 * i)
        except OverloadedError as refused:
            error = refused
            break
        made.first_token(f"r{i}", 20.0 * i + 0.1)
        let_in += 1
    # Three idle steps: the weights twice over, and the first request's own context.
    assert "each token" in str(error) and error.retry_after_s > 0
    step = made.state.workers["a"].announcement.step
    room_s = 2 * (step.weights_s + step.fixed_s) + 2 * 2000 * step.context_token_s
    assert let_in == pytest.approx(room_s / (2000 * step.context_token_s), rel=0.6)


def test_one_that_another_worker_can_serve_in_time_goes_there():
    made = router(Admission())
    first = made.route(ask("r0", tokens=20_000, seed=0), 1.0).worker
    for i in range(1, 40):
        try:
            made.route(ask(f"r{i}", tokens=20_000, seed=i), 1.0)
        except OverloadedError:
            break
    other = {"a": "b", "b": "a"}[first]
    assert made.in_flight_on(first) and made.in_flight_on(other)


def test_no_more_are_let_in_than_a_worker_runs_at_a_time():
    made = router(Admission(ttft_factor=1e9, tpot_factor=1e9), "a", stale_after_s=1e9)
    made.join(replace(announcement("a"), max_sequences=3), 0.0)
    for i in range(3):
        made.route(ask(f"r{i}", tokens=100, seed=i), 20.0 * i)
    with pytest.raises(OverloadedError, match="as many run as may"):
        made.route(ask("r3", tokens=100, seed=3), 60.0)
    made.release("r0", 60.0)
    made.route(ask("r4", tokens=100, seed=4), 61.0)


def test_what_came_later_than_predicted_keeps_the_next_one_out():
    made = router(Admission(), "a", stale_after_s=1e9)
    made.route(ask("slow", tokens=100, seed=1), 0.0)
    with pytest.raises(OverloadedError) as caught:
        made.route(ask("next", tokens=100, seed=2), 30.0)
    assert caught.value.retry_after_s > 20
    made.first_token("slow", 30.0)
    made.release("slow", 31.0)
    made.route(ask("later", tokens=100, seed=3), 60.0)


def test_cheap_requests_are_let_in_where_dear_ones_are_not():
    made = router(Admission(), "a", stale_after_s=1e9)
    flood(made)
    demand = Demand()
    for i in range(100):
        demand.judged(Asked(59.0, i * 1e-3, 1.0, i % 2 == 0))
    fleet = made.state.fleet
    idle, room = Admission().tpot_factor, {}
    for name, tokens in (("cheap", 10), ("dear", 20_000)):
        offers = made.explain(ask("x", tokens=tokens, seed=9), 60.0).offers
        judged = Admission().judge(fleet, offers, made._lateness, demand, offers.in_flight + 1)
        limit_s = Admission().tpot_limit_s(fleet, offers)
        room[name] = float((judged.token_s - judged.slow_s)[0]) / limit_s
    assert room["cheap"] == pytest.approx(1.0, abs=0.05)
    assert 1 / idle < room["dear"] < 0.7


@pytest.mark.parametrize("tokens", [100, 20_000])
def test_an_idle_cluster_lets_anybody_in_whatever_came_of_others(tokens):
    made = router(Admission(), "a", stale_after_s=1e9)
    made.route(ask("slow", tokens=100, seed=1), 59.0)
    made.first_token("slow", 99.0)
    made.release("slow", 100.0)
    for _ in range(128):
        made._demand.judged(Asked(100.0, 1e-9, 1e9, False))
    assert made._lateness.late_s("a", 100.0) > 3
    made.route(ask("dear", tokens=tokens, seed=3), 100.0)
    with pytest.raises(OverloadedError):
        made.route(ask("next", tokens=tokens, seed=4), 100.0)


def test_a_limit_below_idle_refuses_and_does_not_divide_by_it():
    made = router(Admission(floor_s=0.0, ttft_factor=0.0), "a")
    made.route(ask("first", tokens=100, seed=1), 1.0)
    with pytest.raises(OverloadedError, match="too late"):
        made.route(ask("second", tokens=100, seed=2), 1.0)


def chats(made, start_s, count=120, every_s=0.05):
    """Short prompts, each ended before the next; returns the time after them."""
    for i in range(count):
        now_s = start_s + i * every_s
        made.route(ask(f"chat{now_s}", tokens=100, seed=i), now_s)
        made.first_token(f"chat{now_s}", now_s + 0.02)
        made.release(f"chat{now_s}", now_s + 0.04)
    return start_s + count * every_s


def test_a_long_prompt_that_makes_many_short_ones_late_waits_for_its_share():
    made = router(Admission(), "a", stale_after_s=1e9)
    now_s = chats(made, 0.0)
    # The first is let in: nobody did so of late.
    first = made.route(ask("long", tokens=40_000, seed=1), now_s)
    made.first_token("long", now_s + 1.0)
    made.release("long", now_s + 1.1)
    now_s = chats(made, now_s + 3.0)
    with pytest.raises(OverloadedError, match=r"make [0-9]+ others late") as caught:
        made.route(ask("longer", tokens=40_000, seed=2), now_s)
    repaid_s = first.chosen.compute_s / Admission().displacing_share
    assert 1.0 < caught.value.retry_after_s < repaid_s
    now_s = chats(made, now_s + caught.value.retry_after_s)
    made.route(ask("longest", tokens=40_000, seed=3), now_s)


def test_long_prompts_that_come_alone_displace_nobody():
    made = router(Admission(), "a", stale_after_s=1e9)
    for i in range(20):
        made.route(ask(f"long{i}", tokens=40_000, seed=i), 10.0 * i)
        made.first_token(f"long{i}", 10.0 * i + 1.0)
        made.release(f"long{i}", 10.0 * i + 1.1)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_that_would_keep_long_prompts_out_is_refused(share):
    with pytest.raises(ValueError, match="displacing_share"):
        Admission(displacing_share=share)
