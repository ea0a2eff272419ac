"""What our own engine tells the cluster: the same messages as a vLLM engine's processes send.

Admissions, iterations, loads and stores go over the stats channel, blocks that became findable or
left as vLLM's KV event batches over a publisher's socket, so that report stream, router and metrics
need not know which engine runs. Called from the engine's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence as Run

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from engine.loop import Engine
from engine.prefix import BlocksStored, CacheEvent
from engine.sequence import Sequence
from workers.iteration_log import Iteration, IterationLog
from workers.own_engine import kv_events
from workers.own_engine.kv_events import KvPublisher
from workers.stats_channel import StatsSender

# At least so many first blocks of salted prompts are known by their salt.
_LEAST_SALTS = 1024


class TorchReports:
    """Follows one engine (`engine.loop.Observer`) and publishes its cache's changes.

    Args:
        stats_endpoint: of the stats channel; an empty one says nothing.
        kv_endpoint: bound here; the report stream reads it.
        log: file for JSON lines, one per iteration, or None.
        blocks: that device and host hold: no more salts can matter at a time.

    `ran_s`: when the last iteration ended, by the monotonic clock; `was_busy`: whether there was
    more to do then.
    """

    def __init__(
        self, stats_endpoint: str, kv_endpoint: str, log: str | None = None, blocks: int = 0
    ) -> None:
        self.ran_s = time.monotonic()
        self.was_busy = False
        self._most_salts = max(blocks, _LEAST_SALTS)
        self._stats = StatsSender(stats_endpoint)
        self._log = IterationLog(self._stats.send, log)
        self._moved: dict[str, tuple[int, float]] = {}
        self._dropped = 0
        self._faults = (0, 0)
        self._salts: OrderedDict[bytes, str] = OrderedDict()
        self._kv = KvPublisher(kv_endpoint)

    def close(self) -> None:
        """Close the publisher's socket; the engine's thread has ended."""
        self._log.close()
        self._kv.close()

    # -- what the engine calls ----------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        """A request got its blocks: its tokens by source, recomputed ones being new."""
        if sequence.salt and sequence.keys:
            self._salts[sequence.keys[0].digest] = sequence.salt
            if len(self._salts) > self._most_salts:
                self._salts.popitem(last=False)
        account, load = sequence.account, sequence.load
        # What stays in host memory, to be attended to in part, is not computed either.
        loaded = load.plan.crossing_tokens + load.plan.tokens("S") if load is not None else 0
        self._stats.send(
            {
                "kind": "admit",
                "request_id": sequence.name,
                "device_tokens": account.device_tokens,
                "host_tokens": loaded + account.kept_tokens,
                "new_tokens": max(account.new_tokens - loaded, 1),
                "t_s": time.time(),
            }
        )

    def iterated(
        self, engine: Engine, seconds: float, tokens: int, prefilled: Run[Sequence]
    ) -> None:
        """An iteration ended that computed so many tokens, and the last ones of these prompts."""
        self._stats.send(
            {
                "kind": "step",
                "tokens": tokens,
                "prefilled": [sequence.name for sequence in prefilled if sequence.name],
                "spent": [
                    (s.name, s.account.load_s, s.account.compute_s) for s in prefilled if s.name
                ],
                "pace_s": 0.0,
                "took_s": seconds,
                "real_s": seconds,
                "overrun": False,
                "t_s": time.time(),
            }
        )
        now_s = self.ran_s = time.monotonic()
        self.was_busy = engine.busy
        self._log.scheduled(self._iteration(engine, now_s - seconds, tokens))
        self._log.ended(now_s)
        if self._log.due(now_s, idle=not engine.busy):
            rule = engine.batcher.rule
            charges = rule.charges() if hasattr(rule, "charges") else {}
            self._log.publish(now_s, _counts(engine), 0, charges)
        self._transfers(engine)

    def publish(self, events: list[CacheEvent]) -> None:
        """Changes of what can be found, as one of vLLM's batches."""
        self._kv.send(self._kv.batch([self._event(event) for event in events]))

    # -- translation --------------------------------------------------------------------------

    def _event(self, event: CacheEvent) -> BlockStored | BlockRemoved:
        if not isinstance(event, BlocksStored):
            return kv_events.removed(event.place, event.digests)
        salt = self._salts.get(event.digests[0]) if event.parent is None else None
        return kv_events.stored(
            event.place, event.digests, event.parent, event.tokens, event.block_tokens, salt
        )

    def _iteration(self, engine: Engine, started_s: float, tokens: int) -> Iteration:
        waiting, loading, running = _counts(engine)
        memory = engine.memory
        return Iteration(
            started_s,
            tokens=tokens,
            budget_tokens=engine.batcher.budget_tokens,
            blocks=memory.capacity_blocks - memory.available(),
            capacity_blocks=memory.capacity_blocks,
            queued=engine.batcher.was_queued,
            waiting=waiting,
            loading=loading,
            running=running,
            passed=engine.batcher.passed,
        )

    def _transfers(self, engine: Engine) -> None:
        """What crossed the link since last time."""
        token_bytes = engine.arena.block_bytes("kv") / engine.arena.block_tokens
        stats = engine.stats()  # which also settles the mover's counters
        for kind, direction in (("load", "h2d"), ("store", "d2h")):
            counters = engine.mover.counters[direction]  # type: ignore[index]
            before_bytes, before_s = self._moved.get(kind, (0, 0.0))
            moved = counters.copied_bytes - before_bytes
            if moved:
                took_s = counters.busy_s - before_s
                self._moved[kind] = counters.copied_bytes, counters.busy_s
                tokens = round(moved / token_bytes)
                self._stats.send({"kind": kind, "tokens": tokens, "bytes": moved, "took_s": took_s})
        faults = stats.failed_loads, stats.blocks["misused"]
        if faults != self._faults:
            self._faults = faults
            self._stats.send(
                {"kind": "faults", "failed_loads": faults[0], "misused_blocks": faults[1]}
            )
        stores = engine.store.counters
        dropped = stores.dropped_full + stores.dropped_late
        for _ in range(dropped - self._dropped):
            self._stats.send({"kind": "store_dropped"})
        self._dropped = dropped


def _counts(engine: Engine) -> tuple[int, int, int]:
    """Requests that wait, load and run."""
    batcher = engine.batcher
    loading = len(batcher.loading) + len(batcher.ready)
    return len(batcher.rule), loading, len(batcher.running)
