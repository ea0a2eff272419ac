"""A request's tenant, and how much it may take: keys, token buckets, places."""

import copy
import pickle

import numpy as np
import pytest

from kappa.keys import digest_of
from kappa.protocol import Charge
from kappa_router.api.errors import ApiError
from kappa_router.api.tenants import (
    Allowance,
    Bucket,
    Places,
    Tenant,
    TenantLimiter,
    Tenants,
    duration,
    keys_in,
)
from tests.router.building import refused, tenants_of

# -- keys ------------------------------------------------------------------------------------------

KEYS = {"sk-alice": "alice", "sk-alice-2": "alice", "sk-bob": "bob"}
OPEN = tenants_of(KEYS, {"alice": 3.0, "default": 0.5})
CLOSED = tenants_of(KEYS, {"alice": 3.0}, refuse=True)


@pytest.mark.parametrize(
    ("keys", "tenant"),
    [
        (["sk-alice"], Tenant("alice", 3.0)),
        (["sk-alice-2"], Tenant("alice", 3.0)),
        (["sk-bob"], Tenant("bob", 1.0)),
        (["none", "sk-bob"], Tenant("bob", 1.0)),
        (["sk-alice", "sk-bob"], Tenant("alice", 3.0)),
        (["sk-alic"], None),
        (["SK-ALICE"], None),
        (["sk-\udcff"], None),
        ([], None),
    ],
)
def test_first_known_key_counts_else_default_or_none(keys, tenant):
    assert OPEN.find(keys) == (tenant or Tenant("default", 0.5))
    assert CLOSED.find(keys) == tenant
    assert Tenants().find(keys) == Tenant(), "without keys everyone is the default tenant"


SPOKEN = tenants_of(
    {**KEYS, "sk-edge": "edge"}, {"team": 2.0}, speaks_for={"edge": ("team", "bob")},
    operators=frozenset({"bob"}), priorities={"team": (4, ())},
)  # fmt: skip


def test_tenant_is_named_by_who_may_speak_for_it():
    edge = SPOKEN.find(["sk-edge"])
    assert SPOKEN.named(edge, "team") == Tenant("team", 2.0, operator=False, priority=4)
    assert not SPOKEN.named(edge, "bob").operator, "a gateway gains no operator's rights"
    assert SPOKEN.named(edge, "edge") == SPOKEN.named(edge, "") == edge
    assert {"team", "edge", "alice"} <= SPOKEN.all().keys()


@pytest.mark.parametrize("fairness_id", ["bob", "team", "Alice", "nobody", "x" * 9999])
def test_tenant_cannot_be_left_by_a_fairness_header(fairness_id):
    for table in (SPOKEN, OPEN):
        error = refused(table.named, table.find(["sk-alice"]), fairness_id)
        assert (error.status, error.code) == (403, "foreign_tenant")
        assert "tenants.speaks_for.alice" in str(error) and len(str(error)) < 300


def test_fairness_header_is_nothing_where_tenants_are_one():
    assert Tenants().named(Tenant(), "anybody") == Tenant()
    spoken = Tenants(speaks_for={"default": ("team",)})
    assert spoken.apart and spoken.named(Tenant(), "team").name == "team"


@pytest.mark.parametrize(
    ("authorization", "api_key", "keys"),
    [
        ("Bearer sk-a", "", ["sk-a"]), ("bearer   sk-a ", "", ["sk-a"]), ("", "sk-b", ["sk-b"]),
        ("Bearer none", " sk-b", ["none", "sk-b"]), ("Basic dXNlcjpwdw==", "", []),
        ("sk-a", "", []), ("Bearer", "", []), ("Bearer ", "", []), ("", "", []),
    ],
)  # fmt: skip
def test_keys_come_in_either_header(authorization, api_key, keys):
    assert keys_in(authorization, api_key) == keys


def test_keys_are_in_nothing_that_is_shown_or_sent():
    for text in (repr(OPEN), str(OPEN.by_digest), repr(pickle.dumps(OPEN))):
        assert "sk-" not in text
    assert pickle.loads(pickle.dumps(OPEN)) == copy.deepcopy(OPEN) == OPEN


def test_default_tenant_is_listed_only_where_it_can_occur():
    assert list(OPEN.all()) == ["alice", "bob", "default"]
    assert list(CLOSED.all()) == ["alice", "bob"]
    assert Tenants().all() == {"default": Tenant()}


