"""Workloads in numbers, against figures known of their sources."""

import json

import pytest

from workload.block_ids import key_of, stream_ids
from workload.catalogue import workload_named
from workload.description import describe
from workload.shapes import SessionShape, Workload, turn_of


def test_reuse_is_counted_with_and_without_outputs():
    ids = stream_ids(key_of("text"), 0, 10)
    turns = (turn_of(0.0, 45, 10, ids, 10), turn_of(4.0, 70, 10, ids, 10))
    workload = Workload("toy", 10, (SessionShape("a", turns),), "made up")

    kept = describe(workload)
    assert (kept.sessions, kept.requests, kept.distinct_blocks) == (1, 2, 8)
    assert kept.cached_tokens.mean == 25  # 0 and 50
    assert kept.kappa.mean == 1.25  # 0 and 50 / 20
    assert kept.reused_share == 50 / 115
    assert kept.think_s.mean == 4
    assert kept.input_tokens.p50 == 57.5
    prompts = describe(workload, outputs_kept=False)
    assert prompts.cached_tokens.mean == 20
    assert prompts.distinct_blocks == 7
    assert json.loads(json.dumps(kept.to_dict()))["kappa"] == {
        "mean": 1.25,
        "p50": 1.25,
        "p90": 2.25,
    }


def test_a_prompt_that_is_all_cached_still_computes_a_token():
    ids = stream_ids(key_of("text"), 0, 4)
    sessions = tuple(SessionShape(f"s{k}", (turn_of(0.0, 40, 1, ids, 10),)) for k in range(2))
    described = describe(Workload("toy", 10, sessions, ""))

    assert described.kappa.mean == 20  # 0 and 40 / 1


def test_nothing_cannot_be_described():
    with pytest.raises(ValueError, match="'none' has no requests"):
        describe(Workload("none", 1, (), ""))


def test_mooncake_is_as_its_source_says():
    """12,031 requests; 4,497 cached tokens a request with an unlimited cache of prompt blocks.

    That figure counts the last, partly filled block too; whole blocks make 4,494.
    """
    workload = workload_named("mooncake")
    prompts = describe(workload, outputs_kept=False)

    assert prompts.requests == 12_031
    assert prompts.input_tokens.mean == pytest.approx(12_035.06, abs=0.01)
    assert prompts.output_tokens.mean == pytest.approx(342.62, abs=0.01)
    assert prompts.cached_tokens.mean == pytest.approx(4496.57, rel=1e-3)
    assert prompts.cached_tokens.p50 == 512
    kept = describe(workload)
    assert kept.sessions == 8123
    assert kept.cached_tokens.mean > prompts.cached_tokens.mean
    assert 60 < kept.think_s.p50 < 180


def test_narrativeqa_is_long_documents_read_again_and_again():
    described = describe(workload_named("narrativeqa"))

    assert (described.sessions, described.requests) == (4 * 264, 4 * 7907)
    assert described.input_tokens.p90 <= 128 * 1024
    assert described.reused_share > 0.95
    assert described.kappa.p50 > 300
    assert 4 <= described.output_tokens.p50 <= 10


def test_sharegpt_is_as_its_source_says():
    described = describe(workload_named("sharegpt"))

    assert (described.sessions, described.requests) == (570, 2118)
    assert described.input_tokens.mean == pytest.approx(843.1 + 79.1, abs=0.1)
    assert described.output_tokens.mean == pytest.approx(328.4, abs=0.1)


def test_azure_shares_nothing():
    described = describe(workload_named("azure"))

    assert described.requests == described.sessions == 19_366
    assert described.reused_share == 0
    assert described.input_tokens.p50 == 1020
    assert described.output_tokens.p50 == 129
