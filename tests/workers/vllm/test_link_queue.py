"""The order of a link: loads before stores, in pieces; a share for stores; what is late goes."""

import numpy as np
import pytest

from scheduler.link_order import FIFO, LOADS_FIRST, STORE_SHARE
from workers.vllm.link_queue import (
    LOAD,
    PIECE_S,
    STORE,
    LinkPace,
    LinkQueue,
    LinkRules,
    Transfer,
)
from workers.vllm.options import LINK_KEY, read_options

BLOCK_S = PIECE_S / 4


def seconds(direction, blocks):
    return blocks * BLOCK_S


def transfer(job_id, direction, blocks):
    ids = np.arange(blocks)
    return Transfer(job_id, direction, ids, ids, 0.0)


def play(queue, pieces=10_000):
    """Serve so many pieces; return [(job, start, stop)] in the order served."""
    served = []
    while len(served) < pieces and (piece := queue.next()) is not None:
        queue.served(piece, piece.seconds)
        served.append((piece.transfer.job_id, piece.start, piece.stop))
    return served


def test_loads_go_before_stores_that_came_first():
    queue = LinkQueue(LOADS_FIRST, seconds)
    for job, direction in ((1, STORE), (2, STORE), (3, LOAD), (4, LOAD)):
        queue.add(transfer(job, direction, 4))
    assert [job for job, *_ in play(queue)] == [3, 4, 1, 2]


def test_fifo_serves_whole_transfers_in_order_of_arrival():
    queue = LinkQueue(FIFO, seconds)
    for job, direction in ((1, STORE), (2, LOAD), (3, STORE)):
        queue.add(transfer(job, direction, 9))
    assert play(queue) == [(1, 0, 9), (2, 0, 9), (3, 0, 9)]


def test_a_store_under_way_gives_way_between_pieces_and_is_finished_later():
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, STORE, 10))
    assert play(queue, 1) == [(1, 0, 4)]
    queue.add(transfer(2, LOAD, 4))
    assert play(queue) == [(2, 0, 4), (1, 4, 8), (1, 8, 10)]


def test_without_known_times_a_transfer_is_one_piece():
    queue = LinkQueue(LOADS_FIRST, lambda direction, blocks: 0.0)
    queue.add(transfer(1, STORE, 1000))
    assert play(queue) == [(1, 0, 1000)]


def test_what_a_transfer_costs_besides_counts_in_its_first_piece_only():
    queue = LinkQueue(LOADS_FIRST, lambda direction, blocks: 0.5 + blocks * BLOCK_S)
    queue.add(transfer(1, LOAD, 8))
    first, second = queue.next(), queue.next()
    assert first.seconds == pytest.approx(0.5 + 4 * BLOCK_S)
    assert second.seconds == pytest.approx(4 * BLOCK_S)
    assert (first.last, second.last) == (False, True)


def test_under_a_steady_stream_of_loads_stores_get_their_share_and_no_more():
    queue = LinkQueue(LOADS_FIRST, seconds)
    for job in range(1000, 1500):
        queue.add(transfer(job, STORE, 4))
    for job in range(200):
        queue.add(transfer(job, LOAD, 20))
    loaded_blocks = stored_blocks = 0
    while loaded_blocks < 200 * 20:
        ((job, start, stop),) = play(queue, 1)
        if job < 1000:
            loaded_blocks += stop - start
        else:
            stored_blocks += stop - start
    # A piece of a store or two may still be waiting for its turn.
    assert stored_blocks == pytest.approx(STORE_SHARE * loaded_blocks, rel=0.03)


def test_a_link_without_stores_earns_no_credit_for_those_to_come():
    queue = LinkQueue(LOADS_FIRST, seconds)
    for job in range(50):
        queue.add(transfer(job, LOAD, 4))
    play(queue, 40)
    queue.add(transfer(99, STORE, 4))
    assert 99 not in [job for job, *_ in play(queue, 4)]


def test_an_urgent_store_goes_before_loads_and_before_other_stores():
    queue = LinkQueue(LOADS_FIRST, seconds)
    for job, direction in ((1, LOAD), (2, STORE), (3, STORE), (4, STORE)):
        queue.add(transfer(job, direction, 4))
    assert queue.hurry({3, 4}, budget_s=8 * BLOCK_S, serving=None) == []
    assert [job for job, *_ in play(queue)] == [3, 4, 1, 2]


def test_a_store_for_which_there_is_no_time_is_dropped_and_the_others_are_not():
    queue = LinkQueue(LOADS_FIRST, seconds)
    for job, blocks in ((1, 4), (2, 40), (3, 4)):
        queue.add(transfer(job, STORE, blocks))
    late = queue.hurry({1, 2, 3}, budget_s=8 * BLOCK_S, serving=None)
    assert [t.job_id for t in late] == [2]
    assert [job for job, *_ in play(queue)] == [1, 3]


