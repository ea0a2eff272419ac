"""Requests that may be answered approximately, in a whole engine: slots come, go and fail."""

import random
from dataclasses import replace

import pytest
import torch

from kappa.hardware import node_profile
from kappa.plans.clo import CloConfig, SparseSettings
from kappa.plans.rates import rates_from_law
from kappa_engine.kv_cache import ArenaSize
from tests.engine import hf
from tests.engine.engines import (
    BLOCK,
    SIZE,
    engine,
    expected,
    finish,
    generate_in_host,
    link_of,
    loaded_bytes,
    prompt,
    step_until,
    submit,
)
from tests.engine.rig import DEVICES, weights

# With all tokens chosen the answer is the model's, so that whatever goes wrong shows.
WHOLE = CloConfig(share=1.0, sink_tokens=4, recent_tokens=8, code_bits=64)
FEW = CloConfig(share=0.1, sink_tokens=1, recent_tokens=4, code_bits=64)


def slots(clo=WHOLE, **changes):
    return SparseSettings(clo, **{"slots": 2, "max_tokens": 160, "chunk_tokens": 8, **changes})


def answer(request):
    return request.tokens[request.prompt_tokens :]


def go_sparse(made, *requests, tokens=1):
    """Until each has this number of approximate tokens; none waits for a slow copy."""
    for _ in range(60):
        if all(r.account.approximate_tokens >= tokens for r in requests):
            return
        made.step()
        made.store.drain(20)
    raise AssertionError("they get no slot")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_request_moves_into_a_slot_and_frees_its_device_blocks(family, device):
    with engine(family, sparse=slots(), device=device) as made:
        request = submit(made, prompt(45, 1), 16, approx=True)
        go_sparse(made, request, tokens=3)
        assert request.slot is not None and not len(request.blocks)
        assert made.memory.available() == made.memory.capacity_blocks
        finish(made)
        assert answer(request) == expected(prompt(45, 1), 16, family)
        account = request.account
        # The first is its prompt's, and the second was computed before it could move.
        assert (account.approximate_tokens, request.output_tokens) == (14, 16)
        assert not len(made.approximate)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("retriever", ["hash", "oracle"])
def test_a_prefix_in_host_memory_need_not_be_loaded(retriever, device):
    with engine(sparse=slots(retriever=retriever), device=device) as made:
        generate_in_host(made, prompt(48, 1), count=1)
        asked = prompt(48, 1) + prompt(13, 2)
        request = submit(made, asked, 9, approx=True, planner="sparse")
        finish(made)
        assert answer(request) == expected(asked, 9)
        account = request.account
        assert (account.plan, account.sparse_tokens, account.new_tokens) == ("sparse", 48, 13)
        assert account.approximate_tokens == 9 and account.loaded_tokens == 0


def test_a_prefix_that_is_not_loaded_moves_fewer_bytes():
    moved = []
    for planner in ("kv", "sparse"):
        with engine(sparse=slots(FEW)) as made:
            generate_in_host(made, prompt(96, 1), count=1)
            submit(made, prompt(96, 1) + prompt(5, 2), 1, approx=True, planner=planner)
            finish(made)
            moved.append(loaded_bytes(made))
    whole = 96 * 2 * 2 * 8 * 3 * 8
    # A layer of three stays on the device; of the others a tenth, and the tokens always there.
    assert moved[0] == whole and whole / 3 < moved[1] < 0.6 * whole


def test_what_was_computed_approximately_is_found_by_nobody():
    with engine(sparse=slots(FEW)) as made:
        first = submit(made, prompt(50, 1), 40, approx=True)
        go_sparse(made, first)
        finish(made)
        exact = expected(prompt(50, 1), 40)
        # It did differ, or nothing is shown.
        assert answer(first) != exact
        for tokens in (prompt(50, 1) + answer(first), prompt(50, 1) + exact[:20]):
            request = submit(made, tokens, 4)
            finish(made)
            assert answer(request) == expected(tokens, 4)
            # Of the first one, no more is known than was computed exactly.
            assert request.account.device_tokens <= 90 - first.account.approximate_tokens


def test_without_a_free_slot_it_is_computed_exactly():
    with engine(sparse=slots(slots=1)) as made:
        requests = [submit(made, prompt(40, n), 20, approx=True) for n in range(3)]
        while made.busy:
            made.step()
            made.store.drain(20)
        assert [answer(r) for r in requests] == [expected(prompt(40, n), 20) for n in range(3)]
        approximate = sorted(r.account.approximate_tokens for r in requests)
        assert approximate[0] == 0 and approximate[-1] > 0


def test_request_stays_exact_when_short_too_long_or_not_asked():
    with engine(sparse=slots(max_tokens=70)) as made:
        requests = [
            submit(made, prompt(9, 1), 3, approx=True),
            submit(made, prompt(60, 2), 20, approx=True),
            submit(made, prompt(40, 3), 6),
        ]
        finish(made)
        assert [r.account.approximate_tokens for r in requests] == [0, 0, 0]


def test_engine_refuses_approx_without_slots_and_a_sparse_plan():
    with (
        engine() as made,
        pytest.raises(ValueError, match=r"without slots for them: set engine\.approx"),
    ):
        submit(made, prompt(9), 2, approx=True)
    with engine(sparse=slots()) as made, pytest.raises(ValueError, match="no planner 'sparse'"):
        submit(made, prompt(9), 2, planner="sparse")


