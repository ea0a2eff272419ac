"""A request's seconds and parts, and what it is held against: limits, nodes, predictions."""

import numpy as np
import pytest
from msgspec.structs import replace

from kappa import slo
from kappa.hardware import CATALOGUE
from kappa_loadtest import results
from kappa_loadtest.explain import NO_SPLIT, why_slow, why_slow_tokens
from kappa_loadtest.results import Objective, objective_of
from tests.loadtest.replay_records import failed, foreign, reported


def table_of(*records, objective=None):
    return results.table_of(records, objective or Objective())


def row_of(record):
    return table_of(record).row(0, named=True)


# -- the parts of a TTFT


def with_actual(record, **figures):
    return replace(record, actual={**record.actual, **figures})


def parts(row):
    return [row[f"actual_{name}"] for name in ("queue_s", "load_s", "compute_s")]


def test_a_derived_split_adds_up_to_the_ttft():
    row = row_of(reported())
    assert row["split"] == "derived"
    assert parts(row) == pytest.approx([0.1, 0.3, 0.5])
    assert sum(parts(row)) + row["late_s"] + row["way_s"] == pytest.approx(row["ttft_s"])
    assert row["unknown_s"] == 0.0


def test_a_split_that_the_endpoint_reports_is_taken_as_it_is():
    row = row_of(with_actual(reported(), queue_s=0.6, load_s=0.1, compute_s=0.1))
    assert (row["split"], parts(row)) == ("told", [0.6, 0.1, 0.1])
    assert row["unknown_s"] == pytest.approx(0.1)


def test_parts_follow_the_tokens_actually_loaded_and_computed():
    # The prefix was not there: nothing loaded, everything computed, at the predicted rate.
    row = row_of(with_actual(reported(), cached_tokens=0, new_tokens=600))
    assert parts(row)[1:] == pytest.approx([0.0, 0.5 * 600 / 400])
    assert "1,600 of 1,600 reusable tokens were in no cache there" in why_slow(row)


def test_predicted_parts_never_exceed_what_was_measured():
    queue_s, load_s, compute_s = parts(
        row_of(with_actual(reported(), cached_tokens=3200, new_tokens=800))
    )
    assert queue_s == pytest.approx(0.0, abs=1e-12) and load_s + compute_s == pytest.approx(0.9)


def test_tokens_that_nobody_predicted_leave_the_split_unknown():
    predicted = {**reported().predicted, "cached_tokens": 0}
    row = row_of(replace(reported(), predicted=predicted))
    assert (row["split"], parts(row), row["unknown_s"]) == ("none", [None] * 3, 0.9)
    nothing = with_actual(replace(reported(), predicted=predicted), cached_tokens=0)
    assert parts(row_of(nothing))[1:] == [0.0, 0.5]


def test_a_request_without_a_token_has_no_split():
    row = row_of(failed())
    assert (row["split"], row["ttft_s"], row["e2e_s"]) == (None, None, None)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            with_actual(reported(first_token_s=4.93), ttft_s=3.9),
            "waited 3.1 of 3.9 s in the queue of node pcie (paced); predicted 50 ms",
        ),
        (
            with_actual(reported(), cached_tokens=3200, new_tokens=100),
            "load of 3,200 tokens over the link of node pcie (paced) took 0.60 of 0.93 s; "
            "predicted 0.30 s",
        ),
        (
            reported(),
            "computing 400 new tokens on node pcie (paced) took 0.50 of 0.93 s; predicted 0.50 s",
        ),
        (reported(sent_s=1.8), "sent 0.80 s late: the client was at its stream limit, or busy"),
        (
            reported(sent_s=1.8, attempt=2),
            "it was refused 2 times before: 0.80 of 0.93 s went by until the attempt that was "
            "answered",
        ),
        (foreign(), f"0.92 of 0.93 s at the endpoint; {NO_SPLIT}"),
        (
            foreign(predicted_ttft_s=0.2, node="pcie"),
            f"0.92 of 0.93 s at the endpoint; {NO_SPLIT}; predicted TTFT 0.20 s",
        ),
        (
            with_actual(reported(), ttft_s=0.05),
            "0.87 of 0.93 s passed between client and router (network, HTTP, tokenization)",
        ),
    ],
)
def test_one_plain_sentence_says_why_it_was_slow(record, sentence):
    assert why_slow(row_of(record)).startswith(sentence)


def test_why_slow_tokens_names_one_long_pause_or_even_slowness():
    assert why_slow_tokens(row_of(reported(gaps_s=[0.01, 0.02, 2.0]))) == (
        "one pause of 2.0 s on node pcie (paced), before chunk 4 of 4, made most of its 2.0 s of "
        "decoding"
    )
    assert "evenly: the longest pause was 0.10 s" in why_slow_tokens(row_of(reported()))
    assert why_slow_tokens(row_of(reported(gaps_s=[]))) == "it has no second token"


# -- the objective


def node_row(name, dilation=1.0):
    node = CATALOGUE[name].to_dict()
    if dilation > 1:
        node |= {"source": "paced", "dilation": dilation}
    return {"node": name, "paced": dilation > 1, "emulated_model": "llama-3.1-8b", "profile": node}


def test_given_limits_rule_and_one_of_them_may_be_open():
    table = table_of(reported(), foreign(), objective=Objective(ttft_s=0.95))
    assert table["ttft_limit_s"].to_list() == [0.95, 0.95]
    assert table["tpot_limit_s"].to_list() == [None, None]
    assert table["basis"].to_list() == ["given", "given"]


def test_our_nodes_give_the_objective_of_the_whole_system():
    one, *others = sorted(CATALOGUE)[:3]
    objective = objective_of({"nodes": [node_row(name, 20.0) for name in (one, *others, one)]})
    row = table_of(reported(), objective=objective).row(0, named=True)
    assert row["basis"] == "idle"
    idle = slo.median_node([slo.idle_ttft_s(s, 1600.0, 400.0) for s in objective.speeds])
    tpot = slo.median_node([slo.idle_tpot_s(s, 2000.0, 5.0) for s in objective.speeds])
    expected = slo.limits(idle, tpot, 20.0)
    assert row["idle_ttft_s"] == pytest.approx(idle)
    assert row["ttft_limit_s"] == pytest.approx(expected.ttft_s)
    assert row["tpot_limit_s"] == pytest.approx(expected.tpot_s)
    # Half a second of the node's own time, in real seconds.
    assert row["ttft_limit_s"] >= 10.0


def test_table_takes_requested_lengths_if_none_were_reported():
    objective = objective_of({"nodes": [node_row(sorted(CATALOGUE)[0])]})
    unreported = reported(prompt_tokens=None, generated_tokens=0, input_tokens=3000)
    row = table_of(unreported, objective=objective).row(0, named=True)
    assert row["idle_ttft_s"] == pytest.approx(
        float(np.ravel(slo.idle_ttft_s(objective.speeds[0], 1600.0, 1400.0))[0])
    )


def test_objective_falls_back_to_the_prediction_without_a_node():
    objective = objective_of(
        {"nodes": [{**node_row(sorted(CATALOGUE)[0]), "emulated_model": None}], "model": "unknown"}
    )
    table = table_of(reported(), foreign(), failed(predicted=None), objective=objective)
    assert table["basis"].to_list() == ["predicted", "none", "none"]
    assert table["ttft_limit_s"].to_list() == [pytest.approx(5 * 0.8), None, None]
    # What failed missed, whatever the limit.
    assert table["met"].to_list() == [True, None, False]


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
