"""Tokenizing as work like any other: in a queue that is fair to tenants, bounded in time.

Two lanes, each with one prompt at a time and a fair queue before it. Short prompts are tokenized by
a thread of the ingress, which their size keeps busy for milliseconds; long ones by a process that
can be ended. So a small request waits behind no long one, and a long one only for its share.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from router.api.auth import Tenant
from router.api.errors import prompt_not_tokenized, prompt_too_long, tokenizer_not_started
from router.api.render import PromptRenderer, TokenizedPrompt
from router.api.tokenizer import PromptTooLong

# About 10 ms of work.
SHORT_BYTES = 16 << 10
_START_S = 60.0
# Measured, 3.9 MB of one-byte tokens: 8 s on a free core, 28 s on a busy one.
_SHORTEST_S, _S_PER_BYTE = 5.0, 20e-6
# The root that this package is imported from: the process needs the same.
_ROOT = str(Path(__file__).parents[2])

T = TypeVar("T")


class Tokenizing:
    """Turns prompts into tokens for all requests of an ingress."""

    def __init__(self, renderer: PromptRenderer, process: TokenizerProcess | None = None) -> None:
        """`process`: tokenizes long prompts; by default one of the renderer's tokenizer."""
        self._renderer = renderer
        self._process = process or TokenizerProcess(renderer.source)
        self._short, self._long = TokenizingLane("tokenize"), TokenizingLane("tokenize-long")

    async def tokens(
        self, body: Any, body_bytes: int, tenant: Tenant, most_tokens: int | None
    ) -> TokenizedPrompt:
        """A body's prompt as token ids, int64; bounded in length if it cannot be rendered here.

        most_tokens: the largest context of any worker; None: not known.

        Raises:
            ApiError: 400, it cannot fit `most_tokens`, or tokenizing it was ended; 503, there is no
                process to do it.
            Exception: whatever the template raises.
        """
        short = body_bytes <= SHORT_BYTES or not _holds_text(body)
        lane = self._short if short else self._long
        tokenizer = self._renderer.tokenizer if short else self._process

        def work() -> TokenizedPrompt:
            return self._renderer.render(body, lambda plain: tokenizer.tokens(plain, most_tokens))

        try:
            return await lane.run(tenant, body_bytes, work)
        except PromptTooLong as error:
            token_bytes = self._renderer.tokenizer.longest_token_bytes
            assert token_bytes is not None and most_tokens is not None
            raise prompt_too_long(error.args[0], token_bytes, most_tokens) from None

    def close(self) -> None:
        """End the process, and let the threads go."""
        self._short.close()
        self._long.close()
        self._process.close()


def _holds_text(body: Any) -> bool:
    """Whether there is something to tokenize: a prompt may be of token ids."""
    prompt = getattr(body, "prompt", "")
    return isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str)


# -- fairness ---------------------------------------------------------------------------------


class TokenizingLane:
    """Runs one piece of work at a time in a thread of its own; who is next, the queue says."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False

    async def run(self, tenant: Tenant, cost: int, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. Cancelled while it waits, it is taken out of the
        queue; cancelled later, the work goes on to its end, since a thread cannot be stopped, and
        only then comes the next."""
        await self._admitted(tenant, cost)
        job = asyncio.get_running_loop().run_in_executor(self._thread, work)
        job.add_done_callback(self._done)
        return await asyncio.shield(job)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _admitted(self, tenant: Tenant, cost: int) -> None:
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(admission, tenant.name, tenant.weight, max(cost, 1))
        if not self._busy:
            self._next()
        try:
            await admission
        except asyncio.CancelledError:
            self._queue.drop(admission, tenant.name)
            if admission.done() and not admission.cancelled():
                self._next()
            raise

    def _done(self, job: asyncio.Future[Any]) -> None:
        # Nobody may be left to take note of what it raised.
        if not job.cancelled():
            job.exception()
        self._next()

    def _next(self) -> None:
        while (admission := self._queue.take()) is not None and admission.cancelled():
            pass
        self._busy = admission is not None
        if admission is not None:
            admission.set_result(None)


@dataclass(slots=True)
class _Queued(Generic[T]):
    item: T
    advance: float
    order: int


