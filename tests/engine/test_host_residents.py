"""Contexts that lie in host memory while requests run: Hugging Face's logits, and more room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kappa_engine.kv_cache import ArenaSize, ArenaTooLarge
from kappa_engine.sequence import RequestRefused
from kappa_engine.step import Source
from kappa_engine.weights import HostWeights
from tests.engine import hf
from tests.engine.books import check_engine
from tests.engine.engines import (
    BLOCK,
    engine,
    even_rates,
    expected,
    finish,
    generate,
    generate_in_host,
    link_of,
    loaded_bytes,
    prompt,
    step_until,
    submit,
    weight_bytes,
)

# The planner, and what host memory stores for it.
MODES = {
    "host-kv": {"planner": "host-kv", "budget_tokens": 24},
    "host-kvpr": {"planner": "host-kvpr", "act_share": 1.0, "budget_tokens": 24},
    "host-hybrid": {
        "planner": "host-hybrid", "act_share": 0.5, "keep_kv": False, "budget_tokens": 24,
    },
    "on-device": {
        "planner": "host-hybrid", "act_share": 0.5, "keep_kv": False, "budget_tokens": 24,
        "act_device_blocks": 12,
    },
    "activations": {
        "planner": "host-hybrid", "act_share": 1.0, "keep_kv": False, "budget_tokens": 24,
    },
}  # fmt: skip
# Of 64 tokens on the device, no prompt below has room for itself.
SMALL = ArenaSize(16, 256, 48, 256, block_tokens=BLOCK)


def run(made, *handles):
    """Until they are over; logits of every token of each, and most that ran at once."""
    scores = {handle: [] for handle in handles}
    compute, together = made._runner.compute, 0

    def recorded(chunks):
        logits = compute(chunks)
        for handle, row in logits.items():
            if chunks[handle].stop >= handle.prompt_tokens:
                scores[handle].append(row)
        return logits

    made._runner.compute = recorded
    while made.busy:
        made.step()
        together = max(together, len(made.batcher.running))
    return {handle: torch.stack(rows) for handle, rows in scores.items()}, together


def agrees(family, handle, scores):
    """Every logit of the answer is Hugging Face's, to 1e-10."""
    want = hf.logits(hf.reference(family), handle.tokens)
    count = handle.output_tokens
    assert scores.shape[0] == count
    return float((scores - want[-count - 1 : -1]).abs().max()) <= 1e-10


