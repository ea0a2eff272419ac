"""One tenant's queue: order of arrival, those that ran before in front, anyone may leave."""

import pytest

from scheduler.queue import TenantQueue
from scheduler.work import Work


@pytest.fixture
def works():
    found = [Work(1, 0.0) for _ in range(6)]
    for seq, work in enumerate(found):
        work.seq = seq
    return found


def test_first_come_first_served(works):
    queue = TenantQueue()
    for work in works:
        queue.append(work)
    assert list(queue) == works and len(queue) == 6


def test_those_that_ran_stand_in_front_oldest_first(works):
    queue = TenantQueue()
    queue.append(works[0])
    for at in (5, 3, 4):
        queue.restore(works[at])
    assert [w.seq for w in queue] == [3, 4, 5, 0]


def test_who_was_not_admitted_after_all_stands_where_it_was(works):
    queue = TenantQueue()
    for at in (0, 1, 4):
        queue.append(works[at])
    for at in (3, 2):
        queue.put_back(works[at])
    queue.restore(works[5])
    assert [w.seq for w in queue] == [5, 0, 1, 2, 3, 4]


def test_anyone_may_leave(works):
    queue = TenantQueue()
    queue.append(works[0]), queue.append(works[1])
    queue.put_back(works[2]), queue.restore(works[3])
    for at in (0, 2, 3):
        queue.remove(works[at])
    assert list(queue) == [works[1]] and len(queue) == 1
    with pytest.raises(KeyError):
        queue.remove(works[0])
