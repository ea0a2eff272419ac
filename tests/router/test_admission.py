"""Who is refused: those that would start too late, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from router.admission import Admission, Judgement, alone_s, delay_s
from router.core import Router, RouterConfig
from router.decision import NoWorkerError, OverloadedError
from router.demand import Asked, Demand
from router.fleet import Fleet
from router.lateness import Lateness
from router.policies import policy_named
from tests.router import test_fleet
from tests.router.offering import offers
from tests.router.test_core import SHAPE, announcement, ask

fleet_of, priced = test_fleet.fleet, test_fleet.ask


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


def test_the_limit_follows_what_the_best_holder_has_on_the_device_and_in_host():
    # 4,000 tokens, of which one worker has 1,000 on the device and 2,000 in host: the idle TTFT is
    # that of loading 3,000 (131,072 bytes each at 63 GB/s, 6.2 ms) and computing 1,000 behind them.
    fleet = fleet_of("h100-pcie5", "h100-pcie5")
    offers = priced(fleet, tokens=4000)
    offers.device_tokens[1], offers.cached_tokens[1] = 1000.0, 2000.0
    step = step_model(SHAPE, node_profile("h100-pcie5"))
    expected_s = 3000 * 131072 / 63e9 + step.step_s([(1000, 3000)])
    idle_s, limit_s = Admission(floor_s=0.0, ttft_factor=4.0).idle_and_limit_s(fleet, offers)
    assert idle_s == pytest.approx(expected_s)
    assert limit_s == pytest.approx(4 * expected_s)
    floor_s = Admission(floor_s=9.0).idle_and_limit_s(fleet, offers)[1]
    assert floor_s == 9.0


@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_a_long_prompt_is_judged_by_the_long_view_in_dilated_time(dilation):
    fleet = Fleet()
    node = replace(node_profile("h100-pcie5"), source="paced", dilation=dilation)
    fleet.join(replace(announcement("w0"), node=node), 0.0)
    lateness = Lateness()
    # A prompt that delays tokens by 1.2 s: 1.2 / 3 = 0.4 of the last 3 s, 1.2 / 12 = 0.1 of 12 s.
    lateness.sent("r", "w0", 1.0, 0.1, delay_s=1.2 * dilation, dilation=dilation)
    stretched = {}
    for work_s in (0.24, 0.26):
        offers = priced(fleet, now_s=1.0)
        offers.work_s[:] = work_s * dilation
        alone_s = float(offers.tpot_s[0])
        judged = Admission().judge(fleet, offers, lateness, Demand(), np.array([8.0]))
        stretched[work_s] = float(judged.token_s[0]) / alone_s
    assert stretched == pytest.approx({0.24: 1 / 0.6, 0.26: 1 / 0.9})


def test_a_judgement_by_hand():
    fleet = fleet_of("h100-pcie5")
    offers = priced(fleet, tokens=4000)
    offers.ttft_s[0], offers.tpot_s[0], offers.gpu_use[0] = 7.0, 0.5, 0.2
    offers.in_flight[0] = 4.0
    step = step_model(SHAPE, node_profile("h100-pcie5"))
    idle_s = step.step_s([(4000, 0)])
    idle_token_s = step.weights_s + 4000 * step.context_token_s + step.fixed_s
    # Nobody was refused before, so it may use all of the slack: up to 5 and 3 times idle.
    admission = Admission(floor_s=0.0, ttft_factor=5.0, tpot_factor=3.0)
    judged = admission.judge(fleet, offers, Lateness(), Demand(), np.array([4.0]))
    assert judged.late_s == pytest.approx([7.0 - 5 * idle_s])
    # Prompts take 0.2 of the time: 0.5 s a token are 0.4 s without them; none were sent lately.
    assert judged.token_s == pytest.approx([0.4])
    assert judged.slow_s == pytest.approx([0.4 - 3 * idle_token_s])
    assert judged.slack_s == pytest.approx(4 * idle_s)
    assert judged.work_s == offers.work_s[0]
    assert judged.full.tolist() == [True] and judged.idle.tolist() == [False]


def test_a_late_worker_is_late_by_what_its_last_requests_were():
    fleet = fleet_of("h100-pcie5")
    lateness = Lateness()
    lateness.sent("r", "w0", 0.0, ttft_s=0.5, delay_s=0.0)
    lateness.first_token("r", 2.5)
    args = (priced(fleet, now_s=2.5), lateness, Demand(), np.array([8.0]))
    late = Admission().judge(fleet, *args)
    args = (priced(fleet, now_s=2.5), Lateness(), Demand(), np.array([8.0]))
    punctual = Admission().judge(fleet, *args)
    # It came 2.5 - 0.5 s after its prediction, just now.
    assert late.late_s - punctual.late_s == pytest.approx([2.0])


def test_how_long_a_prompt_delays_a_token_beside_it():
    # Without prompts a token takes 0.5 x (1 - 0.2) = 0.4 s. Of that the 0.1 s queued ahead leave
    # 0.3 s for 0.7 s of work. Where 2 s are queued nothing is left; short work delays nobody.
    made = offers(
        {"tpot_s": 0.5, "gpu_use": 0.2, "gpu_backlog_s": 0.1, "work_s": 0.7},
        {"tpot_s": 0.5, "gpu_use": 0.2, "gpu_backlog_s": 2.0, "work_s": 0.7},
        {"tpot_s": 0.5, "gpu_use": 0.2, "gpu_backlog_s": 0.1, "work_s": 0.2},
    )
    assert delay_s(made) == pytest.approx([0.4, 0.7, 0.0])
    assert alone_s(made) == pytest.approx([0.4] * 3)


def test_an_overloaded_worker_is_stretched_by_no_more_than_the_price_of_a_token_is():
    # Use counts as 0.95 at most, as when the token was priced: 2 s x 0.05.
    assert alone_s(offers({"tpot_s": 2.0, "gpu_use": 7.0})) == pytest.approx([0.1])


def judgement(*workers, repaid_s=0.0):
    rows = {
        name: np.array([float(worker.get(name, plain)) for worker in workers])
        for name, plain in (("late_s", -1), ("slow_s", -1), ("token_s", 0.1), ("displaced", 0))
    }
    flags = {
        name: np.array([bool(worker.get(name)) for worker in workers]) for name in ("full", "idle")
    }
    return Judgement(**rows, **flags, repaid_s=repaid_s, slack_s=1.0, work_s=0.1, output_tokens=50)


def test_who_is_refused_and_where():
    judged = judgement(
        {}, {"late_s": 0.1}, {"slow_s": 0.1}, {"full": True}, {"late_s": 0.1, "idle": True},
        {"displaced": 1.0}, {"displaced": 1.5}, {"displaced": 1.5, "idle": True},
    )  # fmt: skip
    assert judged.refused.tolist() == [False, True, True, True, False, False, False, False]
    again = replace(judged, repaid_s=0.5).refused
    assert again.tolist() == [False, True, True, True, False, False, True, True]


@pytest.mark.parametrize(
    ("worker", "repaid_s", "why", "wait_s"),
    [
        ({"late_s": 1.25}, 0.0, "it would start 1.2 s too late", 1.25),
        # Until a typical request ends: 50 tokens of 0.1 s.
        ({"full": True}, 0.0, "as many run as may at a time", 5.0),
        ({"slow_s": 0.025}, 0.0, "each token would take 25 ms too long", 5.0),
        ({"displaced": 3.0}, 7.0, "its prompt would make 3 others late", 7.0),
        ({"late_s": 9.0, "full": True}, 0.0, "it would start 9.0 s too late", 9.0),
    ],
)
def test_a_refusal_says_why_and_when_to_come_back(worker, repaid_s, why, wait_s):
    later = {"late_s": 60.0}
    refusal = judgement(later, worker, repaid_s=repaid_s).refusal()
    assert refusal == (why, pytest.approx(wait_s))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_would_keep_long_prompts_out_for_good_is_refused(share):
    with pytest.raises(ValueError, match=r"give a share above 0, at most 1"):
        Admission(displacing_share=share)
