"""The order in which a fair queue serves tenants, by numbers worked out by hand."""

from router.ingress.fair_queue import FairQueue


def drained(queue):
    items = []
    while (item := queue.take()) is not None:
        items.append(item)
    return items


def filled(*entries):
    queue = FairQueue()
    for item, weight, cost in entries:
        queue.put(item, item[0], weight, cost)
    return queue


def test_one_tenant_is_served_in_the_order_of_arrival():
    assert drained(filled(("a1", 1, 9), ("a2", 1, 1), ("a3", 1, 5))) == ["a1", "a2", "a3"]


def test_small_requests_pass_another_tenants_large_ones():
    queue = filled(("a1", 1, 100), ("a2", 1, 100), ("b1", 1, 30), ("b2", 1, 30))
    # Virtual times: both 0, a came first: a1 (a at 100); b1 (b 30), b2 (b 60); then a2.
    assert drained(queue) == ["a1", "b1", "b2", "a2"]


def test_a_weight_of_two_gets_twice_the_work():
    ones = [(f"a{i}", 1, 10) for i in range(3)]
    twos = [(f"b{i}", 2, 10) for i in range(5)]
    # a advances by 10, b by 5: a 0 10 20, b 0 5 10 15 20; ties go to who arrived first.
    assert drained(filled(*ones, *twos)) == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "b4"]


def test_a_tenant_that_had_nothing_waiting_does_not_catch_up_on_the_past():
    queue = filled(("a1", 1, 10), ("a2", 1, 10), ("a3", 1, 10), ("a4", 1, 10))
    assert [queue.take() for _ in range(3)] == ["a1", "a2", "a3"]
    # a3 began at 20, so b begins there, and a stands at 30: b at 20 and 30, where a4 is earlier.
    for item in ("b1", "b2", "b3"):
        queue.put(item, "b", 1, 10)
    assert drained(queue) == ["b1", "a4", "b2", "b3"]


def test_a_tenant_that_comes_back_at_once_has_not_forgotten_its_last_work():
    queue = filled(("a1", 1, 100), ("b1", 1, 10))
    assert queue.take() == "a1"
    queue.put("a2", "a", 1, 100)
    queue.put("b2", "b", 1, 10)
    assert drained(queue) == ["b1", "b2", "a2"]


def test_all_are_even_again_once_nothing_waits():
    queue = filled(("a1", 1, 100))
    assert drained(queue) == ["a1"]
    queue.put("a2", "a", 1, 1)
    queue.put("b1", "b", 1, 1)
    assert drained(queue) == ["a2", "b1"]


def test_what_is_dropped_is_not_charged():
    queue = filled(("a1", 1, 100), ("a2", 1, 1), ("b1", 1, 1))
    for item, tenant in (("a1", "a"), ("a1", "a"), ("c1", "c")):
        queue.drop(item, tenant)
    assert drained(queue) == ["a2", "b1"]
    queue.put("a3", "a", 1, 1)
    queue.drop("a3", "a")
    assert queue.take() is None
