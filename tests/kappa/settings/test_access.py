"""Tenants, keys, limits, and where the endpoint may listen."""

import pytest
import yaml

from kappa.keys import hashed
from kappa.settings.access import HttpSettings
from kappa.settings.cluster import load_settings
from tests.kappa.settings.faults import fault, named

ALICE = {"by_key": {"sk-alice-0123456": "alice"}}


HUSH = "sk-hush-01234567"


CLOSED = {**ALICE, "unknown": "refuse"}


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("access: {body_timeout_s: .nan}", "access.body_timeout_s", "finite"),
        ("access: {open: true}", "access.open", "not permitted"),
        ("access: {allow_open: perhaps}", "access.allow_open", "boolean"),
        ("tenants: {default_limits: {tokens_per_minute: .inf}}",
         "tenants.default_limits.tokens_per_minute", "finite"),
        ("tenants: {default_limits: {rps: 1}}", "tenants.default_limits.rps", "not permitted"),
        ("tenants: {limits: {alcie: {concurrent: 1}}, $alice}", "tenants",
         "limits names ['alcie'], who have no key"),
        ("tenants: {priorities: {bob: {own: 1}}, $alice}", "tenants",
         "priorities names ['bob'], who have no key"),
        ("tenants: {priorities: {alice: {own: 10}}, $alice}", "tenants.priorities.alice.own",
         "less than or equal to 9"),
        ("tenants: {priorities: {alice: {may_ask: [-1]}}, $alice}",
         "tenants.priorities.alice.may_ask.0", "greater than or equal to 0"),
        ("tenants: {operators: [bob], $alice}", "tenants", "operators names ['bob'], who have no"),
        ("tenants: {speaks_for: {edge: [bob]}, $alice}", "tenants",
         "speaks_for names ['edge'], who have no key"),
        ("tenants: {speaks_for: {alice: ['b b']}, $alice}", "tenants.speaks_for.alice.0",
         "should match pattern"),
        ("tenants: {by_key: {'sha256:hush': alice}}", "tenants.by_key",
         "a key of 'alice' is no digest"),
        (f"tenants: {{by_key: {{{HUSH}: alice, '{hashed(HUSH)}': bob}}}}", "tenants.by_key",
         "given to two tenants"),
        (f"tenants: {{by_key: {{{HUSH[:15]}: alice}}}}", "tenants.by_key",
         "a key of 'alice' has 15 characters, so it could be guessed"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_key_and_reason(text, key, says):
    alice = "by_key: {sk-alice-0123456: alice}"
    message = fault(**yaml.safe_load(text.replace("$alice", alice)))
    assert named(message, key, says) and "hush" not in message


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


def test_limits_of_a_tenant_replace_those_of_everybody():
    limits = {"alice": {"tokens_per_minute": 1000}}
    given = {**ALICE, "default_limits": {"concurrent": 4}, "limits": limits}
    tenants = load_settings(tenants=given).tenants
    assert tenants.default_limits.concurrent == 4
    assert tenants.limits["alice"].concurrent is None
    assert tenants.limits["alice"].tokens_per_minute == 1000
