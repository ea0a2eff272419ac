"""Deadlines, salts, approximate answers, and what no worker can hold: who may serve a request."""

import itertools
from dataclasses import replace

import pytest

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from router.api.errors import ApiError
from router.api.request import (
    Deadline,
    approx_allowed,
    cache_salt,
    deadline_of,
    exact_workers,
    is_approximate,
    late_workers,
    unfit_workers,
)
from router.api.tenants import Tenant
from router.index.prefix_hash import PrefixHasher, salt_of
from tests.router.offering import estimates

# -- deadlines ---------------------------------------------------------------------------------


def refused(call, *arguments, **options):
    with pytest.raises(ApiError) as caught:
        call(*arguments, **options)
    return caught.value


@pytest.mark.parametrize(
    ("text", "allowed_s"), [("1", 0.001), (" 1500 ", 1.5), ("86400000", 86400)]
)
def test_a_deadline_is_whole_milliseconds_from_arrival(text, allowed_s):
    deadline = deadline_of(text, 10.0)
    assert deadline == Deadline(10.0, allowed_s) and deadline.at_s == 10.0 + allowed_s


def test_without_the_header_there_is_none():
    assert deadline_of("", 1.0) is None and deadline_of("  ", 1.0) is None


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-5",
        "1.5",
        "1e3",
        "soon",
        "0x10",
        "1 2",
        "86400001",
        "9" * 400,
        "²",
        "١",
        "+5",
        "1_000",
    ],
)
def test_what_is_no_deadline_is_refused_with_what_it_should_be(text):
    error = refused(deadline_of, text, 0.0)
    assert (error.status, error.param) == (400, "x-kappa-deadline-ms")
    assert "whole milliseconds" in error.message and text not in error.message.split()


def test_it_has_passed_from_its_moment_on():
    deadline = Deadline(10.0, 2.0)
    deadline.check(11.999)
    error = refused(deadline.check, 12.0)
    assert (error.status, error.code, error.retry_after_s) == (504, "deadline_exceeded", None)


def priced(ttft_s, tpot_s=0.1):
    return estimates(
        *({"ttft_s": ttft, "tpot_s": tpot_s} for ttft in ttft_s), expected_output_tokens=10
    )


def test_workers_predicted_too_late_are_told_apart():
    made = priced([1.0, 3.0, 1.99])
    late = late_workers(Deadline(0.0, 2.5), made, 0.5, streamed=True)
    assert late == {made.workers[1]}
    assert late_workers(Deadline(0.0, 9.0), made, 0.5, streamed=True) == frozenset()


def test_an_answer_that_is_not_streamed_is_there_with_its_last_token():
    made = priced([1.0, 1.5])
    assert late_workers(Deadline(0.0, 2.2), made, 0.0, streamed=True) == frozenset()
    assert late_workers(Deadline(0.0, 2.2), made, 0.0, streamed=False) == {made.workers[1]}


def test_if_all_are_late_it_is_refused_with_what_the_soonest_lacks():
    error = refused(late_workers, Deadline(0.0, 2.0), priced([3.0, 2.5]), 1.0, streamed=True)
    assert (error.status, error.code) == (429, "deadline_unmeetable")
    assert error.retry_after_s == pytest.approx(1.5)
    assert "2.5 s from now" in error.message


# -- salts -------------------------------------------------------------------------------------


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


# -- context and KV cache ----------------------------------------------------------------------


