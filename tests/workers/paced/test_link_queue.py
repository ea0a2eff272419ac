"""The order of a link: loads before stores, in pieces; a share for stores; late ones go."""

import numpy as np
import pytest

from kappa_scheduler.link_order import FIFO, LOADS_FIRST, STORE_SHARE
from kappa_workers.paced.link import PIECE_S, LinkQueue, Transfer, exposed_s
from kappa_workers.vllm.load_sources import LOAD, STORE
from kappa_workers.vllm.options import LINK_KEY, LinkPace, LinkRules, read_options

pytestmark = pytest.mark.vllm

BLOCK_S = PIECE_S / 4


def queue_of(*transfers, order=LOADS_FIRST, fixed_s=0.0, block_s=BLOCK_S):
    """A queue with transfers (direction, blocks), numbered from 1."""
    queue = LinkQueue(order, lambda direction, blocks: fixed_s + blocks * block_s)
    for job, (direction, blocks) in enumerate(transfers, start=1):
        add(queue, job, direction, blocks)
    return queue


def add(queue, job, direction, blocks):
    ids = np.arange(blocks)
    queue.add(Transfer(job, direction, ids, ids, 0.0))


def play(queue, pieces=10_000):
    """Serve pieces; return [(job, start, stop)] in the order served."""
    served = []
    while len(served) < pieces and (piece := queue.next()) is not None:
        queue.served(piece, piece.seconds)
        served.append((piece.transfer.job_id, piece.start, piece.stop))
    return served


def jobs(queue, pieces=10_000):
    return [job for job, *_ in play(queue, pieces)]


def hurried(queue, job_ids, blocks, serving=None):
    """Jobs that are dropped when there is time for that number of blocks."""
    return [t.job_id for t in queue.hurry(set(job_ids), blocks * BLOCK_S, serving)]


def test_fifo_serves_whole_transfers_in_order_of_arrival():
    queue = queue_of((STORE, 9), (LOAD, 9), (STORE, 9), order=FIFO)
    assert play(queue) == [(1, 0, 9), (2, 0, 9), (3, 0, 9)]


def test_queue_interrupts_a_store_between_pieces_for_a_load():
    queue = queue_of((STORE, 10))
    assert play(queue, 1) == [(1, 0, 4)]
    add(queue, 2, LOAD, 4)
    assert play(queue) == [(2, 0, 4), (1, 4, 8), (1, 8, 10)]


def test_without_known_times_a_transfer_is_one_piece():
    assert play(queue_of((STORE, 1000), block_s=0.0)) == [(1, 0, 1000)]


def test_queue_counts_the_fixed_cost_in_the_first_piece_only():
    queue = queue_of((LOAD, 8), fixed_s=0.5)
    first, second = queue.next(), queue.next()
    assert first.seconds == pytest.approx(0.5 + 4 * BLOCK_S)
    assert second.seconds == pytest.approx(4 * BLOCK_S)
    assert (first.last, second.last) == (False, True)


def test_queue_cuts_a_load_by_layers_into_equally_long_layers():
    queue, ids = queue_of(fixed_s=2.0, block_s=3.0), np.arange(4)
    queue.add(Transfer(1, LOAD, ids, ids, 0.0, layers=7))
    assert queue.next().seconds == pytest.approx((2.0 + 4 * 3.0) / 7)
    assert play(queue) == [(1, layer, layer + 1) for layer in range(1, 7)]


@pytest.mark.parametrize(
    ("landed_s", "start_s", "compute_s", "beyond_s"),
    [
        ([], 5.0, 6.0, 0.0),
        ([1.0, 2.0, 3.0], 5.0, 6.0, 0.0),  # all was there
        ([1.0, 2.0, 3.0], 0.0, 6.0, 1.0),  # computing is longer: the first layer is waited for
        ([4.0, 8.0, 12.0], 0.0, 3.0, 10.0),  # the load is: behind it one layer is computed
        ([0.0, 5.0, 5.0], 0.0, 6.0, 3.0),  # 2, then 5 to 7, then 7 to 9
    ],
)
def test_of_a_load_a_step_hides_what_its_layers_take(landed_s, start_s, compute_s, beyond_s):
    assert exposed_s(landed_s, start_s, compute_s) == pytest.approx(beyond_s)


