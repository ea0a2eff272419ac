"""What sparse decoding must say, from Hugging Face's own model: its attention, but for a mask.

A `Choice` says which tokens each KV head may see at each generated position, from the queries and
keys of that model, written down independently of `engine.sparse`: full matrices, one position after
the other, no slots, places or blocks but for the rule when a token stops being recent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kappa.plans.clo import CloConfig
from tests.engine import hf
from tests.engine.rig import BLOCK


def host_part(tokens: int, recent: int) -> int:
    """Tokens that have left the recent ones by whole blocks."""
    return max(0, tokens - recent) // BLOCK * BLOCK


@dataclass
class Choice:
    """clo: of the method. prompt: tokens computed with full attention. full: layers whose heads
    see all. stale: choose at the first generated position only. query: whose queries choose, of
    layer and position; the model's own if not given."""

    clo: CloConfig
    prompt: int
    full: tuple[int, ...] = (0,)
    stale: bool = False
    query: Callable[[int], Tensor] | None = None
    chosen: dict[tuple[int, int], list[set[int]]] = field(default_factory=dict)

    def seen(self, layer: int, q: Tensor, k: Tensor) -> Tensor:
        """(kv_heads, queries, keys) bool; q (heads, n, d), k (kv_heads, n, d)."""
        heads, count = k.shape[:2]
        mask = torch.ones((count, count), dtype=torch.bool).tril().expand(heads, -1, -1).clone()
        if layer in self.full:
            return mask
        for at in range(self.prompt, count):
            off = host_part(at, self.clo.recent_tokens)
            mask[:, at] = False
            mask[:, at, : self.clo.sink_tokens] = True
            mask[:, at, off : at + 1] = True
            for head, tokens in enumerate(self._tokens(layer, at, off, q, k)):
                mask[head, at, list(tokens)] = True
        return mask

    def _tokens(self, layer: int, at: int, off: int, q: Tensor, k: Tensor) -> list[set[int]]:
        if self.stale and (layer, at - 1) in self.chosen:
            # What has left since is kept as far as the choice grew.
            before = self.chosen[layer, at - 1]
            count = self._count(at, off)
            grown = count - len(before[0])
            chosen = [old | set(range(off - grown, off)) for old in before]
        else:
            chosen = self._best(layer, at, off, q, k)
        self.chosen[layer, at] = chosen
        return chosen

    def _count(self, at: int, off: int) -> int:
        """k, as of when the last block left: at the prompt's end or later."""
        since = max(self.prompt, off + self.clo.recent_tokens)
        return min(self.clo.chosen_tokens(since), max(0, off - self.clo.sink_tokens))

    def _best(self, layer: int, at: int, off: int, q: Tensor, k: Tensor) -> list[set[int]]:
        sinks, count = self.clo.sink_tokens, self._count(at, off)
        asking = q if self.query is None else self.query(layer)
        groups = asking[:, at].view(len(k), -1, q.shape[-1])
        found = []
        for head, group in enumerate(groups):
            scores = group @ k[head, sinks:off].T * q.shape[-1] ** -0.5
            best = scores.softmax(-1).sum(0).topk(count).indices + sinks
            found.append(set(best.tolist()))
        return found


_NOW: list[Choice] = []


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, scaling: float, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    seen = _NOW[0].seen(module.layer_idx, query[0], key[0])
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    seen = seen.repeat_interleave(query.shape[1] // len(seen), dim=0)
    scores = scores.masked_fill(~seen[None], -torch.inf)
    return torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2).contiguous(), None


AttentionInterface.register("chosen", _attention)
AttentionMaskInterface.register("chosen", eager_mask)


@torch.no_grad()
def logits(family: str, tokens: Any, choice: Choice) -> Tensor:
    """Their logits (tokens, vocabulary), of a model whose heads see what `choice` says."""
    model = hf.reference(family)
    before = model.config._attn_implementation
    _NOW[:] = [choice]
    model.config._attn_implementation = "chosen"
    try:
        out: Tensor = model(torch.as_tensor(tokens)[None], use_cache=False).logits[0]
        return out
    finally:
        model.config._attn_implementation = before
        _NOW.clear()
