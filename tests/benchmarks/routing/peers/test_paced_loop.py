"""Simulated events on the wall clock: exact in simulated time, whenever the process wakes up."""

import asyncio

import pytest

from benchmarks.routing.peers.paced_loop import PacedLoop


async def drained(loop):
    driver = asyncio.create_task(loop.drive())
    while loop.pending:
        await asyncio.sleep(0.002)
    driver.cancel()
    await asyncio.gather(driver, return_exceptions=True)


@pytest.mark.parametrize("dilation", [1.0, 3.0])
async def test_events_happen_in_order_at_their_own_time(dilation):
    loop, seen = PacedLoop(dilation), []
    for at_s in (0.03, 0.01, 0.02):
        loop.at(at_s, lambda name: seen.append((name, loop.now_s)), at_s)
    await drained(loop)
    assert seen == [(0.01, 0.01), (0.02, 0.02), (0.03, 0.03)]
    assert len(loop.late_s) == 3 and min(loop.late_s) >= 0


async def test_an_event_may_schedule_the_next_one():
    loop, seen = PacedLoop(1.0), []

    def tick(left):
        seen.append(loop.now_s)
        if left:
            loop.at(loop.now_s + 0.005, tick, left - 1)

    loop.at(0.0, tick, 4)
    await drained(loop)
    assert seen == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02])


async def test_what_comes_in_finds_all_that_was_due_done():
    loop, seen = PacedLoop(1.0), []
    loop.at(0.001, seen.append, "due")
    await asyncio.sleep(0.01)
    loop.catch_up()
    assert seen == ["due"]
    assert loop.now_s >= 0.01
    loop.at(0.002, seen.append, "too late is now")
    loop.catch_up()
    assert len(seen) == 2


async def test_a_handler_that_fails_ends_the_loop_for_good():
    loop = PacedLoop(1.0)
    loop.at(0.0, lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.catch_up()
    with pytest.raises(RuntimeError, match="broke"):
        await asyncio.wait_for(loop.drive(), 10.0)
