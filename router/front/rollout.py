"""Who steers a request behind `kappa route`, and the journal of what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path

from kappa import metrics as m
from kappa.settings.front import FrontSettings
from router.decision import Decision, RouteRequest
from router.journal import CacheBlocks, JournalWriter
from router.live.live_router import LiveRouter
from router.live.record_file import ThreadedFile
from router.rollout import PRESENT, LeastConnections, Rollout

_DESCRIBE_S = 30.0
_CHUNK_BYTES = 1 << 18


class FrontRollout:
    """Decides who decides, and writes it down.

    Args:
        settings: mode, present balancer and journal.
        live: the router, on whose event loop this lives.
        caches: what each server's caches are known to hold, by its name.
    """

    def __init__(
        self, settings: FrontSettings, live: LiveRouter,
        caches: Callable[[], Mapping[str, CacheBlocks]],
    ) -> None:  # fmt: skip
        mode, self._live, self._caches = settings.router.mode, live, caches
        self._rollout = Rollout.parse(mode, "present")
        self.balancer = "" if settings.present in PRESENT else settings.present
        # Of a real one it is known only afterwards; until then its requests are thought spread.
        self._present = PRESENT.get(settings.present, LeastConnections)()
        self._writer = JournalWriter(mode, settings.present, settings.router.policy)
        self.path, dropped = settings.journal, partial(live.metrics.inc, m.RECORD_DROPPED)
        self._file: ThreadedFile | None = None
        if self.path is not None:
            self._file = ThreadedFile(self.path, dropped, settings.journal_bytes)
        self._described_s, self._workers = 0.0, 0

    def decide(self, request: RouteRequest, tenant: str) -> tuple[Decision, str]:
        """Choose a server by the rule whose turn it is, and reserve it; and the real balancer's
        url, if that is to choose, in which case the server is a guess. Raises NoWorkerError."""
        if self._rollout.arm(f"{tenant} {request.session or request.request_id}") == "kappa":
            return self._live.route(request, tenant), ""
        return self._live.route_as(request, tenant, self._present), self.balancer

    def ended(self, decision: Decision, session: str, end: str) -> None:
        """A request is over at its server (`LiveRouter.release`)."""
        live, request_id = self._live, decision.request_id
        flight, record = live.router.flights.get(request_id), live.records.get(request_id)
        live.release(request_id, end)
        # One that another attempt has replaced has a line of its own.
        if self._file is None or flight is None or record is None or not record.end:
            return
        now_s = time.time()
        if now_s - self._described_s > _DESCRIBE_S or len(live.router.workers) > self._workers:
            self._describe(now_s)
        line = {
            **record.to_dict(), "worker": decision.worker, "end_s": now_s,
            "prompt_tokens": decision.prompt_tokens, "output_tokens": flight.output_tokens,
        }  # fmt: skip
        named = f"{record.tenant} {session or request_id}"
        if not self._file(self._writer.request(line, named, decision.priced.prefix_hashes)):
            self._writer.forget()

    def _describe(self, now_s: float) -> None:
        assert self._file is not None
        self._file(self._writer.workers(self._live.router, now_s, self._caches()))
        self._described_s, self._workers = now_s, len(self._live.router.workers)

    async def journal(self) -> AsyncIterator[bytes]:
        """The journal as it is now, in parts; nothing if there is none."""
        path = Path(self.path) if self.path is not None else None
        if path is None or not path.exists():
            return
        with path.open("rb") as file:
            left = path.stat().st_size
            while left > 0 and (part := await asyncio.to_thread(file.read, _CHUNK_BYTES)):
                yield part[:left]
                left -= len(part)

    def close(self) -> None:
        """Write what waits and what was learnt last."""
        if self._file is not None:
            if self._live.router.workers:
                self._describe(time.time())
            self._file.close()