@pytest.mark.parametrize("family", hf.FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_answers_are_hugging_faces_to_1e_10(family: str, mode: str) -> None:
    with engine(family, size=SMALL, rates=even_rates(), **MODES[mode]) as made:
        handles = [submit(made, prompt(n, seed=n), 14) for n in (41, 90, 7, 66)]
        scores, _ = run(made, *handles)
        for handle in handles:
            assert agrees(family, handle, scores[handle])
        assert made.batcher.preemptions == 0 and loaded_bytes(made) > 0


def test_context_longer_than_the_device_leaves_it_block_by_block() -> None:
    with engine(size=SMALL, budget_tokens=16, planner="host-kv") as made:
        asked = submit(made, prompt(120), 20)
        while not asked.output_tokens:
            made.step()
            assert made.arena.pools["kv", "device"].used <= 16
        finish(made)
        assert asked.tokens[120:] == expected(asked.tokens[:120], 20)


def test_host_resident_keeps_only_its_filling_block_on_device() -> None:
    with engine(size=SMALL, **MODES["host-kv"]) as made:
        asked = submit(made, prompt(30), 40)
        while asked.output_tokens < 20:
            made.step()
            made.store.drain(20)
        assert asked.kept is not None and asked.kept.blocks >= 11
        assert (asked.blocks[: asked.kept.blocks] == -1).all()
        assert (asked.blocks >= 0).sum() <= 2
        pool = made.arena.pools["kv", "host"]
        assert all(pool.refs(block) >= 2 for block in asked.kept.kv.tolist())


def test_activations_hold_twice_the_requests_that_kv_holds() -> None:
    """OPT's activations are half its KV: what holds 2 contexts of 16 blocks as KV holds 4 so."""
    most = {}
    for mode, kv, act in (("host-kv", 32, 0), ("activations", 0, 64)):
        size = ArenaSize(48, kv, 48, act, block_tokens=BLOCK)
        options = {"rates": even_rates(), **MODES[mode]}
        with engine("opt", size=size, **options) as made:
            handles = [submit(made, prompt(52, seed=s), 12) for s in range(6)]
            scores, most[mode] = run(made, *handles)
            assert all(agrees("opt", handle, scores[handle]) for handle in handles)
            assert made.batcher.preemptions == 0
    assert most == {"host-kv": 2, "activations": 4}


def test_activations_on_the_device_hold_more_requests_beside_host() -> None:
    """Host memory for 4 contexts of 16 blocks as activations; 16 on the device are a fifth one."""
    size = ArenaSize(48, 0, 64, 64, block_tokens=BLOCK)
    options = {**MODES["activations"], "act_device_blocks": 16, "rates": even_rates()}
    with engine("opt", size=size, **options) as made:
        handles = [submit(made, prompt(52, seed=s), 12) for s in range(6)]
        scores, most = run(made, *handles)
        assert all(agrees("opt", handle, scores[handle]) for handle in handles)
        assert (most, made.batcher.preemptions) == (5, 0)


def settled(made, handle, tokens):
    """With that many tokens of an answer, all stores and loads ended."""
    while handle.output_tokens < tokens:
        made.step()
        made.store.drain(20)
    made.mover.drain(20)


@pytest.mark.parametrize("host", [None, HostWeights(1.0)], ids=["on-device", "in-host"])
def test_activations_on_the_device_do_not_cross_the_link(host) -> None:
    """Every other block is of activations: of 9, those of 0 to 4 cross, and 6 and 8 stay."""
    options = {**MODES["on-device"], "act_device_blocks": 2, "rates": even_rates(), "host": host}
    with engine("opt", **options) as made:
        asked = submit(made, prompt(33), 10)
        settled(made, asked, 5)
        kept, sources, compute = asked.kept, [], made._model.compute
        assert np.flatnonzero(kept.kv >= 0).tolist() == [1, 3, 5, 7]
        assert np.flatnonzero(kept.act >= 0).tolist() == [0, 2, 4]
        assert np.flatnonzero(kept.here >= 0).tolist() == [6, 8] == sorted(kept.stays)
        assert (asked.blocks[:9] == -1).all()
        made._model.compute = lambda *rows, **how: (
            sources.extend(span.source for span in rows[0][0].spans),
            compute(*rows, **how),
        )[1]
        before = loaded_bytes(made)
        settled(made, asked, 6)
        block = 2 * BLOCK * 64 * 3 * 8
        crossed = 4 * block + 3 * block // 2 + weight_bytes(made)
        assert loaded_bytes(made) - before == crossed
        places = {Source.ACT_DEVICE, Source.ACT_HOST, Source.KV_HOST, Source.KV_DEVICE, Source.NEW}
        assert set(sources) == places
        finish(made)
        assert asked.tokens[33:] == expected(asked.tokens[:33], 10, "opt")
        assert not made.arena.pools["act", "device"].used


def test_prefix_before_what_stayed_on_the_device_is_found() -> None:
    options = {**MODES["on-device"], "act_device_blocks": 2, "budget_tokens": 40}
    with engine("opt", **options) as made:
        generate_in_host(made, prompt(33), count=1)
        asked = submit(made, prompt(33), 6)
        finish(made)
        assert asked.tokens[33:] == expected(prompt(33), 6, "opt")
        assert (asked.account.kept_tokens, asked.account.new_tokens) == (24, 9)


def test_prefix_on_the_device_does_not_make_a_prompt_wait() -> None:
    """Of 16 blocks at most 8 may stay; of these the second prompt finds some as KV already."""
    options = {**MODES["activations"], "act_device_blocks": 8, "budget_tokens": 40}
    with engine("opt", size=ArenaSize(48, 0, 48, 8, block_tokens=BLOCK), **options) as made:
        generate(made, prompt(40), count=1)
        asked = [*prompt(40), *prompt(20, seed=3)]
        assert generate(made, asked, count=4) == [expected(asked, 4, "opt")]


def test_no_more_activations_stay_than_the_setting_has() -> None:
    options = {**MODES["on-device"], "act_device_blocks": 7, "max_running": 3}
    with engine("opt", size=SMALL, rates=even_rates(), **options) as made:
        handles = [submit(made, prompt(n, seed=n), 25) for n in (41, 30, 7, 26)]
        stay, stored = [], []
        while made.busy:
            made.step()
            live = [s.kept for s in made.memory.residents]
            stay.append(sum(len(kept.stays) for kept in live))
            stored.append(sum(int((kept.act >= 0).sum()) for kept in live))
            assert sum(kept.most_stay for kept in live) <= 7
            assert made.arena.pools["act", "device"].used >= stay[-1]
        assert max(stay) == 7 and max(stored) > 3
        for one in handles:
            assert one.tokens[one.prompt_tokens :] == expected(one.tokens[:-25], 25, "opt")


def test_preempted_requests_free_their_activations_on_device() -> None:
    """Host memory for few answers: they fill the device until one must wait."""
    size = ArenaSize(9, 12, 40, 1, block_tokens=BLOCK)
    options = {**MODES["on-device"], "budget_tokens": 16}
    with engine("opt", size=size, **options) as made:
        handles = [submit(made, prompt(25, seed=s), 30) for s in range(4)]
        freed, preempted = [], made._preempted

        def recorded(victim):
            stays, pool = len(victim.kept.stays), made.arena.pools["act", "device"]
            before = pool.used
            preempted(victim)
            freed.append((stays, before - pool.used))

        made._preempted = recorded
        finish(made)
        assert any(stays for stays, _ in freed), freed
        assert all(stays <= gone for stays, gone in freed), freed
        for one in handles:
            assert one.tokens[25:] == expected(one.tokens[:25], 30, "opt")


@pytest.mark.parametrize(
    ("changed", "error", "why"),
    [
        ({"act_device": 1 << 40}, ArenaTooLarge, r"need .* bytes\), but only .* bytes\) are free"),
        ({"act_device": 12}, ValueError, "12 device blocks of activations, 12 of them to stay"),
    ],
)
def test_activations_that_cannot_stay_are_refused(changed, error, why) -> None:
    size = replace(SMALL, act_device=changed.get("act_device", 48))
    options = {n: x for n, x in {**MODES["on-device"], **changed}.items() if n != "act_device"}
    made = engine("opt", size=size, **options)
    with pytest.raises(error, match=why), made:
        pass


def test_kvprs_split_moves_fewer_bytes_at_every_step() -> None:
    moved = {}
    for planner in ("host-kv", "host-kvpr"):
        with engine("opt", rates=even_rates(), **MODES["host-kvpr"]) as made:
            asked = submit(made, prompt(33), 6, planner=planner)
            step_until(made, asked)
            made.store.drain(20)
            before = loaded_bytes(made)
            made.step()
            moved[planner] = loaded_bytes(made) - before
            share = made._runner._share
            finish(made)
            assert asked.tokens[33:] == expected(asked.tokens[:33], family="opt")
    whole = 8 * 2 * BLOCK * 64 * 3 * 8
    assert moved["host-kv"] == whole
    assert 0 < share <= 1 and moved["host-kvpr"] == whole - round(share * 8) * whole // 16


def test_prefix_in_host_memory_is_neither_recomputed_nor_loaded() -> None:
    options = {**MODES["host-hybrid"], "budget_tokens": 40}
    with engine("opt", rates=even_rates(), **options) as made:
        first = prompt(33)
        generate_in_host(made, first, count=1)
        asked = submit(made, [*first, *prompt(7, seed=50)], 6)
        finish(made)
        assert asked.tokens[40:] == expected(asked.tokens[:40], family="opt")
        assert (asked.account.kept_tokens, asked.account.new_tokens) == (32, 8)
        assert asked.account.loaded_tokens == 0


@pytest.mark.parametrize("mode", ["host-hybrid", "on-device"])
def test_contexts_cross_in_mini_batches_that_the_buffers_hold(mode) -> None:
    with engine("opt", rates=even_rates(), pass_blocks=12, **MODES[mode]) as made:
        handles = [submit(made, prompt(n, seed=n), 12) for n in (33, 35, 22, 37)]
        passes, compute = [], made._model.compute
        made._model.compute = lambda *rows, **how: (
            passes.append([*map(len, rows)]),
            compute(*rows),
        )[1]
        scores, _ = run(made, *handles)
        assert all(agrees("opt", handle, scores[handle]) for handle in handles)
        assert any(len(batches) > 1 and sum(batches) == 4 for batches in passes)


def test_planner_keeps_in_host_what_has_no_room_on_the_device() -> None:
    options = {**MODES["host-kvpr"], "planner": "host-auto", "cpu_room_share": 0.25}
    with engine("opt", rates=even_rates(), **options) as made:
        short, long = (submit(made, prompt(n), 6) for n in (48, 49))
        assert (short.resides, long.resides) == ("", "host-kvpr")
        device = submit(made, prompt(60), 6, planner="kv")
        assert device.resides == ""
        finish(made)
        for one in (short, long, device):
            assert one.tokens[one.prompt_tokens :] == expected(one.tokens[:-6], family="opt")


@pytest.mark.parametrize(
    ("pool", "asked", "why"),
    [
        ("host-kv", "host-kvpr", "KV and activations of every block"),
        ("host-hybrid", "host-kv", "needs a pool whose planner is host-kv"),
        ("auto", "host-kv", "needs a pool whose planner is host-kv"),
    ],
)
def test_a_request_for_what_the_pool_does_not_store_is_refused(pool, asked, why) -> None:
    with engine(**MODES.get(pool, {"planner": pool})) as made, pytest.raises(ValueError, match=why):
        submit(made, prompt(5), 1, planner=asked)


def test_submit_refuses_a_context_beyond_host_memory() -> None:
    with engine(size=replace(SMALL, kv_host=10), **MODES["host-kv"]) as made:
        with pytest.raises(RequestRefused, match="holds 40 tokens of a request at most"):
            submit(made, prompt(40), 1)
        assert generate(made, prompt(30), count=6) == [expected(prompt(30))]


def test_full_host_tier_delays_prompts_but_keeps_answers_right() -> None:
    """Answers outgrow host memory: their blocks stay on the device, or their requests wait."""
    size = ArenaSize(12, 22, block_tokens=BLOCK)
    for rule in ("fair", "fcfs"):
        with engine(size=size, planner="host-kv", scheduler=rule, budget_tokens=16) as made:
            handles = [submit(made, prompt(25, seed=s), 30) for s in range(5)]
            finish(made)
            for one in handles:
                assert one.tokens[25:] == expected(one.tokens[:25], 30)


@pytest.mark.parametrize("mode", MODES)
def test_a_context_that_does_not_cross_is_computed_for_that_step(mode: str) -> None:
    with engine("opt", size=SMALL, rates=even_rates(), **MODES[mode]) as made:
        asked, other = (submit(made, prompt(n, seed=n), 10) for n in (33, 21))
        step_until(made, asked, 3)
        link_of(made).breaks = lambda direction, copies: direction == "h2d"
        step_until(made, asked, 6)
        link_of(made).breaks = lambda direction, copies: False
        finish(made)
        for one in (asked, other):
            assert one.tokens[one.prompt_tokens :] == expected(one.tokens[:-10], 10, "opt")
        assert made.loads.failed_loads >= 3


def test_blocks_whose_stores_fail_stay_on_the_device() -> None:
    with engine(**MODES["host-kv"]) as made:
        link_of(made).breaks = lambda direction, copies: direction == "d2h"
        asked = submit(made, prompt(33), 10)
        step_until(made, asked, 4)
        link_of(made).breaks = lambda direction, copies: False
        finish(made)
        assert asked.tokens[33:] == expected(asked.tokens[:33], 10)


def test_preempted_and_aborted_requests_let_go_of_host_memory() -> None:
    with engine(size=replace(SMALL, kv_device=9), planner="host-kv", budget_tokens=16) as made:
        handles = [submit(made, prompt(33, seed=s), 24) for s in range(6)]
        step_until(made, handles[0])
        assert made.abort(handles[0].request_id)
        finish(made)
        check_engine(made)
        for one in handles[1:]:
            assert one.tokens[33:] == expected(one.tokens[:33], 24)


def test_engine_refuses_a_device_without_room_for_a_chunk() -> None:
    made = engine(size=SMALL, planner="host-kv", budget_tokens=100)
    with pytest.raises(ValueError, match="16 blocks: a chunk of 100 tokens needs 27"), made:
        pass