@pytest.mark.ray
def test_shares_say_what_each_was_charged_of_all():
    from kappa_router.api.status import shares

    charged = {"alice": Charge(3.0, 1.0, 0.0), "ghost": Charge(1.0, 1.0, 0.0)}
    rows = {row["tenant"]: row for row in shares(OPEN, charged)}
    assert list(rows) == ["alice", "bob", "default", "ghost"]
    assert rows["alice"]["share"] == {"vram": 0.75, "gpu": 0.5, "link": 0.0}
    assert (rows["alice"]["weight"], rows["alice"]["priority"]) == (3.0, 0)
    assert rows["ghost"]["charged"] == {"vram_s": 1.0, "gpu_s": 1.0, "link_s": 0.0}
    assert rows["bob"]["share"] == {"vram": 0.0, "gpu": 0.0, "link": 0.0}
    assert [row["tenant"] for row in shares(Tenants(), {})] == ["default"]


def test_tenant_has_its_class_from_the_table():
    table = Tenants(priorities={"alice": (3, (0, 5))}).with_digests({digest_of("sk-a"): "alice"})
    found = table.find(["sk-a"])
    assert (found.priority, found.may_ask) == (3, (0, 5))
    assert (table.default.priority, table.default.may_ask) == (0, ())


# -- token buckets ---------------------------------------------------------------------------------


def limits(replicas=1, **allowance):
    return TenantLimiter(by_tenant={"alice": Allowance(**allowance)}, replicas=replicas)


def remaining(some, what="tokens"):
    return some.headers("alice", 0.0)[f"x-ratelimit-remaining-{what}"]


def test_tenant_without_limits_is_never_refused():
    free = TenantLimiter()
    for _ in range(1000):
        free.enter("alice", 0.0).reserve(10**9, 10**9, 0.0)
    assert free.headers("alice", 0.0) == {}


def test_requests_of_a_minute_are_refused_until_one_has_grown():
    some = limits(requests_per_minute=6)
    for _ in range(6):
        some.enter("alice", 100.0)
    error = refused(some.enter, "alice", 100.0)
    assert (error.status, error.code, error.param) == (429, "rate_limit_exceeded", "requests")
    assert error.retry_after_s == pytest.approx(10.0)
    refused(some.enter, "alice", 109.9)
    some.enter("alice", 110.0)
    refused(some.enter, "alice", 110.0)


def test_body_counts_as_a_request_for_each_begun_mib():
    some, mib = limits(requests_per_minute=6), 1 << 20
    for size_bytes, left in ((0, 5), (mib, 4), (mib + 1, 2)):
        some.enter("alice", 0.0, size_bytes)
        assert remaining(some, "requests") == str(left)
    assert refused(some.enter, "alice", 0.0, 3 * mib).retry_after_s == pytest.approx(10.0)
    some.enter("alice", 10.0, 3 * mib)


def test_body_larger_than_a_minute_passes_and_leaves_a_debt():
    some = limits(requests_per_minute=4)
    some.enter("alice", 0.0, 9 << 20)
    assert refused(some.enter, "alice", 0.0).retry_after_s == pytest.approx(90.0)


def test_body_of_unknown_size_is_charged_when_it_is_there():
    some, mib = limits(requests_per_minute=4), 1 << 20
    first, second = some.enter("alice", 0.0), some.enter("alice", 0.0)
    first.received(2 * mib, 0.0)
    first.received(2 * mib, 0.0)
    assert remaining(some, "requests") == "1"
    assert refused(second.received, 3 * mib, 0.0).retry_after_s == pytest.approx(15.0)
    assert remaining(some, "requests") == "1"
    second.received(3 * mib, 15.0)


