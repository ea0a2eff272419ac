"""What admission learns: the cost of recent requests, and how late recent first tokens came."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa_router.admission import Demand, Lateness, Standing
from kappa_router.decision import RouteRequest
from kappa_router.fleet import Flight


def sent(lateness, name, worker, now_s, ttft_s, delay_s=0.0, tpot_s=0.0, dilation=1.0):
    """A request goes to a worker; its TTFT, and its time per token, are predicted."""
    flight = Flight(name, worker, 0, 0.0, 0.0, 1, 1)
    flight.sent_s, flight.tpot_s = now_s, tpot_s
    flight.chosen = SimpleNamespace(ttft_s=ttft_s, node=SimpleNamespace(dilation=dilation))
    lateness.sent(flight, now_s, delay_s)
    return flight


def first_token(lateness, flight, now_s):
    flight.first_token_s = now_s
    lateness.first_token(flight, now_s)


# -- recent demand -------------------------------------------------------------------------------

_works = st.floats(0.0, 1e3, allow_nan=False)


def came(made, work_s=1.0, at_s=0.0, slack_s=1.0, admitted=True, **who):
    """A request was evaluated, and admitted or not."""
    request = RouteRequest("r", **who)
    standing = made.standing(request, work_s)
    made.evaluated(at_s, request, standing, slack_s, admitted=admitted)


def of(work_s, **who):
    return Standing(work_s=work_s, **who)


def demand(works, admitted):
    made = Demand()
    for work_s, inside in zip(works, admitted, strict=True):
        came(made, work_s, admitted=inside)
    return made


def test_nothing_is_costly_before_any_request():
    assert Demand().rank(of(5.0)) == 0.0 and Demand().slack_share(of(5.0)) == 1.0


def test_cost_rank_counts_equals_half():
    made = demand([1.0, 2.0, 2.0, 9.0], [True] * 4)
    assert [made.rank(of(w)) for w in (0.5, 1.0, 2.0, 5.0, 99.0)] == [0.0, 0.125, 0.5, 0.75, 1.0]


def test_costliest_request_alone_lacks_slack_without_refusals():
    made = demand(range(100), [True] * 100)
    assert made.slack_share(of(99.0)) == 1.0
    assert made.slack_share(of(1e9)) == pytest.approx(0.2), "costlier than any that came"
    came(made, admitted=False)
    assert made.slack_share(of(1e9)) == pytest.approx(0.2)
    assert made.slack_share(of(0.5)) > 0.99


@given(st.lists(st.tuples(_works, st.booleans()), max_size=200), _works, _works)
def test_slack_share_is_bounded_and_falls_with_cost(history, one, other):
    made = demand(*zip(*history, strict=True)) if history else Demand()
    shares = [made.slack_share(of(w)) for w in sorted((one, other))]
    assert 0.2 - 1e-9 <= shares[1] <= shares[0] <= 1.0


def test_budget_refills_at_its_rate_and_never_twice():
    made = Demand()
    assert made.budget_wait_s(10.0, 0.5) == 0.0
    made.spend(1.0), made.spend(2.0)
    assert made.budget_wait_s(10.0, 0.5) == 6.0
    assert made.budget_wait_s(14.0, 0.5) == pytest.approx(2.0)
    assert made.budget_wait_s(12.0, 0.5) == pytest.approx(2.0), "a clock set back refills nothing"
    assert made.budget_wait_s(99.0, 0.5) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9)), max_size=40),
    st.lists(st.floats(0, 20), min_size=1, max_size=5),
)
def test_blocked_is_the_plain_sum(requests, blocks_s):
    requests = sorted(requests)
    made = Demand()
    for at_s, slack_s in requests:
        came(made, 1.0, at_s, slack_s)
    got = [made.blocked(50.0, block_s, len(blocks_s)) for block_s in blocks_s]
    for block_s, count in zip(blocks_s, got, strict=True):
        window_s = max(block_s, 50.0 - requests[0][0] if requests else 0.0)
        over_s = sum(max(block_s - slack_s, 0.0) for _, slack_s in requests)
        expected = over_s / window_s / len(blocks_s) if window_s else 0.0
        assert count == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("rejected", "work_s", "share"),
    [
        # Half of four rejected: the power is 2. The rank of 1, 2, 3, 4 is 1/8, 3/8, 5/8, 7/8.
        (2, 1.0, 1 - 0.8 * 0.125**2),
        (2, 3.0, 1 - 0.8 * 0.625**2),
        # All rejected: the power is 1, and the share falls evenly.
        (4, 2.0, 1 - 0.8 * 0.375),
        (4, 9.0, 0.2),
    ],
)
def test_slack_share_equals_figures_by_hand(rejected, work_s, share):
    made = demand([1.0, 2.0, 3.0, 4.0], [i >= rejected for i in range(4)])
    assert made.slack_share(of(work_s)) == pytest.approx(share)


def test_demand_counts_the_last_128_and_not_one_more():
    made = demand([1.0] * 128, [True] * 128)
    assert made.rank(of(2.0)) == 1.0
    for count in range(1, 65):
        came(made, 9.0)
        assert made.rank(of(2.0)) == (128 - count) / 128


def test_standing_orders_by_class_then_share_then_cost():
    order = [of(9.0), of(1.0, over_share=True), of(9.0, over_share=True), of(1.0, priority=1)]
    assert sorted(reversed(order)) == order
    made = demand([1.0] * 4, [True, True, False, False])
    shares = [made.slack_share(each) for each in order]
    assert shares == [pytest.approx(0.2)] * 4, "all stand behind the four that came"
    made = Demand()
    for each in order:
        made.evaluated(0.0, RouteRequest("r"), each, 1.0, admitted=False)
    shares = [made.slack_share(each) for each in order]
    assert shares == pytest.approx([1 - 0.8 * rank for rank in (1 / 8, 3 / 8, 5 / 8, 7 / 8)])


@pytest.mark.parametrize(("weight", "over"), [(1.0, True), (2.0, True), (3.0, False)])
def test_tenant_share_is_of_admitted_work_by_weight(weight, over):
    made = Demand()
    for tenant, weighs, work_s in (("a", weight, 1.9), ("b", 1.0, 1.0)):
        came(made, work_s, tenant=tenant, weight=weighs)
    # Without refusals shares do not matter. A refused request counts for no tenant.
    assert not made.standing(RouteRequest("r", tenant="a", weight=weight), 1.0).over_share
    came(made, 50.0, tenant="b", admitted=False)
    # With 1.1 s more `a` has 3 of 4 s: over a half, over two thirds, not over three quarters.
    assert made.standing(RouteRequest("r", tenant="a", weight=weight), 1.1).over_share is over
    assert not made.standing(RouteRequest("r", tenant="new", weight=1.0), 0.01).over_share


def test_tenant_alone_is_never_over_its_share():
    made = demand([1.0, 2.0], [True, False])
    assert not made.standing(RouteRequest("r"), 99.0).over_share


def test_refused_requests_come_back_one_after_the_other():
    made = Demand()
    for at_s in (0.0, 1.0, 2.0, 3.0):
        came(made, at_s=at_s)
    came(made, at_s=4.0, admitted=False)
    # Four were admitted in 4 s, so there is room for one each second from 4 + 2.5 on.
    assert [made.come_back_s(4.0, 2.5) for _ in range(3)] == [2.5, 3.5, 4.5]
    assert made.come_back_s(5.0, 0.5) == 4.5
    for _ in range(100):
        latest_s = made.come_back_s(5.0, 0.5)
    assert latest_s == 30.5, "no later than 30 s after there may be room"
    assert made.come_back_s(99.0, 1.0) == 1.0


# -- recent outcomes -----------------------------------------------------------------------------


def test_lateness_adds_nothing_without_outcomes():
    lateness = Lateness()
    assert (lateness.of("a").late_s(5.0), lateness.of("a").prompt_share(5.0)) == (0.0, 0.0)


@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_outcome_fades_to_a_third_in_half_a_dilated_second(dilation):
    lateness = Lateness()
    first_token(lateness, sent(lateness, "r", "a", 0.0, 0.0, dilation=dilation), 1.0)
    late_s = [
        lateness.of("a").late_s(1.0 + seconds * dilation) for seconds in (-1.0, 0.0, 0.5, 1.0)
    ]
    assert late_s == pytest.approx([1.0, 1.0, math.exp(-1), math.exp(-2)])
    assert lateness.of("b").late_s(1.0) == 0.0


def test_overdue_first_token_counts_at_once():
    lateness = Lateness()
    first = sent(lateness, "first", "a", 0.0, 0.5)
    sent(lateness, "second", "a", 1.0, 0.5)
    assert lateness.of("a").late_s(0.4) == 0.0
    assert lateness.of("a").late_s(2.0) == pytest.approx(1.5)
    lateness.ended(first, 2.0, 0)
    assert lateness.of("a").late_s(2.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("long", "window_s"), [(False, 3.0), (True, 12.0)])
@pytest.mark.parametrize("dilation", [1.0, 30.0])
def test_work_of_prompts_adds_up_and_fades_with_its_window(long, window_s, dilation):
    lateness = Lateness()
    for i in range(4):
        sent(lateness, f"r{i}", "a", 10.0, 0.1, 0.1 * window_s * dilation, dilation=dilation)
    assert lateness.of("a").prompt_share(10.0, long=long) == pytest.approx(0.4)
    later_s = 10.0 + window_s * dilation
    assert lateness.of("a").prompt_share(later_s, long=long) == pytest.approx(0.4 / math.e)
    assert lateness.of("a").prompt_share(9.0, long=long) == pytest.approx(0.4), (
        "a clock may run backwards"
    )


def test_worker_that_left_leaves_nothing_behind():
    lateness = Lateness()
    flight = sent(lateness, "r", "b", 0.0, 0.1, 0.1)
    lateness.left("b")
    assert lateness.of("b").late_s(99.0) == lateness.of("b").prompt_share(0.0) == 0.0
    first_token(lateness, flight, 9.0)
    lateness.ended(flight, 9.0, 10)
    assert lateness.of("b").late_s(9.0) == 0.0 and lateness.of("b").slowdown == 1.0


def test_request_sent_before_comparing_tells_nothing():
    lateness = Lateness()
    sent(lateness, "r", "a", 0.0, 0.5)
    unknown = Flight("u", "a", 0, 0.0, 0.0, 1, 1)
    first_token(lateness, unknown, 9.0)
    lateness.ended(unknown, 99.0, 10)
    assert lateness.of("a").late_s(0.5) == 0.0 and lateness.of("a").slowdown == 1.0


def slowed(lateness, expected_s, actual_s, tokens=11, count=20):
    for i in range(count):
        flight = sent(lateness, f"p{i}", "a", 0.0, 0.0, 0.0, expected_s)
        first_token(lateness, flight, 0.0)
        lateness.ended(flight, actual_s * (tokens - 1), tokens)


@pytest.mark.parametrize(
    ("actual_s", "factor"), [(0.03, 1.5), (0.02, 1.0), (0.014, 0.7), (9.0, 2.0), (0.001, 0.6)]
)
def test_slowdown_follows_recent_tokens_within_bounds(actual_s, factor):
    lateness = Lateness()
    slowed(lateness, 0.02, actual_s)
    assert lateness.of("a").slowdown == pytest.approx(factor)
    assert lateness.of("b").slowdown == 1.0


@pytest.mark.parametrize("tokens", [0, 1])
def test_cut_short_streams_tell_nothing_of_the_slowdown(tokens):
    lateness = Lateness()
    slowed(lateness, 0.02, 0.03)
    slowed(lateness, 0.02, 9.0, tokens=tokens)
    assert lateness.of("a").slowdown == pytest.approx(1.5)


def test_prompts_that_came_meanwhile_are_no_slowdown():
    # Ten tokens of 0.02 s alone took 0.4 s: prompts that came meanwhile took half of the time.
    lateness = Lateness()
    sent(lateness, "before", "a", 0.0, 0.0, 9.0)
    flights = [sent(lateness, f"p{i}", "a", 0.0, 0.0, 0.0, 0.02) for i in range(20)]
    for flight in flights:
        first_token(lateness, flight, 0.0)
    for i in range(20):
        sent(lateness, f"prompt{i}", "a", 0.4, 0.0, 0.01)
    for flight in flights:
        lateness.ended(flight, 0.4, 11)
    assert lateness.of("a").slowdown == pytest.approx(1.0)


def test_slowdown_counts_no_prompt_beyond_a_bounded_step():
    # Steps there last 0.03 s at most, so that tokens of 0.06 s are twice as slow.
    lateness = Lateness()
    flight = sent(lateness, "p", "a", 0.0, 0.0, 0.0, 0.02)
    flight.bounded_s = 0.03
    first_token(lateness, flight, 0.0)
    sent(lateness, "prompt", "a", 0.1, 0.0, 0.4)
    lateness.ended(flight, 0.6, 11)
    assert lateness.of("a").slowdown == pytest.approx(2.0)


def test_outcome_without_a_predicted_tpot_tells_nothing():
    lateness = Lateness()
    flight = sent(lateness, "r", "a", 0.0, 0.1)
    first_token(lateness, flight, 0.1)
    lateness.ended(flight, 9.0, 11)
    assert lateness.of("a").slowdown == 1.0


def late(lateness, seconds):
    for i, late_s in enumerate(seconds):
        flight = sent(lateness, f"l{i}", "a", -late_s, 0.0)
        first_token(lateness, flight, 0.0)
        lateness.ended(flight, 0.0, 0)
    return lateness.of("a").late_s(0.0)


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        ([3.0], 3.0),
        # What comes sooner than predicted earns nothing.
        ([-0.2] * 5, 0.0),
        # Of five the fourth is passed by one: the place int(0.8·5) = 4 of 0, 1, 2, 3, 4.
        ([4.0, 0.0, 3.0, 1.0, 2.0], 4.0),
        ([*range(10)], 8.0),
        # The last 16 are 4 to 19: the place int(12.8) = 12 of them is 16.
        ([*range(20)], 16.0),
    ],
)
def test_lateness_covers_four_of_five_of_the_last_sixteen(seconds, expected_s):
    assert late(Lateness(), seconds) == expected_s


def test_slowdown_is_the_middle_of_the_last_sixteen():
    lateness = Lateness()
    for i, factor in enumerate([0.7, 1.2, 1.6]):
        flight = sent(lateness, f"p{i}", "a", 0.0, 0.0, 0.0, 0.5)
        first_token(lateness, flight, 1.0)
        lateness.ended(flight, 1.0 + 0.5 * factor, 2)
    assert lateness.of("a").slowdown == pytest.approx(1.2)
    # 0.5 s alone, 1.2 times that here, and prompts that take a quarter of the time: 0.6 / 0.75.
    sent(lateness, "prompt", "a", 5.0, 0.0, 0.75)
    assert lateness.of("a").token_s(5.0, 0.5) == pytest.approx(0.8)
    assert lateness.of("a").token_s(5.0, 0.5, long=True) == pytest.approx(0.6 / (1 - 0.75 / 12))
