"""The sections router and observing."""

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings


def test_all_of_failover_can_be_set():
    failover = {"stall_after_s": 2, "failures": 3, "pause_s": 0.5, "longest_pause_s": 8}
    assert load_settings(router={"failover": failover}).router.failover.model_dump() == failover


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:4318", "https://otel.example/", "http://[::1]:4317", "http://c:4318/x/"],
)
def test_addresses_of_collectors(endpoint):
    seen = load_settings(observing={"otlp_endpoint": endpoint}).observing
    assert seen.otlp_endpoint == endpoint.rstrip("/")


@pytest.mark.parametrize("mode", ["shadow", "canary:5", "canary:0.5", "canary:99.9", "on"])
def test_modes_of_a_rollout(mode):
    assert load_settings(router={"mode": mode}).router.mode == mode


OTLP = "otlp_endpoint"
MODES = r"router\.mode.*give shadow, canary:N"


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("router", {"failover": {"pause_s": float("inf")}}, "router.failover.pause_s"),
        (
            "router", {"failover": {"pause_s": 9, "longest_pause_s": 1}},
            "longest_pause_s = 1 is less than pause_s = 9",
        ),
        ("router", {"failover": {"retries": 1}}, "router.failover.retries"),
        *(
            ("router", {"mode": mode}, MODES)
            for mode in (
                "", "off", "canary", "canary:", "canary:0", "canary:100", "canary:x", "canary:nan",
                "canary:inf", "canary:-1", "Canary:5", "on:5", "ray",
            )
        ),
        ("observing", {OTLP: "collector:4318"}, "give http://HOST:4318 .*4317 with otlp_protocol"),
        ("observing", {OTLP: "http://"}, "is no address"),
        ("observing", {OTLP: "http://h:99999"}, "is no address"),
        ("observing", {OTLP: "http://[::"}, "is no address"),
        ("observing", {"trace_share": float("nan")}, r"observing\.trace_share"),
        ("observing", {"log_format": "xml"}, r"observing\.log_format"),
        ("observing", {"otlp": "x"}, r"observing\.otlp"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(section, values, reason):
    with pytest.raises(SettingsError, match=reason):
        load_settings(**{section: values})
