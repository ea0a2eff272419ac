"""The reports of an engine of ours: the messages that a vLLM engine's processes send over the stats
channel, and vLLM's numbered KV event batches, so that report stream, router and metrics need not
know which engine runs. Called from the engine's thread."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence as Run

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from kappa.cost import batch_work
from kappa_engine.llm_engine import Engine
from kappa_engine.model_runner import Chunk
from kappa_engine.prefix_cache import CacheEvent, StoredBlocks
from kappa_engine.sequence import Sequence
from kappa_workers.iteration_log import Iteration, IterationLog
from kappa_workers.stats_channel import StatsSender

# The salts of at least this many prompts' first blocks are kept.
_LEAST_SALTS = 1024
_MEDIA = {"device": "GPU", "host": "CPU"}
_TOPIC = b"kv"
_HIGH_WATER_MESSAGES = 100_000


class KvPublisher:
    """One engine's numbered batches of KV events, on a socket bound to `endpoint` (empty: no
    reader). Call from one thread."""

    def __init__(self, endpoint: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if endpoint:
            self._socket.bind(endpoint)

    def close(self) -> None:
        self._socket.close()

    def publish(self, events: Run[BlockStored | BlockRemoved]) -> None:
        encoded = self._encode(KVEventBatch(ts=time.time(), events=list(events)))
        number, self._number = self._number, self._number + 1
        self.send(number, [_TOPIC, number.to_bytes(8, "big"), encoded])

    def send(self, number: int, frames: list[bytes]) -> None:
        """Send the batch of that number: topic, number, events."""
        self._socket.send_multipart(frames)


class EngineReports:
    """Follows one engine (`kappa_engine.llm_engine.Observer`) and publishes its cache's changes.

    log: file for JSON lines. blocks: that device and host hold: no more salts can matter at a time.
    paced: there is no link, so loads are known by their tokens alone, and stores take no time."""

    def __init__(
        self,
        stats_endpoint: str,
        publisher: KvPublisher,
        log: str | None = None,
        blocks: int = 0,
        paced: bool = False,
    ) -> None:
        self._most_salts = max(blocks, _LEAST_SALTS)
        self._stats = StatsSender(stats_endpoint)
        self._log = IterationLog(self._stats.send, log)
        self._moved: dict[str, tuple[int, float]] = {}
        self._dropped = self._preempted = 0
        self._faults = (0, 0)
        self._salts: OrderedDict[bytes, str] = OrderedDict()
        self._kv, self._paced = publisher, paced

    def close(self) -> None:
        """Close log and publisher; the engine's thread has ended."""
        self._log.close()
        self._kv.close()

    def admitted(self, sequence: Sequence) -> None:
        """A request got its blocks: its tokens by source, recomputed ones being new."""
        salt = sequence.request.salt
        if salt and sequence.keys:
            self._salts[sequence.keys[0].digest] = salt
            if len(self._salts) > self._most_salts:
                self._salts.popitem(last=False)
        account, load = sequence.account, sequence.load
        # What stays in host memory, to be attended to in part, is not computed either.
        loaded = load.plan.crossing_tokens + load.plan.tokens("S") if load is not None else 0
        self._stats.send(
            {
                "kind": "admit",
                "request_id": sequence.request.name,
                "device_tokens": account.device_tokens,
                "host_tokens": loaded + account.kept_tokens,
                "new_tokens": max(account.new_tokens - loaded, 1),
            }
        )

    def iterated(
        self, engine: Engine, seconds: float, chunks: Run[Chunk], prefilled: Run[Sequence]
    ) -> None:
        """An iteration ended that computed these chunks, and the last ones of these prompts."""
        work = batch_work((chunk.stop - chunk.start, chunk.start) for chunk in chunks)
        tokens = int(work.tokens)
        named = [sequence for sequence in prefilled if sequence.request.name]
        step = {
            "kind": "step",
            "tokens": tokens,
            "work": (*work, len(chunks)),
            "prefilled": [sequence.request.name for sequence in named],
            "spent": [(s.request.name, s.account.load_s, s.account.compute_s) for s in named],
            "took_s": seconds,
            "overrun": False,
        }
        self._stats.send(step, urgent=bool(named))
        now_s = time.monotonic()
        batcher, memory = engine.batcher, engine.memory
        waiting, running = len(batcher.rule), len(batcher.running)
        loading = len(batcher.loading) + len(batcher.ready)
        iteration = Iteration(
            now_s - seconds,
            tokens=tokens,
            budget_tokens=batcher.budget_tokens,
            blocks=memory.capacity_blocks - memory.available(),
            capacity_blocks=memory.capacity_blocks,
            queued=batcher.was_queued,
            waiting=waiting,
            loading=loading,
            running=running,
            preempted=batcher.preemptions - self._preempted,
            passed=batcher.passed,
        )
        self._preempted = batcher.preemptions
        self._log.scheduled(iteration)
        self._log.ended(now_s)
        if self._log.due(now_s, idle=not engine.busy):
            charges = batcher.rule.charges() if hasattr(batcher.rule, "charges") else {}
            self._log.publish(now_s, (waiting, loading, running), 0, charges)
        self._transfers(engine)
        self._failures(engine)

    def publish(self, events: list[CacheEvent]) -> None:
        self._kv.publish([self._event(event) for event in events])

    def _event(self, event: CacheEvent) -> BlockStored | BlockRemoved:
        digests, medium = list(event.digests), _MEDIA[event.place]
        if not isinstance(event, StoredBlocks):
            return BlockRemoved(block_hashes=digests, medium=medium)
        # As with vLLM, the salt comes with a prompt's first block, on the device.
        salt = self._salts.get(digests[0]) if event.parent is None else None
        keys = [(salt,) if salt else None, *[None] * (len(digests) - 1)]
        return BlockStored(
            block_hashes=digests,
            parent_block_hash=event.parent,
            token_ids=list(event.tokens),
            block_size=event.block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=keys if event.place == "device" else None,
        )

    def _transfers(self, engine: Engine) -> None:
        """Report the tokens that crossed the link since the last iteration."""
        token_bytes = engine.arena.block_bytes("kv") / engine.arena.block_tokens
        engine.mover.settle()
        for kind, direction in (("load", "h2d"), ("store", "d2h")):
            counters = engine.mover.counters[direction]  # type: ignore[index]
            before_bytes, before_s = self._moved.get(kind, (0, 0.0))
            moved = counters.copied_bytes - before_bytes
            if not moved or (self._paced and kind == "store"):
                continue
            took_s = counters.busy_s - before_s
            self._moved[kind] = counters.copied_bytes, counters.busy_s
            tokens, size_bytes = round(moved / token_bytes), 0 if self._paced else moved
            self._stats.send(
                {"kind": kind, "tokens": tokens, "bytes": size_bytes, "took_s": took_s}
            )

    def _failures(self, engine: Engine) -> None:
        misused = sum(pool.misused for pool in engine.arena.pools.values())
        faults = engine.loads.failed_loads, misused
        if faults != self._faults:
            self._faults = faults
            self._stats.send(
                {"kind": "faults", "failed_loads": faults[0], "misused_blocks": faults[1]}
            )
        for _ in range(engine.store.dropped - self._dropped):
            self._stats.send({"kind": "store_dropped"})
        self._dropped = engine.store.dropped