def test_tenant_does_not_pay_for_another():
    some = TenantLimiter(Allowance(1), {"bob": Allowance(2)})
    for tenant, count in (("alice", 1), ("bob", 2)):
        for _ in range(count):
            some.enter(tenant, 0.0)
        refused(some.enter, tenant, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_bucket_lets_through_its_size_and_its_rate(seed):
    some, now_s, admitted = limits(requests_per_minute=30), 0.0, 0
    for gap_s in np.random.default_rng(seed).exponential(0.3, 2000):
        now_s += gap_s
        try:
            some.enter("alice", now_s)
            admitted += 1
        except ApiError:
            pass
    # At the end there may be what a few long gaps have left.
    assert 30 + now_s * 0.5 - 4 <= admitted <= 30 + now_s * 0.5 + 1


def test_request_that_waits_as_told_is_admitted():
    some = limits(tokens_per_minute=600)
    some.enter("alice", 0.0).reserve(500, 0, 0.0)
    lease = some.enter("alice", 0.0)
    error = refused(lease.reserve, 300, 0, 0.0)
    assert (error.status, error.param) == (429, "tokens")
    assert error.retry_after_s == pytest.approx(20.0)
    lease.reserve(300, 0, 20.0)


@pytest.mark.parametrize(
    ("reserved", "generated", "served", "worked", "left"),
    [
        ((100, 800), 50, True, False, "850"),  # what was not generated comes back
        ((50, 0), 1060, True, False, "0"),  # beyond the reservation is a debt
        ((60, 30), 0, False, False, "1000"),  # no engine worked for it
        ((60, 30), 0, False, True, "940"),  # one did, and its client left
    ],
)
def test_request_pays_at_its_end_for_what_it_used(reserved, generated, served, worked, left):
    some = limits(tokens_per_minute=1000)
    lease = some.enter("alice", 0.0)
    lease.reserve(*reserved, 0.0)
    assert remaining(some) == str(1000 - sum(reserved))
    lease.generated(generated)
    lease.worked = worked
    lease.close(0.0, served=served)
    assert remaining(some) == left
    if left == "0":
        error = refused(some.enter("alice", 0.0).reserve, 10, 0, 0.0)
        assert error.retry_after_s == pytest.approx((110 + 10) * 0.06)


def test_reserving_again_replaces_and_closing_again_does_nothing():
    some = limits(tokens_per_minute=100, concurrent=1)
    lease = some.enter("alice", 0.0)
    lease.reserve(90, 0, 0.0)
    lease.reserve(20, 0, 0.0)
    for _ in range(3):
        lease.close(0.0, served=True)
    assert remaining(some) == "80"
    lease.reserve(50, 0, 0.0)
    assert remaining(some) == "80"
    some.enter("alice", 0.0)
    refused(some.enter, "alice", 0.0)


def test_request_above_a_whole_minute_is_refused_for_good():
    some = limits(tokens_per_minute=100)
    error = refused(some.enter("alice", 0.0).reserve, 80, 30, 0.0)
    assert (error.status, error.code, error.retry_after_s) == (400, "request_over_limit", None)
    assert "110 tokens" in error.message and "100 a minute" in error.message
    some.enter("alice", 0.0).reserve(70, 30, 0.0)


def test_tenant_has_only_its_number_open_at_a_time():
    some = limits(concurrent=2)
    first, _ = some.enter("alice", 0.0), some.enter("alice", 0.0)
    error = refused(some.enter, "alice", 1e6)
    assert (error.status, error.code) == (429, "too_many_concurrent")
    assert error.retry_after_s is not None
    first.close(1e6, served=True)
    some.enter("alice", 1e6)


def test_replicas_share_the_rate_and_never_exceed_it_together():
    admitted = 0
    for share in [limits(replicas=4, requests_per_minute=40, concurrent=6) for _ in range(4)]:
        for _ in range(50):
            try:
                share.enter("alice", 0.0).close(0.0, served=True)
                admitted += 1
            except ApiError:
                pass
    assert admitted == 40
    for concurrent, each in ((6, 2), (1, 1)):  # rounded up, at least one
        share = limits(replicas=4, concurrent=concurrent)
        for _ in range(each):
            share.enter("alice", 0.0)
        refused(share.enter, "alice", 0.0)


def test_rate_below_one_a_minute_still_admits():
    some = limits(requests_per_minute=0.5)
    some.enter("alice", 0.0)
    assert refused(some.enter, "alice", 60.0).retry_after_s == pytest.approx(60.0)
    some.enter("alice", 120.0)


def test_clock_that_runs_backwards_gives_nothing():
    bucket = Bucket(60.0, 0.0, 100.0)
    bucket.refill(50.0)
    assert bucket.level == 0.0
    bucket.refill(51.0)
    assert bucket.level == pytest.approx(1.0)


def test_headers_say_limit_rest_and_time_to_full():
    some = limits(requests_per_minute=60, tokens_per_minute=6000)
    some.enter("alice", 0.0).reserve(1000, 500, 0.0)
    assert some.headers("alice", 0.0) == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-requests": "59", "x-ratelimit-remaining-tokens": "4500",
        "x-ratelimit-reset-requests": "1s", "x-ratelimit-reset-tokens": "15s",
    }  # fmt: skip


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


# -- places ----------------------------------------------------------------------------------------

EVEN = {"alice": 1.0, "bob": 1.0, "carol": 1.0}
ALICE, BOB = Tenant("alice"), Tenant("bob")


