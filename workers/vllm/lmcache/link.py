"""LMCache's own connector for vLLM, made as soon as its server answers, and asked with care.

LMCache's connector cannot be made while its server is absent, and raises what an engine would not
survive. This holds it: tries again in a thread until it is there, runs its calls, takes what they
raise for failures of the tier, and lets a guard say when not to ask at all. One in each of an
engine's processes; `workers.vllm.lmcache.connector` has both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from workers.stats_channel import StatsSender
from workers.vllm.lmcache.guard import ABSENT, TierGuard
from workers.vllm.options import LMCACHE_KEY

log = structlog.get_logger(__name__)


def guard_of(extra: Mapping[str, Any]) -> TierGuard:
    """The guard that a connector's extra configuration asks for."""
    config = extra[LMCACHE_KEY]
    return TierGuard(float(config["retry_s"]), float(config["timeout_s"]))


class LmcacheLink:
    """Where a process has LMCache's connector from.

    Args:
        make: makes it; raises while the server does not answer, after a bounded time.
        ready: is called once it is made, before anyone else sees it; may raise, then it is made
            anew.
        guard: says when to ask; failures go there.
        stats: is told of every failure.
        retry_s: between two attempts to make it.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        ready: Callable[[Any], None],
        guard: TierGuard,
        stats: StatsSender,
        retry_s: float,
    ) -> None:
        self._make, self._ready, self.guard, self._stats = make, ready, guard, stats
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.inner: Any = None

    def connect(self) -> None:
        """Try once now; if the server does not answer, go on trying in a thread."""
        if not self._attempt():
            self._thread = threading.Thread(target=self._run, name="kappa-lmcache", daemon=True)
            self._thread.start()

    def open(self) -> Any:
        """LMCache's connector if it is there and may be asked now, or None."""
        inner = self.inner
        if inner is None:
            return None
        adapter = getattr(inner, "scheduler_adapter", None) or inner.worker_adapter
        return inner if adapter.is_healthy and self.guard.allows(time.monotonic()) else None

    def failed(self, why: str, error: object = "", *, pause: bool = True) -> None:
        """The tier did not do what it was asked for: counted, and warned of once a minute."""
        with self._lock:
            now_s = time.monotonic()
            if pause:
                self.guard.failed(why, now_s)
            else:
                self.guard.noted(why)
            self._stats.send({"kind": "tier_failed", "why": why})
            due = self.guard.warning(now_s)
        if due:
            log.warning("lmcache_failed", failures=due, last=repr(error)[:300])

    def call(self, why: str, function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
        """(whether it went well and in time, what it returned)."""
        start_s = time.monotonic()
        try:
            result = function(*args)
        except Exception as error:
            self.failed(why, error)
            return False, None
        now_s = time.monotonic()
        if now_s - start_s > self.guard.slow_s:
            self.failed(why, f"took {now_s - start_s:.3f} s")
        return True, result

    def close(self) -> None:
        """Stop trying, and shut LMCache's connector down."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        inner, self.inner = self.inner, None
        if inner is not None:
            try:
                inner.shutdown()
            except Exception as error:
                log.warning("lmcache_shutdown_failed", error=repr(error)[:300])

    def _attempt(self) -> bool:
        inner = None
        try:
            inner = self._make()
            self._ready(inner)
        except Exception as error:
            self.failed(ABSENT, error, pause=False)
            if inner is not None:
                inner.shutdown()
            return False
        self.inner = inner
        return True

    def _run(self) -> None:
        while not self._closed.wait(self._retry_s):
            if self._attempt():
                log.warning("lmcache_found")
                return
