"""Decoding with weights and KV in host memory, the CPU computing while weights cross (paper 002).

Per layer the CPU computes the attention of the batch, as far as its plan says, and perhaps some
columns of the MLP's first projection, while the device is sent the other weights; the device
computes the rest. Prompts are computed on the device alone. One batch, greedy tokens, exact: where
weights are in half precision, the CPU computes in float32, into which its weights are widened once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.offload.cpu_kv import CpuKv
from benchmarks.offload.cpu_weights import CpuWeights, LayerStream
from engine import layers
from engine.cpu_worker import CpuWorker, result
from engine.forward import Forward
from engine.layers import angles
from engine.prefill import Prompt, prompt_work
from engine.step import Ids, Pages
from engine.step_builder import build_step
from kappa.plans.cpu_offload import Mode


@dataclass(frozen=True, slots=True)
class Share:
    """What the CPU computes of every layer: of attention by mode, and columns of FC1 (full mode).

    Columns are of one of gate and value where the MLP is gated: as many of each are computed.
    """

    mode: Mode = "mha"
    columns: int = 0


# The CPU's share when sequences have so many tokens each, at most.
Plan = Callable[[int], Share]


class CpuOffload:
    """Prompts of one batch, then tokens.

    Args:
        forward: for the prompts: a model with streamed weights, and host blocks for some sequence's
            prompt at least.
        threads: of the CPU.
        sequences: of the batch.
        most_tokens: of a sequence, its answer included.
        plan: the CPU's share by length.

    `close` ends its thread and unpins.

    Raises:
        ValueError: weights on the device.
        ArenaTooLarge: host memory does not hold the batch's KV.
    """

    def __init__(
        self, forward: Forward, *, threads: int, sequences: int, most_tokens: int, plan: Plan
    ) -> None:
        weights = forward.weights
        if not weights.streamed:
            raise ValueError(
                "the CPU computes with weights in host memory, and these are on the device: "
                "give streamed=True"
            )
        self.forward, self.plan = forward, plan
        self.config, self.device = forward.config, weights.device
        self.dtype = torch.promote_types(weights.dtype, torch.float32)
        self.kv = CpuKv(self.config, sequences, most_tokens, self.dtype, self.device)
        self.cpu = CpuWeights(weights, self.dtype)
        self.stream = LayerStream(weights, forward.mover, self.kv)
        self.worker = CpuWorker(threads)
        self._last = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        self._generated: list[Tensor] = []

    def close(self) -> None:
        """End the thread, wait for copies, unpin."""
        self.worker.stop()
        self.forward.mover.drain()
        self.kv.close()

    def tokens(self) -> Ids:
        """What was generated, (sequences, tokens)."""
        return torch.stack(self._generated, dim=1).cpu().numpy()

    # -- prompts --------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        """Begin with new prompts, computed on the device; logits (sequences, vocabulary).

        As many at a time as the arena's host blocks hold; each time their KV is widened and moved
        to the slab. So are the CPU's weights, behind the last.

        Raises:
            ValueError: another number of prompts than sequences, or one that is too long.
            OutOfBlocks: the arena does not hold one prompt.
        """
        self.kv.lengths.zero_()
        self._generated = []
        longest = max(len(p) for p in prompts)
        if len(prompts) != len(self.kv.lengths) or longest >= self.kv.most_tokens:
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens: this batch is of "
                f"{len(self.kv.lengths)} sequences of {self.kv.most_tokens} tokens at most, "
                "answers included"
            )
        logits: list[Tensor] = []
        for first, stop in self._turns(prompts):
            logits += self._compute(first, prompts[first:stop])
        self.cpu.widen()
        scores = torch.stack(logits)
        self._take(scores)
        self.begin()
        return scores

    def _turns(self, prompts: Sequence[Ids]) -> list[tuple[int, int]]:
        """[first, stop) of prompts that the arena's host blocks hold together."""
        room, bt = self.forward.arena.pools["kv", "host"].unused, self.forward.arena.block_tokens
        cuts, needed = [0], 0
        for index, tokens in enumerate(prompts):
            blocks = -(-len(tokens) // bt)
            if needed and needed + blocks > room:
                cuts.append(index)
                needed = 0
            needed += blocks
        return list(pairwise([*cuts, len(prompts)]))

    def _compute(self, first: int, prompts: Sequence[Ids]) -> list[Tensor]:
        arena = self.forward.arena
        pool, bt = arena.pools["kv", "host"], arena.block_tokens
        taken: list[list[int]] = []
        try:
            works = []
            for tokens in prompts:
                taken.append(pool.allocate(-(-len(tokens) // bt)))
                pages = Pages()
                pages.put(0, "kv", "host", taken[-1])
                works.append(prompt_work(Prompt(tokens, pages, store=True), bt))
            logits = self.forward.run([build_step(works, bt, self.device)])[0]
            self.forward.mover.drain()
            for index, (tokens, blocks) in enumerate(zip(prompts, taken, strict=True), first):
                self._move(index, len(tokens), blocks)
        finally:
            for blocks in taken:
                pool.free(blocks)
        return list(logits)

    def _move(self, index: int, tokens: int, blocks: list[int]) -> None:
        """A prompt's KV from its blocks to the slab."""
        for layer, host in enumerate(self.forward.arena.kv_host):
            held = host[torch.as_tensor(blocks)]
            for where, slab in enumerate((self.kv.keys, self.kv.values)):
                rows = held[:, where].flatten(0, 1)[:tokens]
                slab[layer, index, :tokens].copy_(rows)
        self.kv.lengths[index] = tokens

    # -- tokens ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> Tensor:
        """The next token of every sequence; logits (sequences, vocabulary).

        Raises:
            TransferFailed: a copy, or the CPU's share, failed or did not end in time.
        """
        share = self._share()
        positions = self.kv.lengths.clone()
        weights = self.forward.weights
        hidden = layers.embed(weights, self._last, positions.to(self.device))
        x = self.to_cpu(hidden)
        turned = self.turned(positions)
        for layer in range(self.config.layers):
            part = self.worker.submit(partial(self.on_cpu, layer, x, turned, share))
            if layer + 1 < self.config.layers:
                self.stream.begin(layer + 1, share.mode, share.columns)
            hidden = self.finish(layer, hidden, result(part), share)
            x = self.to_cpu(hidden)
        self.kv.lengths += 1
        scores = layers.logits(hidden, weights)
        self._take(scores)
        if int(self.kv.lengths.max()) < self.kv.most_tokens:
            self.begin()
        return scores

    def _share(self) -> Share:
        share = self.plan(int(self.kv.lengths.max()) + 1)
        return share if share.mode == "mha" else Share(share.mode)

    def begin(self) -> None:
        """Start to send what the device needs first of the next step."""
        share = self._share()
        self.stream.begin(0, share.mode, share.columns)

    def _take(self, scores: Tensor) -> None:
        self._last = scores.argmax(dim=-1)
        self._generated.append(self._last)

    def to_cpu(self, x: Tensor) -> Tensor:
        """As the CPU computes with it; waits for it."""
        return x.to("cpu", self.dtype)

    def turned(self, positions: Tensor) -> layers.Angles:
        """Angles of rotary positions (sequences,), for the CPU."""
        if self.forward.rope is None:
            return None
        inverse, factor = self.forward.rope
        return angles(positions, inverse.cpu(), factor, self.dtype)

    def on_cpu(self, layer: int, x: Tensor, turned: layers.Angles, share: Share) -> list[Tensor]:
        """The CPU's part of a layer, from hidden states (sequences, hidden).

        Returns:
            Full mode: hidden states behind attention, and FC1's first columns of them. Without the
            output projection: attention's output. Without the values, too: the weights of all
            tokens, and the new one's values.
        """
        config, mine = self.config, self.cpu.layer(layer)
        a = layers.attention_input(x, mine, config)
        q = layers.project_q(a, mine, config, turned)
        kv = torch.empty((len(x), 2 * config.kv_width), dtype=self.dtype)
        layers.project_kv(a, mine, config, turned, kv)
        self.kv.append(layer, kv)
        if share.mode == "mha-av-o":
            return [self.kv.weights(layer, q), kv[:, config.kv_width :].contiguous()]
        attended = self.kv.attend(layer, q)
        if share.mode == "mha-o":
            return [attended]
        x = layers.add_attention(x, attended, mine, config)
        if not share.columns:
            return [x]
        taken = layers.mlp_input(x, mine, config)
        return [x, *(F.linear(taken, w, b) for w, b in self.cpu.columns(layer, share.columns))]

    def finish(self, layer: int, hidden: Tensor, part: list[Tensor], share: Share) -> Tensor:
        """The device's part of a layer: hidden states behind it."""
        config, dtype = self.config, self.forward.weights.dtype
        sent = [x.to(self.device) for x in part]
        there = self.stream.wait(layer)
        if share.mode == "mha":
            x = sent[0].to(dtype)
        else:
            attended = self._times_values(*sent) if share.mode == "mha-av-o" else sent[0]
            x = layers.add_attention(hidden, attended.to(dtype), there, config)
        taken = layers.mlp_input(x, there, config)
        ups = [F.linear(taken, w, b) for w, b in self.stream.columns()]
        if share.columns:
            pairs = zip(sent[1:], ups, strict=True)
            ups = [torch.cat((first.to(dtype), rest), dim=-1) for first, rest in pairs]
        x = layers.add_mlp(x, torch.cat(ups, dim=-1) if len(ups) > 1 else ups[0], there, config)
        self.stream.used()
        return x

    def _times_values(self, weights: Tensor, new: Tensor) -> Tensor:
        """Attention's output from the weights of all tokens, (sequences, heads·d)."""
        config, values = self.config, self.stream.values()
        each = torch.arange(len(new), device=self.device)
        shape = (len(new), config.kv_heads, config.head_dim)
        values[each, self.kv.lengths.to(self.device)] = new.view(shape)
        seen = values[:, : weights.shape[-1]].transpose(1, 2)
        grouped = weights.view(len(new), config.kv_heads, -1, weights.shape[-1])
        return torch.matmul(grouped, seen).reshape(len(new), -1)
