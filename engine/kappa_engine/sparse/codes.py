"""Hash codes of keys: the signs of random projections, packed 64 to a word, compared by popcount.

Two vectors' codes agree in a share of bits that falls with the angle between them, so the keys with
the most bits in common are those with the highest scores, nearly (as HATA of paper 004 does with
projections that it trains; these are random, from a seed, behind maps that `kappa heads` fits to a
model's queries and keys, if it did: `kappa.plans.head_codes`). One code per token and KV head, kept
on the device under the host block that holds the key.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kappa.plans.head_codes import CodeMaps

WORD_BITS = 64
_SEED = 0
# With more queries per key, codes are multiplied as +1 and -1 rather than counted bit by bit.
_COUNTED_QUERIES = 16


class Hasher:
    """Makes codes of `bits` bits (a multiple of 64) of vectors of `head_dim` elements.

    maps: of each layer's queries and keys; None: none.
    """

    def __init__(
        self, head_dim: int, bits: int, dtype: torch.dtype, device: torch.device,
        maps: CodeMaps | None = None,
    ) -> None:  # fmt: skip
        self._maps = None
        if maps is not None:
            self._maps = [
                torch.from_numpy(of).to(dtype).to(device)
                for of in (maps.balance, maps.inverse(), maps.centre)
            ]
        self.bits, self.words = bits, bits // WORD_BITS
        planes = np.random.default_rng(_SEED).standard_normal((head_dim, bits)).astype(np.float32)
        self._planes = torch.from_numpy(planes).to(dtype).to(device)
        # Bit 63 is the sign of a word.
        weights = [1 << bit for bit in range(WORD_BITS - 1)] + [-(1 << (WORD_BITS - 1))]
        self._weights = torch.tensor(weights, dtype=torch.int64, device=device)

    def of_queries(self, layer: int, heads: Tensor, queries: Tensor) -> Tensor:
        """Codes (n, queries, words) of queries (n, queries, head_dim) of KV heads (n,)."""
        if self._maps is not None:
            queries = torch.bmm(queries, self._maps[0][layer, heads])
        return self.encode(queries)

    def of_keys(self, layer: int, heads: Tensor, keys: Tensor) -> Tensor:
        """Codes (..., n, words) of keys (..., n, head_dim) of KV heads (n,)."""
        if self._maps is not None:
            keys = keys - self._maps[2][layer, heads]
            keys = torch.einsum("...nd,nde->...ne", keys, self._maps[1][layer, heads])
        return self.encode(keys)

    def encode(self, vectors: Tensor) -> Tensor:
        """Codes (..., words) int64 of vectors (..., head_dim)."""
        positive = torch.matmul(vectors, self._planes) > 0
        if positive.device.type == "cpu":
            packed = np.packbits(positive.numpy(), axis=-1, bitorder="little")
            return torch.from_numpy(packed.view(np.int64))
        grouped = positive.view(*vectors.shape[:-1], self.words, WORD_BITS)
        return (grouped * self._weights).sum(dim=-1)

    def unpack(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Codes as +1 and -1 (..., bits)."""
        bits = (codes[..., None] >> torch.arange(WORD_BITS, device=codes.device)) & 1
        return (2 * bits - 1).flatten(-2).to(dtype)

    def agreement(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bits in common of codes (heads, queries, words) and (heads, keys, words), summed over all
        queries of a head: (heads, keys) float32."""
        count = queries.shape[1]
        if count <= _COUNTED_QUERIES:
            apart = popcount(keys[:, None] ^ queries[:, :, None]).sum(dim=1, dtype=torch.int16)
            apart = apart.sum(dim=-1)
            return (count * self.bits - apart).to(torch.float32)
        signs = self.unpack(queries, torch.float32).sum(dim=1)
        dots = torch.matmul(self.unpack(keys, torch.float32), signs[..., None])[..., 0]
        return (count * self.bits + dots) / 2


def popcount(words: Tensor) -> Tensor:
    """Bits set in each int64 word; counted by the processor's own instruction on a CPU."""
    if words.device.type == "cpu":
        return torch.from_numpy(np.bitwise_count(words.numpy().view(np.uint64)))
    return _bits_by_halves(words)


def _bits_by_halves(words: Tensor) -> Tensor:
    x = words - ((words >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56