@pytest.mark.parametrize(
    ("held", "weights", "elsewhere", "refuses"),
    [
        ({"alice": 7}, EVEN, 0, False),  # 7 < 8: room for anybody
        ({"bob": 8}, EVEN, 0, True),  # alone its share is all 8; a ninth is one too many
        ({"alice": 8}, EVEN, 0, False),  # bob's share is 8/2 = 4 and it holds none
        ({"alice": 8, "bob": 3}, EVEN, 0, False),  # the fourth is 4 of 4
        ({"alice": 8, "bob": 4}, EVEN, 0, True),  # the fifth would be 5 of 4
        ({"alice": 8, "carol": 4, "bob": 1}, EVEN, 0, False),  # 8/3 = 2.67, the second is 2
        ({"alice": 8, "carol": 4, "bob": 2}, EVEN, 0, True),  # the third would be 3 > 2.67
        ({"alice": 8, "bob": 5}, {"alice": 1.0, "bob": 3.0}, 0, False),  # 8 * 3/4 = 6
        ({"alice": 8, "bob": 6}, {"alice": 1.0, "bob": 3.0}, 0, True),
        ({"alice": 8}, {"alice": 99.0, "bob": 1.0}, 0, False),  # 8/100, but at least one
        ({"alice": 8, "bob": 1}, {"alice": 99.0, "bob": 1.0}, 0, True),
        # 2 here are as 6 of the cluster's 12, since 6 are elsewhere: a seventh exceeds 8/2
        ({"alice": 4, "bob": 2}, EVEN, 6, True),
        # 1 of 5 here, 5 elsewhere: as 2, a third is within 4
        ({"alice": 4, "bob": 1}, EVEN, 5, False),
        ({}, EVEN, 8, False),  # none here: their tenants are not known
    ],
)
def test_tenant_below_its_share_is_never_refused(held, weights, elsewhere, refuses):
    places = Places(8)
    for name, count in held.items():
        for i in range(count):
            places._held[name, i] = Tenant(name, weights[name])
    assert places.take("one more", Tenant("bob", weights["bob"]), elsewhere) is not refuses


def test_places_that_are_left_are_free_again():
    places = Places(2)
    assert places.take(1, ALICE) and places.take(2, ALICE) and not places.take(3, ALICE)
    for holder in (1, 1, "never there"):
        places.leave(holder)
    assert len(places) == 1 and places.take(3, ALICE) and not places.take(4, ALICE)


def test_tenants_in_turn_fill_no_more_than_the_harmonic_sum():
    places = Places(12)
    for name in ("a", "b", "c", "d"):
        count = 0
        while places.take((name, count), Tenant(name)):
            count += 1
    # 12 + 12/2 + 12/3 + 12/4 = 25
    assert len(places) == 25


def test_limit_is_for_all_where_tenants_are_not_told_apart():
    places = Places(2, shared=False)
    assert not places.take(0, BOB, elsewhere=2)
    assert places.take(1, ALICE) and places.take(2, ALICE) and not places.take(3, BOB)


def test_limiter_checks_a_request_without_taking_it():
    limiter = TenantLimiter(Allowance(requests_per_minute=2, concurrent=1))
    for _ in range(5):
        limiter.check("alice", 0.0)
    lease = limiter.enter("alice", 0.0)
    assert "open" in str(refused(limiter.check, "alice", 0.0))
    lease.close(0.0, served=True)
    limiter.enter("alice", 0.0).close(0.0, served=True)
    assert "per minute" in str(refused(limiter.check, "alice", 0.0))


def test_limiter_checks_a_body_of_unknown_length_as_one_request():
    limiter = TenantLimiter(Allowance(requests_per_minute=1))
    limiter.check("alice", 0.0)
    limiter.enter("alice", 0.0, 1 << 20)
    assert "per minute" in str(refused(limiter.check, "alice", 0.0))


def test_limiter_checks_a_long_body_as_several_requests():
    limiter = TenantLimiter(Allowance(requests_per_minute=3))
    limiter.check("alice", 0.0, 3 << 20)
    limiter.enter("alice", 0.0, 2 << 20)
    limiter.check("alice", 0.0, 1 << 20)
    assert "per minute" in str(refused(limiter.check, "alice", 0.0, 2 << 20))


def test_lease_pays_for_the_prompt_that_an_engine_counted():
    limiter = TenantLimiter(Allowance(tokens_per_minute=1000))
    lease = limiter.enter("alice", 0.0)
    lease.reserve(500, 100, 0.0)
    lease.counted(200)
    lease.generated(50)
    lease.close(0.0, served=True)
    assert limiter.headers("alice", 0.0)["x-ratelimit-remaining-tokens"] == "750"
