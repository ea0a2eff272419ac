"""How requests are judged, by limits given, by the endpoint's own nodes, by its predictions."""

import numpy as np
import pytest

from kappa import slo
from kappa.hardware import CATALOGUE
from loadtest.results import Objective, objective_of
from tests.loadtest.replay_records import foreign, reported


def node_row(name, dilation=1.0):
    node = CATALOGUE[name].to_dict()
    if dilation > 1:
        node |= {"source": "paced", "dilation": dilation}
    return {"node": name, "paced": dilation > 1, "emulated_model": "llama-3.1-8b", "profile": node}


def test_given_limits_rule_and_one_of_them_may_be_open():
    judged = Objective(ttft_s=0.95).judge([reported(), foreign()])
    assert judged.limits.ttft_s.tolist() == [0.95, 0.95]
    assert np.isinf(judged.limits.tpot_s).all()
    assert judged.basis == ("given", "given")


def test_our_nodes_give_the_objective_of_the_whole_system():
    names = sorted(CATALOGUE)[:3]
    objective = objective_of({"nodes": [node_row(name, 20.0) for name in names]})
    judged = objective.judge([reported()])
    assert judged.basis == ("idle",)
    idle = slo.median_node([slo.idle_ttft_s(s, 1600.0, 400.0) for s in objective.speeds])
    tpot = slo.median_node([slo.idle_tpot_s(s, 2000.0, 5.0) for s in objective.speeds])
    expected = slo.limits(idle, tpot, 20.0)
    assert judged.limits.ttft_s == pytest.approx(expected.ttft_s)
    assert judged.limits.tpot_s == pytest.approx(expected.tpot_s)
    # Half a second of the node's own time, in real seconds.
    assert judged.limits.ttft_s[0] >= 10.0


def test_without_a_priced_node_the_prediction_stands_in_and_then_nothing_does():
    row = {**node_row("h100-sxm" if "h100-sxm" in CATALOGUE else sorted(CATALOGUE)[0]),
           "emulated_model": None}  # fmt: skip
    judged = objective_of({"nodes": [row], "model": "nobody-knows"}).judge([reported(), foreign()])
    assert judged.basis == ("predicted", "none")
    assert judged.limits.ttft_s[0] == pytest.approx(5 * 0.8)
    assert np.isnan(judged.limits.ttft_s[1])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"objective": {"ttft_s": -1}}, "ttft_s is -1"),
        ({"objective": {"share": 0}}, "share is 0"),
        ({"objective": {"ttft": 1}}, "unknown key 'ttft'"),
    ],
)
def test_a_bad_objective_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        objective_of(run)


@pytest.mark.parametrize("row", [{"profile": "fast"}, {"profile": {"dilation": "x"}}, {}])
def test_nodes_without_a_profile_give_no_objective(row):
    objective = objective_of({"nodes": [row], "model": "llama-3.1-8b"})
    assert (objective.speeds, objective.dilation) == ((), 1.0)
