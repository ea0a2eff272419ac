"""KV of a batch in host memory as one slab, appended to and attended to on the CPU (paper 002).

Token-major, (layers, sequences, tokens, kv_heads, d) each for keys and values, so that a sequence's
values are one copy. Held in float32 at least: CPUs that sum in half precision are the exception,
and widening is done once, when a prompt has been computed, as the paper does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.arena import ArenaTooLarge, free_host_bytes, pin, unpin
from engine.config import ModelConfig


class CpuKv:
    """Keys and values of `sequences` sequences of at most `most_tokens` tokens.

    lengths (sequences,): tokens of each whose KV is there. `close` unpins.

    Raises:
        ArenaTooLarge: host memory does not hold it, or it cannot be pinned.
    """

    def __init__(
        self,
        config: ModelConfig,
        sequences: int,
        most_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.most_tokens = config, most_tokens
        shape = (2, config.layers, sequences, most_tokens, config.kv_heads, config.head_dim)
        wanted, free = torch.Size(shape).numel() * dtype.itemsize, free_host_bytes()
        if wanted > free:
            raise ArenaTooLarge(
                f"KV of {sequences} sequences of {most_tokens} tokens for the CPU needs {wanted} "
                f"bytes of host memory, but only {free} are free: give fewer or shorter sequences"
            )
        # Zeros: what is not written yet is masked, and must be numbers.
        self._both = torch.zeros(shape, dtype=dtype)
        self.keys, self.values = self._both
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self._pinned = device.type == "cuda"
        if self._pinned:
            pin(self._both, "fewer or shorter sequences")

    def close(self) -> None:
        """Unpin. Nothing may be under way."""
        if self._pinned:
            unpin(self._both)
            self._pinned = False

    def append(self, layer: int, kv: Tensor) -> None:
        """The next token of every sequence, kv (sequences, 2·kv_width); `lengths` stay."""
        rows = kv.view(len(kv), 2, self.config.kv_heads, self.config.head_dim)
        each = torch.arange(len(kv))
        self.keys[layer, each, self.lengths] = rows[:, 0]
        self.values[layer, each, self.lengths] = rows[:, 1]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """One query of each sequence (sequences, heads, d), its own token there: the output.

        (sequences, heads·d). Scores are summed in the dtype of the slab.
        """
        k, v, mask = self._seen(layer)
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self._folded(q), k, v, 0.0, False, attn_mask=mask, scale=self._scale
        )
        return out.reshape(len(q), -1)

    def weights(self, layer: int, q: Tensor) -> Tensor:
        """As `attend`, but before the product with the values: (sequences, heads, tokens)."""
        k, _, mask = self._seen(layer)
        scores = torch.matmul(self._folded(q), k.transpose(2, 3)) * self._scale
        if mask is not None:
            scores = scores + mask
        return scores.softmax(dim=-1).reshape(len(q), self.config.heads, -1)

    @property
    def _scale(self) -> float:
        return float(self.config.head_dim**-0.5)

    def _folded(self, q: Tensor) -> Tensor:
        return q.view(len(q), self.config.kv_heads, -1, self.config.head_dim)

    def _seen(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """K and V (sequences, kv_heads, tokens, d); what to add to scores where lengths differ."""
        stop = int(self.lengths.max()) + 1
        k = self.keys[layer, :, :stop].transpose(1, 2)
        v = self.values[layer, :, :stop].transpose(1, 2)
        if bool((self.lengths == stop - 1).all()):
            return k, v, None
        hidden = torch.arange(stop)[None] > self.lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=k.dtype).masked_fill_(hidden, -torch.inf)
        return k, v, mask[:, None, None, :]
