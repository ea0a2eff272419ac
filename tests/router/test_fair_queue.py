"""Work that waits for its turn."""

import asyncio

import pytest

from kappa_router.api.fair_queue import FairTurns
from kappa_router.api.tenants import Tenant

ALICE, BOB = Tenant("alice"), Tenant("bob")


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


class Work:
    """Pieces of work by name, each done when it is bidden; `begun`: in their order."""

    def __init__(self, turns):
        self.turns, self.begun, self.done, self.tasks = turns, [], {}, {}

    def start(self, name, tenant=ALICE):
        self.done[name] = asyncio.get_running_loop().create_future()

        async def work():
            async with self.turns.turn(tenant, 1):
                self.begun.append(name)
                return await self.done[name]

        self.tasks[name] = asyncio.create_task(work())

    async def finish(self, name):
        self.done[name].set_result(name)
        assert await self.tasks[name] == name
        await settled()


async def test_turns_bound_how_many_run_at_a_time():
    work = Work(FairTurns(2))
    for name in "abc":
        work.start(name)
    await settled()
    assert work.begun == ["a", "b"]
    await work.finish("b")
    assert work.begun == ["a", "b", "c"]
    await work.finish("a")
    await work.finish("c")
    work.start("d")
    work.start("e")
    await settled()
    assert work.begun[3:] == ["d", "e"]


async def test_turns_go_round_among_tenants():
    work = Work(FairTurns(1))
    for name in ("a1", "a2", "a3", "a4"):
        work.start(name)
    work.start("b1", BOB)
    await settled()
    for name in ("a1", "b1"):
        await work.finish(name)
    assert work.begun == ["a1", "b1", "a2"]


async def test_turns_pass_on_when_one_fails_or_leaves():
    work = Work(FairTurns(1))
    for name in "abcd":
        work.start(name)
    await settled()
    work.tasks["b"].cancel()
    await settled()
    work.done["a"].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await work.tasks["a"]
    await settled()
    assert work.begun == ["a", "c"]
    # It leaves as its turn comes.
    work.done["c"].set_result("c")
    work.tasks["d"].cancel()
    await settled()
    work.start("e")
    await settled()
    assert work.begun == ["a", "c", "e"]
