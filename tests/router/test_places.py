"""Who gets a place when all are taken, by numbers worked out by hand."""

import pytest

from router.access.places import Places, refused
from router.access.tenants import Tenant

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
    assert refused(held, weights, "bob", 8, elsewhere) is turned_away


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
