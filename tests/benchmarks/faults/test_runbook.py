"""The runbook names only faults, tests and metrics that there are."""

import re
from pathlib import Path

import pytest

from kappa import metrics
from kappa_benchmarks.faults.catalogue import FAULTS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`(tests/[^`]+)`", TEXT))))
def test_every_test_that_is_named_exists(place):
    path, _, name = place.partition("::")
    source = (ROOT / path).read_text(encoding="utf-8")
    assert not name or f"def {name}(" in source


def test_every_fault_is_promised_something():
    missing = [fault.name for fault in FAULTS if f"`{fault.name}`" not in TEXT]
    assert not missing


def test_every_metric_that_is_named_exists():
    known = metrics.document()
    named = set(re.findall(r"`(kappa_[a-z_]+)", TEXT))
    assert named and not [name for name in named if name not in known]
