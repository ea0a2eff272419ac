"""Where KV comes from: seconds of loads, added up by request and read once."""

import pytest

from kappa_workers.vllm.load_sources import LOAD_SOURCES, LoadSource


@pytest.fixture
def source():
    made = LoadSource()
    yield made
    made.leave()
    assert made not in LOAD_SOURCES


def test_seconds_of_a_requests_loads_add_up_and_are_read_once(source):
    assert source in LOAD_SOURCES
    for request, seconds in (("a", 0.25), ("b", 1.0), ("a", 0.5)):
        source.add_load_s(request, seconds)
    assert [source.take_load_s(name) for name in ("a", "b", "a", "c")] == [0.75, 1.0, 0.0, 0.0]


def test_source_forgets_the_oldest_unread_load_seconds(source, monkeypatch):
    monkeypatch.setattr("kappa_workers.vllm.load_sources._REMEMBERED", 2)
    for name in "abc":
        source.add_load_s(name, 1.0)
    assert [source.take_load_s(name) for name in "abc"] == [0.0, 1.0, 1.0]