@pytest.mark.parametrize("when", ["gather", "leaving"])
def test_a_link_that_fails_costs_the_slot_and_no_token(when):
    with engine(sparse=slots()) as made:
        link = link_of(made)
        request = submit(made, prompt(41, 1), 40, approx=True)
        other = submit(made, prompt(30, 2), 40)
        go_sparse(made, request, tokens=5)
        direction = "h2d" if when == "gather" else "d2h"
        link.breaks = lambda way, copies: way == direction
        while request.slot is not None:
            made.step()
        link.breaks = lambda way, copies: False
        finish(made)
        assert answer(request) == expected(prompt(41, 1), 40)
        assert answer(other) == expected(prompt(30, 2), 40)
        assert request.account.preemptions == 1
        assert 5 <= request.account.approximate_tokens < 40


def test_a_prefix_that_cannot_be_brought_is_computed():
    with engine(sparse=slots()) as made:
        generate_in_host(made, prompt(48, 1), count=1)
        link_of(made).breaks = lambda way, copies: way == "h2d"
        request = submit(made, prompt(48, 1) + prompt(6, 2), 5, approx=True, planner="sparse")
        finish(made)
        assert answer(request) == expected(prompt(48, 1) + prompt(6, 2), 5)
        assert made.loads.failed_loads >= 1 and request.account.approximate_tokens == 0


def test_request_goes_on_exactly_when_host_blocks_run_out():
    size = ArenaSize(48, 12, block_tokens=BLOCK)
    with engine(sparse=slots(), size=size) as made:
        request = submit(made, prompt(44, 1), 60, approx=True)
        go_sparse(made, request)
        finish(made)
        assert answer(request) == expected(prompt(44, 1), 60)
        assert 0 < request.account.approximate_tokens < 59


def test_who_leaves_early_leaves_nothing():
    with engine(sparse=slots()) as made:
        generate_in_host(made, prompt(48, 1), count=1)
        decoding = submit(made, prompt(40, 3), 60, approx=True)
        go_sparse(made, decoding)
        waiting = submit(made, prompt(48, 1) + prompt(3, 2), 5, approx=True, planner="sparse")
        made.step()
        for request in (decoding, waiting):
            made.abort(request.request_id)
        finish(made)
        assert len(made.approximate) == 0


def test_auto_leaves_a_prefix_where_it_is_only_if_that_is_faster():
    slow = rates_from_law(hf_shape(), node_profile("pcie"))
    for rates, sparse in ((slow, False), (paced(slow), True)):
        with engine(sparse=slots(FEW), rates=rates, size=SIZE) as made:
            generate_in_host(made, prompt(96, 1), count=1)
            request = submit(made, prompt(96, 1) + prompt(5, 2), 2, approx=True)
            exact = submit(made, prompt(96, 1) + prompt(6, 3), 2)
            finish(made)
            assert (request.account.plan == "sparse") == sparse, request.account.why
            assert exact.account.plan != "sparse" and exact.account.approximate_tokens == 0


def test_prefix_stays_in_host_beside_others_in_small_iterations():
    rates = paced(rates_from_law(hf_shape(), node_profile("pcie")))
    with engine(sparse=slots(FEW), rates=rates, size=SIZE, budget_tokens=8) as made:
        generate_in_host(made, prompt(96, 1), count=1)
        other = submit(made, prompt(9, 7), 30)
        step_until(made, other)
        request = submit(made, prompt(96, 1) + prompt(5, 2), 2, approx=True)
        finish(made)
        account = request.account
        assert (account.plan, account.sparse_tokens, account.approximate_tokens) == (
            "sparse",
            96,
            2,
        )
        assert answer(other) == expected(prompt(9, 7), 30)


def test_who_leaves_a_slot_does_not_make_others_load_twice():
    with engine(sparse=slots()) as made:
        generate_in_host(made, prompt(48, 1), count=1)
        busy = submit(made, prompt(5, 7), 60)
        step_until(made, busy)
        link_of(made).open.clear()
        asked = [prompt(48, 1) + prompt(3, seed) for seed in (2, 3, 4)]
        first = submit(made, asked[0], 2, planner="kv")
        made.step()
        begins = submit(made, asked[1], 2, approx=True, planner="sparse")
        made.step()
        assert begins.slot is not None
        made.abort(begins.request_id)
        last = submit(made, asked[2], 2, planner="kv")
        made.step()
        # It waits for the blocks that are on their way for the first.
        assert first.load is not None and last.load is None
        link_of(made).open.set()
        finish(made)
        assert answer(last) == expected(asked[2], 2)
        assert (last.account.device_tokens, last.account.loaded_tokens) == (48, 0)


def hf_shape():
    return weights("llama", torch.float64, "cpu").config.shape


def paced(rates):
    """The same node behind a link a million times slower, without a GPU to recompute on."""
    load = replace(rates.load, per_token_s=1e-3)
    step = replace(rates.step, token_s=2e-3)
    return replace(rates, load=load, step=step)


def test_a_crowd_of_both_kinds_with_preemptions():
    rng = random.Random(3)
    size = ArenaSize(30, 128, block_tokens=BLOCK)
    with engine(sparse=slots(), size=size, budget_tokens=24) as made:
        asked = []
        for number in range(10):
            tokens = prompt(rng.choice((5, 31, 58)), number % 3)
            count = rng.choice((2, 24))
            asked.append((submit(made, tokens, count, approx=rng.random() < 0.6), tokens, count))
            for _ in range(rng.randrange(4)):
                made.step()
                made.store.drain(20)
        finish(made)
        for request, tokens, count in asked:
            assert answer(request) == expected(tokens, count)
        assert sum(request.account.approximate_tokens > 0 for request, *_ in asked) > 2