class FairQueue(Generic[T]):
    """Serves tenants by weight: start-time fair queueing, in the order of arrival within a tenant.

    Each tenant has a virtual time, which its work advances by cost / weight; who is least advanced
    is next. One that had nothing waiting begins at the time of the work begun last, so nobody saves
    up. P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Queued[T]]] = {}
        self._reached: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def put(self, item: T, tenant: str, weight: float, cost: float) -> None:
        """Add an item; `cost` in any unit that is the same for all, `weight` above zero."""
        if tenant not in self._waiting:
            self._reached[tenant] = max(self._reached.get(tenant, 0.0), self._now)
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(_Queued(item, cost / weight, self._count))
        self._count += 1

    def take(self) -> T | None:
        """The next one, charged to its tenant. None: nothing waits, and all are even again."""
        if not self._waiting:
            self._reached.clear()
            self._now = 0.0
            return None
        tenant = min(self._waiting, key=lambda t: (self._reached[t], self._waiting[t][0].order))
        taken = self._waiting[tenant].popleft()
        self._now = self._reached[tenant]
        self._reached[tenant] += taken.advance
        self._forget_empty(tenant)
        return taken.item

    def drop(self, item: T, tenant: str) -> None:
        """Take an item out without a charge; harmless for one that does not wait."""
        queue = self._waiting.get(tenant)
        if queue is not None:
            self._waiting[tenant] = deque(one for one in queue if one.item is not item)
            self._forget_empty(tenant)

    def _forget_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]


# -- the process ------------------------------------------------------------------------------


class PromptRefused(Exception):  # the prompt's fault, as a template saw it
    """The template or tokenizer refused the prompt; `args`: the name of its error."""


def longest_s(prompt_bytes: int) -> float:
    """Seconds that tokenizing so many bytes may take."""
    return _SHORTEST_S + _S_PER_BYTE * prompt_bytes


class TokenizerProcess:
    """A process of its own that tokenizes one prompt at a time, and can be ended.

    It is started for the first prompt, not forked. A prompt that takes longer than its bytes allow
    costs the process, and the next prompt starts another. Blocking: call it from a thread, and not
    from two at once; `close` is for any.
    """

    def __init__(self, source: str, module: str = "router.api.tokenizer") -> None:
        """`source`: the tokenizer's folder or name; `module`: what is run."""
        self._command = [sys.executable, "-m", module, source]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock, self._closed = threading.Lock(), False

    @property
    def pid(self) -> int | None:
        """The running process' id; None while there is none."""
        return None if self._process is None else self._process.pid

    def tokens(self, plain: Mapping[str, Any], most_tokens: int | None = None) -> np.ndarray:
        """As `PromptTokenizer.tokens`, there.

        Raises:
            ApiError: 400, it took too long or too much memory; 503, the process did not start.
            PromptTooLong: it cannot fit `most_tokens`.
            PromptRefused: the template or the tokenizer refused it.
        """
        question = json.dumps({"plain": plain, "most_tokens": most_tokens}).encode()
        pipe = self._started()
        limit_s = longest_s(len(question))
        try:
            pipe.send_bytes(question)
            if not pipe.poll(limit_s):
                raise TimeoutError
            answer = pipe.recv_bytes()
        except (OSError, EOFError):
            self._end()
            raise prompt_not_tokenized(len(question), limit_s) from None
        if answer[:1] != b"{":
            return np.frombuffer(answer[1:], dtype="<i4").astype(np.int64)
        failure = json.loads(answer)
        if "too_long" in failure:
            raise PromptTooLong(failure["too_long"])
        if failure["error"] == "MemoryError":
            raise prompt_not_tokenized(len(question), limit_s)
        raise PromptRefused(failure["error"])

    def close(self) -> None:
        """End the process, for good."""
        with self._lock:
            self._closed = True
        self._end()

    def _started(self) -> Connection:
        """The connection to a process that has loaded its tokenizer."""
        process, pipe = self._process, self._pipe
        if process is not None and pipe is not None and process.poll() is None:
            return pipe
        self._end()
        try:
            pipe = self._start()
            if not pipe.poll(_START_S):
                raise TimeoutError
            pipe.recv_bytes()
        except (OSError, EOFError):
            self._end()
            raise tokenizer_not_started() from None
        return pipe

    def _start(self) -> Connection:
        mine, its = Pipe()
        paths = [_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with self._lock, its:
            if self._closed:
                mine.close()
                raise tokenizer_not_started()
            self._pipe = mine
            self._process = subprocess.Popen(
                self._command, stdin=its.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        return mine

    def _end(self) -> None:
        with self._lock:
            process, pipe = self._process, self._pipe
            self._process = self._pipe = None
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()
