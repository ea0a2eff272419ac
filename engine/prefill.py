"""Prefill: prompts whose prefix is cached, brought back by load plans, the rest computed.

A plan's segments become sources of tokens: K from host KV blocks, A from activation blocks, R
computed together with the new tokens. Everything ends up in the device blocks and, if asked, the
host blocks that the sequence's pages name. `TorchExecutor` is what `engine.loop` drives: prefill
chunks and decoding rows in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.forward import Forward
from engine.index import build_step
from engine.step import Ids, Pages, Source, Wanted, Work
from kappa.plan.segments import LoadPlan, Segment

if TYPE_CHECKING:
    # The executor needs no loop to be imported.
    from engine.rows import Row
    from engine.sequence import Kept

Sources = NDArray[np.int8]

# More queries of a sequence make attention on a CPU a matter of its FLOPs: what they need of host
# memory crosses the link instead, layer by layer.
_FEW_QUERIES = 4


class PlanRefused(ValueError):
    """A load plan that this engine does not execute, or not for this sequence."""


@dataclass(slots=True)
class Prompt:
    """A prompt to compute. tokens (n,): all of it. pages: where its blocks lie and are to lie.

    The first `start_tokens` are in its blocks; those behind come back by `plan`; the rest is
    computed. store: whether what is new is written to the host blocks of `pages` as well. Of the
    first `cpu_tokens`, those that lie in host memory are attended to there.
    """

    tokens: Ids
    pages: Pages
    plan: LoadPlan | None = None
    start_tokens: int = 0
    store: bool = False
    wanted: Wanted = "last"
    cpu_tokens: int = 0


def prefill(forward: Forward, prompts: Sequence[Prompt]) -> Tensor:
    """Compute prompts together; logits (rows, vocabulary) as wanted, in order.

    Raises:
        PlanRefused: a plan with kinds that are not executed, or for more tokens than there are.
        NoSuchBlock: a plan for tokens that the pages do not have so.
        TransferFailed: a load failed.
    """
    bt = forward.arena.block_tokens
    works = [prompt_work(prompt, bt) for prompt in prompts]
    _check_length(forward, works)
    return forward.run([build_step(works, bt, forward.weights.device)])[0]


def prompt_work(prompt: Prompt, block_tokens: int) -> Work:
    """A prompt as part of a step."""
    tokens = np.asarray(prompt.tokens, np.int64)
    sources = np.full(len(tokens), Source.NEW, np.int8)
    start = prompt.start_tokens
    sources[:start] = held_sources(prompt.pages, start, block_tokens)
    attend_on_cpu(sources[:start], prompt.cpu_tokens)
    end = start
    if prompt.plan is not None:
        end += prompt.plan.cached_tokens
        if end >= len(tokens):
            raise PlanRefused(
                f"a plan for {prompt.plan.cached_tokens} tokens behind {start}, but the prompt has "
                f"{len(tokens)}: at least one token must be computed"
            )
        sources[start:end] = plan_sources(prompt.plan.segments, prompt.pages, start, block_tokens)
    return Work(
        tokens,
        sources,
        prompt.pages,
        store_from=end if prompt.store else 1 << 60,
        wanted=prompt.wanted,
    )


def held_sources(pages: Pages, tokens: int, block_tokens: int, activations: int = 0) -> Sources:
    """Sources of tokens that are in their blocks: the nearest of those that a block has.

    In order: KV on the device, activations on the device, KV in host memory, activations in host
    memory. activations: the first so many tokens come from host activations where there are any,
    and no KV on the device (KVPR's split).
    """
    blocks = -(-tokens // block_tokens)
    there = pages.ids[:, :blocks] >= 0
    sources = np.repeat((there.argmax(axis=0) + Source.KV_DEVICE).astype(np.int8), block_tokens)
    sources = sources[:tokens]
    if activations:
        first = sources[:activations]
        act = np.repeat(there[Source.ACT_HOST - 1], block_tokens)[: len(first)]
        first[act & (first == Source.KV_HOST)] = Source.ACT_HOST
    return sources


def attend_on_cpu(sources: Sources, tokens: int) -> None:
    """Of the first so many tokens, leave those that lie in host memory as KV to the CPU."""
    first = sources[:tokens]
    first[first == Source.KV_HOST] = Source.KV_CPU


def plan_sources(
    segments: Sequence[Segment], pages: Pages, start: int, block_tokens: int
) -> Sources:
    """Sources of the tokens that a plan covers, the first of which is at position `start`.

    Raises:
        PlanRefused: a segment that stays in host memory (C: `pages` say where) or is sparse (S).
    """
    runs = []
    for segment in segments:
        if segment.kind == "K":
            runs.append(np.full(segment.tokens, Source.KV_HOST, np.int8))
        elif segment.kind == "R":
            runs.append(np.full(segment.tokens, Source.NEW, np.int8))
        elif segment.kind == "A":
            at = (start + np.arange(segment.start_tokens, segment.end_tokens)) // block_tokens
            host = np.pad(pages.column("act", "host"), (0, 1), constant_values=-1)
            held = host[np.minimum(at, len(pages))] >= 0
            runs.append(np.where(held, Source.ACT_HOST, Source.ACT_DEVICE).astype(np.int8))
        else:
            raise PlanRefused(
                f"segment {segment.kind} [{segment.start_tokens}, {segment.end_tokens}): prefill "
                "executes K, A and R; plan with those"
            )
    return np.concatenate(runs) if runs else np.empty(0, np.int8)


def _check_length(forward: Forward, works: Sequence[Work]) -> None:
    """Learned positions end; rotary ones do not."""
    longest = max(len(work.sources) for work in works)
    if not forward.config.rope and longest > forward.config.max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens: this model has {forward.config.max_tokens} positions"
        )


class TorchExecutor:
    """The loop's executor: rows of prompts and of decoding sequences, in one pass.

    max_tokens: positions of the model; vocab: token ids are below.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.max_tokens = forward.config.max_tokens
        self.vocab = forward.config.vocab

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Logits (rows, vocabulary) of each row's last token, on the device.

        Raises:
            TransferFailed: a load failed; running the other rows again is safe.
        """
        return prefill(self._forward, [self._prompt(row) for row in rows])

    def _on_cpu(self, kept: Kept, queries: int) -> int:
        """Up to which token the CPU attends to what stays in host memory."""
        size = self._forward.arena.block_tokens
        if not kept.crosses:
            return (kept.start + len(kept.blocks)) * size
        return kept.start * size + kept.cpu_tokens if queries <= _FEW_QUERIES else 0

    def _prompt(self, row: Row) -> Prompt:
        pages = Pages(len(row.blocks))
        pages.put(0, "kv", "device", row.blocks)
        for index, block in row.act_blocks.items():
            pages.put(index, "act", "device", [block])
        load = row.load
        first = row.start if load is None else load.start * self._forward.arena.block_tokens
        # Only what is computed is read, and a long context is a long list.
        tokens = np.zeros(len(row.tokens), np.int64)
        tokens[first:] = row.tokens[first:]
        cpu_tokens = 0
        if row.kept is not None:
            pages.put(row.kept.start, "kv", "host", row.kept.blocks)
            cpu_tokens = self._on_cpu(row.kept, row.new_tokens)
        if load is None:
            return Prompt(tokens, pages, start_tokens=first, cpu_tokens=cpu_tokens)
        pages.put(load.start, "kv", "host", load.kv)
        pages.put(load.start, "act", "host", load.act)
        return Prompt(tokens, pages, load.plan, first, cpu_tokens=cpu_tokens)
