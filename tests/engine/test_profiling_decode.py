"""What runs beside a measurement: under way before, over after, and its failure is heard of."""

from __future__ import annotations

import threading

import pytest

from engine.profiling_decode import repeating


def test_it_is_under_way_in_the_block_and_over_after_it() -> None:
    threads, done = threading.active_count(), []
    with repeating(lambda: done.append(threading.get_ident()), threads=3):
        assert len(set(done)) >= 1
        assert len(done) >= 3
    count = len(done)
    assert threading.active_count() == threads
    assert len(done) == count


def test_a_failure_before_the_block_is_raised_instead_of_it() -> None:
    entered = []
    with pytest.raises(RuntimeError, match="beside the measurement failed: no"), repeating(_fail):
        entered.append(1)
    assert entered == []


def test_a_failure_in_the_block_is_raised_after_it() -> None:
    first, second = threading.Event(), threading.Event()

    def action() -> None:
        if first.is_set():
            second.set()
            _fail()

    with pytest.raises(RuntimeError, match="beside the measurement failed: no"), repeating(action):
        first.set()
        assert second.wait(10)


def test_an_exception_of_the_block_is_its_own() -> None:
    threads = threading.active_count()
    with pytest.raises(KeyError), repeating(lambda: None):
        raise KeyError
    assert threading.active_count() == threads


def _fail() -> None:
    raise OSError("no")
