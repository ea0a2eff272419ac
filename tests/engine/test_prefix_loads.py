"""Loads have a bound: on what they compute at once, on how long others wait, and on their end."""

import pytest

from kappa_engine.kv_cache import ArenaSize
from kappa_engine.model_runner import ModelRunner
from kappa_engine.transfer import WAIT_S, TransferFailed
from tests.engine.engines import (
    BLOCK,
    LONG,
    engine,
    even_rates,
    evict_device,
    expected,
    finish,
    fixed,
    generate,
    generate_in_host,
    link_of,
    loaded_bytes,
    prompt,
    step_until,
    submit,
)

OTHER = prompt(40, seed=6)


def decoding(made):
    """A request that decodes for a while."""
    beside = submit(made, prompt(3, 77), 20)
    step_until(made, beside)
    return beside


@pytest.mark.parametrize("both_at_once", [False, True])
def test_what_is_recomputed_at_once_is_within_the_budget(both_at_once, monkeypatch) -> None:
    computed = []
    run = ModelRunner._run

    def counted(self, *batches, **options):
        loads = [one.load for chunks in batches for one in chunks if one.load is not None]
        computed.append(sum(load.plan.tokens("R") for load in loads))
        return run(self, *batches, **options)

    monkeypatch.setattr(ModelRunner, "_run", counted)
    with engine(budget_tokens=18) as made:
        generate(made, LONG)
        generate_in_host(made, OTHER)
        computed.clear()
        prompts = [[*LONG, 5], [*OTHER, 5]][: 1 + both_at_once]
        handles = [submit(made, tokens, 6, planner=fixed(30)) for tokens in prompts]
        finish(made)
    assert [h.tokens[41:] for h in handles] == [expected(p) for p in prompts]
    assert [(h.account.recomputed_tokens, h.account.loaded_tokens) for h in handles] == [
        (16, 24)
    ] * len(prompts)
    # Neither with more than its budget, nor two of them in one iteration.
    assert [tokens for tokens in computed if tokens] == [16] * len(prompts)


@pytest.mark.parametrize("others", [False, True])
def test_plan_that_would_hold_up_others_is_loaded_beside_them(others: bool) -> None:
    rates = even_rates(step_fixed_s=0.0, load_fixed_s=0.0)
    settings = {"rates": rates, "act_share": 1.0, "budget_tokens": 4}
    with engine("opt", **settings) as made:
        generate_in_host(made, LONG)
        beside = decoding(made) if others else None
        handle = submit(made, [*LONG, 5], 6)
        named = submit(made, [*LONG[:24], 7], 6, planner="kvpr", salt="")
        finish(made)
    assert handle.tokens[41:] == expected([*LONG, 5], family="opt")
    assert named.tokens[25:] == expected([*LONG[:24], 7], family="opt")
    account = handle.account
    assert account.loaded_tokens + account.activation_tokens + account.recomputed_tokens == 40
    if others:
        assert beside is not None and beside.finish_reason == "length"
        assert (account.plan, account.loaded_tokens) == ("load", 40)
        assert "hold up others" in account.why
    else:
        assert account.loaded_tokens < 40


def test_a_preempted_request_counts_its_tokens_once() -> None:
    prompts = [prompt(17 + seed, seed) for seed in range(4)]
    with engine(size=ArenaSize(16, 96, block_tokens=BLOCK), scheduler="fcfs") as made:
        for each in prompts:
            generate(made, each, count=1)
        evict_device(made)
        loads, start = list[object](), made.loads.start
        made.loads.start = lambda loading, *when: (loads.append(loading), start(loading, *when))
        handles = [submit(made, each, 20) for each in prompts]
        finish(made)
        assert made.batcher.preemptions and len(loads) > len(prompts)
    for handle, each in zip(handles, prompts, strict=True):
        account = handle.account
        assert handle.tokens[len(each) :] == expected(each, 20)
        sources = (
            account.device_tokens, account.loaded_tokens, account.recomputed_tokens,
            account.new_tokens,
        )  # fmt: skip
        assert min(sources) >= 0 and sum(sources) == len(each), sources


