"""Tenants' caches are apart: no salt of one can be made by another, and each divides its own."""

import itertools

import pytest

from router.access.isolation import cache_salt
from router.access.tenants import Tenant
from router.index.prefix_hash import PrefixHasher, salt_of

ALICE, BOB = (Tenant(name, own_cache=True) for name in ("alice", "bob"))


def test_without_isolation_a_client_has_the_salt_that_it_asks_for():
    assert cache_salt(Tenant(), None) is None
    assert cache_salt(Tenant(), "") is None
    assert cache_salt(Tenant("alice"), "mine") == "mine"


def test_every_pair_of_tenant_and_own_salt_has_a_salt_of_its_own():
    tenants = [ALICE, BOB, Tenant("alicex", own_cache=True), Tenant("a", own_cache=True)]
    own = [None, "x", "licex", "alice", "bob", "\x00", "ß", "\ud800"]
    salts = {(t.name, o): cache_salt(t, o) for t, o in itertools.product(tenants, own)}
    assert len(set(salts.values())) == len(salts)
    assert cache_salt(ALICE, "") == cache_salt(ALICE, None)


def test_a_tenant_that_sends_anothers_salt_does_not_get_it():
    stolen = cache_salt(ALICE, None)
    assert cache_salt(BOB, stolen) not in (stolen, cache_salt(ALICE, stolen))


def test_a_salt_is_the_same_at_every_start():
    assert cache_salt(ALICE, "x") == "342cb34df72dcc2e5545f14032f21394"
    assert cache_salt(ALICE, "x") == cache_salt(Tenant("alice", 7.0, own_cache=True), "x")


@pytest.mark.parametrize("own", [None, "session"])
def test_the_router_finds_no_prefix_of_another_tenant(own):
    hasher = PrefixHasher(16, secret=7)
    tokens = list(range(64))
    alice, bob = (
        hasher.prefix_hashes(tokens, salt_of(cache_salt(tenant, own))) for tenant in (ALICE, BOB)
    )
    assert len(alice) == 4 and not set(alice.tolist()) & set(bob.tolist())
