"""Prefixes that stay in host memory while requests run: the same answers, more room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kappa.plans.planners import Cached, Planning
from kappa.plans.rates import LineFit
from tests.engine.books import check_engine
from tests.engine.engines import (
    BLOCK,
    SIZE,
    engine,
    expected,
    finish,
    generate,
    generate_in_host,
    link_of,
    loaded_bytes,
    prompt,
    step_until,
    submit,
)
from tests.kappa.plans.profiles import random_rates


def measured(share=1.0):
    """Rates of a node with a CPU that attends to KV at that share of the link's bandwidth."""
    from numpy.random import default_rng

    rates = random_rates(default_rng(1), plain=True)
    line = LineFit("CPU attention", rates.load_token_s / share)
    # The engine's own model, so that it can execute the plans.
    return replace(rates, attend=line, layers=3)


def follow_up(made, length=33, tail=7, **options):
    """A prompt with first blocks that only host memory has; the handle of its request."""
    first = prompt(length)
    generate_in_host(made, first, count=1)
    return submit(made, [*first, *prompt(tail, seed=50)], 6, **options)


def answer(made, sequence):
    finish(made)
    return sequence.tokens[sequence.prompt_tokens :]


@pytest.mark.parametrize("family", ["llama", "opt", "qwen2", "qwen3"])
@pytest.mark.parametrize("tail", [1, 3, 7])
def test_a_prefix_that_stays_gives_the_same_answer(family: str, tail: int) -> None:
    with engine(family, cpu_threads=1) as made:
        asked = follow_up(made, tail=tail, planner="cpu")
        assert answer(made, asked) == expected(asked.tokens[:-6], family=family)
        account = asked.account
        assert account.kept_tokens == 32 and account.device_tokens == 0
        assert account.loaded_tokens == 0 and account.new_tokens == asked.prompt_tokens - 32
        assert account.plan == "cpu"
        # Many queries need it on the device, layer by layer; few, and every answer's token, do not.
        sizes = made.arena.block_bytes("kv") * 32 // BLOCK
        assert loaded_bytes(made) == (sizes if tail > 4 else 0)


def test_it_takes_no_device_blocks_and_its_host_blocks_are_held() -> None:
    with engine(cpu_threads=1) as made:
        asked = follow_up(made, planner="cpu")
        made.step()
        assert asked.kept is not None and asked.kept.blocks == len(asked.kept.kv) == 8
        line = asked.blocks.tolist()
        assert line[:8] == [-1] * 8 and min(line[8:]) >= 0
        pool = made.arena.pools["kv", "host"]
        assert all(pool.refs(block) >= 2 for block in asked.kept.kv.tolist())
        finish(made)
        assert asked.kept is None


def test_auto_keeps_what_exceeds_a_requests_room() -> None:
    # Of 48 blocks a request may take 10: 40 tokens, of which 9 are new.
    with engine(rates=measured(), cpu_threads=1, cpu_room_share=10 / 48) as made:
        asked = follow_up(made, length=41, tail=8)
        assert answer(made, asked) == expected(asked.tokens[:-6])
        assert asked.account.plan.startswith("cpu+")
        assert asked.account.kept_tokens == 12 and asked.account.loaded_tokens == 28
        assert "have room on the device" in asked.account.why


def test_auto_loads_all_when_the_cpu_is_slow_or_there_is_room() -> None:
    for rates, share in ((measured(0.2), 10 / 48), (measured(), 1.0)):
        with engine(rates=rates, cpu_threads=1, cpu_room_share=share) as made:
            asked = follow_up(made, length=41, tail=8)
            assert answer(made, asked) == expected(asked.tokens[:-6])
            assert asked.account.kept_tokens == 0


def test_part_of_what_stays_may_cross_at_every_step() -> None:
    rates = measured()
    rates = replace(rates, step=replace(rates.step, weights_s=0.0, token_s=0.0))
    with engine(rates=rates, cpu_threads=2) as made:
        asked = follow_up(made, planner="cpu")
        made.step()
        assert asked.kept is not None and 0 < asked.kept.cpu_tokens < 32
        crossing = (32 - asked.kept.cpu_tokens) * made.arena.block_bytes("kv") // BLOCK
        before = loaded_bytes(made)
        made.step()
        assert loaded_bytes(made) - before == crossing
        assert answer(made, asked) == expected(asked.tokens[:-6])