def test_the_transfer_being_served_is_marked_and_ends_with_its_piece():
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, STORE, 12))
    serving = queue.next().transfer
    assert queue.hurry({1}, budget_s=0.0, serving=serving) == []
    assert serving.dropped
    assert play(queue) == []


def test_an_urgent_transfer_can_still_be_dropped_by_a_later_call():
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, STORE, 4))
    assert queue.hurry({1}, budget_s=1.0, serving=None) == []
    assert [t.job_id for t in queue.hurry({1}, budget_s=0.0, serving=None)] == [1]


def test_loads_are_never_dropped():
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, LOAD, 40))
    assert queue.hurry({1}, budget_s=0.0, serving=None) == []
    assert play(queue)[-1] == (1, 36, 40)


def test_a_forgotten_transfer_is_served_no_further():
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, LOAD, 40))
    piece = queue.next()
    queue.forget(piece.transfer)
    assert queue.next() is None


def test_pace_arithmetic():
    pace = LinkPace(token_s=2.0, store_token_s=3.0, fixed_s=0.5)
    assert (pace.load_s(10), pace.store_s(10)) == (20.5, 30.5)
    assert (LinkPace(fixed_s=9.0).load_s(10), LinkPace().store_s(10)) == (0.0, 0.0)


def test_rules_are_read_from_the_extra_configuration():
    given = {"duplex": "half", "order": "fifo", "store_backlog_s": 2}
    rules = read_options({LINK_KEY: given}, LINK_KEY, LinkRules)
    assert (rules.duplex, rules.order, rules.store_backlog_s) == ("half", "fifo", 2)
    assert read_options({}, LINK_KEY, LinkRules) == LinkRules("full", "loads_first", 10.0)


def test_the_rules_of_a_paced_node_are_in_its_own_seconds():
    rules = LinkRules(store_backlog_s=10.0, late_wait_s=0.01).dilated(30.0)
    assert (rules.store_backlog_s, rules.late_wait_s) == pytest.approx((300.0, 0.3))
    assert rules.order == LOADS_FIRST


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"duplex": "both"}, r"kappa_link: Invalid enum value 'both' - at `\$.duplex`"),
        ({"order": "lifo"}, r"kappa_link: Invalid enum value 'lifo' - at `\$.order`"),
        ({"store_backlog_s": -1.0}, r"kappa_link: .*>= 0.* - at `\$.store_backlog_s`"),
        ({"late_wait_s": float("nan")}, r"kappa_link: .*>= 0.* - at `\$.late_wait_s`"),
        ({"late_wait_s": float("inf")}, r"kappa_link: .*<= .* - at `\$.late_wait_s`"),
        ({"backlog": 1}, "kappa_link: Object contains unknown field `backlog`"),
    ],
)
def test_wrong_rules_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read_options({LINK_KEY: given}, LINK_KEY, LinkRules)


def test_the_time_for_late_stores_is_spent_once():
    # Each takes 5 of 8 blocks' time: there is time for one.
    queue = LinkQueue(LOADS_FIRST, seconds)
    for job in (1, 2):
        queue.add(transfer(job, STORE, 5))
    late = queue.hurry({1, 2}, budget_s=8 * BLOCK_S, serving=None)
    assert [t.job_id for t in late] == [2]
    assert {job for job, *_ in play(queue)} == {1}


def test_a_store_that_takes_exactly_the_time_there_is_is_kept():
    for blocks, late in ((8, []), (9, [1])):
        queue = LinkQueue(LOADS_FIRST, seconds)
        queue.add(transfer(1, STORE, blocks))
        found = queue.hurry({1}, budget_s=seconds(STORE, 8), serving=None)
        assert [t.job_id for t in found] == late


def test_what_is_left_of_a_store_counts_and_not_what_it_was():
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, STORE, 10))
    piece = queue.next()
    assert (piece.start, piece.stop, piece.last) == (0, 4, False)
    # Six blocks are left.
    assert queue.hurry({1}, budget_s=seconds(STORE, 6.01), serving=None) == []
    assert [(p[1], p[2]) for p in play(queue)] == [(4, 8), (8, 10)]


def test_a_store_gets_a_piece_once_loads_have_earned_its_seconds():
    # A piece of a load is 4 blocks long and earns a twentieth of that: 20 pieces for 4 blocks.
    queue = LinkQueue(LOADS_FIRST, seconds)
    queue.add(transfer(1, LOAD, 4 * 30))
    queue.add(transfer(2, STORE, 4))
    order = [job for job, *_ in play(queue)]
    assert len(order) == 31 and order.index(2) in (20, 21)


def test_the_default_rules():
    rules = LinkRules()
    assert (rules.duplex, rules.order) == ("full", "loads_first")
    assert (rules.store_backlog_s, rules.late_wait_s) == (10.0, 0.01)
    assert LinkRules(store_backlog_s=0.0, late_wait_s=0.0).late_wait_s == 0.0
    assert LinkPace().dilation == 1.0
