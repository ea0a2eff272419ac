"""Waiting for what another task or thread does, within a bound that no busy machine reaches."""

import asyncio

PATIENCE_S = 30.0


async def until(question, within_s=PATIENCE_S):
    """What `question` answers, as soon as that is true."""
    async with asyncio.timeout(within_s):
        while not (answer := question()):
            await asyncio.sleep(0.01)
    return answer
