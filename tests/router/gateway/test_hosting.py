"""Slots: each decider has one of its own for as long as it lives."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from kappa_router.gateway.hosting import free_slot
from kappa_router.gateway.spec import GatewaySpec

HOLDER = """
import sys, time
from pathlib import Path
from kappa.host import Lock
assert Lock(Path(sys.argv[1])).take()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def spec(tmp_path):
    return GatewaySpec(tmp_path, "127.0.0.1", 1, (), (), deciders=2)


async def test_decider_takes_the_first_free_slot(spec):
    async with free_slot(spec) as one:
        async with free_slot(spec) as two:
            assert (one.number, two.number) == (0, 1)
            sockets = {
                socket
                for slot in (one, two)
                for socket in (slot.decider_socket, slot.face_socket, slot.events_socket)
            }
            assert len(sockets) == 6
        async with free_slot(spec) as again:
            assert again.number == 1


async def test_replacement_waits_until_the_old_decider_has_ended(spec):
    spec = replace(spec, deciders=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(spec.slots[0].lock_file)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        with pytest.raises(RuntimeError, match="one that is to be replaced has not ended"):
            async with free_slot(spec, wait_s=0.0):
                pass
        waiting = free_slot(spec)
        taking = asyncio.create_task(waiting.__aenter__())
        await asyncio.sleep(0.05)
        assert not taking.done()
        holder.kill()
        assert (await taking).number == 0
        await waiting.__aexit__(None, None, None)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
