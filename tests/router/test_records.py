"""What became of a decision: its waits add up, and nothing is made up."""

from types import SimpleNamespace

import pytest

from kappa.protocol import Spent
from router.live.live_router import LiveRouter
from router.live.records import DecisionRecord, Records
from tests.router.building import ask, router


@pytest.mark.parametrize(("ttft_s", "queue_s"), [(1.0, 0.5), (0.4, 0.0)])
def test_the_queue_is_what_neither_load_nor_computing_accounts_for(ttft_s, queue_s):
    decision = router("a").route(ask(), 1.0)
    record = DecisionRecord(decision, 1.0, 0.0, ttft_s=ttft_s, spent=Spent("r", 0.2, 0.3))
    actual = record.to_dict()["actual"]
    assert actual["queue_s"] == pytest.approx(queue_s)
    assert (actual["load_s"], actual["compute_s"], actual["ttft_s"]) == (0.2, 0.3, ttft_s)


def test_without_a_report_nothing_is_said_of_what_was_spent():
    record = DecisionRecord(router("a").route(ask(), 1.0), 1.0, 0.0, ttft_s=1.0)
    actual = record.to_dict()["actual"]
    assert actual["queue_s"] is actual["load_s"] is actual["compute_s"] is None


@pytest.mark.parametrize("workers", [2, 5])
def test_the_load_is_the_share_of_workers_with_requests_forecast_or_not(workers):
    made = router(*(f"w{i}" for i in range(workers)))
    made.route(ask(), 1.0)
    assert LiveRouter._load(SimpleNamespace(router=made)) == 1 / workers
    made.release("r", 2.0)
    assert LiveRouter._load(SimpleNamespace(router=made)) == 0.0


def test_as_many_records_are_kept_as_was_said_and_those_being_served_longest():
    records = Records(2)
    for name, end in (("served", ""), ("done", "done"), ("later", "done"), ("last", "done")):
        made = router("a").route(ask(name), 1.0)
        records.add(DecisionRecord(made, 1.0, 0.0, end=end))
        if name == "done":
            assert list(records) == ["served", "done"]
    assert list(records) == ["served", "last"]
