"""What an engine of ours holds and lets go, told as vLLM does: numbered batches on a socket."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

_MEDIA = {"device": "GPU", "host": "CPU"}
_TOPIC = b"kv"
_HIGH_WATER_MESSAGES = 100_000


class KvPublisher:
    """One engine's numbered batches. Call from one thread.

    Args:
        endpoint: bound here; the report stream reads it. An empty one tells nobody.

    `number`: of the next batch, from 0.
    """

    def __init__(self, endpoint: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self.number = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if endpoint:
            self._socket.bind(endpoint)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def batch(self, events: Sequence[BlockStored | BlockRemoved]) -> list[bytes]:
        """The frames of the next batch: topic, number, events."""
        encoded = self._encode(KVEventBatch(ts=time.time(), events=list(events)))
        frames = [_TOPIC, self.number.to_bytes(8, "big"), encoded]
        self.number += 1
        return frames

    def send(self, frames: list[bytes]) -> None:
        """Publish one batch."""
        self._socket.send_multipart(frames)


def stored(
    place: str,
    digests: Sequence[bytes],
    parent: bytes | None,
    tokens: Sequence[int],
    block_tokens: int,
    salt: str | None,
) -> BlockStored:
    """Blocks that can be found from now on in ``device`` or ``host``.

    Args:
        digests: of the blocks, in the prompt's order; `parent`: of the one before, if any.
        salt: of the prompt. As with vLLM it is told with a prompt's first block, on the device.
    """
    first = (salt,) if salt and parent is None else None
    keys = [first, *[None] * (len(digests) - 1)]
    return BlockStored(
        block_hashes=list(digests),
        parent_block_hash=parent,
        token_ids=list(tokens),
        block_size=block_tokens,
        lora_id=None,
        medium=_MEDIA[place],
        lora_name=None,
        extra_keys=keys if place == "device" else None,
    )


def removed(place: str, digests: Sequence[bytes]) -> BlockRemoved:
    """Blocks that ``device`` or ``host`` no longer has."""
    return BlockRemoved(block_hashes=list(digests), medium=_MEDIA[place])
