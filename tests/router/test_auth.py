"""Whose a request is, and that nothing which knows the keys shows them."""

import copy
import pickle

import pytest

from kappa.protocol import Charge
from router.api.status import shares
from router.api.tenants import Tenant, Tenants, keys_in
from tests.router.building import tenants_of

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
def test_the_first_known_key_counts_and_without_one_it_is_the_default_or_nobody(keys, tenant):
    assert OPEN.find(keys) == (tenant or Tenant("default", 0.5))
    assert CLOSED.find(keys) == tenant


def test_without_keys_everyone_is_the_default_tenant():
    assert Tenants().find(["anything"]) == Tenants().find([]) == Tenant()


@pytest.mark.parametrize(
    ("authorization", "api_key", "keys"),
    [
        ("Bearer sk-a", "", ["sk-a"]),
        ("bearer   sk-a ", "", ["sk-a"]),
        ("", "sk-b", ["sk-b"]),
        ("Bearer none", " sk-b", ["none", "sk-b"]),
        ("Basic dXNlcjpwdw==", "", []),
        ("sk-a", "", []),
        ("Bearer", "", []),
        ("Bearer ", "", []),
        ("", "", []),
    ],
)
def test_keys_come_in_either_header(authorization, api_key, keys):
    assert keys_in(authorization, api_key) == keys


def test_keys_are_in_nothing_that_is_shown_or_sent():
    for text in (repr(OPEN), str(OPEN.by_digest), repr(pickle.dumps(OPEN))):
        assert "sk-" not in text
    assert pickle.loads(pickle.dumps(OPEN)) == copy.deepcopy(OPEN) == OPEN


def test_the_default_tenant_is_listed_only_where_it_can_occur():
    assert list(OPEN.all()) == ["alice", "bob", "default"]
    assert list(CLOSED.all()) == ["alice", "bob"]
    assert Tenants().all() == {"default": Tenant()}


def test_shares_tell_what_each_was_charged_of_all():
    charged = {"alice": Charge(3.0, 1.0, 0.0), "ghost": Charge(1.0, 1.0, 0.0)}
    rows = {row["tenant"]: row for row in shares(OPEN, charged)}
    assert list(rows) == ["alice", "bob", "default", "ghost"]
    assert rows["alice"]["share"] == {"vram": 0.75, "gpu": 0.5, "link": 0.0}
    assert rows["alice"]["weight"] == 3.0
    assert rows["ghost"]["charged"] == {"vram_s": 1.0, "gpu_s": 1.0, "link_s": 0.0}
    assert rows["bob"]["share"] == {"vram": 0.0, "gpu": 0.0, "link": 0.0}
    assert [row["tenant"] for row in shares(Tenants(), {})] == ["default"]
