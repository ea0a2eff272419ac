"""The order of events, and the noise of their durations."""

import numpy as np
import pytest

from kappa_simulator.loop import Loop, Noise


def test_loop_runs_events_of_one_time_in_their_scheduled_order():
    loop, seen = Loop(), []
    for name in "abc":
        loop.at(1.0, seen.append, name)
    loop.at(0.5, lambda _: loop.at(1.0, seen.append, "d"))
    loop.run()
    assert seen == ["a", "b", "c", "d"] and loop.now_s == 1.0


def test_noise_has_median_one_and_is_seeded():
    first, again = (Noise(np.random.default_rng(5), 0.1) for _ in range(2))
    drawn = [first.factor() for _ in range(5000)]
    assert drawn == [again.factor() for _ in range(5000)]
    assert np.median(drawn) == pytest.approx(1.0, abs=0.01)
    assert np.std(np.log(drawn)) == pytest.approx(0.1, rel=0.05)
    assert Noise(np.random.default_rng(5), 0.0).factor() == 1.0
