"""Which requests are rejected: those that would start too late, and no others."""

from dataclasses import replace

import pytest

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.slo import ServiceObjective
from kappa_router import admission
from kappa_router.admission import (
    Demand,
    Evaluation,
    Lateness,
    Outcomes,
    Standing,
    alone_s,
    delay_s,
    evaluate,
    limits,
)
from kappa_router.config import RouterConfig
from kappa_router.decision import Choice, NoWorkerError, OverloadedError
from kappa_router.fleet import Fleet
from kappa_router.policy import LeastTtft
from kappa_router.router import Router
from tests.router import building
from tests.router.building import SHAPE, announcement, ask, estimate, fleet_of, join, outcome
from tests.router.offering import estimates
from tests.router.test_lateness import came, sent


def router(*workers, admission=True, **options):
    """Workers that are taken at their word."""
    options = {"calibrate": False, **options}
    return building.router(*workers, admission=admission, stale_after_s=1e9, **options)


def limits_of(fleet, estimates, share=1.0):
    return limits(fleet.objective, fleet.idle_s(estimates), share)


def flood(made, limit=200):
    """Send long prompts at once until one is rejected; returns how many were admitted."""
    for i in range(limit):
        try:
            made.route(ask(f"r{i}", tokens=20_000, seed=i), 1.0)
        except OverloadedError as error:
            return i, error
    return limit, None


def test_everything_is_admitted_without_admission_control():
    assert flood(router(admission=False), limit=60) == (60, None)


def test_queue_beyond_the_objective_is_rejected_with_a_wait():
    made = router()
    count, error = flood(made)
    # Two nodes, five times the idle TTFT each: at most five on each; VRAM holds fewer at once.
    assert 4 <= count <= 10
    assert error.retry_after_s > 0 and "too l" in str(error)
    assert isinstance(error, NoWorkerError) and made.reservations == count


def test_floor_admits_short_prompts_whatever_their_multiple():
    strict = flood(router(objective=ServiceObjective(ttft_s=0.0, ttft_idle_factor=1.5)))[0]
    assert strict < flood(router(objective=ServiceObjective(ttft_s=10.0, ttft_idle_factor=1.5)))[0]


def test_request_is_held_to_the_limit_that_it_asks_for():
    made, long = router("a"), ask("r", tokens=20_000)
    made.route(replace(long, request_id="first", ttft_limit_s=0.001), 1.0)  # It is alone there.
    with pytest.raises(OverloadedError):
        made.route(replace(long, ttft_limit_s=0.001), 1.0)
    made.route(long, 1.0)
    assert flood(made)[1] is not None
    assert made.route(replace(long, ttft_limit_s=60.0), 1.0).worker == "a"


def test_request_goes_where_its_limit_is_kept_without_admission():
    nodes = announcement("a", "gh200-c2c"), announcement("b", "gb200-c2c")
    made = router(*nodes, admission=False, policy="least_backlog")
    asked = ask("r", tokens=20_000)
    slow, fast = sorted(made.explain(asked, 1.0).estimates.ttft_s.tolist(), reverse=True)
    assert made.route(asked, 1.0).worker == "a"
    assert made.route(replace(asked, ttft_limit_s=(slow + fast) / 2), 1.0).worker == "b"
    made.release("r", 1.0)
    assert made.route(replace(asked, ttft_limit_s=fast / 2), 1.0).worker == "a", "none keeps it"


def test_retry_after_a_lost_worker_is_not_rejected():
    made = router()
    flood(made)
    made.route(ask("again", tokens=20_000, seed=1, exclude=frozenset({"a"}), retry=True), 1.0)


def test_uninformed_request_is_not_evaluated():
    made = router()
    flood(made)
    assert made.route(ask("blind", tokens=None), 1.0).reason == "uninformed_least_backlog"


@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_floor_is_in_dilated_time(dilation):
    node = replace(node_profile("h100-pcie5"), source="paced", dilation=dilation)
    made = router(announcement("a", node), admission=False)
    estimates = made.explain(ask(), 1.0).estimates
    fleet = made.fleet
    idle_s = fleet.idle_s(estimates)[0]
    assert limits_of(fleet, estimates).ttft_s == max(0.5 * dilation, 5 * idle_s)


