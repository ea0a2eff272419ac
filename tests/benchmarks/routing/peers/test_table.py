"""Rows of the table: medians, spreads, shares, and what was not finished."""

import pytest

from benchmarks.routing.peers.play import Outcome
from benchmarks.routing.peers.table import against, measured, repeat_row, router_row

TOTALS = {
    "a": {"prompt_tokens": 300, "device_tokens": 100, "host_tokens": 0},
    "b": {"prompt_tokens": 100, "device_tokens": 0, "host_tokens": 100},
}


def outcome(number, ttft_s, node="a", error="", start_s=None):
    at_s = float(number) if start_s is None else start_s
    done = {"ttft_s": ttft_s, "e2e_s": 2 * ttft_s, "route_s": 0.001} if not error else {}
    return Outcome(f"r{number}", at_s, 100, 5, node=node, error=error, **done)


def test_what_only_warmed_the_caches_is_left_out():
    outcomes = [outcome(i, 1.0) for i in range(10)]
    assert [o.request for o in measured(outcomes, 8.0)] == ["r8", "r9"]


def test_a_repeat_counts_shares_failures_and_hits():
    outcomes = [outcome(0, 1.0), outcome(1, 2.0, "b"), outcome(2, 3.0)]
    outcomes += [outcome(3, 0.0, error="unfinished"), outcome(4, 0.0, error="status 500: a")]
    row = repeat_row(outcomes, TOTALS)
    assert (row["requests"], row["completed"]) == (5, 3)
    assert row["failed"] == {"unfinished": 1, "status 500": 1}
    assert row["node_share"] == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert row["found"] == {"device": 0.25, "host": 0.25}
    assert (row["ttft_s"]["p50"], row["e2e_s"]["p50"]) == (2.0, 4.0)
    assert row["route_ms"] == pytest.approx(1.0)
    assert row["in_flight"] == pytest.approx((2 + 4 + 6) / 4)


def test_a_repeat_in_which_nothing_ended_has_no_figures():
    row = repeat_row([outcome(0, 0.0, error="unfinished")], TOTALS)
    assert "ttft_s" not in row and row["failed"] == {"unfinished": 1}
    assert "ttft_s" not in router_row([row])


def test_a_router_is_the_median_of_its_repeats_with_their_spread():
    repeats = [repeat_row([outcome(i, t) for i in range(3)], TOTALS) for t in (1.0, 4.0, 2.0)]
    row = router_row(repeats)
    assert row["ttft_s"]["p50"] == {"median": 2.0, "least": 1.0, "most": 4.0}
    assert (row["requests"], row["completed"]) == (9, 9)


def test_routers_are_compared_repeat_by_repeat():
    def of(name, *ttft_s):
        repeats = [repeat_row([outcome(i, t) for i in range(3)], TOTALS) for t in ttft_s]
        return {"router": name, **router_row(repeats)}

    rows = [of("ours", 1.0, 2.0, 4.0), of("theirs", 2.0, 2.0, 2.0)]
    (ratio,) = against(rows, "ours")
    assert ratio["router"] == "theirs"
    assert ratio["p99"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    assert against(rows, "nobody") == []
