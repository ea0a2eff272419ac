"""What an engine has done so far: counts, seconds and bytes, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.arena import Arena
from engine.memory import TieredMemory
from engine.sequence import Account, Sequence
from engine.store import HostStore, Keeper
from engine.transfer import Direction, LinkCounters
from scheduler.batching import Step


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine began.

    gpu_s: seconds in iterations. failed_loads: that did not arrive, each followed by computing
    what it should have brought. tokens, seconds: by source and kind as in `Account`, over all
    requests that ended. link: bytes, seconds and failures of each direction. blocks: stored in
    host memory, and not, by reason; evicted; misused, which is a bug. sparse: slots, look-ups and
    hits (`engine.sparse.serving`), where there are slots.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    iterations: int = 0
    gpu_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    loads: int = 0
    failed_loads: int = 0
    failed_load_tokens: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    link: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    sparse: dict[str, Any] = field(default_factory=dict)

    def ended(self, account: Account) -> None:
        """Add what a request took."""
        for name in (
            "device", "loaded", "activation", "recomputed", "sparse", "kept", "new", "output",
            "approximate",
        ):  # fmt: skip
            tokens = getattr(account, f"{name}_tokens")
            self.tokens[name] = self.tokens.get(name, 0) + tokens
        for name in ("queue", "load", "compute", "predicted_load", "predicted_compute"):
            seconds = getattr(account, f"{name}_s")
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def iterated(self, step: Step, decoding: int, seconds: float) -> None:
        """Add an iteration, and its seconds to what its prompts took."""
        self.iterations += 1
        self.gpu_s += seconds
        self.decode_tokens += decoding
        for work, new, _ in step.chunks:
            self.prefill_tokens += new
            if isinstance(work, Sequence):
                work.account.compute_s += seconds

    def crossed(self, counters: Mapping[Direction, LinkCounters]) -> None:
        """What the link did so far."""
        for direction, link in counters.items():
            self.link[f"{direction}_bytes"] = link.copied_bytes
            self.link[f"{direction}_s"] = link.busy_s
            self.link[f"{direction}_failed"] = link.failed

    def kept(self, store: HostStore, keeper: Keeper, memory: TieredMemory, arena: Arena) -> None:
        """What became of blocks so far."""
        counters = store.counters
        self.blocks = {
            "stored": counters.stored, "dropped_full": counters.dropped_full,
            "dropped_late": counters.dropped_late, "dropped_orphan": counters.dropped_orphan,
            "failed_stores": counters.failed, "not_captured": keeper.skipped,
            "evicted_device": memory.device.evicted,
            "evicted_host": sum(cache.evicted for cache in memory.host.values()),
            "misused": sum(pool.misused for pool in arena.pools.values()),
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return asdict(self)
