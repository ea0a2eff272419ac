"""The first token leaves a replica at once; what follows is batched."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ROLE = 'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKENS = [f'data: {{"choices":[{{"delta":{{"content":"{i}"}}}}]}}\n\n' for i in range(4)]


async def sent(items):
    from workers.replica import _first_at_once

    asked = asyncio.Event()

    async def engine():
        for i, item in enumerate(items):
            if i == 1 + (items[0] == ROLE):
                # The next token takes for ever unless the first has gone out.
                await asyncio.wait_for(asked.wait(), 5.0)
            yield item

    async def batched(rest):
        yield [item async for item in rest]

    got = []
    async for part in _first_at_once(engine(), batched):
        got.append(part)
        asked.set()
    return got


async def test_a_chats_role_travels_with_its_first_token():
    assert await sent([ROLE, *TOKENS]) == [[ROLE, TOKENS[0]], TOKENS[1:]]


async def test_a_completions_first_token_waits_for_nothing():
    assert await sent(TOKENS) == [[TOKENS[0]], TOKENS[1:]]
