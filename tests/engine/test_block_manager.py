"""The scheduler's view of the blocks: quotes hold, and what cannot be taken leaves no trace."""

import pytest

from kappa.plans.load_plan import LoadPlan, layout
from kappa_engine.block_manager import fit
from kappa_engine.sequence import EngineRequest, Sequence
from kappa_scheduler.work import Quote
from tests.engine.books import check_memory
from tests.engine.engines import (
    BLOCK,
    LONG,
    SIZE,
    engine,
    generate,
    generate_in_host,
    prompt,
    submit,
)


def request(tokens: list[int], **options) -> Sequence:
    return Sequence(10**6, EngineRequest(tokens, 4, **options), 0.0, 4, BLOCK)


def host_only(made) -> None:
    """LONG in host memory and nothing on the device."""
    generate_in_host(made, LONG, count=1)


def test_a_quote_says_what_is_taken() -> None:
    with engine() as made:
        memory = made.memory
        generate(made, LONG[:16], count=1)
        fresh, part = request(prompt(9, seed=1)), request(LONG[:22])
        assert memory.quote(fresh) == Quote(3, 0, 0, 0, memory.quote(fresh).shared_key)
        # The four blocks that it finds are idle: they count, as no other request could have them.
        assert memory.quote(part)[:4] == (6, 16, 0, 0)
        before = memory.available()
        quote = memory.quote(part)
        assert memory.take(part, quote) == quote
        assert memory.available() == before - 6
        again = request(LONG[:22])
        assert memory.quote(again)[:4] == (2, 16, 0, 4)
        assert memory.quote(again).shared_key == memory.quote(request(LONG)).shared_key
        memory.release(part)
        assert memory.available() == SIZE.kv_device


def test_a_full_hit_computes_its_last_block_again() -> None:
    with engine() as made:
        generate(made, LONG, count=1)
        quote = made.memory.quote(request(LONG))
        assert (quote.device_tokens, quote.host_tokens) == (36, 0)


def test_who_needs_what_another_loads_is_told_to_wait() -> None:
    with engine() as made:
        host_only(made)
        memory, first, second = made.memory, request([*LONG, 1]), request([*LONG, 2])
        assert memory.quote(first).host_tokens == memory.quote(second).host_tokens == 40
        memory.take(first, memory.quote(first))
        assert memory.quote(second) is None
        assert memory.take(second, Quote(11, 0, 40)) is None
        version = memory.version
        memory.release(first)
        assert memory.version > version and memory.quote(second).host_tokens == 40
        check_memory(memory)


def test_what_does_not_fit_after_all_is_not_taken() -> None:
    with engine() as made:
        host_only(made)
        memory, late = made.memory, request([*LONG, 1])
        quote = memory.quote(late)
        taken = memory.device.take(SIZE.kv_device - 5)
        assert memory.take(late, quote) is None
        assert memory.available() == 5 and late.load is None and not len(late.blocks)
        assert memory.host["kv"].available() == memory.host["kv"].pool.count
        memory.device.release(taken)
        check_memory(memory)


def test_a_quote_does_not_outlive_what_was_evicted() -> None:
    with engine() as made:
        host_only(made)
        memory, late = made.memory, request([*LONG, 1])
        quote = memory.quote(late)
        host = memory.host["kv"]
        host.release(host.take(host.pool.count))
        taken = memory.take(late, quote)
        assert taken is not None and (taken.host_tokens, taken.blocks) == (0, 11)
        memory.release(late)


def test_blocks_behind_a_hole_in_host_memory_are_not_counted_on() -> None:
    with engine() as made:
        host_only(made)
        memory, late = made.memory, request([*LONG, 1])
        assert memory.quote(late).host_tokens == 40
        # The third block goes, those behind it stay: the last one is still there when looked up.
        host = memory.host["kv"]
        host.touch([*late.keys[:2], *late.keys[3:]])
        gone = host.take(host.pool.unused + 1)
        assert host.find(late.keys[2]) is None and host.find(late.keys[9]) is not None
        taken = memory.take(late, memory.quote(late))
        assert taken is not None and taken.host_tokens == 8
        memory.release(late)
        host.release(gone)


def test_what_a_waiting_request_will_load_is_evicted_last() -> None:
    with engine() as made:
        host_only(made)
        generate(made, prompt(40, seed=6), count=1)
        host = made.memory.host["kv"]
        waiting = submit(made, [*LONG, 1], 1)
        keys = made._live[waiting.request_id].keys
        # Without it the oldest would go, and that is LONG.
        gone = host.take(host.pool.unused + 5)
        assert all(host.find(key) is not None for key in keys[:10])
        host.release(gone)
        made.abort(waiting.request_id)


def test_a_running_request_grows_until_there_is_nothing_left() -> None:
    with engine() as made:
        memory, growing = made.memory, request(prompt(4))
        memory.take(growing, memory.quote(growing))
        rest = memory.device.take(SIZE.kv_device - 2)
        assert memory.grow(growing) and growing.grown_blocks == 1
        assert growing.room_tokens == 8
        assert not memory.grow(growing)
        memory.device.release(rest)
        memory.release(growing)


@pytest.mark.parametrize(
    ("plan", "kv", "act", "fitted"),
    [
        (layout(16), [1, 2, 3, 4], [-1] * 4, "KKKK"),
        (layout(16), [1, -1, 3, -1], [5, 6, -1, 8], "KAKA"),
        (layout(16, activations=16), [1, -1, 3, -1], [5, 6, -1, 8], "AAKA"),
        (layout(16, recompute=6), [1, 2, 3, -1], [-1, -1, -1, 8], "RRKA"),
        (layout(16, recompute=4, activations=4), [1, -1, 3, 4], [-1, 6, -1, -1], "RAKK"),
        # The scheduler computes a recomputed tail, so blocks end before the plan does.
        (layout(16, recompute=8, tail=True), [1, 2], [-1, -1], "KK"),
    ],
)
def test_every_block_comes_in_a_form_that_is_there(plan, kv, act, fitted: str) -> None:
    segments = fit(LoadPlan(plan), 4, kv, act)
    assert "".join(s.kind * ((s.end_tokens - s.start_tokens) // 4) for s in segments) == fitted
