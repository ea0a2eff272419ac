"""Waiting for what a worker computes, and being told that the worker is lost."""

import asyncio

import pytest

from kappa_router.live.waiting import Waits, WorkerLostError
from tests.router.patience import PATIENCE_S


@pytest.fixture
def waits():
    return Waits()


async def never():
    await asyncio.Event().wait()


async def test_result_comes_through_and_so_does_a_failure(waits):
    async def result():
        return "a"

    async def late():
        raise TimeoutError("late")

    wait = waits.begin("w")
    assert await wait.of(result()) == "a"
    with pytest.raises(TimeoutError, match="late"):
        await wait.of(late())


async def test_loss_ends_the_wait_in_progress_and_those_to_come(waits):
    wait = waits.begin("w")
    assert not waits.on("w")
    task = asyncio.create_task(wait.of(never()))
    await asyncio.sleep(0)
    assert waits.on("w") and not waits.on("v")
    assert waits.lose("w", "disconnected") == 1
    waits.lose("w", "left")
    with pytest.raises(WorkerLostError, match="disconnected"):
        await asyncio.wait_for(task, PATIENCE_S)
    with pytest.raises(WorkerLostError, match="disconnected"):
        await wait.of(never())
    assert not waits.on("w")


async def test_cancelled_wait_stays_cancelled_if_the_worker_is_lost(waits):
    task = asyncio.create_task(waits.begin("w").of(never()))
    await asyncio.sleep(0)
    task.cancel()
    waits.lose("w", "died")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_loss_ends_only_waits_for_its_worker_and_keeps_nothing(waits):
    mine, other = waits.begin("a"), waits.begin("b")
    assert waits.lose("a", "died") == 1
    waits.end("a", mine)
    waits.end("a", mine)
    waits.end("b", other)
    assert len(waits) == 0 and waits.lose("a", "died") == 0
