"""Token buckets and places: what a tenant may use, never more, and what was not used comes back."""

import numpy as np
import pytest

from router.api.errors import ApiError
from router.api.tenants import Allowance, Bucket, Places, Tenant, TenantLimiter, duration

FAR_S = 1e6


def limits(replicas=1, **allowance):
    return TenantLimiter(by_tenant={"alice": Allowance(**allowance)}, replicas=replicas)


def refused(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def test_without_limits_nothing_is_refused_or_said():
    free = TenantLimiter()
    for _ in range(1000):
        free.enter("alice", 0.0).reserve(10**9, 10**9, 0.0)
    assert free.headers("alice", 0.0) == {}


def test_requests_of_a_minute_are_let_in_then_refused_until_the_next_one_has_grown():
    some = limits(requests_per_minute=6)
    for _ in range(6):
        some.enter("alice", 100.0)
    error = refused(some.enter, "alice", 100.0)
    assert (error.status, error.code, error.param) == (429, "rate_limit_exceeded", "requests")
    assert error.retry_after_s == pytest.approx(10.0)
    refused(some.enter, "alice", 109.9)
    some.enter("alice", 110.0)
    refused(some.enter, "alice", 110.0)


def test_a_tenant_does_not_pay_for_another():
    some = TenantLimiter(
        Allowance(requests_per_minute=1), {"bob": Allowance(requests_per_minute=2)}
    )
    some.enter("alice", 0.0)
    refused(some.enter, "alice", 0.0)
    some.enter("bob", 0.0)
    some.enter("bob", 0.0)
    refused(some.enter, "bob", 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_over_any_time_no_more_than_a_full_bucket_and_the_rate_goes_through(seed):
    rng = np.random.default_rng(seed)
    some, now_s, let_in = limits(requests_per_minute=30), 0.0, 0
    for gap_s in rng.exponential(0.3, 2000):
        now_s += gap_s
        try:
            some.enter("alice", now_s)
            let_in += 1
        except ApiError:
            pass
    # At the end there may be what a few long gaps have left.
    assert 30 + now_s * 0.5 - 4 <= let_in <= 30 + now_s * 0.5 + 1


def test_a_request_that_may_wait_what_it_was_told_is_let_in_then():
    some = limits(tokens_per_minute=600)
    some.enter("alice", 0.0).reserve(500, 0, 0.0)
    lease = some.enter("alice", 0.0)
    error = refused(lease.reserve, 300, 0, 0.0)
    assert (error.status, error.param) == (429, "tokens")
    assert error.retry_after_s == pytest.approx(20.0)
    lease.reserve(300, 0, 20.0)


def test_what_was_reserved_and_not_generated_comes_back_at_the_end():
    some = limits(tokens_per_minute=1000)
    lease = some.enter("alice", 0.0)
    lease.reserve(100, 800, 0.0)
    assert some.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "100"
    lease.generated(50)
    lease.close(0.0, served=True)
    assert some.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "850"


def test_what_was_generated_beyond_the_reservation_is_a_debt():
    some = limits(tokens_per_minute=100)
    lease = some.enter("alice", 0.0)
    lease.reserve(50, 0, 0.0)
    lease.generated(110)
    lease.close(0.0, served=True)
    assert some.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "0"
    error = refused(some.enter("alice", 0.0).reserve, 10, 0, 0.0)
    assert error.retry_after_s == pytest.approx(70 * 0.6)


def test_one_that_no_engine_worked_for_pays_no_tokens():
    some = limits(tokens_per_minute=100)
    lease = some.enter("alice", 0.0)
    lease.reserve(60, 30, 0.0)
    lease.close(0.0, served=False)
    assert some.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "100"


def test_reserving_again_replaces_and_closing_again_changes_nothing():
    some = limits(tokens_per_minute=100, concurrent=1)
    lease = some.enter("alice", 0.0)
    lease.reserve(90, 0, 0.0)
    lease.reserve(20, 0, 0.0)
    for _ in range(3):
        lease.close(0.0, served=True)
    assert some.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "80"
    some.enter("alice", 0.0).close(0.0, served=True)
    lease.reserve(50, 0, 0.0)
    assert some.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "80"


def test_what_no_minute_allows_is_refused_for_good_and_takes_nothing():
    some = limits(tokens_per_minute=100)
    error = refused(some.enter("alice", 0.0).reserve, 80, 30, 0.0)
    assert (error.status, error.code, error.retry_after_s) == (400, "request_over_limit", None)
    assert "110 tokens" in error.message and "100 a minute" in error.message
    some.enter("alice", 0.0).reserve(70, 30, 0.0)


def test_only_so_many_are_open_at_a_time():
    some = limits(concurrent=2)
    first, _ = some.enter("alice", 0.0), some.enter("alice", 0.0)
    error = refused(some.enter, "alice", FAR_S)
    assert (error.status, error.code) == (429, "too_many_concurrent")
    assert error.retry_after_s is not None
    first.close(FAR_S, served=True)
    some.enter("alice", FAR_S)


def test_replicas_share_the_rate_and_never_exceed_it_together():
    shares = [limits(replicas=4, requests_per_minute=40, concurrent=6) for _ in range(4)]
    let_in = 0
    for share in shares:
        for _ in range(50):
            try:
                share.enter("alice", 0.0).close(0.0, served=True)
                let_in += 1
            except ApiError:
                pass
    assert let_in == 40
    for concurrent, each in ((6, 2), (1, 1)):
        share = limits(replicas=4, concurrent=concurrent)
        for _ in range(each):
            share.enter("alice", 0.0)
        refused(share.enter, "alice", 0.0)


def test_less_than_one_request_a_minute_can_still_be_made():
    some = limits(requests_per_minute=0.5)
    some.enter("alice", 0.0)
    assert refused(some.enter, "alice", 60.0).retry_after_s == pytest.approx(60.0)
    some.enter("alice", 120.0)


def test_a_clock_that_runs_backwards_gives_nothing():
    bucket = Bucket(60.0, 0.0, 100.0)
    bucket.refill(50.0)
    assert bucket.level == 0.0
    bucket.refill(51.0)
    assert bucket.level == pytest.approx(1.0)


def test_headers_tell_limit_rest_and_time_to_full():
    some = limits(requests_per_minute=60, tokens_per_minute=6000)
    some.enter("alice", 0.0).reserve(1000, 500, 0.0)
    assert some.headers("alice", 0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4500",
        "x-ratelimit-reset-tokens": "15s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"), (0.0001, "1ms"), (0.35, "350ms"), (0.75, "750ms"), (0.9999, "1s"),
        (1.0, "1s"), (1.2, "2s"), (59.5, "1m0s"), (360.0, "6m0s"), (3723.0, "1h2m3s"),
        (86400.0, "24h0m0s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_does_and_rounded_up(seconds, text):
    assert duration(seconds) == text


# -- places ------------------------------------------------------------------------------------


EVEN = {"alice": 1.0, "bob": 1.0, "carol": 1.0}
ALICE, BOB = Tenant("alice"), Tenant("bob")


@pytest.mark.parametrize(
    ("held", "weights", "elsewhere", "turned_away"),
    [
        ({"alice": 7}, EVEN, 0, False),  # 7 < 8: room for anybody
        ({"bob": 8}, EVEN, 0, True),  # alone its share is all 8; a ninth is one too many
        ({"alice": 8}, EVEN, 0, False),  # bob's share is 8/2 = 4 and it holds none
        ({"alice": 8, "bob": 3}, EVEN, 0, False),  # the fourth is 4 of 4
        ({"alice": 8, "bob": 4}, EVEN, 0, True),  # the fifth would be 5 of 4
        ({"alice": 8, "carol": 4, "bob": 1}, EVEN, 0, False),  # 8/3 = 2.67, the second is 2
        ({"alice": 8, "carol": 4, "bob": 2}, EVEN, 0, True),  # the third would be 3 > 2.67
        ({"alice": 8, "carol": 0, "bob": 3}, EVEN, 0, False),  # who holds none has no share: 8/2
        ({"alice": 8, "bob": 5}, {"alice": 1.0, "bob": 3.0}, 0, False),  # 8 * 3/4 = 6
        ({"alice": 8, "bob": 6}, {"alice": 1.0, "bob": 3.0}, 0, True),
        ({"alice": 8}, {"alice": 99.0, "bob": 1.0}, 0, False),  # 8/100, but at least one
        ({"alice": 8, "bob": 1}, {"alice": 99.0, "bob": 1.0}, 0, True),
        # 2 here are as 6 of the cluster's 12, since 6 are elsewhere: a seventh exceeds 8/2
        ({"alice": 4, "bob": 2}, EVEN, 6, True),
        # 1 of 5 here, 5 elsewhere: as 2, a third is within 4
        ({"alice": 4, "bob": 1}, EVEN, 5, False),
        ({}, EVEN, 8, False),  # nobody here: whose they are is not known
    ],
)
def test_a_tenant_below_its_share_is_never_refused(held, weights, elsewhere, turned_away):
    places = Places(8)
    for name, count in held.items():
        for i in range(count):
            places._held[name, i] = Tenant(name, weights[name])
    assert places.take("one more", Tenant("bob", weights["bob"]), elsewhere) is not turned_away


def test_places_that_are_left_are_free_again():
    places = Places(2)
    assert places.take(1, ALICE) and places.take(2, ALICE) and not places.take(3, ALICE)
    places.leave(1)
    places.leave(1)
    places.leave("never there")
    assert len(places) == 1 and places.take(3, ALICE) and not places.take(4, ALICE)


def test_tenants_that_come_one_after_the_other_fill_no_more_than_the_harmonic_sum():
    places = Places(12)
    for name in ("a", "b", "c", "d"):
        count = 0
        while places.take((name, count), Tenant(name)):
            count += 1
    # 12 + 12/2 + 12/3 + 12/4 = 25
    assert len(places) == 25


def test_where_tenants_cannot_be_told_apart_the_limit_is_all_there_is():
    places = Places(2, shared=False)
    assert not places.take(0, BOB, elsewhere=2)
    assert places.take(1, ALICE) and places.take(2, ALICE) and not places.take(3, BOB)
