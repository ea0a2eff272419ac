"""The engine section: host tiers, CPU attention, sparse decoding."""

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


def test_threads_and_room_are_read(written) -> None:
    text = "engine: {kind: torch, planner: cpu, cpu_threads: 2, cpu_room_share: 0.25}\n"
    engine = load_settings(written(text)).engine
    assert (engine.planner, engine.cpu_threads, engine.cpu_room_share) == ("cpu", 2, 0.25)
    assert load_settings(written("engine: torch\n")).engine.cpu_threads == 0


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("{kind: vllm, cpu_threads: 1}", "cpu_threads needs kind torch"),
        ("{kind: torch, cpu_threads: 1, host_bytes: 0}", "host_bytes above zero"),
        ("{kind: torch, planner: cpu}", "planner cpu needs cpu_threads"),
        ("{kind: torch, cpu_threads: -1}", "cpu_threads"),
        ("{kind: torch, cpu_room_share: 1.5}", "cpu_room_share"),
        ("{kind: vllm, planner: cpu}", "planner cpu is not one of kind vllm"),
    ],
)
def test_cpu_attention_that_cannot_be_is_refused(written, engine: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load_settings(written(f"engine: {engine}\n"))


def loaded(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_settings(path)


@pytest.mark.parametrize(
    ("word", "meaning"),
    [("true", "ask"), ("false", "never"), ("ask", "ask"), ("always", "always")],
)
def test_who_may_get_approximate_answers(tmp_path, word, meaning):
    engine = loaded(tmp_path, f"engine: {{kind: torch, approx: {word}}}").engine
    assert engine.approx == meaning


def test_nobody_does_by_default_and_the_numbers_are_the_papers(tmp_path):
    engine = loaded(tmp_path, "").engine
    assert engine.approx == "never"
    s = engine.sparse
    assert (s.share, s.sink_tokens, s.recent_tokens, s.eta, s.power) == (0.1, 4, 64, 0.8, 3.0)
    assert (s.code_bits, s.retriever, s.prefetch, s.max_age) == (256, "hash", True, 0)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("{approx: ask}", "approx ask needs kind torch, and this is vllm"),
        ("{kind: torch, approx: ask, host_bytes: 0}", "needs host_bytes above zero"),
        ("{kind: torch, approx: maybe}", "'never', 'ask' or 'always'"),
        ("{kind: torch, sparse: {share: 0}}", "share"),
        ("{kind: torch, sparse: {share: 1.5}}", "share"),
        ("{kind: torch, sparse: {eta: 1.2}}", "eta"),
        ("{kind: torch, sparse: {code_bits: 100}}", "give a multiple of 64"),
        ("{kind: torch, sparse: {code_bits: 100}}", "give a multiple of 64"),
        ("{kind: torch, sparse: {retriever: guess}}", "retriever"),
        ("{kind: torch, sparse: {lanes: 0}}", "lanes"),
        ("{kind: torch, sparse: {recent_tokens: 0}}", "recent_tokens"),
        ("{kind: torch, sparse: {speed: 1}}", "speed"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path, engine, why):
    with pytest.raises(SettingsError, match=why) as caught:
        loaded(tmp_path, f"engine: {engine}")
    assert "engine" in str(caught.value)
