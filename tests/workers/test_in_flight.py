"""Which requests are in a replica: as they are reported, and what they ask of the worker."""

from types import SimpleNamespace

import pytest

from kappa.protocol import Arrival
from kappa_workers.in_flight import InFlight
from kappa_workers.report_totals import ReportTotals

pytestmark = pytest.mark.vllm


def body(request_id="r", max_tokens=None, **words):
    return SimpleNamespace(
        vllm_xargs={"kappa_request_id": request_id, **words}, max_tokens=max_tokens
    )


@pytest.fixture
def scene():
    here = InFlight(0.0)
    return here, ReportTotals("w", here)


def test_report_carries_the_deciders_expectation_and_the_end(scene):
    here, totals = scene
    words = {"kappa_prompt_tokens": 100, "kappa_device_tokens": 32, "kappa_host_tokens": 16}
    name = here.arrived(body(max_tokens=8, **words), 0.0)
    assert totals.urgent
    report = totals.take(1.0)
    assert report.arrived == (Arrival("r", 32, 16, 52, 8),) and report.finished == ()
    assert not totals.urgent
    here.ended(name, 5)
    assert totals.urgent
    report = totals.take(2.0)
    assert (report.finished, report.generated) == (("r",), {"r": 5})
    assert len(here) == 0 and totals.take(3.0).generated == {}


def test_report_caps_tokens_on_disk_at_those_of_the_host_tier(scene):
    here, totals = scene
    words = {"kappa_prompt_tokens": 100, "kappa_host_tokens": 64, "kappa_disk_tokens": 900}
    here.arrived(body(**words), 0.0)
    assert totals.take(1.0).arrived == (Arrival("r", 0, 64, 36, disk_tokens=64),)


def test_report_omits_the_arrival_of_a_request_already_ended(scene):
    here, totals = scene
    here.ended(here.arrived(body(), 0.0))
    report = totals.take(1.0)
    assert report.arrived == () and report.finished == ("r",)


def test_report_lists_all_in_flight_on_demand_and_now_and_then(scene):
    here, totals = scene
    here.arrived(body("a", kappa_prompt_tokens=10), 0.0)
    here.arrived(body("b"), 0.0)
    totals.add({"kind": "step", "tokens": 1, "prefilled": ["a"], "pace_s": 0.0, "took_s": 0.1,
                "overrun": False})  # fmt: skip
    assert totals.take(1.0).in_flight is None
    totals.report_all()
    assert totals.take(1.1).in_flight == (
        Arrival("a", new_tokens=10, prefilled=True),
        Arrival("b"),
    )
    assert totals.take(1.2).in_flight is None
    assert totals.take(30.0).in_flight is not None, "now and then unasked"


def test_an_id_that_is_here_twice_ends_with_its_last(scene):
    here, totals = scene
    here.arrived(body(), 0.0)
    here.arrived(body(), 0.0)
    assert len(totals.take(1.0).arrived) == 1
    here.ended("r")
    assert totals.take(2.0).finished == ()
    here.ended("r")
    here.ended("r")
    assert totals.take(3.0).finished == ("r",)


@pytest.mark.parametrize("words", [None, {}, {"mine": 1}])
def test_a_request_that_no_decider_of_ours_sent_is_not_reported(scene, words):
    here, totals = scene
    assert here.arrived(SimpleNamespace(vllm_xargs=words), 0.0) == ""
    here.ended("")
    assert not totals.urgent
    assert here.backlog_s() == (0, 0) and here.demand(1.0, 8) == 0.0


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("value", "counted"),
    [
        *((nonsense, 0) for nonsense in ("x", -3, float("nan"), None, [1], {}, -(10**400))),
        *((huge, MOST) for huge in (2**31, 2**63, 2**64, 10**400, float("inf"), 1e300)),
    ],
)
def test_report_takes_nonsense_for_none_and_bounds_huge_counts(scene, value, counted):
    here, totals = scene
    here.arrived(body(max_tokens=value, kappa_prompt_tokens=value), 0.0)
    assert totals.take(1.0).arrived == (Arrival("r", new_tokens=counted, max_tokens=counted),)


# -- the load of the worker ------------------------------------------------------------------------


def predicted(request_id, link_s=1.0, gpu_s=2.0):
    return body(request_id, kappa_link_s=link_s, kappa_gpu_s=gpu_s)


def load():
    return InFlight(0.0)


def test_a_request_waits_until_its_prompt_is_computed():
    here = load()
    here.arrived(predicted("a"), 0.0)
    here.arrived(predicted("b", 0.5, 0.0), 0.0)
    assert here.backlog_s() == (1.5, 2.0)
    here.prefilled("a")
    assert here.backlog_s() == (0.5, 0.0)
    here.ended("b")
    here.ended("a")
    here.ended("never came")
    assert here.backlog_s() == (0, 0)


@pytest.mark.parametrize("nonsense", ["much", None, float("nan"), float("inf"), -3.0])
def test_nonsense_for_seconds_counts_as_none(nonsense):
    here = load()
    here.arrived(predicted("a", nonsense, nonsense), 0.0)
    assert here.backlog_s() == (0.0, 0.0)


def test_demand_is_the_share_of_the_busier_resource_that_arrives():
    here = load()
    for second in range(300):
        request_id = here.arrived(predicted(str(second), 0.2, 0.6), float(second))
        here.ended(request_id)
    assert here.demand(300.0, 1000) == pytest.approx(0.6, rel=0.05)
    # Nothing comes any more: forgotten within a few windows.
    assert here.demand(500.0, 1000) < 0.01


def test_demand_is_right_before_a_whole_window_has_passed():
    here = load()
    for tenth in range(100):
        here.ended(here.arrived(predicted(str(tenth), 0.0, 0.05), tenth / 10))
    assert here.demand(10.0, 1000) == pytest.approx(0.5, rel=0.1)


def test_open_streams_ask_for_places_even_when_no_prompt_waits():
    here = load()
    for i in range(3):
        here.arrived(predicted(str(i), 0.0, 0.0), 0.0)
        here.prefilled(str(i))
    assert here.demand(10.0, 4) == pytest.approx(0.75)
