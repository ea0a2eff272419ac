"""Workloads made small: ratios and sharing stay."""

from fractions import Fraction
from itertools import islice, repeat

import numpy as np
import pytest

from kappa_workload.analysis import source_ratios
from kappa_workload.catalogue import workload_named
from kappa_workload.reading import ReadAs
from kappa_workload.replay import replay_sessions, requests
from kappa_workload.scaling import scaled
from tests.workload.checks import cached_in_fact

BLOCK = 16


@pytest.fixture(scope="module", params=["narrativeqa", "mooncake", "finqa", "sharegpt", "miniswe"])
def pair(request):
    blocks = 128 if request.param in ("sharegpt", "miniswe") else None
    workload = workload_named(request.param, ReadAs(block_tokens=blocks, readers=1))
    return workload, scaled(workload, 1 / 8)


def test_every_length_shrinks_by_the_factor(pair):
    workload, small = pair
    assert small.block_tokens == workload.block_tokens // 8
    assert len(small.sessions) == len(workload.sessions)
    for session, shrunk in zip(workload.sessions[:50], small.sessions[:50], strict=True):
        assert shrunk.document_tokens == session.document_tokens // 8
        assert (shrunk.id, shrunk.arrival_s) == (session.id, session.arrival_s)
        for turn, less in zip(session.turns, shrunk.turns, strict=True):
            assert less.input_tokens - turn.input_tokens / 8 <= 1
            assert less.input_tokens >= max(turn.input_tokens // 8, 1)
            assert less.output_tokens == max(turn.output_tokens // 8, 1)
            assert less.after_s == turn.after_s
            assert len(less.blocks) == less.input_tokens // small.block_tokens
            assert less.kept_blocks[: len(less.blocks)].tolist() == less.blocks.tolist()


def test_the_ratio_stays_where_questions_are_not_lost(pair):
    workload, small = pair
    before, after = source_ratios(workload), source_ratios(small)
    large = before.new_tokens >= 80
    if large.any():
        quotient = (after.kappa[large] + 0.01) / (before.kappa[large] + 0.01)
        assert np.quantile(np.abs(quotient - 1), 0.95) < 0.15


def test_prompts_share_what_is_expected_of_them(pair):
    _, small = pair
    seen: set[bytes] = set()
    sent = requests(replay_sessions(small, arrivals=repeat(0.0), seed=2))
    for request in islice(sent, 150):
        tokens = request.make_prompt()
        assert len(tokens) == request.input_tokens
        assert cached_in_fact(seen, tokens, BLOCK) == request.cached_tokens


def test_a_factor_of_one_changes_nothing_and_fractions_are_exact():
    workload = workload_named("finqa")
    assert scaled(workload, 1) is workload
    assert scaled(workload, Fraction(1, 256)).block_tokens == 1
    assert "every length times 1/256" in scaled(workload, 1 / 256).notes


@pytest.mark.parametrize("factor", [0, -1, 2, 1 / 3, 1 / 512])
def test_other_factors_are_refused(factor):
    with pytest.raises(ValueError, match="scale"):
        scaled(workload_named("finqa"), factor)
