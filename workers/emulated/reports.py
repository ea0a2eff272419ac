"""What an emulated engine tells the cluster: the same messages as a real engine's processes send.

Admissions, steps and loads go over the stats channel, changes of its block names as vLLM's KV event
batches over a publisher's socket. A fault may lose, repeat or reorder every second batch, as a
network could. Called on the engine's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from workers.emulated.blocks import Change, Stored
from workers.emulated.loop import Job
from workers.own_engine import kv_events
from workers.own_engine.kv_events import KvPublisher
from workers.stats_channel import StatsSender

_COUNTS_EVERY_S = 0.2


class EmulatedReports:
    """Publishes one engine's life.

    Args:
        stats_endpoint, kv_endpoint: as of any engine; the latter is bound here.
        block_tokens: of a block.
        event_fault: what is to happen to every second batch; see `EngineFaults.events`.
    """

    def __init__(
        self,
        stats_endpoint: str,
        kv_endpoint: str,
        block_tokens: int,
        event_fault: Callable[[], str] = lambda: "",
    ) -> None:
        self._stats = StatsSender(stats_endpoint)
        self._block_tokens, self._event_fault = block_tokens, event_fault
        self._kv = KvPublisher(kv_endpoint)
        self._late: list[bytes] | None = None
        self._counted_s, self._failed = 0.0, 0
        self._iterations = 0

    def close(self) -> None:
        """Close the publisher's socket."""
        self._kv.close()

    def admitted(self, job: Job) -> None:
        """A request got its room: its tokens by source."""
        cached = job.device_tokens + job.host_tokens
        self._stats.send(
            {
                "kind": "admit", "request_id": job.name, "device_tokens": job.device_tokens,
                "host_tokens": job.host_tokens, "new_tokens": len(job.tokens) - cached,
                "t_s": time.time(),
            }
        )  # fmt: skip

    def loaded(self, job: Job, tokens: int, took_s: float) -> None:
        """A load ended. Bytes are not known here: there are none."""
        self._stats.send({"kind": "load", "tokens": tokens, "bytes": 0, "took_s": took_s})

    def stepped(
        self, took_s: float, tokens: int, done: list[Job], counts: tuple[int, int, int],
        failed_loads: int,
    ) -> None:  # fmt: skip
        """A step ended that computed so many tokens (0: the engine is idle)."""
        if tokens:
            self._iterations += 1
            self._stats.send(
                {
                    "kind": "step", "tokens": tokens, "prefilled": [job.name for job in done],
                    "spent": [(job.name, job.load_s, job.compute_s) for job in done],
                    "pace_s": took_s, "took_s": took_s, "real_s": 0.0, "overrun": False,
                    "t_s": time.time(),
                }
            )  # fmt: skip
        now_s = time.monotonic()
        if now_s - self._counted_s >= _COUNTS_EVERY_S:
            self._counted_s = now_s
            self._counts(counts)
        if failed_loads != self._failed:
            self._failed = failed_loads
            self._stats.send({"kind": "faults", "failed_loads": failed_loads, "misused_blocks": 0})

    def _counts(self, counts: tuple[int, int, int]) -> None:
        waiting, loading, running = counts
        self._stats.send(
            {
                "kind": "iterations", "iterations": self._iterations, "queued_iterations": 0,
                "budget_fill": 0.0, "vram_fill": 0.0, "passed": {}, "charges": {},
                "rule_errors": 0, "preemptions": 0, "waiting": waiting, "loading": loading,
                "running": running,
            }
        )  # fmt: skip

    def publish(self, changes: list[Change]) -> None:
        """Changes of what can be found, as one of vLLM's batches."""
        if not changes:
            return
        fault = self._event_fault() if self._kv.number % 2 else ""
        frames = self._kv.batch([self._event(change) for change in changes])
        if fault == "lose":
            return
        if fault == "reorder":
            self._late = frames
            return
        for _ in range(2 if fault == "repeat" else 1):
            self._kv.send(frames)
        if self._late is not None:
            self._kv.send(self._late)
            self._late = None

    def _event(self, change: Change) -> BlockStored | BlockRemoved:
        if not isinstance(change, Stored):
            return kv_events.removed(change.place, change.digests)
        return kv_events.stored(
            change.place, change.digests, change.parent, change.tokens, self._block_tokens,
            change.salt,
        )  # fmt: skip