def test_more_requests_run_at_once() -> None:
    """Three prefixes fill the device twice over; their requests decode together, none preempted."""
    prompts = [prompt(89, seed=s) for s in (1, 2, 3)]
    for planner, most in (("kv", 1), ("cpu", 3)):
        with engine(cpu_threads=1, size=replace(SIZE, kv_device=40), planner=planner) as made:
            for one in prompts:
                generate(made, one, count=1)
            generate(made, prompt(90, seed=9), count=1)
            asked = [submit(made, [*one, *prompt(3, seed=60)], 6) for one in prompts]
            together = 0
            while made.busy:
                made.step()
                together = max(together, len(made.batcher.running))
            assert together == most
            for one in asked:
                assert one.tokens[one.prompt_tokens :] == expected(one.tokens[:-6])
            assert made.batcher.preemptions == 0


def test_preempted_aborted_and_failed_requests_let_go() -> None:
    with engine(cpu_threads=1) as made:
        asked = follow_up(made, planner="cpu")
        made.step()
        assert made.abort(asked.request_id)
        finish(made)
        check_engine(made)
    small = replace(SIZE, kv_device=14)
    with engine(cpu_threads=1, size=small, scheduler="fcfs") as made:
        first = prompt(33)
        generate(made, first, count=1)
        for seed in range(3):
            generate(made, prompt(45, seed=100 + seed), count=1)
        asked = [submit(made, [*first, *prompt(n, seed=n)], 16, planner="cpu") for n in (5, 6, 7)]
        finish(made)
        for one in asked:
            assert one.tokens[one.prompt_tokens :] == expected(one.tokens[:-16], 16)
        assert made.batcher.preemptions > 0


def test_rest_that_does_not_arrive_is_computed_behind_the_kept() -> None:
    with engine(rates=measured(), cpu_threads=1, cpu_room_share=10 / 48) as made:
        first = prompt(41)
        generate_in_host(made, first, count=1)
        link_of(made).breaks = lambda direction, copies: direction == "h2d"
        asked = submit(made, [*first, *prompt(3, seed=50)], 6)
        step_until(made, asked)
        link_of(made).breaks = lambda direction, copies: False
        assert answer(made, asked) == expected(asked.tokens[:-6])
        # Twice: what was to be loaded, and what was to cross for the new tokens.
        assert made.loads.failed_loads == 2
        assert asked.account.recomputed_tokens == 36


def test_a_link_that_fails_leaves_it_to_the_cpu() -> None:
    rates = measured()
    rates = replace(rates, step=replace(rates.step, weights_s=0.0, token_s=0.0))
    with engine(rates=rates, cpu_threads=1) as made:
        asked = follow_up(made, planner="cpu")
        other = submit(made, prompt(21, seed=5), 6)
        step_until(made, asked, 2)
        link_of(made).breaks = lambda direction, copies: direction == "h2d"
        assert answer(made, asked) == expected(asked.tokens[:-6])
        assert other.tokens[other.prompt_tokens :] == expected(other.tokens[:-6])
        # Told once, and not asked again.
        assert made.loads.failed_loads == 1


def test_without_threads_there_is_no_such_planner() -> None:
    with engine() as made:
        with pytest.raises(ValueError, match="cpu_threads"):
            submit(made, prompt(5), 1, planner="cpu")
        assert "cpu" not in made.planning.names


def test_plans_are_priced_for_the_first_token_and_for_every_step() -> None:
    planning = Planning(BLOCK, measured(), cpu=True)
    asked = Cached(640, 20, 32, 0, room=160)
    plan, loaded = planning.named("auto")(asked), planning.named("kv")(asked)
    assert [(s.kind, s.tokens) for s in plan.segments] == [("C", 480), ("K", 160)]
    assert (plan.ttft_s, plan.load_s) == (loaded.ttft_s, loaded.load_s)
    assert plan.crossing_tokens == 640 and plan.exact
    assert plan.step_s > 0 == loaded.step_s
    assert 0 < planning.on_cpu(480) < 480 and planning.on_cpu(0) == 0
    assert Planning(BLOCK, cpu=True).on_cpu(480) == 480
    bare = Planning(BLOCK, cpu=True).named("cpu")(asked)
    assert bare.kind == "cpu" and bare.step_s == 0
