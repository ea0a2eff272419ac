"""A worker in a process of its own, to be stopped: `python -m tests.router.cluster.node NAME`.

It says what it announces in one line, and ends with its input."""

import asyncio
import json
import sys

from kappa_workers.reaper import fence
from tests.router.cluster.conftest import STEP_S, PortedNode


async def main(name, fenced_s):
    node = PortedNode(name, STEP_S)
    announced = await node.open()
    fence(fenced_s)
    print(json.dumps(announced), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
