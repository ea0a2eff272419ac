"""Rows and steps: where blocks lie, which copies a step makes, how queries are grouped."""

import numpy as np
import pytest
import torch

from kappa.plans.load_plan import layout
from kappa_engine.input_batch import build_step
from kappa_engine.step import NoSuchBlock, Pages, Source, StepRow, TokenSpan, joined, prompt_row

BLOCK = 4
CPU = torch.device("cpu")


def decoding(length: int, first: int, act_block: int = -1, source=Source.KV_DEVICE) -> StepRow:
    """The next token of a sequence of `length` tokens, in blocks from `first` on."""
    pages, last = Pages(), length // BLOCK
    place = "device" if source is Source.KV_DEVICE else "host"
    pages.put(0, "kv", place, list(range(first, first + last + 1)))
    if act_block >= 0:
        pages.put(last, "act", "device", [act_block])
    return StepRow(
        [7], (TokenSpan(source, 0, length), TokenSpan(Source.NEW, length, length + 1)), pages
    )


def fresh(wanted="last", tokens=9) -> StepRow:
    return prompt_row(np.arange(tokens), Pages(), wanted=wanted)


def test_pages_grow_with_what_is_put_into_them():
    pages = Pages()
    pages.put(0, "kv", "host", [7])
    pages.put(1, "act", "device", [2])
    pages.put(1, "kv", "device", [4, 5])
    assert pages.column("kv", "device").tolist() == [-1, 4, 5]
    assert pages.column("act", "device").tolist() == [-1, 2]
    assert pages.of(Source.KV_HOST, np.arange(3)).tolist() == [7, -1, -1]
    assert pages.of(Source.KV_CPU, np.array([0])).tolist() == [7]
    assert pages.of(Source.KV_DEVICE, np.array([2, 1])).tolist() == [5, 4]


def test_neighbouring_spans_of_one_source_are_one():
    row = prompt_row(np.arange(20), Pages(), layout(12, recompute=4, tail=True))
    assert row.spans == (TokenSpan(Source.KV_HOST, 0, 8), TokenSpan(Source.NEW, 8, 20))
    assert row.tokens.tolist() == list(range(8, 20))
    assert joined([TokenSpan(Source.KV_DEVICE, 0, 0), TokenSpan(Source.NEW, 0, 3)]) == (
        TokenSpan(Source.NEW, 0, 3),
    )


def test_step_loads_shared_blocks_once_and_neighbours_together():
    rows = [decoding(n, first, source=Source.KV_HOST) for n, first in ((11, 3), (11, 3), (7, 20))]
    step = build_step(rows, BLOCK, CPU)
    assert step.kv_runs == [(0, 3, 3), (3, 20, 2)]
    assert step.loaded_rows == 5 * 2 * BLOCK and step.act_tokens == 0


