"""Lets vLLM's engine hash only the new blocks of a prompt.

It names each block of a prompt by a hash of its tokens and of the block before: 4 us a block, on
the GIL that its steps need too, and a follow-up turn has thousands that it named before. Remembered
hashes are found by all that a hash is made of (the block before, the salt and the adapter that the
first ones hold, the tokens), so a prompt profits only from prompts with the same salt.
Private names of vLLM: tests/workers/test_contracts.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.engine import core

CACHE_BYTES = 64 << 20
"""Bound of the memory: 7 million tokens in blocks of 32."""

_RUN_TOKENS = 1024
# What a hash takes with its object and its place in a list, and a run besides.
_HASH_BYTES, _RUN_BYTES = 80, 512

Hasher = Callable[[Any], list[Any]]
_Key = tuple[Any, Any, Any, bytes]


class KnownHashes:
    """Stands in for the hasher that vLLM makes: the hashes of a `Request`'s whole blocks that have
    none yet. Runs of blocks are remembered, least recently used first out.

    Args:
        stock: vLLM's hasher.
        block_tokens: tokens of a block.
    """

    def __init__(self, stock: Hasher, block_tokens: int, most_bytes: int = CACHE_BYTES) -> None:
        self._stock, self._blocks = stock, max(_RUN_TOKENS // block_tokens, 1)
        self._tokens = self._blocks * block_tokens
        self._most_runs = most_bytes // (4 * self._tokens + _HASH_BYTES * self._blocks + _RUN_BYTES)
        self._runs: OrderedDict[_Key, list[Any]] = OrderedDict()

    def __call__(self, request: Any) -> list[Any]:
        # Blocks that an answer fills come one by one; images and embeddings are in keys of theirs.
        if (
            request.block_hashes
            or request.num_tokens < self._tokens
            or request.mm_features
            or request.prompt_embeds is not None
        ):
            return self._stock(request)
        data = np.array(request.prompt_token_ids, dtype=np.int32).tobytes()
        size = 4 * self._tokens
        lora = request.lora_request.lora_name if request.lora_request else None

        def key_of(before: Any, number: int) -> _Key:
            # The first block's hash holds the salt, and each block's all those before.
            salt = None if number else request.cache_salt
            return before, salt, lora, data[size * number : size * (number + 1)]

        found, known = list[Any](), 0
        for known in range(len(data) // size + 1):
            key = key_of(found[-1] if found else None, known)
            run = self._runs.get(key)
            if run is None:
                break
            self._runs.move_to_end(key)
            found += run
        # vLLM's goes on behind the blocks that have a hash.
        request.block_hashes.extend(found)
        hashes = found + self._stock(request)
        request.block_hashes.clear()
        for number in range(known, len(data) // size):
            at = number * self._blocks
            before = hashes[at - 1] if at else None
            self._keep(key_of(before, number), hashes[at : at + self._blocks])
        return hashes

    def _keep(self, key: _Key, hashes: list[Any]) -> None:
        self._runs[key] = hashes
        while len(self._runs) > self._most_runs:
            self._runs.popitem(last=False)


def install() -> None:
    """Have the engine that is made in this process from now on remember its hashes."""
    stock = core.get_request_block_hasher
    if not getattr(stock, "remembers", False):

        def remembering(hash_block_size: int, caching_hash_fn: Any) -> KnownHashes:
            return KnownHashes(stock(hash_block_size, caching_hash_fn), hash_block_size)

        remembering.remembers = True  # type: ignore[attr-defined]
        core.get_request_block_hasher = remembering
