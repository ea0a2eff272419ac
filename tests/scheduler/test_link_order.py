"""Which transfer a link serves next."""

import pytest

from kappa_scheduler.link_order import FIFO, LOADS_FIRST, STORE_SHARE, LinkOrder


def order(kind=LOADS_FIRST):
    """Transfers are their own seconds."""
    return LinkOrder(kind, lambda seconds: seconds)


def test_urgent_stores_go_before_loads_and_loads_before_stores():
    queues = order()
    queues.add(1.0, load=False)
    queues.add(2.0, load=True)
    queues.urgent.append(3.0)
    assert queues.next_queue().popleft() == 3.0
    assert queues.next_queue().popleft() == 2.0
    assert queues.next_queue().popleft() == 1.0
    assert queues.next_queue() is None


def test_a_store_goes_first_once_loads_have_earned_its_seconds():
    queues = order()
    queues.add(9.0, load=True)
    queues.add(1.0, load=False)
    # 5 % of the loads' seconds: 1 s of store costs 20 s of loads.
    queues.served(19.0, load=True)
    assert queues.next_queue() is queues.loads
    queues.served(1.0, load=True)
    assert queues.next_queue() is queues.stores and queues.credit_s == pytest.approx(1.0)
    queues.served(0.25, load=False)
    assert queues.credit_s == pytest.approx(0.75) and STORE_SHARE == 0.05


def test_credit_is_zero_without_waiting_stores_or_when_idle():
    queues = order()
    queues.served(100.0, load=True)
    assert queues.credit_s == 0.0
    queues.add(1.0, load=False)
    queues.served(100.0, load=True)
    queues.stores.clear()
    assert queues.next_queue() is None and queues.credit_s == 0.0


def test_first_come_first_served_knows_no_direction():
    queues = order(FIFO)
    queues.add(1.0, load=False)
    queues.add(2.0, load=True)
    assert [queues.next_queue().popleft() for _ in range(2)] == [1.0, 2.0]


def test_cleared_queues_hold_nothing_and_owe_nothing():
    queues = order()
    queues.add(1.0, load=False)
    queues.served(100.0, load=True)
    queues.clear()
    assert queues.next_queue() is None and queues.credit_s == 0.0
