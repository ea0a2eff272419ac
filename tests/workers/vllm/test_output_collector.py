"""Tokens are counted as vLLM generates them, however it merges outputs not taken in time."""

from __future__ import annotations

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from kappa_workers import generated
from kappa_workers.vllm import output_collector

pytestmark = pytest.mark.vllm


def output(*tokens, finished=False):
    answer = CompletionOutput(
        0, "x" * len(tokens), list(tokens), None, None, "length" if finished else None
    )
    return RequestOutput("r", None, [1], None, [answer], finished)


def collector(kind=RequestOutputKind.DELTA):
    tally = generated.begin()
    return output_collector.CountingCollector(kind, "r"), tally


def tokens_of(taken):
    return [token for answer in taken.outputs for token in answer.token_ids]


async def test_tokens_are_counted_once_when_they_are_taken():
    made, tally = collector()
    assert made.get_nowait() is None
    made.put(output(1))
    assert tokens_of(await made.get()) == [1]
    for token in (2, 3):
        made.put(output(token))
    assert tally.tokens == 1
    made.put(output(4, finished=True))
    assert tokens_of(made.get_nowait()) == [2, 3, 4]
    assert tally.tokens == 4


async def test_a_failure_is_raised_and_has_no_tokens():
    made, tally = collector()
    made.put(EngineDeadError())
    with pytest.raises(EngineDeadError):
        await made.get()
    assert tally.tokens == 0


async def test_an_answer_that_is_not_streamed_is_counted_whole():
    made, tally = collector(RequestOutputKind.FINAL_ONLY)
    made.put(output(1, 2, finished=True))
    assert tokens_of(await made.get()) == [1, 2] and tally.tokens == 2
