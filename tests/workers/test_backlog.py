"""What waits for a worker, in the seconds that the router sent along."""

import pytest

from kappa.protocol import GPU_S_KEY, LINK_S_KEY, REQUEST_ID_KEY
from workers.backlog import Backlog


def words(request_id, link_s=1.0, gpu_s=2.0):
    return {REQUEST_ID_KEY: request_id, LINK_S_KEY: link_s, GPU_S_KEY: gpu_s}


def test_a_request_waits_until_its_prompt_is_computed():
    backlog = Backlog(0.0, max_sequences=8)
    backlog.arrived(words("a"), 0.0)
    backlog.arrived(words("b", 0.5, 0.0), 0.0)
    assert backlog.seconds() == (1.5, 2.0)
    backlog.started("a")
    assert backlog.seconds() == (0.5, 0.0)
    backlog.ended("b")
    backlog.ended("a")
    backlog.ended("never came")
    assert backlog.seconds() == (0, 0)


def test_a_request_that_no_ingress_of_ours_sent_is_not_counted():
    backlog = Backlog(0.0, max_sequences=8)
    assert backlog.arrived(None, 0.0) == "" and backlog.arrived({}, 0.0) == ""
    assert backlog.seconds() == (0, 0) and backlog.demand(1.0) == 0.0


@pytest.mark.parametrize("nonsense", ["much", None, float("nan"), float("inf"), -3.0])
def test_nonsense_for_seconds_counts_as_none(nonsense):
    backlog = Backlog(0.0, max_sequences=8)
    backlog.arrived(words("a", nonsense, nonsense), 0.0)
    assert backlog.seconds() == (0.0, 0.0)


def test_demand_is_the_share_of_the_busier_resource_that_arrives():
    backlog = Backlog(0.0, max_sequences=1000)
    for second in range(300):
        request_id = backlog.arrived(words(str(second), 0.2, 0.6), float(second))
        backlog.ended(request_id)
    assert backlog.demand(300.0) == pytest.approx(0.6, rel=0.05)
    # Nothing comes any more: forgotten within a few windows.
    assert backlog.demand(500.0) < 0.01


def test_demand_is_right_before_a_whole_window_has_passed():
    backlog = Backlog(0.0, max_sequences=1000)
    for tenth in range(100):
        backlog.ended(backlog.arrived(words(str(tenth), 0.0, 0.05), tenth / 10))
    assert backlog.demand(10.0) == pytest.approx(0.5, rel=0.1)


def test_open_streams_ask_for_places_even_when_no_prompt_waits():
    backlog = Backlog(0.0, max_sequences=4)
    for i in range(3):
        backlog.arrived(words(str(i), 0.0, 0.0), 0.0)
        backlog.started(str(i))
    assert backlog.demand(10.0) == pytest.approx(0.75)
