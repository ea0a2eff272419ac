"""Prefill: prompts whose prefix is cached, brought back by load plans, the rest computed.

A plan's segments become sources of tokens: K from host KV blocks, A from activation blocks, R
computed together with the new tokens. Everything ends up in the device blocks and, if asked, the
host blocks that the sequence's pages name. `compute_rows` is what `engine.loop` drives: prefill
chunks and decoding rows in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.blocks import Ids
from engine.forward import Forward
from engine.sequence import Kept, Load
from engine.step import Decode, Pages, Source, Wanted, Work
from engine.step_builder import build_step
from kappa.plans.load_plan import LoadPlan, Segment

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
    return _compute(
        forward, [prompt_work(prompt, forward.arena.block_tokens) for prompt in prompts]
    )


def prompt_work(prompt: Prompt, block_tokens: int) -> Work | Decode:
    """A prompt as part of a step."""
    tokens = np.asarray(prompt.tokens, np.int64)
    if (found := _as_decode(prompt, tokens, block_tokens)) is not None:
        return found
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


def _as_decode(prompt: Prompt, tokens: Ids, block_tokens: int) -> Decode | None:
    """A prompt of which but one token is to be computed behind what device blocks hold."""
    last = len(tokens) - 1
    special = prompt.plan is not None or prompt.store or prompt.cpu_tokens
    if special or prompt.start_tokens != last or prompt.wanted == "none":
        return None
    index = last // block_tokens
    held = prompt.pages.column("kv", "device")[: index + 1]
    if len(held) <= index or held.min() < 0:
        return None
    act = int(prompt.pages.column("act", "device")[index])
    return Decode(int(tokens[last]), last, held, act)


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


def _compute(forward: Forward, works: Sequence[Work | Decode]) -> Tensor:
    # Learned positions end; rotary ones do not.
    longest = max(work.length for work in works)
    if not forward.config.rope and longest > forward.config.max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens: this model has {forward.config.max_tokens} positions"
        )
    step = build_step(works, forward.arena.block_tokens, forward.weights.device)
    return forward.run([step])[0]


@dataclass(slots=True)
class Row:
    """Tokens of one sequence to compute: one if it decodes, a chunk of its prompt otherwise.

    tokens: ids from position `first` to the last one to compute. start: the first that is new; KV
    of those before `first` is in `blocks`, and those between come by `load`, whose end is `start`.
    blocks: device blocks of KV, block i for positions [i·block_tokens, (i+1)·block_tokens); room
    for all tokens, -1 for what stays in host memory (`kept`). act_blocks: device blocks that take
    the activations of the blocks computed here, by block index; one without is not captured.
    """

    tokens: list[int]
    start: int
    blocks: Ids
    load: Load | None = None
    act_blocks: dict[int, int] = field(default_factory=dict)
    kept: Kept | None = None

    @property
    def first(self) -> int:
        """The position of the first of `tokens`."""
        return self.start if self.load is None else self.load.start * self.load.block_tokens

    @property
    def stop(self) -> int:
        """Tokens of the sequence up to the last one to compute."""
        return self.first + len(self.tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens to compute."""
        return self.stop - self.start


def compute_rows(forward: Forward, rows: Sequence[Row]) -> Tensor:
    """Compute rows together, write their KV; logits (rows, vocabulary) of each one's last token.

    Raises:
        TransferFailed: a load of one of the rows failed; running the others again is safe.
    """
    return _compute(forward, [_row_work(row, forward.arena.block_tokens) for row in rows])


def _row_work(row: Row, block_tokens: int) -> Work | Decode:
    """A row as part of a step: what decodes from the device needs its block table, no more."""
    if row.new_tokens == 1 and row.load is None and row.kept is None:
        act = row.act_blocks.get(row.start // block_tokens, -1)
        return Decode(row.tokens[0], row.start, row.blocks, act)
    pages = Pages(len(row.blocks))
    pages.put(0, "kv", "device", row.blocks)
    for index, block in row.act_blocks.items():
        pages.put(index, "act", "device", [block])
    # Of those before only the sources are read.
    tokens = np.zeros(row.stop, np.int64)
    tokens[row.first :] = row.tokens
    prompt = Prompt(tokens, pages, start_tokens=row.first)
    if row.kept is not None:
        pages.put(row.kept.start, "kv", "host", row.kept.blocks)
        prompt.cpu_tokens = _on_cpu(row.kept, row.new_tokens, block_tokens)
    if row.load is not None:
        prompt.plan = row.load.plan
        pages.put(row.load.start, "kv", "host", row.load.kv)
        pages.put(row.load.start, "act", "host", row.load.act)
    return prompt_work(prompt, block_tokens)


def _on_cpu(kept: Kept, queries: int, block_tokens: int) -> int:
    """Up to which token the CPU attends to what stays in host memory."""
    if not kept.crosses:
        return (kept.start + len(kept.blocks)) * block_tokens
    return kept.start * block_tokens + kept.cpu_tokens if queries <= _FEW_QUERIES else 0