def test_a_link_that_is_stuck_is_told_rather_than_waited_for() -> None:
    now_s = [100.0]
    with engine() as made:
        made._clock = lambda: now_s[0]
        generate_in_host(made, LONG)
        decoding(made)
        link_of(made).open.clear()
        handle = submit(made, [*LONG, 5], 6)
        made.step()
        now_s[0] += 0.9 * WAIT_S
        made.step()
        now_s[0] += 0.2 * WAIT_S
        with pytest.raises(TransferFailed, match="the link is stuck"):
            made.step()
        link_of(made).open.set()
        made.mover.drain(20)
        finish(made)
    assert handle.tokens[41:] == expected([*LONG, 5])


def test_chunks_and_loads_and_decoding_in_one_iteration() -> None:
    prompts = [[*LONG, n] for n in range(4, 8)]
    with engine(budget_tokens=24, act_share=1.0) as made:
        generate_in_host(made, LONG)
        first = submit(made, prompts[0], 12, planner="hybrid")
        step_until(made, first)
        evicted = submit(made, prompt(30, 9), 6)
        later = [submit(made, p, 6, planner=fixed(8, 8)) for p in prompts[1:]]
        finish(made)
    assert first.tokens[41:] == expected(prompts[0], 12)
    assert evicted.tokens[30:] == expected(prompt(30, 9))
    assert [h.tokens[41:] for h in later] == [expected(p) for p in prompts[1:]]


def test_one_loads_for_all_that_need_it() -> None:
    with engine() as made:
        generate_in_host(made, LONG)
        answers = generate(made, [*LONG, 3], [*LONG, 4], [*LONG, 5])
    assert answers == [expected([*LONG, n]) for n in (3, 4, 5)]
    assert loaded_bytes(made) == 10 * made.arena.block_bytes("kv")


@pytest.mark.parametrize("planner", ["kv", fixed(8, 12), fixed(0, 40)])
def test_a_load_that_fails_is_computed_and_counted(planner) -> None:
    with engine(act_share=1.0, budget_tokens=16) as made:
        generate_in_host(made, LONG)
        link_of(made).breaks = lambda direction, copies: direction == "h2d"
        beside = submit(made, prompt(3, 77), 12)
        made.step()
        handle = submit(made, [*LONG, 5], 6, planner=planner)
        finish(made)
        assert made.loads.failed_loads == 1
        link_of(made).breaks = lambda direction, copies: False
        again = generate(made, [*LONG, 6])
    assert handle.tokens[41:] == expected([*LONG, 5])
    assert beside.tokens[3:] == expected(prompt(3, 77), 12)
    assert again == [expected([*LONG, 6])]
    assert (handle.account.recomputed_tokens, handle.account.new_tokens) == (40, 1)


def test_only_the_failed_one_of_two_loads_is_recomputed() -> None:
    other = prompt(40, seed=6)
    with engine(scheduler="fcfs") as made:
        generate(made, LONG)
        generate_in_host(made, other)
        handles = [submit(made, [*tokens, 5], 6) for tokens in (LONG, other)]
        block = made.memory.host["kv"].find(handles[1].keys[0])
        assert block is not None
        page = made.arena.kv_host[1, block].data_ptr()
        link_of(made).breaks = lambda direction, copies: (
            direction == "h2d"
            and any(
                source.data_ptr() <= page < source.data_ptr() + source.nbytes
                for _, source in copies
            )
        )
        finish(made)
    assert [h.tokens[41:] for h in handles] == [expected([*LONG, 5]), expected([*other, 5])]
    assert [h.account.recomputed_tokens for h in handles] == [0, 40]
    assert [h.account.loaded_tokens for h in handles] == [40, 0]
    assert made.loads.failed_loads == 1
