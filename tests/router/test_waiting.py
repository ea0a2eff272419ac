"""Waiting for what a worker computes, and being told that the worker is lost."""

import asyncio

import pytest

from kappa_router.live.waiting import Waits, WorkerLostError, unless_lost
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
    assert await unless_lost(wait, result()) == "a"
    with pytest.raises(TimeoutError, match="late"):
        await unless_lost(wait, late())


async def test_loss_ends_the_wait_in_progress_and_those_to_come(waits):
    assert not waits.on("w")
    wait = waits.begin("w")
    task = asyncio.create_task(unless_lost(wait, never()))
    await asyncio.sleep(0)
    assert waits.on("w") and not waits.on("v")
    waits.lose("w", "disconnected")
    waits.lose("w", "left")
    with pytest.raises(WorkerLostError, match="disconnected"):
        await asyncio.wait_for(task, PATIENCE_S)
    with pytest.raises(WorkerLostError, match="disconnected"):
        await unless_lost(wait, never())
    assert not waits.on("w")


async def test_cancelled_wait_stays_cancelled_if_the_worker_is_lost(waits):
    task = asyncio.create_task(unless_lost(waits.begin("w"), never()))
    await asyncio.sleep(0)
    task.cancel()
    waits.lose("w", "died")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_loss_ends_only_waits_for_its_worker_and_keeps_nothing(waits):
    mine, other = waits.begin("a"), waits.begin("b")
    waits.lose("a", "died")
    assert mine.result() == "died" and not other.done()
    waits.end("a", mine)
    waits.end("a", mine)
    waits.end("b", other)
    assert len(waits) == 0
