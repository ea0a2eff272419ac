"""An engine on its own thread answers many callers, loses none, and leaves nothing behind."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import pytest

from kappa_engine.engine_thread import EngineStopped, EngineThread
from kappa_engine.llm_engine import Engine
from kappa_engine.prefix_cache import CacheEvent, StoredBlocks
from kappa_engine.sampling import Sampling
from kappa_engine.sequence import EngineRequest, Output, RequestRefused
from tests.engine.books import check_memory, no_thread_left
from tests.engine.engines import engine, expected, prompt


@contextmanager
def runner(publish=None, **settings) -> Iterator[EngineThread]:
    with engine(**settings) as made, no_thread_left():
        running = EngineThread(made, publish)
        try:
            yield running
        finally:
            running.stop(20)


def hold(made: Engine, go_on: threading.Event) -> None:
    """Have each pass but the first wait for that, as no test is sooner than a tiny engine."""
    compute, passes = made._runner.compute, itertools.count()

    def held(chunks):
        assert next(passes) == 0 or go_on.wait(20)
        return compute(chunks)

    made._runner.compute = held


async def stream(running: EngineThread, request: EngineRequest) -> AsyncGenerator[Output, None]:
    """What a request gets; who leaves withdraws it."""
    loop, outputs = asyncio.get_running_loop(), asyncio.Queue[Output]()

    def deliver(output: Output) -> None:
        loop.call_soon_threadsafe(outputs.put_nowait, output)

    submitted = running.submit(request, deliver)
    try:
        await asyncio.shield(asyncio.wrap_future(submitted))
        while True:
            yield (output := await outputs.get())
            if output.finish_reason is not None:
                return
    finally:
        running.withdraw(submitted)


async def collect(running: EngineThread, tokens: list[int], count: int = 6, **options) -> list[int]:
    outputs = [each async for each in stream(running, EngineRequest(tokens, count, **options))]
    if outputs[-1].finish_reason == "error":
        raise running.error or AssertionError("nothing failed")
    return [token for output in outputs for token in output.tokens]


async def test_many_streams_at_once_each_get_their_own_tokens() -> None:
    prompts = [prompt(3 * n + 1, n) for n in range(6)]
    with runner(budget_tokens=16) as running:
        answers = await asyncio.gather(*(collect(running, p) for p in prompts))
    assert answers == [expected(p) for p in prompts]


async def test_the_first_and_the_last_output_have_the_account() -> None:
    with runner() as running:
        outputs = [
            o
            async for o in stream(
                running, EngineRequest(prompt(9), 3, Sampling(temperature=1, seed=1))
            )
        ]
    assert [o.finish_reason for o in outputs] == [None, None, "length"]
    account = outputs[-1].account
    assert outputs[0].account is account and outputs[1].account is None
    assert account is not None and account.new_tokens == 9 and account.compute_s > 0


async def test_who_leaves_early_holds_nothing() -> None:
    both_left = threading.Event()
    with runner() as running:
        hold(running._engine, both_left)
        left = stream(running, EngineRequest(prompt(9), 60))
        await anext(left)
        await left.aclose()
        task = asyncio.create_task(collect(running, prompt(8, 2), 60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        both_left.set()
        async with asyncio.timeout(20):
            while await asyncio.wrap_future(running.call(lambda made: made.busy)):
                pass
        await asyncio.wrap_future(running.call(lambda made: check_memory(made.memory)))


async def test_refusals_come_to_the_caller() -> None:
    with runner() as running:
        with pytest.raises(RequestRefused, match="0 tokens"):
            await collect(running, [])
        with pytest.raises(ValueError, match="no planner"):
            await collect(running, [1], planner="best")
        assert await collect(running, prompt(5)) == expected(prompt(5))


async def test_stored_blocks_are_published_also_when_all_is_quiet() -> None:
    events: list[CacheEvent] = []
    with runner(events.extend) as running:
        await collect(running, prompt(12), 1)
        async with asyncio.timeout(20):
            while not any(isinstance(e, StoredBlocks) and e.place == "host" for e in events):
                await asyncio.sleep(0.001)
    assert {e.place for e in events if isinstance(e, StoredBlocks)} == {"device", "host"}
    tokens = [
        t for e in events if isinstance(e, StoredBlocks) and e.place == "host" for t in e.tokens
    ]
    assert tokens == prompt(12)


async def test_failed_iteration_ends_all_requests_and_refuses_new_ones() -> None:
    with engine() as made:
        running = EngineThread(made)
        run = made._runner.compute

        def fails(rows):
            raise MemoryError("no more memory")

        made._runner.compute = fails
        both_there = threading.Event()
        running.call(lambda _: both_there.wait(20))
        waiting = [asyncio.create_task(collect(running, prompt(n))) for n in (5, 9)]
        await asyncio.sleep(0)
        both_there.set()
        for task in waiting:
            with pytest.raises(MemoryError):
                await task
        with pytest.raises(EngineStopped, match="the engine failed: MemoryError: no more memory"):
            await collect(running, prompt(5))
        assert isinstance(running.error, MemoryError)
        running.stop(20)
        made._runner.compute = run
        for request_id in list(made._live):
            made.abort(request_id)


async def test_a_caller_that_fails_ends_nobody_else() -> None:
    def fails(output: Output) -> None:
        raise ValueError("a bug of the caller")

    with runner() as running:
        await asyncio.wrap_future(running.submit(EngineRequest(prompt(4, 3), 3), fails))
        async with asyncio.timeout(20):
            assert await collect(running, prompt(5)) == expected(prompt(5))
        assert running.error is None


async def test_changes_that_nobody_publishes_do_not_pile_up() -> None:
    with runner() as running:
        await collect(running, prompt(12))
        async with asyncio.timeout(20):
            while await asyncio.wrap_future(running.call(lambda made: bool(len(made.store)))):
                pass
        # The one before this call may still be there, those of the request are not.
        left = await asyncio.wrap_future(running.call(lambda made: made.events()))
    assert not any(isinstance(event, StoredBlocks) and event.place == "device" for event in left)


async def test_stop_answers_everybody() -> None:
    outputs: list[Output] = []
    with engine() as made:
        running = EngineThread(made)
        hold(made, running._stopping)
        answer = running.submit(EngineRequest(prompt(9), 120), outputs.append)
        request_id = await asyncio.wrap_future(answer)
        running.stop(20)
        assert outputs[-1].finish_reason == "abort" and outputs[-1].request_id == request_id
        with pytest.raises(EngineStopped, match="is stopped"):
            await asyncio.wrap_future(running.call(lambda made: made.busy))