def test_step_pads_contexts_to_less_than_twice_their_blocks():
    lengths = [3, 5, 7, 8, 60, 100, 1000, 1]
    rows = [decoding(n, 300 * i) for i, n in enumerate(lengths)]
    loaded = [decoding(n, 300 * i, source=Source.KV_HOST) for i, n in enumerate(lengths)]
    for step, unit in ((build_step(rows, BLOCK, CPU), BLOCK), (build_step(loaded, BLOCK, CPU), 1)):
        found = [group.rows.tolist() for group in step.groups]
        assert sorted(row for group in found for row in group) == list(range(len(lengths)))
        for group, mine in zip(step.groups, found, strict=True):
            contexts = [lengths[row] + 1 for row in mine]
            (part,) = group.parts
            assert part.keys == max(contexts)
            assert (part.visible is None) == (len(set(contexts)) == 1)
            assert -(-max(contexts) // unit) < 2 * -(-min(contexts) // unit)


def test_prompts_of_one_shape_are_one_group_in_order():
    step = build_step([fresh(), fresh(), fresh("all")], BLOCK, CPU)
    (group,) = step.groups
    assert group.in_order and (group.batch, group.queries) == (3, 9)
    assert step.logit_rows.tolist() == [8, 17, *range(18, 27)]
    assert step.to_pool is None


def test_a_chunk_reads_its_context_by_its_block_table():
    pages = Pages(np.array([9, 2, 5, 7]))
    step = build_step([prompt_row(np.arange(13), pages, start=7)], BLOCK, CPU)
    (group,) = step.groups
    pool, own = group.parts
    assert (group.queries, pool.k_rows.tolist(), pool.keys) == (6, [18, 4], 7)
    assert own.keys == 6 and pool.visible is None and own.visible is None
    # Tokens 7 to 12 go to the last row of block 2, all of block 5, and the first of block 7.
    assert step.to_pool.target[:6].tolist() == [19, 40, 41, 42, 43, 56]


def test_few_tokens_of_the_pool_are_copied_to_the_many_beside():
    pages = Pages(np.array([3, 4, 5, 6]))
    pages.put(1, "kv", "host", [8, 9])
    step = build_step([prompt_row(np.arange(16), pages, layout(8), start=4)], BLOCK, CPU)
    (part,) = step.groups[0].parts
    assert step.copied_tokens == 4 and part.keys == 16
    assert step.from_pool.source.tolist() == [*range(24, 28), *range(28, 32)]
    # Behind the loaded rows of two blocks and the pairs of four new tokens.
    assert step.from_pool.target[:4].tolist() == [24, 26, 28, 30]
    assert step.buffer_rows == 32


def test_a_step_without_the_blocks_or_without_work_is_refused():
    row = decoding(7, 0)
    row.pages.column("kv", "device")[1] = -1
    chunk = StepRow([1, 2], (row.spans[0], TokenSpan(Source.NEW, 7, 9)), row.pages)
    with pytest.raises(NoSuchBlock, match=r"token 4 of sequence 1 .* device kv"):
        build_step([decoding(7, 2), chunk], BLOCK, CPU)
    with pytest.raises(NoSuchBlock, match="a sequence of 7 tokens is to be decoded"):
        build_step([decoding(7, 2), row], BLOCK, CPU)
    short = StepRow(
        [7], (TokenSpan(Source.KV_DEVICE, 0, 5), TokenSpan(Source.NEW, 5, 6)), Pages(np.array([4]))
    )
    with pytest.raises(NoSuchBlock, match="a sequence of 5 tokens is to be decoded"):
        build_step([short], BLOCK, CPU)
    with pytest.raises(NoSuchBlock, match="sequence 0 of the step has no token to compute"):
        build_step([StepRow([], (TokenSpan(Source.KV_DEVICE, 0, 7),), row.pages)], BLOCK, CPU)


def test_build_step_reads_device_blocks_whole_by_their_table():
    # Blocks of 4: 7 tokens and the next fill 2 blocks, 8 and the next reach into a third.
    step = build_step([decoding(8, 20), decoding(7, 30)], BLOCK, CPU)
    (group,) = step.groups
    (part,) = group.parts
    assert group.in_order and group.rows.tolist() == [0, 1]
    # Keys of block b are half 2b of the pool; the shorter context is padded with its first block.
    assert part.k_rows.tolist() == [40, 42, 44, 60, 62, 60]
    assert part.v_rows.tolist() == [41, 43, 45, 61, 63, 61]
    assert part.keys == 9 and part.visible.sum(dim=1).tolist() == [9, 8]
    # Contexts end at the third and at the fifth of the blocks read, behind one token and four.
    assert part.last.tolist() == [2, 4] and part.inside.sum(dim=1).tolist() == [1, 4]
    # Token 8 is the first of block 22, token 7 the last of block 31: K rows 22*8, 31*8+3.
    assert step.to_pool.target.tolist() == [176, 251, 180, 255]
    assert step.to_pool.source.tolist() == [0, 2, 1, 3]
    assert (step.new_tokens, step.positions.tolist()) == (2, [8, 7])
    assert step.buffer_rows == 4


def test_contexts_of_one_length_are_read_without_a_mask():
    step = build_step([decoding(8, 20), decoding(8, 30)], BLOCK, CPU)
    (part,) = step.groups[0].parts
    assert part.visible is None and part.inside is None and part.keys == 9


def test_rows_of_all_kinds_share_a_step_in_their_order():
    rows = [fresh("all"), decoding(7, 0, act_block=5), decoding(5, 8, source=Source.KV_HOST)]
    step = build_step(rows, BLOCK, CPU)
    assert step.tokens.tolist() == [*range(9), 7, 7]
    assert step.positions.tolist() == [*range(9), 7, 5]
    assert step.logit_rows.tolist() == list(range(11))
    # Its activation is the fourth row of block 5: 5*4 + 3.
    assert (step.to_act.target.tolist(), step.to_act.source.tolist()) == ([23], [9])
    # Two host blocks of 8 rows are loaded in front of the new tokens' pairs of rows.
    assert step.to_pool.source.tolist() == [16 + 18, 17 + 18]
