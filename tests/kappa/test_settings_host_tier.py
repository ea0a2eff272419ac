"""Which host tier a cluster has, and how its prefixes come back: what is refused, and why."""

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return path

    return write


def test_the_host_tier_is_ours_unless_told_otherwise():
    engine = load_settings().engine
    assert (engine.host_tier, engine.planner, engine.lmcache.server) == ("own", "auto", None)


def test_a_shared_lmcache_server_with_its_bounds(written):
    text = (
        "engine:\n  host_tier: lmcache\n  planner: tail\n"
        "  lmcache: {server: 'tcp://cache.example:5555', timeout_s: 0.2, retry_s: 1}\n"
    )
    engine = load_settings(written(text)).engine
    assert engine.lmcache.server == "tcp://cache.example:5555"
    assert (engine.lmcache.timeout_s, engine.lmcache.retry_s) == (0.2, 1.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("engine: {host_tier: disk}", "engine.host_tier"),
        ("engine: {host_tier: lmcache, kind: torch}", "needs kind vllm"),
        ("engine: {host_tier: lmcache, host_bytes: 0}", "needs host_bytes above zero"),
        ("engine: {host_tier: lmcache, lmcache: {server: 'cache:5555'}}", "engine.lmcache.server"),
        ("engine: {host_tier: lmcache, lmcache: {timeout_s: 0}}", "engine.lmcache.timeout_s"),
        ("engine: {host_tier: lmcache, lmcache: {timeout_s: .inf}}", "engine.lmcache.timeout_s"),
        ("engine: {lmcache: {port: 5555}}", "engine.lmcache.port"),
        ("engine: {load: layers}", "not proven inside vLLM"),
        ("engine: {planner: kvpr}", "not one of kind vllm: choose auto, kv, tail"),
        ("engine: {planner: tail, kind: torch}", "not one of kind torch"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place_and_reason(written, text, reason):
    with pytest.raises(SettingsError, match=reason):
        load_settings(written(text))
