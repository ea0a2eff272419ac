"""Copies arrive, in order, are counted, can fail, and never outlive the mover."""

import threading

import pytest
import torch

from kappa_engine.transfer import CpuMover, Event, TransferFailed, mover_for
from tests.engine.links import Link


@pytest.fixture
def gated():
    """A link that is held until it is opened."""
    mover = Link()
    mover.open.clear()
    yield mover
    mover.open.set()
    mover.stop(10)


def test_bytes_arrive_and_are_counted() -> None:
    mover = mover_for("cpu")
    source, target = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    event = mover.h2d([(target[0], source[2]), (target[1:], source[:2])])
    mover.wait(event)
    assert torch.equal(target, source[[2, 0, 1]])
    back = torch.zeros(3, 4)
    mover.d2h([(back, target)]).block()
    assert torch.equal(back, target)
    counters = mover.counters["h2d"]
    assert counters.copied_bytes == 48
    assert mover.counters["d2h"].copied_bytes == 48
    assert counters.busy_s > 0
    mover.stop(10)


def test_an_event_is_not_done_before_its_copy(gated: Link) -> None:
    target = torch.zeros(2)
    event = gated.h2d([(target, torch.ones(2))])
    assert not event.done()
    with pytest.raises(TransferFailed, match=r"did not end within 0\.01 s"):
        event.block(0.01)
    with pytest.raises(TransferFailed, match="still under way"):
        gated.drain(0.01)
    gated.open.set()
    gated.drain(10)
    assert event.done() and event.error() is None
    assert target.tolist() == [1, 1]


def test_a_copy_comes_after_what_it_was_told_to(gated: Link) -> None:
    middle, end = torch.zeros(2), torch.zeros(2)
    first = gated.d2h([(middle, torch.ones(2))])
    second = gated.h2d([(end, middle)], after=first)
    gated.open.set()
    second.block(10)
    assert end.tolist() == [1, 1]


def test_failed_copy_fails_what_depends_on_it(gated: Link) -> None:
    gated.breaks = lambda direction, copies: direction == "h2d"
    gated.open.set()
    target = torch.zeros(2)
    event = gated.h2d([(target, torch.ones(2))])
    after = gated.d2h([(torch.zeros(2), target)], after=event)
    with pytest.raises(TransferFailed, match="the link is down"):
        gated.wait(event)
    with pytest.raises(TransferFailed):
        gated.wait(after)
    assert isinstance(event.error(), OSError)
    assert gated.counters["h2d"].copied_bytes == 0
    gated.breaks = lambda direction, copies: False
    gated.h2d([(target, torch.ones(2))]).block(10)
    assert target.tolist() == [1, 1]


def test_pairs_that_do_not_match_are_refused_at_once() -> None:
    mover = mover_for("cpu")
    with pytest.raises(ValueError, match=r"cannot copy \(3,\) of torch.float32 to \(2,\)"):
        mover.h2d([(torch.zeros(2), torch.zeros(3))])
    with pytest.raises(ValueError, match="float64"):
        mover.h2d([(torch.zeros(2), torch.zeros(2, dtype=torch.float64))])
    mover.stop(10)


def test_stop_ends_the_threads_and_fails_what_had_not_begun(gated: Link) -> None:
    started = [gated.h2d([(torch.zeros(1), torch.ones(1))]) for _ in range(3)]
    stopper = threading.Thread(target=gated.stop, args=(10,))
    stopper.start()
    while not all(pool._shutdown for pool in gated._threads.values()):
        pass
    gated.open.set()
    stopper.join(10)
    # Its own: other tests' engines may still run in this process.
    threads = [thread for pool in gated._threads.values() for thread in pool._threads]
    assert threads and not any(thread.is_alive() for thread in threads)
    assert all(event.done() for event in started)
    assert started[-1].error() is not None
    assert isinstance(gated.h2d([(torch.zeros(1), torch.ones(1))]).error(), TransferFailed)


def test_whatever_is_asked_for_while_it_stops_ends() -> None:
    for _ in range(4):
        mover = CpuMover()
        events: list[Event] = []

        def copy(mover: CpuMover = mover, events: list[Event] = events) -> None:
            while not events or events[-1].error() is None:
                events.append(mover.h2d([(torch.zeros(1), torch.ones(1))]))

        asking = threading.Thread(target=copy)
        asking.start()
        while not events:
            pass
        mover.stop(10)
        asking.join(10)
        assert not asking.is_alive()
        assert all(event.ended(1) for event in events)
