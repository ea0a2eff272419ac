"""Measures a model's heads over text: what each is worth, and how alike its queries are.

A head is worth what is lost where it sees no more than the first and the latest tokens. Each text
is computed exactly; then its last tokens once more for each query head, which attends as a
streaming head would while all others attend to everything, as a decoding step behind an exact
context. The loss is the divergence of the next token's distribution from the exact one. This is
ablation in place of the gates that paper 004 trains (Appendix A); `kappa.plans.clo.gates` says
which gate such a loss stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kappa.plans.clo import CloConfig, HeadProfile, Scores, gates, group_similarity
from kappa.plans.head_codes import Moments, code_maps
from kappa_engine import layers
from kappa_engine.block_pool import Ids
from kappa_engine.sparse.cache import cosines
from kappa_engine.weights import Layer, Weights

TAIL = 32
"""Last tokens of each text, which are computed with a head ablated."""
# Rows of a batch of ablations, in tokens.
_ROWS = 1_024
_DIGITS = 5
_HIDDEN = " Remember this: the pass key is {}."
_ASKED = "\n\nThe pass key to be remembered is {}."

Encode = Callable[[str], list[int]]
"""Token ids of a text."""


def pieces(text: str, encode: Encode, count: int, tokens: int) -> Iterator[Ids]:
    """Pieces of a text, evenly spread, each of `tokens` token ids. Every other one hides a number,
    at another depth each time, and ends with it.

    Raises:
        ValueError: the text is too short.
    """
    every, rng = np.array(encode(text)), np.random.default_rng(0)
    if len(every) < count * tokens:
        raise ValueError(
            f"the text has {len(every)} tokens: {count} pieces of {tokens} need {count * tokens}; "
            "give a longer text, or fewer or shorter pieces"
        )
    for number in range(count):
        first = number * (len(every) // count)
        piece = every[first : first + tokens]
        if number % 2 == 0:
            key = str(rng.integers(10 ** (_DIGITS - 1), 10**_DIGITS))
            hidden, asked = (encode(words.format(key)) for words in (_HIDDEN, _ASKED))
            room = tokens - len(hidden) - len(asked)
            at = int((number + 0.5) / count * room)
            piece = np.concatenate((piece[:at], hidden, piece[at:room], asked))
        yield piece


def measure_heads(
    weights: Weights, texts: Sequence[Ids], clo: CloConfig, goes_on: Callable[[int, int], bool]
) -> tuple[HeadProfile, int]:
    """Importance and similarity of a model's heads, and by how many of the texts.

    Args:
        goes_on: is told how many texts and layers of the next are done; the text under way is left
            out where it says no.

    Raises:
        ValueError: a text has more tokens than the model has learned positions, or no text was
            done.
    """
    one = HeadPass(weights, clo, TAIL)
    found: list[HeadMeasures] = []
    for text in texts:
        measured = one.measure(text, lambda layers: goes_on(len(found), layers))
        if measured is None:
            break
        found.append(measured)
    if not found:
        raise ValueError("time ran out before one text was done: give more, or shorter texts")
    importance = gates(np.mean([each.damage for each in found], axis=0))
    similar = np.concatenate([each.cosines for each in found])
    similarity = group_similarity(similar, importance, weights.config.kv_heads)
    maps = code_maps(reduce(add, (each.moments for each in found)))
    return HeadProfile(importance, similarity, "measured", maps), len(found)


@dataclass(frozen=True, slots=True)
class HeadMeasures:
    """Of one text."""

    # Divergence in nats a token when a query head sees first and latest tokens alone, shape
    # (layers, heads).
    damage: Scores
    # Cosines of predicted queries with those of the token before, shape (steps, layers, heads).
    cosines: Scores
    # Of queries, and of keys behind the first tokens.
    moments: Moments


@dataclass(slots=True)
class _Exact:
    """An exact pass over one text, as far as ablations of its last tokens need it."""

    # Of each layer: states (tail, hidden) before it, queries (tail, heads, d) and attention to all.
    inputs: list[Tensor]
    queries: list[Tensor]
    attended: list[Tensor]
    # Keys and values (2, kv_heads, tokens, d).
    kv: list[Tensor]
    # (steps, heads) of each layer.
    cosines: list[Tensor]
    # Σqqᵀ of each layer, (kv_heads, d, d), by the KV head that serves a query.
    asked: list[Tensor]


class HeadPass:
    """Passes of a model over texts, on its device.

    Args:
        tail: last tokens of each text that are computed with a head ablated.
        clo: how many first and latest tokens an ablated head sees.
    """

    def __init__(self, weights: Weights, clo: CloConfig, tail: int) -> None:
        self.weights, self.config, self.tail = weights, weights.config, tail
        self._clo, self._angles = clo, layers.rotation(weights)

    @torch.no_grad()
    def measure(self, text: Ids, goes_on: Callable[[int], bool]) -> HeadMeasures | None:
        """Measure all heads by one text of token ids.

        goes_on: is told how many layers are done; where it says no, there is no result.

        Raises:
            ValueError: it is longer than the model's learned positions, or no longer than `tail`.
        """
        config, tokens = self.config, len(text)
        if tokens <= self.tail or not (config.rope or tokens <= config.max_tokens):
            raise ValueError(
                f"a text of {tokens} tokens: give more than {self.tail}, and no more than "
                f"{config.max_tokens}, this model's positions"
            )
        ids = torch.as_tensor(text, device=self.weights.device)
        positions = torch.arange(tokens, device=ids.device)
        hidden, exact = self._exact(ids, positions)
        mine = positions[-self.tail :]
        # Which keys (tail, tokens) each of the last tokens sees: all before it, or few.
        every = positions <= mine[:, None]
        few = (positions < self._clo.sink_tokens) | (
            positions > mine[:, None] - self._clo.recent_tokens
        )
        wanted = self._log_shares(hidden)
        damage = np.zeros((config.layers, config.heads))
        most = max(1, _ROWS // self.tail)
        for layer in range(config.layers):
            if not goes_on(layer):
                return None
            few_seen = self._attend(
                exact.queries[layer][None], exact.kv[layer][:, None], every & few
            )
            for first in range(0, config.heads, most):
                heads = range(first, min(first + most, config.heads))
                states = self._ablated(layer, heads, exact, few_seen[0])
                got = self._rest(layer, states, exact, every, mine)
                damage[layer, heads.start : heads.stop] = self._divergence(wanted, got)
        similar = torch.stack(exact.cosines, dim=1)
        return HeadMeasures(damage, _doubles(similar), self._moments(exact))

    def _exact(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, _Exact]:
        """States (tail, hidden) behind the last layer, and what the pass leaves."""
        config, turn, tail = self.config, self._angles(positions), self.tail
        hidden = before = layers.embed(self.weights, ids, positions)
        kept = _Exact([], [], [], [], [], [])
        causal = positions <= positions[:, None]
        for layer in self.weights.layers:
            # The first layer's queries are its own: nothing comes before to predict them.
            a = layers.attention_input(before, layer, config)
            predicted = layers.project_q(a, layer, config, turn)
            kept.cosines.append(cosines(predicted[1:], predicted[:-1]))
            a = layers.attention_input(hidden, layer, config)
            queries = layers.project_q(a, layer, config, turn)
            kv = self._kv(a, layer, turn, 1)
            attended = self._attend(queries[None], kv, causal)[0]
            kept.inputs.append(hidden[-tail:])
            kept.queries.append(queries[-tail:])
            kept.attended.append(attended[-tail:])
            kept.kv.append(kv[:, 0])
            grouped = queries.view(len(ids), config.kv_heads, -1, config.head_dim)
            kept.asked.append(torch.einsum("nhgd,nhge->hde", grouped, grouped))
            before = hidden
            hidden = layers.project_out(hidden, attended.flatten(1), layer, config)
            hidden = layers.feed_forward(hidden, layer, config)
        return hidden[-tail:], kept

    def _moments(self, exact: _Exact) -> Moments:
        """Of all queries, and of all keys but the first tokens', which are never chosen."""
        keys = torch.stack([kv[0, :, self._clo.sink_tokens :] for kv in exact.kv])
        products = torch.einsum("lhnd,lhne->lhde", keys, keys)
        asked = torch.stack(exact.asked)
        return Moments(
            _doubles(asked), _doubles(products), _doubles(keys.sum(dim=2)), keys.shape[2]
        )

    def _kv(self, a: Tensor, layer: Layer, turn: layers.Angles, batch: int) -> Tensor:
        """Keys and values (2, batch, kv_heads, tokens, d) of states (batch·tokens, hidden)."""
        config = self.config
        out = a.new_empty((len(a), 2 * config.kv_width))
        layers.project_kv(a, layer, config, turn, out)
        shaped = out.view(batch, -1, 2, config.kv_heads, config.head_dim)
        return shaped.permute(2, 0, 3, 1, 4)

    def _attend(self, queries: Tensor, kv: Tensor, seen: Tensor) -> Tensor:
        """Output (batch, new, heads, d) of queries (batch, new, heads, d) over keys and values
        (2, batch, kv_heads, tokens, d), of which seen (new, tokens) may be attended to."""
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2), kv[0], kv[1], seen,
            scale=self.config.head_dim**-0.5, enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2)

    def _ablated(self, layer: int, heads: range, exact: _Exact, few: Tensor) -> Tensor:
        """States (heads·tail, hidden) behind a layer, each with one head's output (tail, heads, d)
        from `few`."""
        tensors, config = self.weights.layers[layer], self.config
        mixed = exact.attended[layer].expand(len(heads), -1, -1, -1).clone()
        for row, head in enumerate(heads):
            mixed[row, :, head] = few[:, head]
        states = exact.inputs[layer].repeat(len(heads), 1)
        states = layers.project_out(states, mixed.flatten(0, 1).flatten(1), tensors, config)
        return layers.feed_forward(states, tensors, config)

    def _rest(
        self, layer: int, states: Tensor, exact: _Exact, every: Tensor, positions: Tensor
    ) -> Tensor:
        """States behind the last layer of those behind `layer`, over the exact context."""
        config, batch = self.config, len(states) // self.tail
        turn = self._angles(positions.repeat(batch))
        for index in range(layer + 1, config.layers):
            tensors = self.weights.layers[index]
            a = layers.attention_input(states, tensors, config)
            queries = layers.project_q(a, tensors, config, turn)
            new = self._kv(a, tensors, turn, batch)
            before = exact.kv[index][:, None, :, : -self.tail].expand(-1, batch, -1, -1, -1)
            shaped = queries.view(batch, self.tail, config.heads, -1)
            attended = self._attend(shaped, torch.cat((before, new), dim=3), every)
            states = layers.project_out(states, attended.reshape(len(states), -1), tensors, config)
            states = layers.feed_forward(states, tensors, config)
        return states

    def _log_shares(self, states: Tensor) -> Tensor:
        """Log-probabilities of the next token, in float32 at least."""
        found = layers.logits(states, self.weights)
        return found.to(torch.promote_types(found.dtype, torch.float32)).log_softmax(dim=-1)

    def _divergence(self, wanted: Tensor, states: Tensor) -> Scores:
        """Mean KL divergence from `wanted` (tail, vocabulary) for each batch of states."""
        found = []
        for one in states.split(self.tail):
            got = self._log_shares(one)
            found.append(F.kl_div(got, wanted, reduction="sum", log_target=True) / self.tail)
        return np.maximum(_doubles(torch.stack(found)), 0.0)


def _doubles(tensor: Tensor) -> Scores:
    """On the host."""
    return np.asarray(tensor.double().cpu().numpy())
