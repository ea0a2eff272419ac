"""The settings of `kappa route`: each fault is one message, with what to do."""

from __future__ import annotations

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.front import backend_of, load_front_settings

A = {"url": "http://a:8000", "profile": "h100-pcie5"}
B = {"url": "http://b:8000", "profile": "gh200-c2c"}


def load(*backends, **more):
    return load_front_settings(None, backends=list(backends), **more)


def test_a_server_s_address_is_its_root():
    for url in ("http://a:8000", "http://a:8000/", "http://a:8000/v1", "http://a:8000/v1/"):
        assert load({**A, "url": url}).backends[0].url == "http://a:8000"
    assert load({**A, "url": "https://h/llm/v1"}).backends[0].url == "https://h/llm"


def test_backend_is_called_by_host_and_port_unless_named():
    made = load(A, {**B, "name": "grace"})
    assert [one.worker for one in made.backends] == ["a:8000", "grace"]


@pytest.mark.parametrize(
    ("backends", "why"),
    [
        ([], "give at least one server"),
        ([{**A, "url": "a:8000"}], "no address of a server: give one such as http"),
        ([{**A, "url": "ftp://a"}], "no address of a server"),
        ([{**A, "url": "http://"}], "no address of a server"),
        ([{**A, "url": "http://a:99999"}], "no address of a server"),
        ([{**A, "url": "http://key:x@a"}], "no address of a server"),
        ([{**A, "profile": "h100"}], "h100-pcie5"),
        ([{**A, "shape": "llama-9"}], "llama-9"),
        ([A, B, A], "two backends have the url http://a:8000"),
        ([A, {**A, "url": "http://a:8000/v1"}], "two backends have the url http://a:8000"),
        ([{**A, "name": "x"}, {**B, "name": "x"}], "two backends have the name x"),
        ([{**A, "events": "a:5557"}], "no ZMQ endpoint: give tcp"),
        ([{**A, "key_env": "KAPPA_TEST_NO_SUCH"}], "the environment has no KAPPA_TEST_NO_SUCH"),
        (
            [{**A, "serves": ["/v1/embedding"]}],
            "backend a:8000 serves /v1/embedding, which clients",
        ),
        ([{**A, "data_parallel_size": 0}], "greater than or equal to 1"),
        (
            [{**A, "data_parallel_size": 4, "events": ["tcp://a:1", "tcp://a:2"]}],
            "one endpoint for each of the 4 ranks",
        ),
        ([{**A, "data_parallel_size": 2, "events": "ipc://a"}], "for each of the 2 ranks"),
        ([{**A, "data_parallel_size": 2, "events": "tcp://a:65535"}], "for each of the 2 ranks"),
        ([{**A, "serves": ["v1/embeddings"]}], "is no path"),
        ([{**A, "profil": "x"}], "Extra inputs are not permitted"),
    ],
)
def test_each_fault_is_named(backends, why):
    with pytest.raises(SettingsError, match=why):
        load(*backends)


def test_each_rank_publishes_at_a_port_of_its_own():
    (one,) = load({**A, "name": "a", "data_parallel_size": 3, "events": "tcp://a:5557"}).backends
    assert [(made.worker, made.events, rank) for made, rank in one.ranks()] == [
        ("a#0", ("tcp://a:5557",), 0), ("a#1", ("tcp://a:5558",), 1), ("a#2", ("tcp://a:5559",), 2),
    ]  # fmt: skip
    both = {**A, "data_parallel_size": 2, "events": ["tcp://x:1", "ipc://y"]}
    assert [made.events for made, _ in load(both).backends[0].ranks()] == [
        ("tcp://x:1",),
        ("ipc://y",),
    ]
    assert [made.events for made, _ in load({**both, "events": ()}).backends[0].ranks()] == [(), ()]
    (single,) = load(A).backends
    assert single.ranks() == [(single, None)]


def test_a_section_that_is_given_keeps_its_other_defaults():
    made = load(A, router={"policy": "ttft"}, http={"host": "::1"})
    assert (made.router.max_body_bytes, made.http.port) == (64 << 20, 8080)
    with pytest.raises(SettingsError, match=r"http\.replicas"):
        load(A, http={"replicas": 2})


def test_a_server_s_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("KAPPA_TEST_KEY", "sk-1")
    made = load({**A, "key_env": "KAPPA_TEST_KEY"})
    assert made.backends[0].key == "sk-1"
    assert "sk-1" not in str(made)


def test_a_closed_endpoint_cannot_do_without_its_router():
    http = {"decider_away": "least_request"}
    closed = {"by_key": {"k" * 16: "alice"}, "unknown": "refuse"}
    with pytest.raises(SettingsError, match=r"least_request serves anybody.*give http\.decider"):
        load(A, http=http, tenants=closed)
    assert load(A, http=http, tenants={"by_key": {"k" * 16: "alice"}}).http.decider_away
    load(A, http={"decider_away": "refuse"}, tenants=closed)


def test_an_open_door_needs_a_word():
    with pytest.raises(SettingsError, match="--allow-open"):
        load(A, http={"host": "0.0.0.0"})
    assert load(A, http={"host": "0.0.0.0"}, access={"allow_open": True})


def test_a_file_is_read(tmp_path):
    path = tmp_path / "route.yaml"
    path.write_text("backends: [{url: http://a:8000, profile: h100-pcie5, host_tokens: 4096}]\n")
    assert load_front_settings(path).backends[0].host_tokens == 4096
    path.write_text("backends: [{url: http://a:8000}]\n")
    with pytest.raises(SettingsError, match=r"route.yaml: 1 fault\(s\)\n  backends.0.profile"):
        load_front_settings(path)


@pytest.mark.parametrize("text", ["http://a:8000", "=h100-pcie5", "http://a:8000=", ""])
def test_a_backend_on_the_command_line_names_its_profile(text):
    with pytest.raises(ValueError, match="give URL=PROFILE"):
        backend_of(text)


def test_a_url_may_hold_an_equals_sign():
    assert backend_of("http://a/x=y=c2c") == {"url": "http://a/x=y", "profile": "c2c"}


def test_peers_of_a_closed_endpoint_need_a_key(monkeypatch):
    given = {
        "backends": [{"url": "http://a:8000", "profile": "pcie"}],
        "tenants": {"by_key": {"sk-root-0123456789": "root"}, "unknown": "refuse"},
    }
    with pytest.raises(ValueError, match=r"give peers\.key_env"):
        load_front_settings(None, **given, peers={"urls": ["http://b:8080"]})
    with pytest.raises(ValueError, match="has no KAPPA_TEST_KEY"):
        load_front_settings(None, **given, peers={"key_env": "KAPPA_TEST_KEY"})
    with pytest.raises(ValueError, match="is no address of a server"):
        load_front_settings(None, **given, peers={"urls": ["b:8080"]})
    monkeypatch.setenv("KAPPA_TEST_KEY", "sk-root-0123456789")
    peers = {"urls": ["http://b:8080/v1"], "key_env": "KAPPA_TEST_KEY"}
    made = load_front_settings(None, **given, peers=peers).peers
    assert (made.urls, made.key) == (("http://b:8080",), "sk-root-0123456789")
