"""Pages and steps: where blocks lie, which copies a step makes, how queries are grouped."""

import numpy as np
import pytest
import torch

from engine.prefill import held_sources
from engine.step import Decode, NoSuchBlock, Pages, Source, Work
from engine.step_builder import build_step

BLOCK = 4
CPU = torch.device("cpu")


def decoding(length: int, first: int, place: str = "device") -> Work:
    """The next token of a sequence whose `length` tokens lie in blocks from `first` on."""
    pages = Pages()
    pages.put(0, "kv", place, list(range(first, first + -(-(length + 1) // BLOCK))))
    sources = np.append(held_sources(pages, length, BLOCK), np.int8(Source.NEW))
    return Work(np.arange(length + 1), sources, pages)


def test_pages_grow_with_what_is_put_into_them():
    pages = Pages()
    pages.put(0, "kv", "host", [7])
    pages.put(1, "act", "device", [2])
    assert pages.column("kv", "host").tolist() == [7, -1]
    assert pages.column("act", "device").tolist() == [-1, 2]
    pages.put(1, "kv", "device", [4, 5])
    assert len(pages) == 3 and pages.column("kv", "device").tolist() == [-1, 4, 5]
    assert pages.column("kv", "host").tolist() == [7, -1, -1]


def test_the_nearest_copy_is_the_source_and_the_split_only_replaces_host_kv():
    pages = Pages(4)
    pages.put(0, "act", "host", [0, 1, 2, 3])
    pages.put(1, "kv", "host", [5, 6, 7])
    pages.put(2, "act", "device", [8])
    pages.put(3, "kv", "device", [9])
    by_block = [Source.ACT_HOST, Source.KV_HOST, Source.ACT_DEVICE, Source.KV_DEVICE]
    assert held_sources(pages, 15, BLOCK).tolist() == np.repeat(by_block, BLOCK)[:15].tolist()
    split = held_sources(pages, 15, BLOCK, 6)
    assert split[4:8].tolist() == [Source.ACT_HOST] * 2 + [Source.KV_HOST] * 2
    assert split[8:].tolist() == held_sources(pages, 15, BLOCK)[8:].tolist()


def test_blocks_that_several_sequences_share_are_loaded_once_and_neighbours_together():
    works = [decoding(11, 3, "host"), decoding(11, 3, "host"), decoding(7, 20, "host")]
    step = build_step(works, BLOCK, CPU)
    # The new token's block is not loaded: nothing of it is needed where it is all new.
    assert step.kv_runs == [(0, 3, 3), (3, 20, 2)]
    assert step.loaded_rows == 5 * 2 * BLOCK and step.act_tokens == 0


def test_contexts_of_unlike_length_are_padded_within_a_factor_of_two():
    lengths = [5, 6, 7, 60, 100, 1000, 1]
    first, works = 0, []
    for length in lengths:
        works.append(decoding(length, first))
        first += -(-(length + 1) // BLOCK)
    step = build_step(works, BLOCK, CPU)
    rows = [group.rows.tolist() for group in step.groups]
    assert sorted(row for group in rows for row in group) == list(range(len(lengths)))
    for group in step.groups:
        contexts = [lengths[row] + 1 for row in group.rows.tolist()]
        (part,) = group.parts
        assert part.pool and part.keys == max(contexts) < 2 * min(contexts)
        assert (part.visible is None) == (len(set(contexts)) == 1)
        assert len(part.k_rows) == part.keys * group.batch


def test_prompts_of_one_shape_are_one_group_in_order():
    works = [
        Work(np.arange(9), np.full(9, Source.NEW, np.int8), Pages(3), wanted=wanted)
        for wanted in ("last", "none", "all")
    ]
    step = build_step(works, BLOCK, CPU)
    (group,) = step.groups
    assert group.in_order and (group.batch, group.queries) == (3, 9)
    assert step.logit_rows.tolist() == [8, *range(18, 27)]
    assert step.to_pool is None and not step.stores


def test_a_step_without_the_blocks_or_without_work_is_refused():
    work = decoding(7, 0)
    work.pages.column("kv", "device")[1] = -1
    with pytest.raises(NoSuchBlock, match=r"token 4 of sequence 1 .* device kv"):
        build_step([decoding(7, 2), work], BLOCK, CPU)
    idle = decoding(7, 0)
    idle.sources[-1] = Source.KV_DEVICE
    with pytest.raises(NoSuchBlock, match="sequence 0 of the step has no token to compute"):
        build_step([idle], BLOCK, CPU)


def paged(length: int, first: int, act_block: int = -1) -> Decode:
    """The next token of a sequence whose `length` tokens lie in blocks from `first` on."""
    return Decode(7, length, np.arange(first, first + length // BLOCK + 1), act_block)


def test_decoding_from_device_blocks_reads_them_whole_and_by_their_table():
    # Blocks of 4: 7 tokens and the next fill 2 blocks, 8 and the next reach into a third.
    step = build_step([paged(8, 20), paged(7, 30)], BLOCK, CPU)
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
    step = build_step([paged(8, 20), paged(8, 30)], BLOCK, CPU)
    (part,) = step.groups[0].parts
    assert part.visible is None and part.inside is None and part.keys == 9


def test_decoding_contexts_are_padded_within_a_factor_of_two_of_their_blocks():
    lengths = [3, 5, 7, 8, 60, 100, 1000, 1]
    step = build_step([paged(n, 300 * i) for i, n in enumerate(lengths)], BLOCK, CPU)
    assert sorted(row for group in step.groups for row in group.rows.tolist()) == list(range(8))
    for group in step.groups:
        blocks = [lengths[row] // BLOCK + 1 for row in group.rows.tolist()]
        assert len(group.parts[0].k_rows) == max(blocks) * group.batch
        assert max(blocks) < 2 * min(blocks)


def test_decoding_and_other_work_share_a_step_and_logits_keep_their_order():
    fresh = Work(np.arange(9), np.full(9, Source.NEW, np.int8), Pages(3), wanted="all")
    step = build_step([fresh, paged(7, 0, act_block=5), decoding(5, 8, "host")], BLOCK, CPU)
    # The sequence that decodes from the device comes first: 7, then 0 to 8, then 5.
    assert step.tokens.tolist() == [7, *range(9), 5]
    assert step.positions.tolist() == [7, *range(9), 5]
    assert step.logit_rows.tolist() == [*range(1, 10), 0, 10]
    # Its activation is the fourth row of block 5: 5*4 + 3.
    assert (step.to_act.target.tolist(), step.to_act.source.tolist()) == ([23], [0])
    # Two host blocks of 8 rows are loaded in front of the new tokens' pairs of rows.
    assert step.to_pool.source.tolist() == [16, 17]


def test_decoding_without_a_block_for_each_token_is_refused():
    for blocks in ([4], [4, -1]):
        with pytest.raises(NoSuchBlock, match="a sequence of 5 tokens is to be decoded"):
            build_step([paged(2, 0), Decode(7, 5, np.array(blocks))], BLOCK, CPU)
