"""VRAM as promised: reserves, reservations, and who is charged for a shared prefix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_scheduler.blocks import Ledger
from kappa_scheduler.work import Quote
from tests.scheduler.engine import Blocks, Request


def admit(ledger, blocks, reserve=0, shared=0, key=0, high=False, tenant=""):
    work = Request(blocks, tenant=tenant)
    changes = ledger.admit(
        work, Quote(blocks - shared, shared, 0, shared, key), blocks, reserve, high
    )
    return work, {w: delta for w, (_, delta) in changes.items()}


def test_what_is_declared_and_not_yet_taken_is_not_free():
    ledger, memory = Ledger(), Blocks(100)
    work, _ = admit(ledger, 10, reserve=5)
    assert ledger.outstanding() == 5 and ledger.free(memory) == 95
    work.grown_blocks = 3
    assert ledger.outstanding() == 2
    work.grown_blocks = 9
    assert ledger.outstanding() == 0
    ledger.release(work)
    assert not len(ledger) and ledger.free(memory) == 100


def test_who_takes_more_than_it_declared_is_charged_for_it():
    ledger = Ledger()
    work, _ = admit(ledger, 10, reserve=2, high=True)
    work.grown_blocks = 2
    assert ledger.grow() == {}
    work.grown_blocks = 7
    assert ledger.grow() == {work: ("", 5.0)} and ledger.grow() == {}
    assert ledger.high_blocks == 17
    assert ledger.release(work) == {work: ("", -17.0)} and ledger.high_blocks == 0


def test_those_behind_a_reservation_hold_no_more_than_it_leaves():
    ledger, memory = Ledger(), Blocks(100)
    before, _ = admit(ledger, 60)
    large = Request(80)
    assert ledger.spare(memory) == 100
    ledger.reserve(large, 80, memory)
    assert ledger.reserved_for is large and ledger.spare(memory) == 20
    behind, _ = admit(ledger, 10, reserve=5)
    assert ledger.spare(memory) == 5
    behind.grown_blocks = 8
    ledger.grow()
    assert ledger.spare(memory) == 2
    ledger.release(before)
    assert ledger.spare(memory) == 2
    ledger.release(behind)
    assert ledger.spare(memory) == 20
    ledger.admit(large, Quote(80, 0, 0), 80, 0, False)
    assert ledger.reserved_for is None and ledger.spare(memory) == 100


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 3), st.integers(0, 5), st.integers(0, 99)),
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_ledger_charges_sum_to_the_blocks_held_and_reserved(events, size):
    """Blocks held, shared ones once, and what was declared besides."""
    ledger, memory = Ledger(), Blocks(10_000, size)
    charged, reserves = {}, {}
    for number, (tokens, chain, reserve, leaves) in enumerate(events):
        work = Request(tokens, chain=chain, prefix=tokens if chain else 0)
        work.seq = number
        quote = memory.quote(work)
        blocks = memory.of(tokens)
        memory.take(work, quote)
        changes = ledger.admit(work, quote, blocks, reserve, False)
        reserves[work] = reserve
        if leaves % 3 == 0 and reserves:
            gone = list(reserves)[leaves % len(reserves)]
            for other, (_, delta) in changes.items():
                charged[other] = charged.get(other, 0) + delta
            changes = ledger.release(gone)
            memory.release(gone)
            del reserves[gone]
        for other, (_, delta) in changes.items():
            charged[other] = charged.get(other, 0) + delta
        assert sum(charged.values()) == pytest.approx(memory.used() + sum(reserves.values()))
        assert all(charged[w] == pytest.approx(0) for w in charged if w not in reserves)
        assert all(charged[w] >= -1e-9 for w in charged)


def test_a_reservation_is_no_larger_than_the_memory():
    ledger, memory = Ledger(), Blocks(100)
    large = Request(150)
    ledger.reserve(large, 150, memory)
    assert ledger.spare(memory) == 0
    # Of the 100 set aside 90 are its prompt's: it may declare 10 more; of 100, and of 101, none.
    assert [ledger.promised(blocks, 40) for blocks in (90, 100, 101)] == [10, 0, 0]
    assert ledger.promised(50, 40) == 40
    ledger.unreserve()
    assert ledger.spare(memory) == 100 and ledger.promised(0, 40) == 0


def test_a_new_reservation_counts_only_those_who_come_after_it():
    ledger, memory = Ledger(), Blocks(100)
    ledger.reserve(Request(40), 40, memory)
    early, _ = admit(ledger, 10, reserve=2)
    assert ledger.spare(memory) == 100 - 40 - 12
    ledger.reserve(Request(30), 30, memory)
    assert ledger.spare(memory) == 70
    ledger.release(early)
    assert ledger.spare(memory) == 70


def test_a_chain_is_divided_among_those_who_reach_so_far():
    ledger = Ledger()
    # Other prefixes, and those without a key, have nothing to do with it.
    assert [list(admit(ledger, 8, key=key)[1].values()) for key in (8, 0)] == [[8], [8]]
    first, change = admit(ledger, 10, key=7)
    assert change == {first: 10.0}
    # 4 blocks of 10 are the first one's: 2 each. It pays 8; the second 2 + 6, and 1
    # of reserve.
    second, change = admit(ledger, 10, reserve=1, shared=4, key=7)
    assert change == {first: -2.0, second: 9.0}
    # The third found 9: the first's own, all but the last. Of 4 each pays 4/3, of 5 more the first
    # and the third 5/2 each.
    third, change = admit(ledger, 12, shared=9, key=7)
    thirds, halves = 4 / 3, 5 / 2
    assert change[second] == pytest.approx(6 + 1 + thirds - 9)
    assert change[third] == pytest.approx(3 + thirds + halves)
    assert change[first] == pytest.approx(1 + thirds + halves - 8)
    ledger.release(third)
    assert ledger.release(second)[second] == ("", pytest.approx(-9.0))
