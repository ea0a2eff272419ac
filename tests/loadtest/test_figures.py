import json

import numpy as np
import polars as pl
import pytest

from kappa_loadtest.figures import figures as figures_of
from kappa_loadtest.figures import jain, spread, timeline
from kappa_loadtest.plots import cdf, sampled
from kappa_loadtest.results import Objective, objective_of, table_of
from tests.loadtest.replay_records import failed, foreign, many, reported

QUICK = Objective(ttft_s=0.95, tpot_s=0.2)


def summarize(records, objective, **options):
    return figures_of(table_of(records, objective), objective, **options)


@pytest.mark.parametrize("count", [1, 10, 5000])
def test_quantiles_are_values_that_occurred(count):
    values = np.random.default_rng(1).lognormal(0, 2, count)
    found = spread(pl.Series(values))
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == np.quantile(values, q, method="lower")
    assert found["mean"] == pytest.approx(values.mean())
    assert found["max"] == values.max()


def test_a_cumulative_share_ends_at_one_and_keeps_few_points():
    values, shares = cdf(pl.Series(np.arange(1000.0)), points=10)
    assert len(values) == 10
    assert (values[-1], shares[-1]) == (999.0, 1.0)
    assert shares[0] == 1 / 1000


def test_nothing_has_no_spread_and_no_shares():
    nothing = pl.Series([None], dtype=pl.Float64)
    assert set(spread(nothing).values()) == {None}
    assert len(cdf(nothing)[0]) == 0


def test_jain_is_one_when_alike_and_one_over_n_when_one_has_all():
    assert jain([3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0]) is None


def test_latency_counts_from_when_a_request_was_due():
    late = reported(sent_s=1.51, first_token_s=1.93)
    figures = summarize([late], QUICK)
    assert figures["ttft_s"]["max"] == pytest.approx(0.93)
    assert figures["ttft_sent_s"]["max"] == pytest.approx(0.42)
    assert figures["late_s"]["max"] == pytest.approx(0.51)
    assert figures["e2e_s"]["max"] == pytest.approx(1.34)


def test_tpot_counts_tokens_and_itl_counts_chunks():
    # Two chunks of several tokens: one gap, but four later tokens.
    figures = summarize([reported(gaps_s=[0.4])], QUICK)
    assert figures["itl_s"]["max"] == pytest.approx(0.4)
    assert figures["tpot_s"]["max"] == pytest.approx(0.1)


def test_goodput_counts_what_met_the_objective_and_failures_miss():
    records = [
        reported(scheduled_s=0.0, sent_s=0.0, first_token_s=0.9, last_token_s=1.3, ended_s=1.3),
        reported(scheduled_s=1.0, sent_s=1.0, first_token_s=2.0, last_token_s=2.4, ended_s=2.4),
        reported(scheduled_s=2.0, sent_s=2.0, first_token_s=2.5, last_token_s=4.5, ended_s=4.5),
        failed(scheduled_s=4.0, sent_s=4.0, ended_s=4.2),
    ]
    figures = summarize(records, QUICK)
    assert figures["goodput_rps"] == pytest.approx(1 / 4)
    slo = figures["slo"]
    assert (slo["met"], slo["ttft_met"], slo["tpot_met"]) == (0.25, 0.5, 0.5)
    assert (slo["passed"], slo["basis"]) == (False, "given")
    assert slo["meaning"] == "first token within 0.95 s, later tokens within 0.2 s each"
    assert summarize(records, Objective(0.95, 0.2, share=0.25))["slo"]["passed"] is True


def test_without_an_objective_there_is_no_goodput():
    figures = summarize([foreign()], Objective())
    assert figures["goodput_rps"] is None
    assert (figures["slo"]["basis"], figures["slo"]["passed"]) == ("none", None)
    assert figures["nodes"] == [] and figures["classes"] == []


def test_summary_counts_errors_by_kind_and_not_as_latency():
    never_sent = failed("prompt", sent_s=0.0, error_detail="no such document")
    figures = summarize([reported(), failed(), failed(), never_sent], QUICK)
    assert figures["errors"]["429"]["count"] == 2
    assert figures["errors"]["429"]["examples"] == ["queue <full>"]
    assert figures["errors"]["prompt"]["meaning"]
    assert (figures["requests"], figures["sent"], figures["completed"]) == (4, 3, 1)
    assert figures["ttft_s"]["max"] == pytest.approx(0.93)


def test_owners_have_their_own_figures():
    on_c2c = reported(node="c2c", tenant="b", ratio=200.0, crit=114.9, session="t")
    figures = summarize([reported(), reported(turn=1), on_c2c, foreign(session="f")], QUICK)
    assert [(r["name"], r["requests"]) for r in figures["nodes"]] == [
        ("pcie", 2), ("(not reported)", 1), ("c2c", 1),
    ]  # fmt: skip
    assert {r["name"]: r["requests"] for r in figures["tenants"]} == {"a": 3, "b": 1}
    assert {r["name"]: r["requests"] for r in figures["classes"]} == {
        "compute-bound": 2, "memory-bound": 1, "(not reported)": 1,
    }  # fmt: skip
    assert figures["nodes"][0]["cached_tokens"] == 3200


def test_classes_that_were_asked_for_have_their_own_figures():
    records = [reported(priority=p, session=str(n)) for n, p in enumerate((0, 0, 3, None))]
    rows = summarize(records, QUICK)["priorities"]
    assert [(row["name"], row["requests"]) for row in rows] == [("0", 2), ("(none)", 1), ("3", 1)]
    assert rows[2]["ttft_s"] == summarize(records[2:3], QUICK)["ttft_s"]
    assert summarize([reported()], QUICK)["priorities"] == []


