"""What a worker tells the prefix index: typed events, one meaning each.

`router.index.kv_stream` makes them from an engine's wire format, the simulator makes them directly,
and `PrefixIndex.handle` is their only consumer. Engine hashes are opaque: whatever the engine
calls a block, unique per worker until it resets.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Tier = Literal["device", "host"]
EngineHash = int | bytes


# eq=False: token arrays have no single truth value, so generated equality would raise.
@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """A run of consecutive blocks became available in a tier.

    Args:
        worker: who holds them.
        tier: where they are held.
        engine_hashes: the engine's names, in order.
        parent_engine_hash: the block before the first one; None at the start of a sequence.
        token_ids: all blocks' tokens, block_tokens each; empty when the engine only names them.
        block_tokens: tokens in a block (ignored without tokens).
        salt: what sets this sequence apart (`prefix_hash.salt_of`, 0 for nothing); None when
            the event does not say, and the parent or the engine hash must.
    """

    worker: str
    tier: Tier
    engine_hashes: tuple[EngineHash, ...]
    parent_engine_hash: EngineHash | None
    token_ids: NDArray[np.integer] | tuple[int, ...]
    block_tokens: int
    salt: int | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left a tier, in any order, with or without those before and after them."""

    worker: str
    tier: Tier
    engine_hashes: tuple[EngineHash, ...]


@dataclass(frozen=True, slots=True)
class TierCleared:
    """A tier lost everything at once; tier None means both."""

    worker: str
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class WorkerReset:
    """What is known of the worker is void (restart, or events were lost); it lives on."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker left."""

    worker: str


KVEvent = BlocksStored | BlocksRemoved | TierCleared | WorkerReset | WorkerGone