def test_node_with_many_streams_is_too_slow_per_token():
    made = router("a", objective=ServiceObjective(ttft_idle_factor=1e9))
    admitted, error = 0, None
    for i in range(2000):
        try:
            # So far apart that no prompt is in another's way.
            made.route(ask(f"r{i}", tokens=2000, seed=i), 20.0 * i)
        except OverloadedError as rejected:
            error = rejected
            break
        made.first_token(f"r{i}", 20.0 * i + 0.1)
        admitted += 1
    # Three idle steps: the weights twice over, and the first request's own context.
    assert "each token" in str(error) and error.retry_after_s > 0
    step = made.workers["a"].announcement.step
    room_s = 2 * (step.weights_s + step.fixed_s) + 2 * 2000 * step.context_token_s
    assert admitted == pytest.approx(room_s / (2000 * step.context_token_s), rel=0.6)


def test_request_goes_to_a_worker_that_can_serve_it_in_time():
    made = router()
    first = made.route(ask("r0", tokens=20_000, seed=0), 1.0).worker
    for i in range(1, 40):
        try:
            made.route(ask(f"r{i}", tokens=20_000, seed=i), 1.0)
        except OverloadedError:
            break
    other = {"a": "b", "b": "a"}[first]
    assert made.in_flight_on(first) and made.in_flight_on(other)


class FirstWorker(LeastTtft):
    def choose(self, estimates):
        return Choice(0, "first")


def test_request_that_moves_avoids_excluded_workers():
    config = RouterConfig(policy=FirstWorker(), secret=7, admission=True)
    made = Router(config)
    for worker in "abc":
        made.join(announcement(worker), 0.0)
    for i in range(20):
        only_a = frozenset("bc")
        made.route(ask(f"r{i}", tokens=20_000, seed=i, exclude=only_a, retry=True), 1.0)
    assert made.route(ask("r", exclude=frozenset("b")), 1.0).worker == "c"


def test_worker_admits_no_more_than_it_runs_at_a_time():
    made = router("a", objective=ServiceObjective(ttft_idle_factor=1e9, tpot_idle_factor=1e9))
    made.join(replace(announcement("a"), max_sequences=3), 0.0)
    for i in range(3):
        made.route(ask(f"r{i}", tokens=100, seed=i), 20.0 * i)
    with pytest.raises(OverloadedError, match="as many run as may"):
        made.route(ask("r3", tokens=100, seed=3), 60.0)
    made.release("r0", 60.0)
    made.route(ask("r4", tokens=100, seed=4), 61.0)


def test_overdue_request_keeps_the_next_one_out():
    made = router("a")
    made.route(ask("slow", tokens=100, seed=1), 0.0)
    with pytest.raises(OverloadedError) as caught:
        made.route(ask("next", tokens=100, seed=2), 30.0)
    assert caught.value.retry_after_s > 20
    made.first_token("slow", 30.0)
    made.release("slow", 31.0)
    made.route(ask("later", tokens=100, seed=3), 60.0)


def test_cheap_requests_are_admitted_where_costly_ones_are_not():
    made = router("a")
    flood(made)
    demand = Demand()
    for i in range(100):
        came(demand, i * 1e-3, 59.0, admitted=i % 2 == 0)
    fleet = made.fleet
    allowed = {}
    for name, tokens in (("cheap", 10), ("costly", 20_000)):
        estimates = made.explain(ask("x", tokens=tokens, seed=9), 60.0).estimates
        share = demand.slack_share(Standing(work_s=float(estimates.work_s[0])))
        limit = limits_of(fleet, estimates, share)
        found = evaluate(fleet, estimates, 0, made.lateness, demand, limit)
        allowed[name] = (found.token_s - found.slow_s) / limit.tpot_s
    assert allowed["cheap"] == pytest.approx(1.0, abs=0.05)
    assert 1 / 3 < allowed["costly"] < 0.7


@pytest.mark.parametrize("tokens", [100, 20_000])
def test_idle_cluster_admits_anything_whatever_came_of_others(tokens):
    made = router("a")
    outcome(made, 40.0, 59.0)
    for _ in range(128):
        came(made.models["m"].demand, 1e-9, 100.0, 1e9, admitted=False)
    assert made.lateness.of("a").late_s(100.0) > 3
    made.route(ask("costly", tokens=tokens, seed=3), 100.0)
    with pytest.raises(OverloadedError):
        made.route(ask("next", tokens=tokens, seed=4), 100.0)


