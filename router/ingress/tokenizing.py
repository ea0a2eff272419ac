"""Tokenizing as work like any other: in a queue that is fair to tenants, bounded in time.

Two lanes, each with one prompt at a time and a fair queue before it. Short prompts are tokenized by
a thread of the ingress, which their size keeps busy for milliseconds; long ones by a process that
can be ended. So a small request waits behind no long one, and a long one only for its share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from router.access.tenants import Tenant
from router.errors import prompt_too_long
from router.ingress.fair_queue import FairQueue
from router.ingress.prompt_tokenizer import PromptTooLong
from router.ingress.rendering import Prompt, PromptRenderer
from router.ingress.tokenizer_process import TokenizerProcess

# About 10 ms of work.
SHORT_BYTES = 16 << 10

T = TypeVar("T")


class Lane:
    """Runs one piece of work at a time in a thread of its own; who is next, the queue says."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False

    async def run(self, tenant: Tenant, cost: int, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. Cancelled while it waits, it is taken out of the
        queue; cancelled later, the work goes on to its end, since a thread cannot be stopped, and
        only then comes the next."""
        await self._turn(tenant, cost)
        job = asyncio.get_running_loop().run_in_executor(self._thread, work)
        job.add_done_callback(self._done)
        return await asyncio.shield(job)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: Tenant, cost: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(turn, tenant.name, tenant.weight, max(cost, 1))
        if not self._busy:
            self._next()
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.drop(turn, tenant.name)
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _done(self, job: asyncio.Future[Any]) -> None:
        # Nobody may be left to take note of what it raised.
        if not job.cancelled():
            job.exception()
        self._next()

    def _next(self) -> None:
        while (turn := self._queue.take()) is not None and turn.cancelled():
            pass
        self._busy = turn is not None
        if turn is not None:
            turn.set_result(None)


class Tokenizing:
    """Turns prompts into tokens for all requests of an ingress."""

    def __init__(self, renderer: PromptRenderer, process: TokenizerProcess | None = None) -> None:
        """`process`: tokenizes long prompts; by default one of the renderer's tokenizer."""
        self._renderer = renderer
        self._process = process or TokenizerProcess(renderer.source)
        self._short, self._long = Lane("tokenize"), Lane("tokenize-long")

    async def tokens(
        self, body: Any, body_bytes: int, tenant: Tenant, most_tokens: int | None
    ) -> Prompt:
        """A body's prompt as token ids, int64; bounded in length if it cannot be rendered here.

        most_tokens: the largest context of any worker; None: not known.

        Raises:
            ApiError: 400, it cannot fit `most_tokens`, or tokenizing it was ended; 503, there is no
                process to do it.
            Exception: whatever the template raises.
        """
        short = body_bytes <= SHORT_BYTES or not _holds_text(body)
        lane, work = (self._short, self._here) if short else (self._long, self._there)
        try:
            return await lane.run(tenant, body_bytes, lambda: work(body, most_tokens))
        except PromptTooLong as error:
            token_bytes = self._renderer.tokenizer.longest_token_bytes
            assert token_bytes is not None and most_tokens is not None
            raise prompt_too_long(error.args[0], token_bytes, most_tokens) from None

    def close(self) -> None:
        """End the process, and let the threads go."""
        self._short.close()
        self._long.close()
        self._process.close()

    def _here(self, body: Any, most_tokens: int | None) -> Prompt:
        tokenizer = self._renderer.tokenizer
        return self._renderer.render(body, lambda plain: tokenizer.tokens(plain, most_tokens))

    def _there(self, body: Any, most_tokens: int | None) -> Prompt:
        return self._renderer.render(body, lambda plain: self._process.tokens(plain, most_tokens))


def _holds_text(body: Any) -> bool:
    """Whether there is something to tokenize: a prompt may be of token ids."""
    prompt = getattr(body, "prompt", "")
    return isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str)
