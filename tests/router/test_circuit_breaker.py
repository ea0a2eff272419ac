"""Circuit breakers: when they open, whom they let through, what closes them."""

from kappa_router.live.circuit_breaker import ERRORS, BreakerRule, Breakers

RULE = BreakerRule(failures=3, pause_s=1.0, longest_pause_s=4.0)


def failing(breakers, worker="w", times=3, now_s=0.0):
    return [breakers.failed(worker, f"r{i}", now_s) for i in range(times)]


def test_failures_in_a_row_open_and_a_success_resets_the_count():
    breakers = Breakers(RULE)
    failing(breakers, times=2)
    assert not breakers.succeeded("w", "r")
    assert failing(breakers, times=2) == [False, False]
    assert breakers.state("w", 0.0).standing == "closed"
    assert breakers.failed("w", "r9", 0.0)
    state = breakers.state("w", 0.0)
    assert (state.standing, state.why, state.opened) == ("open", ERRORS, 1)
    assert breakers.blocked(0.5).failing == {"w"} and not breakers.blocked(0.5).gone


def test_probe_after_the_pause_closes_it_on_success():
    breakers = Breakers(RULE)
    failing(breakers)
    assert breakers.retry_after_s(0.25) == 0.75
    assert not breakers.blocked(1.0).failing
    assert breakers.state("w", 1.0).standing == "half_open"
    breakers.sent("w", "probe", 1.0)
    assert breakers.blocked(1.1).failing == {"w"}, "one probe at a time"
    assert breakers.succeeded("w", "probe")
    assert breakers.state("w", 1.2).standing == "closed"
    assert not breakers.blocked(1.2).failing


def test_failed_probe_doubles_the_pause_up_to_the_longest():
    breakers = Breakers(RULE)
    failing(breakers)
    now_s, pauses = 0.0, []
    for i in range(4):
        wait_s = breakers.retry_after_s(now_s)
        pauses.append(wait_s)
        now_s += wait_s
        breakers.sent("w", f"p{i}", now_s)
        assert breakers.failed("w", f"p{i}", now_s)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    assert breakers.state("w", now_s).opened == 5


def test_open_breaker_ignores_requests_sent_before_it_opened():
    breakers = Breakers(RULE)
    failing(breakers)
    assert not breakers.succeeded("w", "old")
    assert not breakers.failed("w", "older", 0.5)
    assert breakers.retry_after_s(0.0) == 1.0


def test_probe_without_an_outcome_frees_its_place():
    breakers = Breakers(RULE)
    failing(breakers)
    breakers.sent("w", "left", 1.0)
    breakers.abandoned("w", "left")
    assert not breakers.blocked(1.0).failing
    breakers.sent("w", "silent", 1.0)
    assert breakers.blocked(61.0).failing
    assert not breakers.blocked(61.1).failing, "forgotten after PROBE_S"


def test_worker_without_a_sign_of_life_stays_blocked():
    breakers = Breakers(RULE)
    assert breakers.trip("w", "silent", 0.0)
    assert not breakers.trip("w", "disconnected", 1.0), "open for that already"
    assert breakers.blocked(1e6).gone == {"w"}
    assert breakers.state("w", 1e6).standing == "open"
    assert breakers.alive("w", 1e6)
    assert breakers.state("w", 1e6).standing == "half_open"
    breakers.sent("w", "probe", 1e6)
    assert breakers.succeeded("w", "probe")
    assert not breakers.alive("w", 1e6)


def test_stalled_worker_is_left_until_it_moves_or_a_long_pause():
    breakers, longest_s = Breakers(RULE), RULE.longest_pause_s
    assert breakers.trip("w", "stalled", 0.0, needs_sign=False)
    assert not breakers.trip("w", "stalled", 1.0, needs_sign=False), "open for that already"
    assert breakers.blocked(longest_s - 0.1).failing == {"w"}
    assert not breakers.blocked(longest_s).failing
    breakers.sent("w", "probe", longest_s)
    assert breakers.trip("w", "stalled", longest_s + 5.0, needs_sign=False)
    assert breakers.retry_after_s(longest_s + 5.0) == longest_s
    assert breakers.alive("w", longest_s + 6.0)
    assert breakers.state("w", longest_s + 6.0).standing == "half_open"


def test_worker_that_left_leaves_nothing_behind():
    breakers = Breakers(RULE)
    failing(breakers)
    breakers.leave("w")
    assert breakers.state("w", 0.0).opened == 0
    assert not breakers.blocked(0.0).failing and breakers.retry_after_s(0.0) == 0.0


def test_workers_do_not_share_a_breaker():
    breakers = Breakers(RULE)
    failing(breakers, "a")
    breakers.trip("b", "silent", 0.0)
    blocked = breakers.blocked(0.0)
    assert (blocked.failing, blocked.gone) == ({"a"}, {"b"})
