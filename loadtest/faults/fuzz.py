"""Requests that no client should send, sent to a whole cluster: what its answers were.

Every answer must come, in OpenAI's shape where it is a refusal, and none may say that we failed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from loadtest.faults.bodies import Bad, bad_requests
from loadtest.faults.target import Target

_AT_ONCE = 8
_TIMEOUT_S = 120.0
_MOST_TOLD = 20
_MARKER = "zqxsecretprompt"


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """statuses: of the answers; wrong: what was wrong with which request, the first twenty."""

    requests: int
    statuses: dict[str, int]
    wrong_total: int
    wrong: tuple[str, ...]
    reservations: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


async def fuzz(target: Target, requests: int, seed: int) -> FuzzResult:
    """Send so many, several at once, and wait until nothing is reserved for them any more."""
    statuses: Counter[str] = Counter()
    wrong: list[str] = []
    drawn = bad_requests(seed, requests, target.model, _MARKER)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        senders = (_sender(session, target, drawn, statuses, wrong) for _ in range(_AT_ONCE))
        await asyncio.gather(*senders)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, lambda: target.until(lambda: target.reservations() == 0, 60))
    return FuzzResult(
        requests, dict(statuses), len(wrong), tuple(wrong[:_MOST_TOLD]), target.reservations()
    )


async def _sender(
    session: aiohttp.ClientSession, target: Target, drawn: Iterator[Bad], statuses: Counter[str],
    wrong: list[str],
) -> None:  # fmt: skip
    for bad in drawn:
        try:
            # Twice the same name is not what is tried here: a dictionary will do.
            async with session.post(
                f"{target.url}{bad.path}", data=bad.body,
                headers={**target.headers, **dict(bad.headers)},
            ) as answer:  # fmt: skip
                text = await answer.text(errors="replace")
                statuses[str(answer.status)] += 1
                complaint = complaint_of(answer.status, text)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            statuses[type(error).__name__] += 1
            complaint = repr(error)
        if complaint:
            wrong.append(f"{complaint}: {bad.path} {bad.body[:300]!r} {bad.headers}")


def complaint_of(status: int, text: str) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if status == 500:
        return f"500 {text[:200]}"
    if status < 400:
        return ""
    try:
        error = json.loads(text)["error"]
        right = set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        right = False
    return "" if right else f"{status} in another shape: {text[:200]}"
