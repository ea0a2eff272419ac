"""What became of a decision: its waits add up, and nothing is made up."""

from types import SimpleNamespace

import pytest

from kappa.protocol import Spent
from kappa_router.live.decision_records import DecisionRecord, Records, oldest_waits_s
from kappa_router.live.live_router import LiveRouter
from tests.router.building import ask, router


@pytest.mark.parametrize(("ttft_s", "queue_s"), [(1.0, 0.5), (0.4, 0.0)])
def test_queue_s_is_what_load_and_compute_leave_of_the_ttft(ttft_s, queue_s):
    decision = router("a").route(ask(), 1.0)
    record = DecisionRecord(decision, 1.0, 0.0, ttft_s=ttft_s, spent=Spent("r", 0.2, 0.3))
    actual = record.to_dict()["actual"]
    assert actual["queue_s"] == pytest.approx(queue_s)
    assert (actual["load_s"], actual["compute_s"], actual["ttft_s"]) == (0.2, 0.3, ttft_s)


def test_spent_seconds_are_unknown_without_a_report():
    record = DecisionRecord(router("a").route(ask(), 1.0), 1.0, 0.0, ttft_s=1.0)
    actual = record.to_dict()["actual"]
    assert actual["queue_s"] is actual["load_s"] is actual["compute_s"] is None


@pytest.mark.parametrize("workers", [2, 5])
def test_load_is_the_share_of_workers_with_requests(workers):
    made = router(*(f"w{i}" for i in range(workers)))
    made.route(ask(), 1.0)
    assert LiveRouter._load(SimpleNamespace(router=made)) == 1 / workers
    made.release("r", 2.0)
    assert LiveRouter._load(SimpleNamespace(router=made)) == 0.0


def test_records_are_bounded_and_open_ones_kept_longest():
    records = Records(2)
    for name, end in (("served", ""), ("done", "done"), ("later", "done"), ("last", "done")):
        made = router("a").route(ask(name), 1.0)
        records.add(DecisionRecord(made, 1.0, 0.0, end=end))
        if name == "done":
            assert list(records) == ["served", "done"]
    assert list(records) == ["served", "last"]


def test_oldest_request_that_no_engine_has_admitted_counts():
    rows = [
        ("a", 5.0, {}), ("a", 8.0, {}), ("b", 1.0, {"admitted": SimpleNamespace()}),
        ("b", 2.0, {"ttft_s": 0.1}), ("b", 3.0, {"end": "done"}), ("c", 99.0, {}),
    ]  # fmt: skip
    records = [
        DecisionRecord(SimpleNamespace(), time_s, 0.0, tenant, **changes)
        for tenant, time_s, changes in rows
    ]
    assert oldest_waits_s(records, 10.0) == {"a": 5.0, "c": 0.0}


def test_reused_tokens_are_what_caches_spared_by_worker():
    records = Records()
    for name, worker, device, cached in [("r", "a", 64, 32), ("s", "b", 0, 0), ("t", "a", 32, 0)]:
        counts = SimpleNamespace(device_tokens=device, cached_tokens=cached)
        decision = SimpleNamespace(
            request_id=name, worker=worker, chosen=SimpleNamespace(counts=counts)
        )
        records.add(DecisionRecord(decision, 1.0, 0.0))
    assert records.reused_tokens() == {"a": 128, "b": 0}
