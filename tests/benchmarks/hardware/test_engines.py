"""What the ladder makes of vLLM's answers and reports, over an engine that answers by script."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from kappa_benchmarks.hardware import engines
from kappa_benchmarks.hardware.engines import VllmServed


class Scripted:
    """Answers a token a time; reports a load, a step of each token, and a store of all full blocks,
    of which `lost` never end."""

    def __init__(self, lost=0):
        self.lost, self.reports, self.aborted, self.resets = lost, [], 0, 0

    def report(self, kind, **more):
        self.reports.append(msgspec.msgpack.encode({"kind": kind, **more}))

    def recv(self, _):
        if not self.reports:
            raise zmq.Again
        return self.reports.pop(0)

    async def generate(self, given, params, _):
        ids = given["prompt_token_ids"]
        assert params.extra_args and params.temperature == 0
        try:
            self.report("load", took_s=0.25)
            for number in range(params.max_tokens):
                await asyncio.sleep(1e-3)
                self.report("step", tokens=len(ids) if number == 0 else 1, took_s=0.5)
                likely = [{7: SimpleNamespace(logprob=-0.5)}] if params.logprobs else None
                made = SimpleNamespace(token_ids=[7], logprobs=likely)
                yield SimpleNamespace(outputs=[made], num_cached_tokens=16)
            self.report("store", tokens=(len(ids) // 16 - 1) * 16 - self.lost)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise

    async def reset_prefix_cache(self):
        self.resets += 1
        return self.resets > 1


@pytest.fixture
def served(monkeypatch):
    def make(llm):
        one = object.__new__(VllmServed)
        one._llm = one._stats = llm
        one._runner, one._reports, one._block_tokens = asyncio.Runner(), [], 16
        one._stored = one._to_store = one._number = 0
        return one

    monkeypatch.setattr(engines, "_STORED_WAIT_S", 0.2)
    monkeypatch.setattr(engines, "_BROKEN_OFF_S", 0.0)
    return make


def test_answers_and_reports_of_a_prompt_come_together(served):
    played = served(Scripted()).play([list(range(40))], 3, likeliest=5)
    (answer,) = played.answers
    assert answer.tokens == [7, 7, 7] and answer.cached_tokens == 16
    assert answer.logprobs == [{7: -0.5}] * 3
    assert answer.times_s == sorted(answer.times_s) and answer.ttft_s > 0
    assert played.load_s == 0.25 and played.steps == [(40, 0.5), (1, 0.5), (1, 0.5)]


def test_evict_empties_the_device_once_all_is_stored(served):
    llm = Scripted()
    one = served(llm)
    one.play([list(range(40)), list(range(64))])
    # A reset that was refused is tried again.
    assert one.evict() and llm.resets == 2
    # What the last prompts left is forgotten: nothing is waited for.
    assert one.evict()


def test_a_block_that_never_reaches_host_memory_is_told(served):
    one = served(Scripted(lost=16))
    one.play([list(range(64))])
    assert not one.evict()


def test_beside_request_begins_before_a_burst_and_is_broken_off(served):
    llm = Scripted()
    played = served(llm).play([list(range(40))], 2, beside=[1, 2, 3])
    assert played.beside is not None and len(played.beside.tokens) >= 8
    assert played.beside.times_s[7] <= played.answers[0].submitted_s
    assert llm.aborted == 1
