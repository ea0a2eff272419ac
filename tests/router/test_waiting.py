"""Waiting for a worker's stream, and being told that the worker is lost."""

import asyncio

import pytest

from router.live.waiting import Waits, WorkerLostError

_PATIENCE_S = 20.0


class Stream:
    """Items as they are fed; notes when it is closed."""

    def __init__(self):
        self.items, self.closed = asyncio.Queue(), False

    async def __call__(self):
        try:
            while (item := await self.items.get()) is not None:
                yield item
        finally:
            self.closed = True


@pytest.fixture
def scene():
    feed = Stream()
    return Waits(), feed, feed()


async def test_items_come_through_and_the_end_is_the_end(scene):
    waits, feed, stream = scene
    wait = waits.begin("w")
    for item in ("a", "b", None):
        feed.items.put_nowait(item)
    assert [await wait.next(stream), await wait.next(stream)] == ["a", "b"]
    with pytest.raises(StopAsyncIteration):
        await wait.next(stream)


async def test_a_loss_ends_the_wait_in_progress(scene):
    waits, _, stream = scene
    wait = waits.begin("w")
    task = asyncio.create_task(wait.next(stream))
    await asyncio.sleep(0)
    assert waits.lose("w", "disconnected", begun=False) == 1
    with pytest.raises(WorkerLostError, match="disconnected"):
        await asyncio.wait_for(task, _PATIENCE_S)
    with pytest.raises(WorkerLostError, match="disconnected"):
        await wait.next(stream)
    await stream.aclose()


async def test_one_that_has_had_an_item_is_left_alone_unless_all_are_meant(scene):
    waits, feed, stream = scene
    wait = waits.begin("w")
    feed.items.put_nowait("a")
    await wait.next(stream)
    assert waits.lose("w", "silent", begun=False) == 0
    task = asyncio.create_task(wait.next(stream))
    await asyncio.sleep(0)
    feed.items.put_nowait("b")
    assert await asyncio.wait_for(task, _PATIENCE_S) == "b"
    assert waits.lose("w", "silent", begun=True) == 1
    with pytest.raises(WorkerLostError, match="silent"):
        await wait.next(stream)


async def test_a_late_item_is_a_timeout_and_not_a_loss(scene):
    waits, _, stream = scene
    with pytest.raises(TimeoutError):
        await waits.begin("w").next(stream, 0.01)


async def test_a_cancelled_wait_is_cancelled_even_if_the_worker_is_lost_then(scene):
    waits, feed, stream = scene
    task = asyncio.create_task(waits.begin("w").next(stream))
    await asyncio.sleep(0)
    task.cancel()
    waits.lose("w", "died", begun=True)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert feed.closed


async def test_only_those_who_wait_for_the_worker_lose_it_and_nothing_is_kept(scene):
    waits, _, _ = scene
    mine, other = waits.begin("a"), waits.begin("b")
    assert waits.lose("a", "died", begun=True) == 1
    waits.end("a", mine)
    waits.end("a", mine)
    waits.end("b", other)
    assert len(waits) == 0 and waits.lose("a", "died", begun=True) == 0
