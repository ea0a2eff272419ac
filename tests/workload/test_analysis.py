"""The distributions behind Figure 3, and the paper's figures beside ours."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kappa.cost import kappa_eff
from kappa.hardware import node_profile
from kappa.shapes import model_shape
from kappa_workload.analysis import (
    PAPER_FIGURES,
    WHY_OURS_DIFFER,
    Ratios,
    analyse,
    engine_ratios,
    memory_bound_share,
    quantiles,
    source_ratios,
)
from kappa_workload.catalogue import BUILT_IN, workload_named
from kappa_workload.reading import ReadAs
from kappa_workload.shapes import SessionShape, Workload, key_of, stream_ids, turn_of
from tests.workload.checks import document_session

SIZE = 16
LLAMA, PCIE = model_shape("llama-3.1-8b"), node_profile("pcie")


def named(name, **how):
    how = {"block_tokens": SIZE, "max_context_tokens": None, "readers": 1, **how}
    return workload_named(name, ReadAs(**how))


def one_document(tokens=1000, questions=(10, 20)):
    session = document_session(tokens, questions, 100)
    return Workload("narrativeqa", 100, (session,), "made up")


def test_source_ratios_count_tokens_and_cache_documents_at_start():
    ratios = source_ratios(one_document(1030))
    assert ratios.cached_tokens.tolist() == [1030, 1030]
    assert ratios.new_tokens.tolist() == [10, 20]
    assert ratios.kappa.tolist() == [103.0, 51.5]


def test_an_engine_starts_cold_and_has_full_blocks_only():
    ratios = engine_ratios(one_document(1030), block_tokens=SIZE)
    assert ratios.cached_tokens.tolist() == [0, 1024]
    assert ratios.new_tokens.tolist() == [1040, 26]


def test_a_trace_of_blocks_counts_what_its_prompts_repeat():
    shared = stream_ids(key_of("chain"), 0, 9)
    turns = (turn_of(0.0, 250, 200, shared, 100), turn_of(1.0, 520, 10, shared, 100))
    workload = Workload("blocks", 100, (SessionShape("s", turns),), "made up")
    assert source_ratios(workload).cached_tokens.tolist() == [0, 200]
    assert engine_ratios(workload).cached_tokens.tolist() == [0, 400]  # the answer's blocks too


def test_a_request_without_new_tokens_counts_one():
    ids = stream_ids(key_of("x"), 0, 9)
    turn = turn_of(0.0, 50, 5, ids, SIZE, 0)
    workload = Workload("x", SIZE, (SessionShape("s", (turn,)),), "made up")
    assert source_ratios(workload).kappa.tolist() == [50.0]


def test_the_share_above_is_that_of_memory_bound_requests():
    level = 100 * kappa_eff(LLAMA, PCIE, 100)
    ratios = Ratios(np.full(4, 100.0), np.array([0.0, 0.5, 1.5, 2.0]) * level)
    faster = replace(PCIE, h2d_bytes_per_s=1.8 * PCIE.h2d_bytes_per_s)
    nodes = {"a": PCIE, "b": replace(PCIE, name="b"), "c": faster}
    found = memory_bound_share(ratios, LLAMA, nodes)
    assert found == {"a": 0.5, "b": 0.5, "c": 0.25}


def test_everything_comes_as_one_json_object():
    nodes = {"slow": replace(PCIE, h2d_bytes_per_s=1e9), "none": node_profile("unified-hbm")}
    found = json.loads(json.dumps(analyse(one_document(), LLAMA, nodes), allow_nan=False))
    assert found["requests"] == 2
    for view in (found, found["engine"]):
        for key in ("new", "cached", "kappa"):
            assert list(view[key]) == ["p10", "p50", "p90", "p99"]
    assert found["share_above"] == {"slow": 1.0, "none": 0.0}
    assert found["engine"]["share_above"] == {"slow": 0.5, "none": 0.0}
    assert found["kappa_crit"]["slow"] > 0 and found["kappa_crit"]["none"] is None
    assert found["paper"]


def test_quantiles_are_those_of_numpy():
    values = np.arange(101.0)
    assert quantiles(values) == {"p10": 10.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}


@pytest.mark.parametrize("name", BUILT_IN)
def test_ratios_of_built_in_workloads_sum_to_each_prompt(name):
    workload = named(name)
    inputs = [turn.input_tokens for s in workload.sessions for turn in s.turns]
    for ratios in (source_ratios(workload), engine_ratios(workload)):
        assert (ratios.new_tokens + ratios.cached_tokens).tolist() == inputs
        assert ratios.new_tokens.min() >= 0


def ours(name, **how):
    rows = analyse(named(name, **how), LLAMA, {})["paper"]
    return {(row["quantity"], row["statistic"]): (row["ours"], row["paper"]) for row in rows}


def test_sharegpt_with_history_has_the_papers_shape():
    figures = ours("sharegpt", whole_history=True)
    for key in (("new", "p50"), ("new", "p90"), ("kappa", "p50")):
        measured, printed = figures[key]
        assert measured == pytest.approx(printed, rel=0.2)
    for key in (("cached", "p50"), ("cached", "p90"), ("kappa", "above 1000")):
        measured, printed = figures[key]
        assert printed / 2 < measured < printed
    assert ours("sharegpt")["cached", "p90"][0] < 2_500  # the cut pieces do not


def test_document_questions_have_the_papers_ratios():
    for name, least in (("narrativeqa", 0.7), ("finqa", 0.5)):
        figures = ours(name)
        for key in (("kappa", "p25"), ("kappa", "p50"), ("kappa", "p75"), ("document", "p50")):
            measured, printed = figures[key]
            assert least * printed < measured < printed * 1.15
        assert figures["new", "mean"][0] == pytest.approx(figures["new", "mean"][1], rel=0.15)


def test_each_workload_of_the_paper_says_why_ours_differs():
    assert set(PAPER_FIGURES) == set(WHY_OURS_DIFFER)
    assert set(WHY_OURS_DIFFER) <= set(BUILT_IN)


def test_analysis_explains_differences_of_built_in_data_only(tmp_path):
    talk = [{"from": "human", "value": "What is two and two?"}, {"from": "gpt", "value": "Four."}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"id": "a", "conversations": talk}]))
    own = analyse(workload_named(str(path)), LLAMA, {})
    assert own["source"] == "texts in the layout of ShareGPT, talks.json"
    assert own["notes"] == ["tokens are estimated, 3.07 characters each"]
    assert own["why_ours_differ"] == ""
    assert "570 pieces" in analyse(workload_named("sharegpt"), LLAMA, {})["why_ours_differ"]


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match="'none' has no requests"):
        source_ratios(Workload("none", SIZE, (), "made up"))
