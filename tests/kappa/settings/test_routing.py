"""The router section: failover; and observing."""

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


def test_by_default_nothing_leaves_the_machine():
    seen = load_settings().observing
    assert (seen.log_format, seen.log_file, seen.otlp_endpoint) == ("console", None, None)
    assert seen.metrics and seen.request_log


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:4318", "https://otel.example/", "http://[::1]:4317", "http://c:4318/x/"],
)
def test_addresses_of_collectors(endpoint):
    seen = load_settings(None, observing={"otlp_endpoint": endpoint}).observing
    assert seen.otlp_endpoint == endpoint.rstrip("/")


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"otlp_endpoint": "collector:4318"}, r"give http://HOST:4318 .*4317 with otlp_protocol"),
        ({"otlp_endpoint": "http://"}, "is no address"),
        ({"otlp_endpoint": "http://h:99999"}, "is no address"),
        ({"otlp_endpoint": "http://[::"}, "is no address"),
        ({"trace_share": 1.5}, r"observing\.trace_share"),
        ({"trace_share": float("nan")}, r"observing\.trace_share"),
        ({"log_format": "xml"}, r"observing\.log_format"),
        ({"service_name": ""}, r"observing\.service_name"),
        ({"otlp": "x"}, r"observing\.otlp"),
    ],
)
def test_what_cannot_be_is_refused(section, reason):
    with pytest.raises(SettingsError, match=reason):
        load_settings(None, observing=section)


@pytest.mark.parametrize("mode", ["ray", "shadow", "canary:5", "canary:0.5", "on"])
def test_modes(mode):
    assert load_settings(None, router={"mode": mode}).router.mode == mode


@pytest.mark.parametrize("mode", ["off", "canary", "canary:100", "canary:0", "canary:nan", ""])
def test_other_modes_are_refused_with_those_that_are(mode):
    with pytest.raises(SettingsError, match=r"router\.mode.*ray, shadow, canary:N"):
        load_settings(None, router={"mode": mode})


def test_every_mode_that_the_settings_allow_is_one_that_the_router_reads():
    from router.rollout import Rollout

    for mode in ("ray", "shadow", "canary:5", "canary:0.5", "canary:99.9", "on"):
        assert Rollout.parse(load_settings(None, router={"mode": mode}).router.mode)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"handover_dir": "/dev/shm/k", "host_tier": "lmcache"}, "handover_dir needs kind vllm"),
        ({"handover_dir": "/dev/shm/k", "kind": "torch"}, "handover_dir needs kind vllm"),
        ({"handover_wait_s": -1}, r"engine\.handover_wait_s"),
    ],
)
def test_a_handover_that_cannot_be_is_refused(engine, reason):
    with pytest.raises(SettingsError, match=reason):
        load_settings(None, engine=engine)
