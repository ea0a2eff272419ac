"""Metric names: one file, well formed, documented."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kappa import metrics
from kappa_router.live.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]


def test_names_are_unique_prefixed_and_without_colon() -> None:
    names = [m.name for m in metrics.ALL]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"kappa_[a-z0-9_]+", name)
        assert not name.endswith("_total"), "the exposition adds it"


@pytest.mark.parametrize("metric", metrics.ALL, ids=lambda m: m.name)
def test_each_says_what_it_means(metric: metrics.Metric) -> None:
    assert metric.meaning
    assert (metric.kind == "histogram") == bool(metric.buckets)


def test_document_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics.document()


def test_every_metric_is_used() -> None:
    """A metric that no code sets is a defect."""
    sources = "\n".join(p.read_text() for p in (ROOT / "router").rglob("*.py"))
    constants = {name for name, value in vars(metrics).items() if isinstance(value, metrics.Metric)}
    unused = [name for name in constants if f"m.{name}" not in sources]
    assert not unused


def test_exposition_keeps_totals_when_their_source_restarts() -> None:
    exported = RouterMetrics()
    exported.total(metrics.LOAD_BYTES, "pcie", to=100.0, source="a")
    exported.total(metrics.LOAD_BYTES, "pcie", to=150.0, source="a")
    exported.total(metrics.LOAD_BYTES, "pcie", to=30.0, source="a")  # restarted
    exported.total(metrics.LOAD_BYTES, "pcie", to=7.0, source="b")
    families = {
        family.name: family
        for family in text_string_to_metric_families(exported.exposition().decode())
    }
    values = {s.name: s.value for s in families["kappa_load_bytes"].samples}
    assert values["kappa_load_bytes_total"] == 187.0


@pytest.mark.parametrize("metric", metrics.ALL, ids=lambda m: m.name)
def test_bounds_of_buckets_rise_from_above_zero(metric: metrics.Metric) -> None:
    bounds = [0.0, *metric.buckets]
    assert all(low < high for low, high in pairwise(bounds))
