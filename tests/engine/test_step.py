"""Pages and steps: where blocks lie, which copies a step makes, how queries are grouped."""

import numpy as np
import pytest
import torch

from engine.blocks import BlockTable, Entry
from engine.index import build_step
from engine.prefill import held_sources
from engine.step import NoSuchBlock, Pages, Source, Work

BLOCK = 4
CPU = torch.device("cpu")


def decoding(length: int, first: int, place: str = "device") -> Work:
    """The next token of a sequence whose `length` tokens lie in blocks from `first` on."""
    pages = Pages()
    pages.put(0, "kv", place, list(range(first, first + -(-(length + 1) // BLOCK))))
    sources = np.append(held_sources(pages, length, BLOCK), np.int8(Source.NEW))
    return Work(np.arange(length + 1), sources, pages)


def test_pages_say_what_a_block_table_says():
    table = BlockTable(BLOCK, [Entry("kv", "host", 7), Entry("act", "device", 2)], 6)
    pages = Pages.of(table)
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