def worker(name, blocks, context=4096, size=16):
    return Announcement(
        worker=name, model="m", node=replace(node_profile("pcie"), name=name),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=size, device_blocks=blocks, host_blocks=0,
        max_batch_tokens=512, max_context_tokens=context, events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip


SMALL, LARGE = worker("small", 11), worker("large", 21)  # 160 and 320 tokens can be held


@pytest.mark.parametrize(
    ("prompt", "wanted", "unfit"),
    [
        (100, 60, set()),
        (100, 61, {"small"}),
        (159, 0, set()),
        (160, 0, {"small"}),
        (160, -1, {"small"}),
        (1, 319, {"small"}),
    ],
)
def test_workers_that_cannot_hold_prompt_and_answer_are_named(prompt, wanted, unfit):
    assert unfit_workers([SMALL, LARGE], prompt, wanted) == unfit


@pytest.mark.parametrize(
    ("prompt", "wanted", "param", "blocks"), [(10, 311, "max_tokens", 21), (900, 0, "messages", 57)]
)
def test_what_no_worker_can_hold_is_refused_with_both_numbers(prompt, wanted, param, blocks):
    with pytest.raises(ApiError) as caught:
        unfit_workers([SMALL, LARGE], prompt, wanted)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "footprint_too_large", param)
    assert f"takes {blocks} blocks" in error.message and "has 20" in error.message


def test_a_context_that_is_too_short_is_told_as_such():
    with pytest.raises(ApiError, match="context is 200 tokens, the request needs 210") as caught:
        unfit_workers([worker("a", 500, context=200), worker("b", 2, context=100)], 200, 10)
    assert caught.value.code == "context_length_exceeded"


def test_a_worker_with_room_but_a_short_context_does_not_help_one_with_neither():
    with pytest.raises(ApiError) as caught:
        unfit_workers([worker("deep", 11, context=4096), worker("short", 500, context=100)], 200, 1)
    assert caught.value.code in ("footprint_too_large", "context_length_exceeded")


def test_without_workers_nothing_is_known_to_be_too_large():
    assert unfit_workers([], 10**6, 1) == frozenset()


# -- approximate answers -----------------------------------------------------------------------


def approx_worker(name, policy=None):
    plan = {"planner": "auto", "rates": {}, **({"approx": policy} if policy else {})}
    return Announcement(
        worker=name, model="m", node=replace(node_profile("pcie"), name=name),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=10, host_blocks=0, max_batch_tokens=512,
        max_context_tokens=1024, events_endpoint="tcp://127.0.0.1:9",
        snapshot_endpoint="tcp://127.0.0.1:9", engine="torch", load_plan=plan,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("header", "field", "asked"),
    [
        ("ok", None, True), (" OK ", None, True), (None, "ok", True), ("no", "ok", False),
        (None, None, None), ("", "ok", None), (None, "", None),
    ],
)  # fmt: skip
def test_a_request_says_ok_no_or_nothing_and_the_header_wins(header, field, asked):
    assert approx_allowed(header, field) is asked


@pytest.mark.parametrize("said", ["yes", "true", 1, True, "k=5", ["ok"]])
def test_another_word_is_refused(said):
    with pytest.raises(ApiError, match="give 'ok'") as caught:
        approx_allowed(None, said)
    assert (caught.value.status, caught.value.param) == (400, "x-kappa-approx")


def test_a_worker_answers_approximately_where_it_may_and_nobody_objects():
    policies = {name: approx_worker("w", name) for name in ("never", "ask", "always")}
    policies[None] = approx_worker("w")
    assert {
        (policy, asked)
        for policy, said in policies.items()
        for asked in (True, None, False)
        if is_approximate(said, asked)
    } == {("ask", True), ("always", True), ("always", None)}


def test_who_asks_is_kept_from_exact_workers_and_refused_if_there_are_no_others():
    mixed = [
        approx_worker("a"),
        approx_worker("b", "ask"),
        approx_worker("c", "always"),
    ]
    assert exact_workers(mixed, True) == {"a"}
    assert exact_workers(mixed, None) == exact_workers(mixed, False) == frozenset()
    with pytest.raises(ApiError, match="no worker here gives approximate") as caught:
        exact_workers(mixed[:1], True)
    assert (caught.value.status, caught.value.code) == (400, "approx_not_allowed")
    # Of workers that are not there yet nothing is known: that is another error.
    assert exact_workers([], True) == frozenset()