def chats(made, start_s, count=120, every_s=0.05):
    """Short prompts, each ended before the next; returns the time after them."""
    for i in range(count):
        outcome(made, 0.02, start_s + i * every_s)
    return start_s + count * every_s


def test_long_prompt_that_delays_short_ones_waits_its_share():
    made = router("a")
    now_s = chats(made, 0.0)
    # The first is admitted: no other did so recently.
    first = made.route(ask("long", tokens=40_000, seed=1), now_s)
    made.first_token("long", now_s + 1.0)
    made.release("long", now_s + 1.1)
    now_s = chats(made, now_s + 3.0)
    with pytest.raises(OverloadedError, match=r"make [0-9]+ others late") as caught:
        made.route(ask("longer", tokens=40_000, seed=2), now_s)
    budget_wait_s = first.chosen.compute_s / admission.BLOCKING_SHARE
    assert 1.0 < caught.value.retry_after_s < budget_wait_s
    now_s = chats(made, now_s + caught.value.retry_after_s)
    made.route(ask("longest", tokens=40_000, seed=3), now_s)


def test_long_prompts_that_come_alone_are_admitted():
    made = router("a")
    for i in range(20):
        outcome(made, 1.0, 10.0 * i, tokens=40_000)


def test_limit_follows_the_best_holder_on_device_and_in_host():
    # 4,000 tokens, of which one worker has 1,000 on the device and 2,000 in host: the idle TTFT is
    # that of loading 3,000 (131,072 bytes each at 54 GB/s, 7.3 ms) and computing 1,000 behind them.
    fleet = fleet_of("h100-pcie5", "h100-pcie5")
    estimates = estimate(fleet, tokens=4000)
    estimates.device_tokens[1], estimates.cached_tokens[1] = 1000.0, 2000.0
    step = step_model(SHAPE, node_profile("h100-pcie5"))
    expected_s = 3000 * 131072 / 54e9 + step.step_s([(1000, 3000)])
    fleet.objective = ServiceObjective(
        ttft_s=0.0, ttft_idle_factor=4.0, tpot_s=0.0, tpot_idle_factor=3.0
    )
    found = limits_of(fleet, estimates, 0.25)
    assert found.idle_s == pytest.approx(expected_s)
    assert found.ttft_s == pytest.approx(4 * expected_s)
    assert found.slack_s == pytest.approx(3 * expected_s)
    # A quarter of what lies between idle and the limit.
    assert found.usable_ttft_s == pytest.approx(1.75 * expected_s)
    assert found.usable_tpot_s == pytest.approx(0.5 * found.tpot_s)
    fleet.objective = ServiceObjective(ttft_s=9.0, tpot_s=2.0)
    assert limits_of(fleet, estimates)[1:3] == (9.0, 2.0)


@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_long_prompt_is_evaluated_by_the_long_dilated_window(dilation):
    fleet = Fleet()
    node = replace(node_profile("h100-pcie5"), source="paced", dilation=dilation)
    join(fleet, announcement("w0", node))
    lateness = Lateness()
    # A prompt that delays tokens by 1.2 s: 1.2 / 3 = 0.4 of the last 3 s, 1.2 / 12 = 0.1 of 12 s.
    sent(lateness, "r", "w0", 1.0, 0.1, 1.2 * dilation, dilation=dilation)
    stretched = {}
    for work_s in (0.24, 0.26):
        estimates = estimate(fleet, now_s=1.0)
        estimates.work_s[:] = work_s * dilation
        alone_s = float(estimates.tpot_s[0])
        found = evaluate(fleet, estimates, 0, lateness, Demand(), limits_of(fleet, estimates))
        stretched[work_s] = found.token_s / alone_s
    assert stretched == pytest.approx({0.24: 1 / 0.6, 0.26: 1 / 0.9})


def test_evaluation_equals_figures_by_hand():
    fleet = Fleet(objective=ServiceObjective(ttft_s=0.0))
    join(fleet, announcement("w0", max_sequences=4))
    estimates = estimate(fleet, tokens=4000)
    estimates.ttft_s[0], estimates.tpot_s[0], estimates.gpu_use[0] = 7.0, 0.5, 0.2
    estimates.in_flight[0] = 4.0
    step = step_model(SHAPE, node_profile("h100-pcie5"))
    idle_s = step.step_s([(4000, 0)])
    idle_token_s = step.weights_s + 4000 * step.context_token_s + step.fixed_s
    # It may use all of the slack: up to 5 and 3 times idle.
    found = evaluate(fleet, estimates, 0, Lateness(), Demand(), limits_of(fleet, estimates))
    assert found.late_s == pytest.approx(7.0 - 5 * idle_s)
    # Prompts take 0.2 of the time: 0.5 s a token are 0.4 s without them; none were sent lately.
    assert found.token_s == pytest.approx(0.4)
    assert found.slow_s == pytest.approx(0.4 - 3 * idle_token_s)
    assert found.full and not found.idle


