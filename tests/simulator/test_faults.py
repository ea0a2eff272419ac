"""What goes wrong is drawn from the seed, and within the cluster."""

import pytest

from kappa.step import StepModel
from simulator.clusters import KINDS
from simulator.faults import (
    Misprofile,
    announced,
    drawn_failures,
    drawn_stragglers,
    misprofiled_third,
)

STEP = StepModel(1e-4, 1e-9, 5e-3, 1e-7, 1e-3)


def test_a_third_of_the_nodes_is_wrong_in_both_directions():
    wrong = misprofiled_third(20, ("link", "compute"), 3.0, seed=0)
    assert len(wrong) == len({fault.node for fault in wrong}) == 6
    assert {fault.factor for fault in wrong} == {3.0, 1 / 3.0}
    assert {fault.resource for fault in wrong} == {"link", "compute"}
    assert wrong == misprofiled_third(20, ("link", "compute"), 3.0, seed=0)
    assert wrong != misprofiled_third(20, ("link", "compute"), 3.0, seed=1)
    assert len(misprofiled_third(2, ("link",), 3.0, seed=0)) == 1


def test_an_announcement_is_wrong_in_the_resource_named_alone():
    profile = KINDS["h100"].profile
    wrong = (Misprofile(1, "link", 3.0), Misprofile(2, "compute", 0.5))
    assert announced(0, profile, STEP, wrong) == (profile, STEP)
    fast, step = announced(1, profile, STEP, wrong)
    assert fast.h2d_bytes_per_s == 3 * profile.h2d_bytes_per_s and step == STEP
    slow, step = announced(2, profile, STEP, wrong)
    assert slow.flops_per_s == profile.flops_per_s / 2
    assert (step.token_s, step.pair_s) == (2e-4, 2e-9)
    assert step.weights_s == STEP.weights_s


def test_failures_and_stragglers_are_of_different_nodes_within_the_run():
    failures = drawn_failures(10, 4, 100.0, 20.0, seed=0)
    assert len({f.node for f in failures}) == 4
    assert all(30.0 <= f.at_s <= 80.0 for f in failures)
    slow = drawn_stragglers(10, 4, 100.0, 3.0, seed=0)
    assert len({s.node for s in slow}) == 4
    assert all(s.end_s - s.start_s == pytest.approx(20.0) for s in slow)


def test_somebody_has_to_stay():
    with pytest.raises(ValueError, match="leave at least one"):
        drawn_failures(3, 3, 100.0, 20.0, seed=0)
    with pytest.raises(ValueError, match="at most 3"):
        drawn_stragglers(3, 4, 100.0, 3.0, seed=0)
    assert drawn_failures(1, 0, 100.0, 20.0, seed=0) == ()
