import numpy as np
import pytest

from kappa import slo as law
from kappa.hardware import CATALOGUE
from loadtest.slo import Objective, objective_of
from tests.loadtest.replay_records import foreign, told


def node_row(name, dilation=1.0):
    node = CATALOGUE[name].to_dict()
    if dilation > 1:
        node |= {"source": "paced", "dilation": dilation}
    return {"node": name, "paced": dilation > 1, "emulated_model": "llama-3.1-8b", "profile": node}


def test_given_limits_rule_and_one_of_them_may_be_open():
    judged = Objective(ttft_s=0.95).judge([told(), foreign()])
    assert judged.ttft_limit_s.tolist() == [0.95, 0.95]
    assert np.isinf(judged.tpot_limit_s).all()
    assert judged.basis == ("given", "given")


def test_our_nodes_give_the_objective_of_the_whole_system():
    names = sorted(CATALOGUE)[:3]
    run = {"nodes": [node_row(name, 20.0) for name in names]}
    objective = objective_of(run)
    judged = objective.judge([told()])
    assert judged.basis == ("idle",)
    idle = law.median_node([law.idle_ttft_s(s, 1600.0, 400.0) for s in objective.speeds])
    tpot = law.median_node([law.idle_tpot_s(s, 2000.0, 5.0) for s in objective.speeds])
    expected = law.limits(idle, tpot, 20.0)
    assert judged.ttft_limit_s == pytest.approx(expected.ttft_s)
    assert judged.tpot_limit_s == pytest.approx(expected.tpot_s)
    # Half a second of the node's own time, in real seconds.
    assert judged.ttft_limit_s[0] >= 10.0


def test_without_a_priced_node_the_prediction_stands_in_and_then_nothing_does():
    run = {"nodes": [{**node_row("h100-sxm" if "h100-sxm" in CATALOGUE else sorted(CATALOGUE)[0]),
                      "emulated_model": None}], "model": "nobody-knows"}  # fmt: skip
    judged = objective_of(run).judge([told(), foreign()])
    assert judged.basis == ("predicted", "none")
    assert judged.ttft_limit_s[0] == pytest.approx(5 * 0.8)
    assert np.isnan(judged.ttft_limit_s[1])


def test_a_request_without_a_token_misses_whatever_the_limit():
    judged = Objective(tpot_s=0.2).judge([told(), told(), told()])
    ttft, tpot = np.array([0.1, np.nan, 0.1]), np.array([np.nan, np.nan, 0.3])
    assert judged.met(ttft, tpot).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"objective": {"ttft_s": -1}}, "ttft_s is -1"),
        ({"objective": {"share": 0}}, "share is 0"),
        ({"objective": {"ttft": 1}}, "unknown key 'ttft'"),
    ],
)
def test_an_objective_that_is_none_is_refused(run, said):
    with pytest.raises(ValueError, match=said):
        objective_of(run)


def test_nodes_that_tell_nothing_of_themselves_do_no_harm():
    for row in ({"profile": "fast"}, {"profile": {"dilation": "x"}}, {}):
        objective = objective_of({"nodes": [row], "model": "llama-3.1-8b"})
        assert (objective.speeds, objective.dilation) == ((), 1.0)