def test_delay_s_is_how_long_a_prompt_delays_a_token():
    # Without prompts a token takes 0.5 x (1 - 0.2) = 0.4 s. Of that the 0.1 s queued ahead leave
    # 0.3 s for 0.7 s of work. Where 2 s are queued nothing is left; short work delays none.
    made = estimates(
        {"tpot_s": 0.5, "gpu_use": 0.2, "gpu_backlog_s": 0.1, "work_s": 0.7},
        {"tpot_s": 0.5, "gpu_use": 0.2, "gpu_backlog_s": 2.0, "work_s": 0.7},
        {"tpot_s": 0.5, "gpu_use": 0.2, "gpu_backlog_s": 0.1, "work_s": 0.2},
    )
    assert [delay_s(made.row(at)) for at in range(3)] == pytest.approx([0.4, 0.7, 0.0])
    assert [alone_s(made.row(at)) for at in range(3)] == pytest.approx([0.4] * 3)


def test_alone_s_caps_the_use_of_an_overloaded_worker():
    # Use counts as 0.95 at most, as when the token was priced: 2 s x 0.05.
    made = estimates({"tpot_s": 2.0, "gpu_use": 7.0})
    assert alone_s(made.row(0)) == pytest.approx(0.1)


def evaluation(budget_wait_s=0.0, **figures):
    plain = {"late_s": -1.0, "slow_s": -1.0, "token_s": 0.1, "blocked": 0.0, "full": False}
    # A typical request: 50 tokens of 0.1 s.
    plain |= {"idle": False, "budget_wait_s": budget_wait_s, "ends_s": 5.0}
    return Evaluation(**plain | figures)


@pytest.mark.parametrize(
    ("figures", "rejected", "while_waiting"),
    [
        ({}, False, False),
        ({"late_s": 0.1}, True, True),
        ({"slow_s": 0.1}, True, True),
        ({"full": True}, True, True),
        ({"late_s": 0.1, "idle": True}, False, False),
        ({"blocked": 1.0}, False, False),
        ({"blocked": 1.5}, False, True),
        ({"blocked": 1.5, "idle": True}, False, True),
    ],
)
def test_evaluation_rejects_by_its_figures(figures, rejected, while_waiting):
    assert evaluation(**figures).rejected == rejected
    assert evaluation(0.5, **figures).rejected == while_waiting


@pytest.mark.parametrize(
    ("worker", "budget_wait_s", "why", "wait_s"),
    [
        ({"late_s": 1.25}, 0.0, "it would start 1.2 s too late", 1.25),
        # Until a typical request ends: 50 tokens of 0.1 s.
        ({"full": True}, 0.0, "as many run as may at a time", 5.0),
        ({"slow_s": 0.025}, 0.0, "each token would take 25 ms too long", 5.0),
        ({"blocked": 3.0}, 7.0, "its prompt would make 3 others late", 7.0),
        ({"late_s": 9.0, "full": True}, 0.0, "it would start 9.0 s too late", 9.0),
    ],
)
def test_rejection_says_why_and_when_to_come_back(worker, budget_wait_s, why, wait_s):
    found = evaluation(budget_wait_s, **worker)
    assert (found.why, found.wait_s) == (why, pytest.approx(wait_s))


def test_token_s_is_capped_by_the_bound_on_steps():
    outcomes = Outcomes(short=0.9, sent_at_s=1.0)
    assert outcomes.token_s(1.0, 0.010) == pytest.approx(0.100)
    assert outcomes.token_s(1.0, 0.010, 0.025) == pytest.approx(0.025)
    # What reads for longer than the bound takes its time.
    assert outcomes.token_s(1.0, 0.040, 0.025) == pytest.approx(0.040)
    outcomes.slowdown = 1.2
    assert outcomes.token_s(1.0, 0.010, 0.025) == pytest.approx(0.030)
