"""The loop says what the model says, however it batches, chunks, preempts, reuses and loads."""

import random

import pytest

from kappa.protocol import Charge
from kappa_engine.kv_cache import ArenaSize
from kappa_engine.sampling import Sampling
from kappa_engine.sequence import RequestRefused
from kappa_scheduler.catalogue import SCHEDULERS
from kappa_scheduler.config import FairConfig
from tests.engine.books import check_engine, check_memory
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
from tests.engine.rig import DEVICES

LENGTHS = (1, 4, 17, 30, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["opt", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("budget_tokens", [7, 256])
def test_a_batch_in_chunks_says_what_each_alone_would(family, budget_tokens, device) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    with engine(family, budget_tokens=budget_tokens, device=device) as made:
        answers = generate(made, *prompts)
    assert answers == [expected(p, family=family) for p in prompts]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_rule_serves_everybody(scheduler: str) -> None:
    prompts = [prompt(6 * seed + 1, seed) for seed in range(6)]
    small = ArenaSize(14, 20, block_tokens=BLOCK)
    with engine(size=small, scheduler=scheduler, budget_tokens=16) as made:
        answers = generate(made, *prompts, count=4)
    assert answers == [expected(p, 4) for p in prompts]


def test_a_prefix_on_the_device_is_reused() -> None:
    with engine() as made:
        generate(made, LONG)
        again = submit(made, [*LONG[:36], 7, 8], 6)
        other = submit(made, LONG[:36], 6, salt="another tenant")
        finish(made)
    assert again.tokens[38:] == expected([*LONG[:36], 7, 8])
    assert (again.account.device_tokens, again.account.new_tokens) == (36, 2)
    assert (other.account.device_tokens, other.account.new_tokens) == (0, 36)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("planner", "share", "both", "loaded", "activations", "recomputed"),
    [
        ("auto", 0.0, True, 40, 0, 0),
        ("kv", 0.5, True, 40, 0, 0),
        ("kv", 0.5, False, 20, 20, 0),
        ("hybrid", 0.5, True, 20, 20, 0),
        ("hybrid", 1.0, False, 0, 40, 0),
        ("recompute", 1.0, True, 0, 0, 0),
        (fixed(12, 8), 1.0, True, 20, 8, 12),
        (fixed(10, 0), 0.0, True, 28, 0, 12),
        (fixed(12, 0, tail=True), 0.0, True, 28, 0, 0),
        (fixed(99, 0), 0.0, True, 0, 0, 0),
    ],
)
def test_a_prefix_in_host_memory_comes_back_by_its_plan(
    planner, share, both, loaded, activations, recomputed, alone, device
) -> None:
    settings = {"act_share": share, "keep_kv": both}
    with engine(**settings, budget_tokens=64, device=device) as made:
        generate_in_host(made, LONG)
        handle = submit(made, [*LONG, 5], 6, planner=planner)
        # Somebody else computes meanwhile, or comes when the load is under way.
        if alone:
            made.step()
        beside = submit(made, prompt(3, 77), 8, planner=planner)
        finish(made)
        account = handle.account
        link_bytes = loaded_bytes(made)
        kv_bytes, act_bytes = (made.arena.block_bytes(type) // BLOCK for type in ("kv", "act"))
    assert handle.tokens[41:] == expected([*LONG, 5])
    assert beside.tokens[3:] == expected(prompt(3, 77), 8)
    assert account.device_tokens == 0
    assert account.loaded_tokens == loaded
    assert account.activation_tokens == activations
    assert account.recomputed_tokens == recomputed
    assert account.new_tokens == 41 - loaded - activations - recomputed
    assert link_bytes == loaded * kv_bytes + activations * act_bytes


@pytest.mark.parametrize("scheduler", ["fair", "fcfs"])
def test_preempted_requests_say_the_same(scheduler: str) -> None:
    prompts = [prompt(6 + seed, seed) for seed in range(4)]
    small = ArenaSize(13, 8, 4, 8, block_tokens=BLOCK)
    unaware = FairConfig(expected_output_tokens=1)
    with engine(size=small, scheduler=scheduler, fair=unaware, act_share=0.5) as made:
        answers = generate(made, *prompts, count=16)
        assert made.batcher.preemptions > 0
    assert answers == [expected(p, 16) for p in prompts]


def test_no_room_in_host_memory_is_counted_and_computed_again() -> None:
    with engine(size=ArenaSize(48, 4, block_tokens=BLOCK)) as made:
        generate(made, LONG)
        assert (len(made.memory.host["kv"]), made.store.dropped) == (4, 6)
        evict_device(made)
        answer = generate(made, [*LONG, 5])
    assert answer == [expected([*LONG, 5])]


def stages(made):
    """An abort of each of these requests catches it somewhere else."""
    generate_in_host(made, LONG)
    link = link_of(made)
    yield "waiting", submit(made, prompt(20, 1), 6)
    chunked = submit(made, prompt(30, 2), 6)
    made.step()
    assert 0 < chunked.computed_tokens < 30
    yield "between chunks", chunked
    decoding = submit(made, prompt(9, 3), 20)
    step_until(made, decoding, 3)
    yield "decoding", decoding
    beside = submit(made, prompt(9, 4), 40)
    step_until(made, beside)
    link.open.clear()
    loading = submit(made, [*LONG, 5], 6)
    made.step()
    assert loading in made.batcher.loading
    yield "loading", loading
    link.open.set()
    finish(made)
    ready = submit(made, [*LONG, 6], 6, planner=fixed(4, 0))
    device = made.memory.device
    device.release(device.take(device.pool.count))
    made.step()
    assert ready in made.batcher.ready and ready.load is not None
    yield "to be loaded with its first chunk", ready


def test_an_abort_at_any_stage_frees_everything() -> None:
    with engine(budget_tokens=16, act_share=0.5) as made:
        for stage, handle in stages(made):
            assert made.abort(handle.request_id), stage
            assert not made.abort(handle.request_id)
            assert handle.finish_reason == "abort"
            link_of(made).open.set()
            aborted = [o for o in finish(made) if o.request_id == handle.request_id]
            assert [(o.tokens, o.finish_reason) for o in aborted] == [([], "abort")], stage
            check_engine(made)
        assert generate(made, [*LONG, 7]) == [expected([*LONG, 7])]


def test_stop_tokens_lengths_and_the_end_of_the_context() -> None:
    said = expected(LONG, 6)
    with engine(size=ArenaSize(12, 16, block_tokens=BLOCK)) as made:
        stop = submit(made, LONG, 6, Sampling(stop_tokens=frozenset({said[2]})))
        cut = submit(made, LONG, 100)
        outputs = finish(made)
    assert (stop.tokens[40:], stop.finish_reason) == (said[: said.index(said[2]) + 1], "stop")
    assert (len(cut.tokens), cut.finish_reason) == (48, "length")
    last = [o for o in outputs if o.finish_reason][-1]
    assert last.account is cut.account and cut.output_tokens == 8
    assert [o.tokens[0] for o in outputs if o.request_id == cut.request_id] == cut.tokens[40:]


def test_draws_depend_on_the_seed_and_on_nobody_else() -> None:
    drawn = Sampling(temperature=0.8, top_p=0.9, seed=3)
    with engine() as made:
        alone = generate(made, LONG, sampling=drawn)
        handles = [submit(made, LONG, 6, drawn), submit(made, prompt(7), 6)]
        handles.append(submit(made, LONG, 6, Sampling(temperature=0.8, top_p=0.9, seed=4)))
        finish(made)
    assert handles[0].tokens[40:] == alone[0]
    assert handles[2].tokens[40:] != alone[0]
    assert handles[1].tokens[7:] == expected(prompt(7))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "0 tokens"),
        ([1], {"count": 0}, "an answer of 0"),
        ([3] * 192, {}, "holds 192 tokens of a request at most"),
        ([3, 96], {}, "token ids 3 to 96: the model's are 0 to 95"),
        ([-1], {}, "token ids -1 to -1"),
        ([1], {"planner": "best"}, "no planner 'best' here: choose one of auto, kv"),
        ([1], {"planner": "kvpr"}, "it needs rates"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(tokens, options, message: str) -> None:
    with engine() as made:
        with pytest.raises(ValueError, match=message) as refused:
            submit(made, tokens, **{"count": 4, **options})
        assert isinstance(refused.value, RequestRefused) or "planner" in options
        assert not made.busy


def test_settings_that_make_no_sense_are_refused() -> None:
    for options, message in (
        ({"act_share": 0.5, "size": ArenaSize(8, 8)}, "give both, or act_share=0"),
        ({"planner": "kvpr"}, "it needs rates"),
        ({"scheduler": "best"}, "choose one of fair"),
    ):
        with pytest.raises(ValueError, match=message), engine(**options):
            pass


def test_an_account_says_what_was_planned_and_what_it_took() -> None:
    rates = even_rates()
    with engine("opt", rates=rates, act_share=1.0, planner="kvpr") as made:
        generate_in_host(made, LONG)
        handle = submit(made, [*LONG, 5], 6)
        finish(made)
    account = handle.account
    assert (account.activation_tokens, account.loaded_tokens) == (20, 20)
    assert account.plan == "activations+load" and "KVPR" in account.why
    assert account.load_s > 0 and account.compute_s > 0


def test_random_traffic_matches_the_model_and_leaks_no_memory() -> None:
    dice = random.Random(11)
    size = ArenaSize(24, 30, 8, 20, block_tokens=BLOCK)
    bases = [prompt(44, seed) for seed in range(3)]
    planners = [None, "kv", "recompute", "hybrid", fixed(8, 8), fixed(12, 0, tail=True)]
    with engine(size=size, act_share=0.5, keep_kv=False, budget_tokens=24) as made:
        link_of(made).breaks = lambda direction, copies: dice.random() < 0.03
        handles = []
        for _ in range(24):
            tokens = dice.choice(bases)[: dice.randrange(1, 44)] + prompt(dice.randrange(4), 9)
            handles.append(submit(made, tokens, 4, planner=dice.choice(planners)))
            for _ in range(dice.randrange(4)):
                made.step()
                check_memory(made.memory)
            if dice.random() < 0.2:
                made.abort(dice.choice(handles).request_id)
        finish(made)
    for handle in handles:
        if handle.finish_reason != "abort":
            asked = handle.tokens[: handle.prompt_tokens]
            assert handle.tokens[handle.prompt_tokens :] == expected(asked, 4)


def test_of_a_sequence_in_host_memory_the_end_is_evicted_first() -> None:
    with engine(size=ArenaSize(48, 12, block_tokens=BLOCK)) as made:
        # Block by block, as it decodes; and then others that need room.
        long = submit(made, prompt(5, seed=8), 36)
        finish(made)
        generate(made, prompt(16, seed=9), count=1)
        host = made.memory.host["kv"]
        found = [host.find(key) is not None for key in long.keys]
    assert found == [True] * 8 + [False] * 2


class Watcher:
    """Notes what an engine tells."""

    def __init__(self) -> None:
        self.admissions: list[tuple[str, int, int]] = []
        self.iterations: list[tuple[int, list[str]]] = []
        self.busy: list[bool] = []

    def admitted(self, sequence) -> None:
        cached = sequence.load.plan.cached_tokens if sequence.load else 0
        self.admissions.append((sequence.request.name, sequence.account.device_tokens, cached))

    def iterated(self, made, seconds, chunks, prefilled) -> None:
        assert seconds > 0
        self.busy.append(made.busy)
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        self.iterations.append((tokens, [sequence.request.name for sequence in prefilled]))


def test_an_observer_is_told_of_admissions_and_iterations() -> None:
    watcher = Watcher()
    with engine(observer=watcher, budget_tokens=24) as made:
        submit(made, LONG, 2, name="first")
        finish(made)
        evict_device(made)
        del watcher.admissions[1:], watcher.iterations[3:]
        submit(made, [*LONG, 5], 1, name="second")
        finish(made)
    assert watcher.admissions == [("first", 0, 0), ("second", 0, 40)]
    assert watcher.iterations == [(24, []), (16, ["first"]), (1, []), (1, ["second"])]


def test_an_engine_that_has_answered_all_is_idle_to_observers() -> None:
    watcher = Watcher()
    with engine(observer=watcher) as made:
        generate(made, prompt(6), count=3)
    assert watcher.busy == [True, True, False]


def test_what_others_charged_reaches_the_rule_that_cares() -> None:
    for scheduler in ("fair", "fcfs"):
        with engine(scheduler=scheduler, budget_tokens=8) as made:
            heavy = submit(made, prompt(8, 1), 1, tenant="heavy")
            light = submit(made, prompt(8, 2), 1, tenant="light")
            made.charge({"heavy": Charge(0.0, 50.0, 0.0)}, {"heavy": 1.0, "light": 1.0})
            first = next(out for _ in range(9) if (out := made.step()))[0].request_id
            finish(made)
        assert first == (light if scheduler == "fair" else heavy).request_id
