"""What both halves of the LMCache tier share: a shell around LMCache's own connector (multi-process
mode), so that nothing it does costs an engine more than a bounded wait. An engine can start without
the server and finds it later; what the server fails to do is computed; what it holds is announced
to the router."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.options import LMCACHE_KEY, STATS_KEY, read_options

log = structlog.get_logger(__name__)

_LONGEST_PAUSE_S = 60.0
_WARN_EVERY_S = 60.0
ABSENT, LOOKUP, LOAD, STORE = "absent", "lookup", "load", "store"


class LmcacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an engine deals with its server."""

    # An answer that takes longer is a failure.
    timeout_s: float
    # The first pause after a failure, and the one between attempts to reach the server.
    retry_s: float
    # The most blocks that are announced of the server.
    most_blocks: int


class TierGuard:
    """Failures of one tier, as one process sees them. retry_s: the first pause. slow_s: a call that
    takes longer has failed, even if it came back with an answer. Pure."""

    def __init__(self, retry_s: float, slow_s: float) -> None:
        self._retry_s, self.slow_s = retry_s, slow_s
        self._pause_s = retry_s
        self._closed_until_s = 0.0
        self._warned_s = float("-inf")
        self._unwarned: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def allows(self, now_s: float) -> bool:
        return now_s >= self._closed_until_s

    def failed(self, why: str, now_s: float, *, pause: bool = True) -> dict[str, int]:
        """Something went wrong: leave the server alone for a while, unless somebody else sees to it
        (`pause`). Returns what to warn of now, once a minute at most: failures since then."""
        self.failures[why] += 1
        self._unwarned[why] += 1
        if pause and now_s >= self._closed_until_s:
            self._closed_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, max(_LONGEST_PAUSE_S, self._retry_s))
        if now_s - self._warned_s < _WARN_EVERY_S:
            return {}
        unwarned, self._unwarned = dict(self._unwarned), Counter()
        self._warned_s = now_s
        return unwarned

    def answered(self) -> None:
        """The server did what it was asked for: the next pause is a short one again."""
        self._pause_s = self._retry_s


class LmcacheLink:
    """Where a process has LMCache's connector from. make: makes it; raises while the server does
    not answer, after a bounded time. ready: is called once it is made, before anyone else sees it;
    if that raises, another is made. stats: gets a message for every failure."""

    def __init__(
        self,
        make: Callable[[], Any],
        ready: Callable[[Any], None],
        options: LmcacheOptions,
        stats: StatsSender,
    ) -> None:
        self._make, self._ready, self._stats = make, ready, stats
        self._retry_s = options.retry_s
        self.guard = TierGuard(options.retry_s, options.timeout_s)
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
            failures = self.guard.failed(why, time.monotonic(), pause=pause)
            self._stats.send({"kind": "tier_failed", "why": why})
        if failures:
            log.warning("lmcache_failed", failures=failures, last=repr(error)[:300])

    def call(self, why: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What it returned; None if it raised. One that took too long is counted as failed, too."""
        start_s = time.monotonic()
        try:
            result = function(*args, **named)
        except Exception as error:
            self.failed(why, error)
            return None
        took_s = time.monotonic() - start_s
        if took_s > self.guard.slow_s:
            self.failed(why, f"took {took_s:.3f} s")
        return result

    def close(self) -> None:
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


# A stored run of a request: its id, and the tokens from and to.
Stored = tuple[str, int, int]


@dataclass
class LmcacheMetadata(KVConnectorMetadata):
    """What a step's workers get."""

    # LMCache's own metadata; None: it has none.
    inner: Any = None
    # Requests that ended and keep their blocks until a worker names them.
    delayed: set[str] = field(default_factory=set)
    # Loads that LMCache does not know of, with their blocks.
    lost: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class LmcacheWorkerMeta(KVConnectorWorkerMetadata):
    """What became of stores since the last step."""

    # How many workers stored a run.
    stored: dict[Stored, int] = field(default_factory=dict)
    # Runs that were given up.
    lost: set[Stored] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LmcacheWorkerMeta:
        assert isinstance(other, LmcacheWorkerMeta)
        stored = dict(self.stored)
        for run, count in other.stored.items():
            stored[run] = stored.get(run, 0) + count
        return LmcacheWorkerMeta(stored, self.lost | other.lost)


class LmcacheBase(KVConnectorBase_V1, SupportsHMA):
    """One half of a connector of vLLM's, which has its link to LMCache."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = read_options(self._extra, LMCACHE_KEY, LmcacheOptions)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._stats = StatsSender(self._extra.get(STATS_KEY, ""))

        def make() -> Any:
            from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

            return LMCacheMPConnector(vllm_config, role, kv_cache_config)

        # A sender of its own: the link's thread uses it.
        stats = StatsSender(self._extra.get(STATS_KEY, ""))
        self._link = LmcacheLink(make, self._ready, self._options, stats)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a block that is not stored is a future miss, nothing more."""
        return False

    def _ready(self, inner: Any) -> None:
        """LMCache's connector is there."""

    def shutdown(self) -> None:
        self._link.close()

    # -- what the other half answers ----------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing to do: loads and stores are whole."""

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        raise NotImplementedError

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        raise NotImplementedError

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])
