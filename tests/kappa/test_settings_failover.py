"""Failover and the number of ingresses in the cluster file."""

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings


def test_without_a_word_there_is_one_ingress_and_a_breaker():
    settings = load_settings(None)
    failover = settings.router.failover
    assert settings.http.replicas == 1
    assert (failover.failures, failover.pause_s, failover.longest_pause_s) == (5, 1.0, 30.0)
    assert failover.stall_after_s == 5.0


def test_all_of_it_can_be_set():
    failover = {"stall_after_s": 2, "failures": 3, "pause_s": 0.5, "longest_pause_s": 8}
    settings = load_settings(None, http={"replicas": 3}, router={"failover": failover})
    assert settings.http.replicas == 3
    assert settings.router.failover.model_dump() == failover


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"http": {"replicas": 0}}, "http.replicas"),
        ({"router": {"failover": {"failures": 0}}}, "router.failover.failures"),
        ({"router": {"failover": {"stall_after_s": 0}}}, "router.failover.stall_after_s"),
        ({"router": {"failover": {"pause_s": float("inf")}}}, "router.failover.pause_s"),
        (
            {"router": {"failover": {"pause_s": 9, "longest_pause_s": 1}}},
            "longest_pause_s = 1 is less than pause_s = 9",
        ),
        ({"router": {"failover": {"retries": 1}}}, "router.failover.retries"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(section, why):
    with pytest.raises(SettingsError, match=why):
        load_settings(None, **section)
