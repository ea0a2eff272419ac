"""How long a paced node's steps last, by its law or by a table of real GPUs."""

import json
import math
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from kappa.hardware import node_profile
from kappa.shapes import model_shape
from kappa.silicon import silicon_figures, silicon_table
from kappa_workers.paced.steps import PacedSteps
from kappa_workers.vllm.arguments import Pace

TABLE = "h100_sxm/llama-3.1-8b/tp1"
CHUNKS = [(512, 1000), (1, 3000), (1, 5000)]
SHAPE = model_shape("llama-3.1-8b")


def steps_of(**figures):
    node = replace(node_profile("pcie"), source="paced", dilation=30.0, **figures)
    pace = Pace(SHAPE, node)
    # As vLLM hands it to its worker.
    return pace, PacedSteps(json.loads(json.dumps(pace.steps)))


def test_steps_last_by_the_law_where_no_table_is_named():
    pace, steps = steps_of()
    assert steps.real_s(CHUNKS) == pace.step.real_s(CHUNKS)


def test_steps_last_by_the_named_table_and_the_host():
    _, steps = steps_of(**silicon_figures(TABLE), step_fixed_s=2e-3)
    expected = silicon_table(TABLE).step_s(CHUNKS[:1], 2, 8000) + 2e-3
    assert steps.real_s(CHUNKS) == pytest.approx(30 * expected)


def test_what_the_law_continues_is_logged_once_for_each_part(monkeypatch):
    monkeypatch.setattr("kappa_workers.paced.steps.silicon_table", fresh)
    _, steps = steps_of(**silicon_figures(TABLE))
    with capture_logs() as logged:
        steps.real_s(CHUNKS)
        assert logged == []
        for _ in range(3):
            lasted_s = steps.real_s([(16384, 0)])
        steps.real_s([(1, 400_000)])
    assert math.isfinite(lasted_s)
    assert [(line["event"], line["continued_by_law"]) for line in logged] == [
        ("silicon_exceeded", "attention of prompts and products"),
        ("silicon_exceeded", "attention of those that decode"),
    ]
    assert {line["table"] for line in logged} == {TABLE}


def fresh(name):
    """A table that nothing has left yet."""
    return replace(silicon_table(name), beyond=set())


def test_unknown_table_and_unusable_steps_are_refused():
    with pytest.raises(ValueError, match=f"no table of silicon named 'x'.*{TABLE}"):
        steps_of(silicon="x")
    _, steps = steps_of(**silicon_figures(TABLE))
    with pytest.raises(ValueError, match="a step of nan tokens"):
        steps.real_s([(math.nan, 0)])
