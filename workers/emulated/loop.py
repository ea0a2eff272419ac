"""The time that an emulated engine takes: continuous batching by a step model, loads by a link.

Requests wait for room, load what the host tier holds of their prefix over one serial link, compute
the rest of their prompts in chunks of a token budget, then decode a token per step. Nothing is
computed: a step lasts as long as `kappa.cost` says that it would on the emulated node.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kappa.cost import StepModel, transfer_s
from workers.emulated.blocks import Change, EmulatedBlocks, digests_of

_IDLE_S = 0.25


@dataclass(frozen=True, slots=True)
class EmulatedPace:
    """How fast: step, seconds per loaded token and per load; at most so many tokens and requests at
    once. All seconds are real ones, dilation included."""

    step: StepModel
    load_token_s: float
    load_fixed_s: float
    max_batch_tokens: int
    max_sequences: int


@dataclass(slots=True, eq=False)
class Job:
    """One request. tokens: its prompt. Each output token puts its number into `outputs`; None says
    that the engine stopped."""

    name: str
    tokens: list[int]
    max_tokens: int
    salt: str
    outputs: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    digests: list[bytes] = field(default_factory=list)
    blocks: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    loaded_at_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    computed: int = 0
    made: int = 0
    gone: bool = False

    @property
    def prefilled(self) -> bool:
        """Whether its prompt is computed."""
        return self.computed >= len(self.tokens)


@dataclass(frozen=True, slots=True)
class Told:
    """What the loop tells its owner as it happens."""

    admitted: Callable[[Job], None]
    loaded: Callable[[Job, int, float], None]
    stepped: Callable[[float, int, list[Job]], None]
    changed: Callable[[list[Change]], None]


class EmulatedLoop:
    """Requests in, token numbers out. Lives on one event loop; `link_slower` and `loads_fail` are
    asked at every load."""

    def __init__(
        self,
        pace: EmulatedPace,
        blocks: EmulatedBlocks,
        told: Told,
        link_slower: Callable[[], float] = lambda: 1.0,
        loads_fail: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pace, self._blocks, self._told = pace, blocks, told
        self._link_slower, self._loads_fail = link_slower, loads_fail
        self._waiting: deque[Job] = deque()
        self._loading: list[Job] = []
        self._running: list[Job] = []
        self._link_free_s = 0.0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.failed_loads = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests that wait, load and run."""
        return len(self._waiting), len(self._loading), len(self._running)

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """End; requests that are left are told so."""
        if self._task is not None:
            self._task.cancel()
        for job in (*self._waiting, *self._loading, *self._running):
            job.outputs.put_nowait(None)

    def submit(self, job: Job) -> None:
        """Queue a request.

        Raises:
            ValueError: it needs more blocks than the device has, or it has no tokens.
        """
        size = self._blocks.block_tokens
        job.blocks = -(-(len(job.tokens) + job.max_tokens) // size)
        if not job.tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if job.blocks > self._blocks.capacity_blocks:
            raise ValueError(
                f"the request needs {job.blocks} blocks, the device has "
                f"{self._blocks.capacity_blocks}: shorten the prompt or lower max_tokens"
            )
        job.digests = digests_of(job.tokens, size, job.salt)
        self._waiting.append(job)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._drop_gone()
            self._admit()
            self._finish_loads()
            work = self._work()
            if work:
                await self._step(work)
                continue
            self._wake.clear()
            now_s = time.monotonic()
            soon_s = min((job.loaded_at_s - now_s for job in self._loading), default=_IDLE_S)
            try:
                async with asyncio.timeout(max(min(soon_s, _IDLE_S), 0.001)):
                    await self._wake.wait()
            except TimeoutError:
                if not self._loading:
                    self._told.stepped(0.0, 0, [])

    def _drop_gone(self) -> None:
        for jobs in (self._loading, self._running):
            for job in [job for job in jobs if job.gone]:
                jobs.remove(job)
                self._blocks.free(job.blocks)
        for job in [job for job in self._waiting if job.gone]:
            self._waiting.remove(job)

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._loading) < self._pace.max_sequences:
            job = self._waiting[0]
            changes = self._blocks.hold(job.blocks)
            if changes is None:
                return
            self._waiting.popleft()
            self._told.changed(changes)
            self._find(job)
            self._told.admitted(job)
            if job.host_tokens:
                self._load(job)
            else:
                self._running.append(job)

    def _find(self, job: Job) -> None:
        """At least the last token is computed, or there would be none to sample from."""
        size, usable = self._blocks.block_tokens, (len(job.tokens) - 1) // self._blocks.block_tokens
        device, host = self._blocks.found(job.digests[:usable])
        job.device_tokens, job.host_tokens = device * size, host * size
        job.computed = job.device_tokens

    def _load(self, job: Job) -> None:
        now_s, pace = time.monotonic(), self._pace
        token_s = pace.load_token_s * self._link_slower()
        took_s = transfer_s(job.host_tokens, token_s, pace.load_fixed_s)
        self._link_free_s = max(self._link_free_s, now_s) + took_s
        job.loaded_at_s, job.load_s = self._link_free_s, took_s
        self._loading.append(job)

    def _finish_loads(self) -> None:
        now_s = time.monotonic()
        for job in [job for job in self._loading if job.loaded_at_s <= now_s]:
            self._loading.remove(job)
            self._running.append(job)
            if self._loads_fail():
                self.failed_loads += 1  # what did not arrive is computed
            else:
                job.computed += job.host_tokens
                self._told.loaded(job, job.host_tokens, job.load_s)

    def _work(self) -> list[tuple[Job, int]]:
        """New tokens of each running request in the next step: decodes first, then prompts."""
        budget = self._pace.max_batch_tokens
        decoding = [job for job in self._running if job.prefilled][:budget]
        work = [(job, 1) for job in decoding]
        left = budget - len(work)
        for job in self._running:
            if left and not job.prefilled:
                chunk = min(left, len(job.tokens) - job.computed)
                work.append((job, chunk))
                left -= chunk
        return work

    async def _step(self, work: list[tuple[Job, int]]) -> None:
        lasts_s = self._pace.step.real_s((new, job.computed + job.made) for job, new in work)
        start_s = time.monotonic()
        await asyncio.sleep(lasts_s)
        took_s = time.monotonic() - start_s
        prefilled = []
        for job, new in work:
            if not job.prefilled:
                job.computed += new
                job.compute_s += took_s
                if job.computed < len(job.tokens):
                    continue
                prefilled.append(job)
                self._told.changed(self._blocks.keep(job.digests, job.tokens, job.salt))
            job.outputs.put_nowait(job.made)
            job.made += 1
            if job.made >= job.max_tokens:
                self._running.remove(job)
                self._blocks.free(job.blocks)
        self._told.stepped(took_s, sum(new for _, new in work), prefilled)