def test_summary_shows_expected_beside_actual_cached_tokens():
    missed = reported(actual={"device_tokens": 100, "cached_tokens": 0, "new_tokens": 1900,
                          "ttft_s": 0.9})  # fmt: skip
    cached = summarize([reported(), missed, foreign()], QUICK)["cached_tokens"]
    assert cached["expected"] == 4800
    assert (cached["expected_where_told"], cached["told_requests"]) == (3200, 2)
    assert (cached["actual"], cached["device"], cached["host"]) == (1700, 100, 1600)
    assert summarize([foreign()], QUICK)["cached_tokens"]["actual"] is None


def test_prediction_errors_are_against_client_and_router():
    found = summarize([reported()], QUICK)["prediction"]
    assert found["client_error"]["p50"] == pytest.approx((0.92 - 0.85) / 0.92, rel=0.01)
    assert found["client_bias_p50"] == pytest.approx((0.85 - 0.92) / 0.92, rel=0.01)
    assert found["router_error"]["p50"] == pytest.approx(0.05 / 0.9, rel=0.01)


def test_fairness_compares_how_near_to_idle_tenants_ran():
    slow = reported(tenant="b", first_token_s=1.93 + 0.93 * 3)
    figures = summarize([reported(), slow], Objective())
    assert "idle" in figures["jain_of"]
    assert figures["jain"] == pytest.approx((1 + 0.25) ** 2 / (2 * (1 + 0.25**2)))
    assert summarize([reported()], Objective())["jain"] is None


def test_the_slowest_come_first_with_the_reason():
    records = list(many(200))
    figures = summarize([*records, failed()], Objective())
    ttft_s = (record.first_token_s - record.scheduled_s for record in records)
    worst = sorted(ttft_s, reverse=True)[:25]
    assert [row["ttft_s"] for row in figures["slowest"]] == worst
    assert all(row["why"] and row["actual"]["source"] for row in figures["slowest"])


def test_timeline_counts_requests_in_flight_and_joins_bins():
    records = [
        reported(scheduled_s=k, sent_s=k + 0.5, ended_s=k + 3.0, session=str(k)) for k in range(20)
    ]
    short = timeline(table_of(records, QUICK))
    assert short["bin_s"] == 0.25
    assert sum(short["sent"]) == 20
    # At the end of the bin from 5.5 to 5.75 s six were sent and three (due at 0, 1 and 2) ended.
    assert short["in_flight"][22] == 6 - 3
    assert short["in_flight"][-1] == 0
    assert (short["waiting"][:3], max(short["waiting"])) == ([1, 1, 0], 1)
    long = timeline(table_of([*records, reported(ended_s=100.0)], QUICK))
    assert (long["bin_s"], len(long["due"])) == (0.5, 201)
    assert sum(long["ended"]) == 21


def test_a_sample_is_even_and_bounded():
    sample = sampled(pl.DataFrame({"at": range(1000)}), 10)["at"]
    assert len(sample) == 10
    assert set(sample.diff().drop_nulls()) == {100}


def test_owners_beyond_a_bound_share_one_row():
    records = [reported(tenant=f"t{k}", session=str(k)) for k in range(600)]
    rows = summarize(records, QUICK)["tenants"]
    assert len(rows) == 513
    assert (rows[0]["name"], rows[0]["requests"]) == ("(all others)", 88)


def test_an_empty_run_has_figures_too():
    figures = summarize([], QUICK)
    assert (figures["requests"], figures["goodput_rps"]) == (0, None)
    assert figures["slo"]["passed"] is None
    json.dumps(figures, allow_nan=False)


def test_summary_counts_retries_and_not_as_the_clients_lateness():
    retried = reported(attempt=1, retried=["503"], sent_s=9.0, first_token_s=9.9, last_token_s=10.3)
    figures = summarize([reported(paced=False), retried], QUICK)
    assert (figures["paced_requests"], figures["retried"]) == (1, 1)
    # Waiting before a retry is not the client's arrival error.
    assert figures["late_s"]["max"] == pytest.approx(0.01)


def test_a_closed_loop_has_rates_over_the_whole_run():
    # All due at once: over the time between the first and the last there would be any rate.
    records = [reported(scheduled_s=1.0 + i * 1e-6, session=str(i)) for i in range(4)]
    records.append(reported(scheduled_s=1.0, sent_s=1.0, ended_s=5.0))
    figures = summarize(records, QUICK, is_closed=True)
    assert figures["duration_s"] == pytest.approx(4.0)
    assert figures["rate_rps"] == pytest.approx(5 / 4)
    assert figures["goodput_rps"] == pytest.approx(5 / 4)


def test_summary_neither_passes_nor_misses_an_unasked_objective():
    late = reported(first_token_s=90.0, last_token_s=91.0)
    own = summarize([late], objective_of({}))["slo"]
    assert (own["met"], own["basis"]) == (0.0, "predicted")
    assert (own["asked"], own["passed"]) == (False, None)
    required = summarize([late], objective_of({"objective": {"share": 0.5}}))["slo"]
    assert (required["asked"], required["passed"]) == (True, False)


def test_what_has_no_objective_is_neither_met_nor_missed():
    # An endpoint that reports its predictions for some requests only.
    unreported = [reported(session=str(i), predicted=None) for i in range(3)]
    late = reported(session="late", first_token_s=90.0, last_token_s=91.0)
    figures = summarize([reported(), late, *unreported, failed(predicted=None)], Objective())
    assert figures["slo"]["met"] == pytest.approx(1 / 3)
    assert figures["slo"]["not_judged"] == 3
    assert figures["nodes"][0]["met"] == pytest.approx(1 / 3)
