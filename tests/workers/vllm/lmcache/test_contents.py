"""Announcements of an LMCache server: blocks stored or found, none that was evicted."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kappa_workers.vllm.lmcache.scheduler import LmcacheContents, Run

pytestmark = pytest.mark.vllm

BLOCK = 4


def chunk_hashes(blocks):
    """A rolling hash over chunks, as the server has one."""
    size = BLOCK * blocks

    def hashes(tokens, before):
        made, prefix = [], before or b"none"
        for i in range(0, len(tokens) - len(tokens) % size, size):
            prefix = hashlib.sha256(prefix + repr(tokens[i : i + size]).encode()).digest()
            made.append(prefix)
        return made

    return hashes


def contents(blocks=1, most=1000):
    return LmcacheContents(BLOCK, blocks, chunk_hashes(blocks), lambda h: h, most)


def prompt(name, blocks, salt=""):
    """(token ids, vLLM's block hashes), the latter salted."""
    tokens = [ord(name) * 1000 + i for i in range(blocks * BLOCK)]
    hashes = [
        hashlib.sha256(f"{salt}{tokens[: (i + 1) * BLOCK]}".encode()).digest()
        for i in range(blocks)
    ]
    return tokens, hashes


def held(events, state=None):
    """Replay events as a router does: names of the blocks that are held."""
    state = set() if state is None else state
    for event in events:
        if isinstance(event, BlockStored):
            state.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            state.difference_update(event.block_hashes)
    return state


def test_hold_announces_a_run_block_by_block_with_parents():
    made = contents()
    tokens, hashes = prompt("a", 5)
    made.hold(Run(tokens, hashes, 2, 5))
    events = made.take()
    assert [e.block_hashes for e in events] == [[h] for h in hashes[2:]]
    assert [e.parent_block_hash for e in events] == hashes[1:4]
    assert [e.token_ids for e in events] == [tokens[i * BLOCK : (i + 1) * BLOCK] for i in (2, 3, 4)]
    assert {(e.medium, e.block_size) for e in events} == {("CPU", BLOCK)}
    assert made.take() == []


def test_what_is_announced_already_is_not_announced_again():
    made = contents()
    tokens, hashes = prompt("a", 6)
    made.hold(Run(tokens, hashes, 0, 3))
    made.take()
    made.hold(Run(tokens, hashes, 0, 6))
    assert [e.block_hashes[0] for e in made.take()] == hashes[3:]


def test_an_eviction_withdraws_a_chunk_under_every_salt():
    made = contents()
    one, other = prompt("a", 3, "tenant1"), prompt("a", 3, "tenant2")
    for tokens, hashes in (one, other):
        made.hold(Run(tokens, hashes, 0, 3))
    state = held(made.take())
    evicted = chunk_hashes(1)(one[0], None)[1]
    made.evicted([evicted, b"unknown"])
    assert held(made.take(), state) == {*one[1], *other[1]} - {one[1][1], other[1][1]}
    assert len(made) == 4


def test_chunks_of_several_blocks_come_and_go_whole():
    made = contents(blocks=2)
    tokens, hashes = prompt("a", 7)
    made.hold(Run(tokens, hashes, 0, 7))
    state = held(made.take())
    assert state == set(hashes[:6])  # half a chunk is none
    made.evicted(chunk_hashes(2)(tokens, None)[1:2])
    assert held(made.take(), state) == set(hashes) - {hashes[2], hashes[3], hashes[6]}


def test_miss_withdraws_one_block_and_clear_withdraws_all():
    made = contents()
    tokens, hashes = prompt("a", 4)
    made.hold(Run(tokens, hashes, 0, 4))
    state = held(made.take())
    made.miss(hashes[2])
    made.miss(b"unknown")
    assert held(made.take(), state) == set(hashes) - {hashes[2]}
    made.clear()
    assert held(made.take(), state) == set()
    assert len(made) == 0


def test_beyond_the_bound_the_oldest_are_withdrawn():
    made, state = contents(most=5), set()
    runs = [prompt(name, 3) for name in "abc"]
    for tokens, hashes in runs:
        made.hold(Run(tokens, hashes, 0, 3))
        held(made.take(), state)
        assert len(made) <= 5
    assert set(runs[2][1]) <= state
    assert len(state) == len(made)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 6)), max_size=40))
def test_what_a_router_believes_is_what_is_kept(steps):
    made, state = contents(most=12), set()
    prompts = [prompt(name, 6) for name in "abcd"]
    for which, start, stop in steps:
        tokens, hashes = prompts[which]
        if start < stop:
            made.hold(Run(tokens, hashes, start, stop))
        else:
            made.evicted(chunk_hashes(1)(tokens, None)[stop:start])
        held(made.take(), state)
        assert len(state) == len(made)
    assert state <= {h for _, hashes in prompts for h in hashes}
