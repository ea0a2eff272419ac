"""Rows about the peers' decisions: what is in them, and what happens without a peer."""

import pytest

from benchmarks.routing.peers.decision import WORKERS, decision_rows
from benchmarks.routing.peers.venvs import PeerError


@pytest.fixture
def no_peers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.mark.ray
def test_a_peer_that_cannot_be_made_is_told_and_the_others_are_measured(no_peers):
    missing = []
    rows = decision_rows([16, 64], repeats=3, missing=missing.append)
    assert len(missing) == 1 and "ai-dynamo-runtime 1.6.1" in missing[0]
    found = [(row["peer"], row["tokens"]) for row in rows]
    assert found == [
        ("ray_prefix_tree", 16),
        ("ray_prefix_tree", 64),
        ("ray_pow_2", 16),
        ("ray_pow_2", 64),
    ]
    for row in rows:
        assert row["workers"] == WORKERS and row["what"] and row["version"]
        assert 0 < row["us"]["p50"] <= row["us"]["p99"]


def test_a_missing_peer_is_an_error_unless_someone_is_told(no_peers):
    with pytest.raises(PeerError, match="ai-dynamo-runtime"):
        decision_rows([16], repeats=1)


@pytest.mark.parametrize(("lengths", "repeats"), [([], 1), ([0], 1), ([16], 0)])
def test_nothing_to_measure_is_refused(lengths, repeats):
    with pytest.raises(ValueError, match="at least 1"):
        decision_rows(lengths, repeats)