def test_queue_gives_stores_their_share_under_steady_loads():
    queue = queue_of(*[(LOAD, 20)] * 200, *[(STORE, 4)] * 500)
    blocks = {LOAD: 0, STORE: 0}
    while blocks[LOAD] < 200 * 20:
        ((job, start, stop),) = play(queue, 1)
        blocks[LOAD if job <= 200 else STORE] += stop - start
    # A piece of a store or two may still be waiting for its turn.
    assert blocks[STORE] == pytest.approx(STORE_SHARE * blocks[LOAD], rel=0.03)


def test_a_store_gets_a_piece_once_loads_have_earned_its_seconds():
    # A piece of a load is 4 blocks long and earns a twentieth of that: 20 pieces for 4 blocks.
    order = jobs(queue_of((LOAD, 4 * 30), (STORE, 4)))
    assert len(order) == 31 and order.index(2) in (20, 21)


@pytest.mark.parametrize(
    ("stores", "blocks", "dropped", "order"),
    [
        ((4, 4, 4), 8, [3], [1, 2]),
        ((4, 40, 4), 8, [2], [1, 3]),
        ((8,), 8, [], [1, 1]),  # exactly the time there is
        ((9,), 8, [1], []),
        ((5, 5), 8, [2], [1, 1]),  # the time is spent once
    ],
)
def test_late_stores_are_kept_while_there_is_time_for_them(stores, blocks, dropped, order):
    queue = queue_of(*[(STORE, size) for size in stores])
    assert hurried(queue, range(1, 9), blocks) == dropped
    assert jobs(queue) == order


def test_queue_serves_an_urgent_store_before_loads_and_stores():
    queue = queue_of((LOAD, 4), (STORE, 4), (STORE, 4), (STORE, 4))
    assert hurried(queue, {3, 4}, 8) == []
    assert jobs(queue) == [3, 4, 1, 2]


def test_what_is_left_of_a_store_counts_and_not_what_it_was():
    queue = queue_of((STORE, 10))
    assert play(queue, 1) == [(1, 0, 4)]
    assert hurried(queue, {1}, 6.01) == []
    assert play(queue) == [(1, 4, 8), (1, 8, 10)]


def test_hurry_drops_the_transfer_being_served_after_its_piece():
    queue = queue_of((STORE, 12))
    serving = queue.next().transfer
    assert hurried(queue, {1}, 0, serving) == []
    assert serving.dropped and play(queue) == []


def test_hurry_drops_an_urgent_store_in_a_later_call_but_no_load():
    queue = queue_of((STORE, 4), (LOAD, 40))
    assert hurried(queue, {1}, 4) == []
    assert hurried(queue, {1, 2}, 0) == [1]
    assert play(queue)[-1] == (2, 36, 40)


def test_a_forgotten_transfer_is_served_no_further():
    queue = queue_of((LOAD, 40))
    queue.forget(queue.next().transfer)
    assert queue.next() is None


def test_pace_arithmetic():
    pace = LinkPace(token_s=2.0, store_token_s=3.0, fixed_s=0.5)
    assert (pace.load_s(10), pace.store_s(10)) == (20.5, 30.5)
    assert (LinkPace(fixed_s=9.0).load_s(10), LinkPace().store_s(10)) == (0.0, 0.0)
    assert LinkPace().dilation == 1.0


def test_rules_are_read_from_the_extra_configuration_and_dilated():
    given = {"duplex": "half", "order": "fifo", "store_backlog_s": 2}
    rules = read_options({LINK_KEY: given}, LINK_KEY, LinkRules)
    assert rules == LinkRules("half", "fifo", 2.0, 0.01)
    assert read_options({}, LINK_KEY, LinkRules) == LinkRules("full", "loads_first", 10.0, 0.01)
    dilated = LinkRules(store_backlog_s=10.0, late_wait_s=0.01, by_layer=True).dilated(30.0)
    assert dilated.by_layer and not rules.by_layer
    assert (dilated.store_backlog_s, dilated.late_wait_s) == pytest.approx((300.0, 0.3))
    assert (dilated.duplex, dilated.order) == ("full", LOADS_FIRST)


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
