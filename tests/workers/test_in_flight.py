"""Which requests are in a replica, as they are told to its report stream."""

from types import SimpleNamespace

import pytest

from kappa.report import Arrival
from workers.in_flight import InFlight
from workers.report_totals import ReportTotals

pytestmark = pytest.mark.vllm


def body(request_id="r", max_tokens=None, **words):
    return SimpleNamespace(
        vllm_xargs={"kappa_request_id": request_id, **words}, max_tokens=max_tokens
    )


@pytest.fixture
def scene():
    totals = ReportTotals("w")
    return InFlight(totals.add), totals


def test_a_request_is_told_with_what_its_ingress_expects_and_again_when_it_is_over(scene):
    here, totals = scene
    words = {"kappa_prompt_tokens": 100, "kappa_device_tokens": 32, "kappa_host_tokens": 16}
    name = here.arrived(body(max_tokens=8, **words))
    assert totals.urgent
    report = totals.take(1.0)
    assert report.arrived == (Arrival("r", 32, 16, 52, 8),) and report.finished == ()
    assert not totals.urgent
    here.ended(name)
    assert totals.urgent and totals.take(2.0).finished == ("r",)
    assert len(here) == 0


def test_one_that_came_and_went_between_two_reports_is_no_arrival(scene):
    here, totals = scene
    here.ended(here.arrived(body()))
    report = totals.take(1.0)
    assert report.arrived == () and report.finished == ("r",)


def test_all_that_is_here_is_told_when_asked_for_with_what_has_become_of_it(scene):
    here, totals = scene
    here.arrived(body("a", kappa_prompt_tokens=10))
    here.arrived(body("b"))
    totals.add({"kind": "step", "tokens": 1, "prefilled": ["a"], "pace_s": 0.0, "took_s": 0.1,
                "overrun": False})  # fmt: skip
    assert totals.take(1.0).in_flight is None
    totals.tell_all()
    assert totals.take(1.1).in_flight == (
        Arrival("a", new_tokens=10, prefilled=True),
        Arrival("b"),
    )
    assert totals.take(1.2).in_flight is None
    assert totals.take(30.0).in_flight is not None, "now and then unasked"


def test_an_id_that_is_here_twice_ends_with_its_last(scene):
    here, totals = scene
    here.arrived(body())
    here.arrived(body())
    assert len(totals.take(1.0).arrived) == 1
    here.ended("r")
    assert totals.take(2.0).finished == ()
    here.ended("r")
    here.ended("r")
    assert totals.take(3.0).finished == ("r",)


@pytest.mark.parametrize("words", [None, {}, {"mine": 1}])
def test_a_request_that_no_ingress_of_ours_sent_is_not_told(scene, words):
    here, totals = scene
    assert here.arrived(SimpleNamespace(vllm_xargs=words)) == ""
    here.ended("")
    assert not totals.urgent


@pytest.mark.parametrize("nonsense", ["x", -3, float("nan"), None, [1]])
def test_counts_that_are_none_count_as_none(scene, nonsense):
    here, totals = scene
    here.arrived(body(max_tokens=nonsense, kappa_prompt_tokens=nonsense))
    assert totals.take(1.0).arrived == (Arrival("r"),)
