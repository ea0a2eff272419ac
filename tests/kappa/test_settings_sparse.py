"""Approximate answers in the settings: off by default, and what they need."""

import pytest

from kappa.settings.base import SettingsError
from kappa.settings.cluster import load_settings


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
