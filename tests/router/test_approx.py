"""Who asks for approximate answers, and which workers may give them."""

from dataclasses import replace

import pytest

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from router.errors import ApiError
from router.ingress.approx import approx_asked, exact_workers, is_approximate


def worker(name, policy=None):
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
    assert approx_asked(header, field) is asked


@pytest.mark.parametrize("said", ["yes", "true", 1, True, "k=5", ["ok"]])
def test_another_word_is_refused(said):
    with pytest.raises(ApiError, match="give 'ok'") as caught:
        approx_asked(None, said)
    assert (caught.value.status, caught.value.param) == (400, "x-kappa-approx")


def test_a_worker_answers_approximately_where_it_may_and_nobody_objects():
    policies = {name: worker("w", name) for name in ("never", "ask", "always")}
    policies[None] = worker("w")
    assert {
        (policy, asked)
        for policy, said in policies.items()
        for asked in (True, None, False)
        if is_approximate(said, asked)
    } == {("ask", True), ("always", True), ("always", None)}


def test_who_asks_is_kept_from_exact_workers_and_refused_if_there_are_no_others():
    mixed = [worker("a"), worker("b", "ask"), worker("c", "always")]
    assert exact_workers(mixed, True) == {"a"}
    assert exact_workers(mixed, None) == exact_workers(mixed, False) == frozenset()
    with pytest.raises(ApiError, match="no worker here gives approximate") as caught:
        exact_workers(mixed[:1], True)
    assert (caught.value.status, caught.value.code) == (400, "approx_not_allowed")
    # Of workers that are not there yet nothing is known: that is another error.
    assert exact_workers([], True) == frozenset()
