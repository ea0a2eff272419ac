"""Tenants, keys, limits, and where the endpoint may listen."""

import pytest

from kappa.keys import digest_of, hashed
from kappa.settings.access import HttpSettings
from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings

ALICE = {"by_key": {"sk-alice-0123456": "alice"}}


HUSH = "sk-hush-01234567"


CLOSED = {**ALICE, "unknown": "refuse"}


def fault(**sections):
    with pytest.raises(SettingsError) as caught:
        load_settings(None, **sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "key", "says"),
    [
        ({"access": {"body_timeout_s": float("nan")}}, "access.body_timeout_s", "finite"),
        ({"access": {"open": True}}, "access.open", "not permitted"),
        ({"access": {"allow_open": "perhaps"}}, "access.allow_open", "boolean"),
        (
            {"tenants": {"default_limits": {"tokens_per_minute": float("inf")}}},
            "tenants.default_limits.tokens_per_minute", "finite",
        ),
        (
            {"tenants": {"default_limits": {"rps": 1}}},
            "tenants.default_limits.rps", "not permitted",
        ),
        (
            {"tenants": {**ALICE, "limits": {"alcie": {"concurrent": 1}}}},
            "tenants", "limits names ['alcie'], who have no key",
        ),
        (
            {"tenants": {**ALICE, "priorities": {"bob": {"own": 1}}}},
            "tenants", "priorities names ['bob'], who have no key",
        ),
        (
            {"tenants": {**ALICE, "priorities": {"alice": {"own": 10}}}},
            "tenants.priorities.alice.own", "less than or equal to 9",
        ),
        (
            {"tenants": {**ALICE, "priorities": {"alice": {"may_ask": [-1]}}}},
            "tenants.priorities.alice.may_ask.0", "greater than or equal to 0",
        ),
        (
            {"tenants": {**ALICE, "operators": ["bob"]}},
            "tenants", "operators names ['bob'], who have no key",
        ),
        (
            {"tenants": {"by_key": {"sha256:hush": "alice"}}},
            "tenants.by_key", "a key of 'alice' is no digest",
        ),
        (
            {"tenants": {"by_key": {HUSH: "alice", hashed(HUSH): "bob"}}},
            "tenants.by_key", "given to two tenants",
        ),
        (
            {"tenants": {"by_key": {HUSH[:15]: "alice"}}},
            "tenants.by_key", "a key of 'alice' has 15 characters, so it could be guessed",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_key_and_reason(sections, key, says):
    message = fault(**sections)
    line = next(line for line in message.splitlines() if line.startswith(f"  {key}: "))
    assert says in line and "hush" not in message


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True),
        ("localhost", True), ("LOCALHOST", True), ("0.0.0.0", False), ("::", False),
        ("10.0.0.7", False), ("my-host", False), ("localhost.example.com", False), ("", False),
        ("127.0.0.1.example.com", False),
    ],
)  # fmt: skip
def test_what_only_this_machine_can_reach(host, loopback):
    assert HttpSettings(host=host).loopback is loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "my-host"])
@pytest.mark.parametrize("tenants", [{}, ALICE])
def test_settings_require_keys_beyond_loopback_unless_allow_open(host, tenants):
    message = fault(http={"host": host}, tenants=tenants)
    assert f"http.host listens on {host}" in message and "access.allow_open: true" in message
    load_settings(None, http={"host": host}, tenants=tenants, access={"allow_open": True})
    load_settings(None, http={"host": host}, tenants=CLOSED)


def test_a_cluster_never_does_without_its_routers():
    assert "http.decider_away" in fault(http={"decider_away": "least_request"})


def test_on_loopback_no_keys_are_needed():
    assert not load_settings().tenants.closed


def test_keys_of_the_settings_are_told_from_those_of_the_file(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"sk-alice-0123456: alice\n{hashed('sk-bob-012345678')}: bob\n")
    tenants = load_settings(None, tenants={**CLOSED, "keys_file": str(path)}).tenants
    assert tenants.digests == {
        digest_of("sk-alice-0123456"): "alice",
        digest_of("sk-bob-012345678"): "bob",
    }
    assert tenants.fixed_digests == {digest_of("sk-alice-0123456")}
    assert tenants.keys_in_clear == 1
    assert load_settings().tenants.fixed_digests == frozenset()


def test_limits_of_a_tenant_replace_those_of_everybody():
    tenants = load_settings(
        None,
        tenants={
            **ALICE,
            "default_limits": {"concurrent": 4},
            "limits": {"alice": {"tokens_per_minute": 1000}},
        },
    ).tenants
    assert tenants.default_limits.concurrent == 4
    assert tenants.limits["alice"].concurrent is None
    assert tenants.limits["alice"].tokens_per_minute == 1000
