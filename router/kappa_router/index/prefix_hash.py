"""Prefix hashes of token sequences, one per full block, in one compiled loop.

The decider hashes each prompt with these to look up in the prefix index who holds it; the index
computes the same hashes from the token ids in KV events. They never decide what KV is reused
(engines trust their own hashes), so a collision costs one wrong prediction, not a wrong answer.

Every token is scrambled, multiplied by a secret weight that belongs to its position, and summed
modulo 2^64; the running sum at each block boundary goes through a keyed finaliser. Weights are
pseudo-random rather than powers of one base: modulo 2^64, any base collides on Thue-Morse
sequences of about 2,000 tokens, which a tenant could send without knowing the base.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled, interpreted

UInt64s = NDArray[np.uint64]
Tokens = NDArray[np.integer] | Sequence[int]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SALT_FACTOR = 0xD6E8FEB86659FD93
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(_GOLDEN)
_UNMIX_A, _UNMIX_B = pow(int(_MIX_A), -1, 1 << 64), pow(int(_MIX_B), -1, 1 << 64)


class HashState(NamedTuple):
    """State at a block boundary: enough to hash what follows without the tokens before it."""

    # The unfinalised sum modulo 2^64: it must stay in the process, since it reveals the weights.
    raw_sum: int
    # The number of blocks that it covers.
    blocks: int


ROOT = HashState(0, 0)


def secret_from_seed(seed: bytes | str) -> int:
    """A 64-bit hasher secret from any seed; all decider replicas that share a seed agree."""
    raw = seed.encode() if isinstance(seed, str) else seed
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"kappa-secret").digest())


def salt_of(cache_salt: str | None, lora_name: str | None = None) -> int:
    """A stable 64-bit salt for what, besides tokens, sets KV apart; 0 when nothing does.

    Args:
        cache_salt: the isolation salt of the request (per tenant), or None.
        lora_name: the adapter that made the KV, or None.
    """
    if not cache_salt and not lora_name:
        return 0
    salt, lora = (cache_salt or "").encode(), (lora_name or "").encode()
    raw = len(salt).to_bytes(8) + salt + lora
    digest = hashlib.blake2b(raw, digest_size=8, person=b"kappa-salt").digest()
    return int.from_bytes(digest) or 1


class PrefixHasher:
    """Hashes every full-block prefix of a token sequence.

    Two different prefixes collide with probability about 2^-59 or less for a random secret; an
    index of 10 million blocks queried with 1,000-block prompts sees a false match about once in
    10^8 queries. The odds hold only while tenants do not know the secret: keep it out of logs,
    metrics and responses, and do not hand out hashes either.

    Args:
        block_tokens: tokens in a block; must equal the engine's block size.
        secret: 64-bit key, see `secret_from_seed`.

    Raises:
        ValueError: block_tokens below 1 or a secret outside [0, 2^64).
    """

    __slots__ = ("_key", "_seed", "_token_key", "_weights", "block_tokens")

    def __init__(self, block_tokens: int, secret: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        if not 0 <= secret <= _MASK:
            raise ValueError("secret must fit 64 unsigned bits")
        self.block_tokens = block_tokens
        keys = (secret, secret ^ _GOLDEN, ~secret & _MASK)
        token_key, key, seed = (_mix(np.uint64(each)) for each in keys)
        self._token_key, self._key, self._seed = np.uint64(token_key), int(key), np.uint64(seed)
        self._weights: UInt64s = np.empty(0, dtype=np.uint64)
        # Compiled now rather than while the first request waits.
        self.prefix_hashes(range(block_tokens))

    def prefix_hashes(self, token_ids: Tokens, salt: int = 0) -> UInt64s:
        """Hashes of all full-block prefixes, shape (len(token_ids) // block_tokens,).

        Entry k covers tokens [0, (k+1)·block_tokens); a trailing partial block is left out.

        Raises:
            ValueError: token_ids is not one-dimensional or not integers.
        """
        return self.extend(ROOT, token_ids, salt)

    def extend(self, parent: HashState, token_ids: Tokens, salt: int = 0) -> UInt64s:
        """Hashes of the prefixes that continue `parent` with `token_ids`, one per full block.

        Raises:
            ValueError: token_ids is not one-dimensional or not integers.
        """
        size = self.block_tokens
        tokens = _as_integers(token_ids)
        hashes: UInt64s = np.empty(len(tokens) // size, dtype=np.uint64)
        weights = self._weights_for((parent.blocks + len(hashes)) * size)
        keys = (self._token_key, np.uint64(self._salted(salt)))
        _hash_blocks(
            tokens, weights, size, keys, (np.uint64(parent.raw_sum), parent.blocks), hashes
        )
        return hashes

    def running(self, prefix_hash: int, blocks: int, salt: int = 0) -> HashState:
        """The state behind the hash of a prefix of `blocks` blocks: the finaliser can be undone."""
        mixed = _unmix(_unmix(prefix_hash) ^ self._salted(salt))
        return HashState((mixed - blocks * _GOLDEN) & _MASK, blocks)

    def _salted(self, salt: int) -> int:
        return (self._key + salt * _SALT_FACTOR) & _MASK

    def _weights_for(self, tokens: int) -> UInt64s:
        """Weights for at least `tokens`. The caller uses the returned array: calls may come from
        several threads, and a shorter array may be kept after a longer one.
        """
        weights = self._weights
        if len(weights) < tokens:
            weights = _weights(self._seed, max(4096, 1 << (tokens - 1).bit_length()))
            self._weights = weights
        return weights


def _mixed(values: UInt64s) -> UInt64s:
    """`_mix` of arrays, which wrap around without a warning."""
    mix: Any = interpreted(_mix)
    return mix(values)


@compiled
def _mix(value: np.uint64) -> np.uint64:
    """A bijective 64-bit scramble (xor-shift and multiply, three rounds)."""
    value ^= value >> np.uint64(30)
    value *= _MIX_A
    value ^= value >> np.uint64(27)
    value *= _MIX_B
    return value ^ value >> np.uint64(31)


def _weights(seed: np.uint64, length: int) -> UInt64s:
    """The weight of each position."""
    return _mixed(np.arange(1, length + 1, dtype=np.uint64) * _STEP + seed)


def _hash_blocks_of_arrays(
    tokens: UInt64s, weights: UInt64s, block_tokens: int, keys: tuple[np.uint64, np.uint64],
    parent: tuple[np.uint64, int], hashes: UInt64s,
) -> None:  # fmt: skip
    """`_hash_blocks` without a compiler."""
    (token_key, key), (raw_sum, before), count = keys, parent, len(hashes) * block_tokens
    mixed = (tokens[:count] ^ token_key) * _MIX_A
    at = before * block_tokens
    added = (mixed ^ mixed >> np.uint64(32)) * weights[at : at + count]
    sums = added.reshape(-1, block_tokens).sum(axis=1).cumsum() + raw_sum
    depths = np.arange(before + 1, before + 1 + len(hashes), dtype=np.uint64) * _STEP
    hashes[:] = _mixed(_mixed(sums + depths) ^ key)


@partial(compiled, plain=_hash_blocks_of_arrays)
def _hash_blocks(
    tokens: UInt64s, weights: UInt64s, block_tokens: int, keys: tuple[np.uint64, np.uint64],
    parent: tuple[np.uint64, int], hashes: UInt64s,
) -> None:  # fmt: skip
    """Hashes of the blocks that follow a parent (raw sum, blocks); keys: of tokens, of hashes."""
    token_key, key = keys
    raw_sum, blocks_before = parent
    for block in range(len(hashes)):
        first = block * block_tokens
        at = blocks_before * block_tokens + first
        added = np.uint64(0)
        for i in range(block_tokens):
            # One multiply-and-fold: without it, tokens that differ in a high bit only would leave
            # the low bits of every product equal and shorten the effective hash.
            mixed = (tokens[first + i] ^ token_key) * _MIX_A
            added += (mixed ^ mixed >> np.uint64(32)) * weights[at + i]
        raw_sum += added
        depth = np.uint64(blocks_before + block + 1) * _STEP
        hashes[block] = _mix(_mix(raw_sum + depth) ^ key)


def _unmix(value: int) -> int:
    """The inverse of `_mix`."""
    value ^= value >> 31 ^ value >> 62
    value = value * _UNMIX_B & _MASK
    value ^= value >> 27 ^ value >> 54
    value = value * _UNMIX_A & _MASK
    return value ^ value >> 30 ^ value >> 60


def _as_integers(token_ids: Tokens) -> UInt64s:
    """The ids' bits, widened to 64 with their sign; one type, so that one loop is compiled."""
    if isinstance(token_ids, list | tuple):
        try:
            # Four times as fast as numpy's own conversion, which looks at every item's type first.
            return np.frombuffer(array("Q", token_ids), dtype=np.uint64)
        except (TypeError, OverflowError):
            pass
    ids = np.asarray(token_ids)
    if ids.ndim == 1 and ids.size == 0:
        return np.empty(0, dtype=np.uint64)
    if ids.ndim == 1 and ids.dtype.kind in "iu":
        # The same bits, so that no conversion is needed.
        bits = ids.view(np.uint64) if ids.dtype == np.int64 else ids
        return np.require(bits, np.uint64, ("C", "A", "W"))
    raise ValueError(
        f"token ids must be a one-dimensional run of integers, got shape {ids.shape} of {ids.dtype}"
    )
