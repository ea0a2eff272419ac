"""Spans of a request: contiguous, within each other, and split by what the worker reported."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observing.spans import EngineShare, Timelines, spans_of


def decision(worker="w1", node="pcie", reason="load"):
    chosen = SimpleNamespace(node=SimpleNamespace(name=node))
    return SimpleNamespace(chosen=chosen, worker=worker, reason=reason)


def served(timelines, request_id="r", headers=None):
    timelines.received(request_id, "alice", headers or {}, 10.0)
    timelines.tokenized(request_id, 500, 10.1)
    timelines.decided(request_id, decision(), 0, 10.12)
    timelines.sent(request_id, "w1", 10.13)
    timelines.first_token(request_id, 11.13)
    timelines.ended(request_id, "done", 200, 12.0)
    return timelines.get(request_id)


def by_name(spans):
    return {span.name: span for span in spans}


def test_a_served_request_is_split_into_its_stations():
    spans = by_name(spans_of(served(Timelines()), EngineShare(0.5, 0.3, 64, 320, 116)))
    assert list(spans) == [
        "ingress", "tokenize", "decide", "first_token", "queue", "load", "prefill", "stream",
    ]  # fmt: skip
    seconds = {name: round(span.seconds, 6) for name, span in spans.items()}
    assert seconds == {
        "ingress": 2.0, "tokenize": 0.1, "decide": 0.02, "first_token": 1.0,
        "queue": 0.2, "load": 0.5, "prefill": 0.3, "stream": 0.87,
    }  # fmt: skip
    assert spans["load"].attributes == {"tokens": 320}
    assert spans["queue"].parent == "first_token" and spans["first_token"].parent == "ingress"
    assert [name for name, span in spans.items() if span.derived] == ["queue", "load", "prefill"]
    assert spans["ingress"].attributes["kappa.tenant"] == "alice"
    assert spans["decide"].attributes["kappa.node"] == "pcie"


def test_an_answer_that_is_not_streamed_had_its_first_token_before_it_came_back():
    spans = by_name(spans_of(served(Timelines()), EngineShare(0.1, 0.1, ttft_s=0.41)))
    assert spans["first_token"].end_s == pytest.approx(10.53)
    assert spans["queue"].seconds == pytest.approx(0.2)
    assert spans["stream"].start_s == spans["prefill"].end_s == spans["first_token"].end_s
    late = by_name(spans_of(served(Timelines()), EngineShare(0.1, 0.1, ttft_s=99.0)))
    assert late["first_token"].end_s == 11.13, "no later than what came back"
    early = by_name(spans_of(served(Timelines()), EngineShare(0.1, 0.1, ttft_s=0.0)))
    assert early["first_token"].seconds == 0.0


def test_without_the_workers_word_the_wait_is_one_span():
    names = [span.name for span in spans_of(served(Timelines()))]
    assert names == ["ingress", "tokenize", "decide", "first_token", "stream"]


def test_a_worker_that_died_shows_as_given_up_and_the_next_as_served():
    timelines = Timelines()
    timelines.received("r", "t", {}, 0.0)
    timelines.tokenized("r", None, 0.1)
    timelines.decided("r", decision("w1"), 0, 0.2)
    timelines.sent("r", "w1", 0.3)
    timelines.decided("r", decision("w2", "c2c"), 1, 1.3)
    timelines.sent("r", "w2", 1.4)
    timelines.first_token("r", 2.0)
    timelines.ended("r", "done", 200, 2.5)
    spans = spans_of(timelines.get("r"), EngineShare(0.1, 0.2))
    assert [s.name for s in spans] == [
        "ingress", "tokenize", "decide", "given_up", "decide", "first_token",
        "queue", "load", "prefill", "stream",
    ]  # fmt: skip
    given_up = by_name(spans)["given_up"]
    assert (given_up.start_s, given_up.end_s) == (0.3, 1.3)
    assert given_up.attributes["kappa.worker"] == "w1"
    assert by_name(spans)["first_token"].attributes["kappa.worker"] == "w2"


@pytest.mark.parametrize(
    ("stations", "names"),
    [
        ([], ["ingress"]),
        (["tokenized"], ["ingress", "tokenize"]),
        (["tokenized", "decided"], ["ingress", "tokenize", "decide"]),
        (["tokenized", "decided", "sent"], ["ingress", "tokenize", "decide", "given_up"]),
    ],
)
def test_a_request_that_ended_on_the_way_has_the_spans_that_it_reached(stations, names):
    timelines = Timelines()
    timelines.received("r", "t", {}, 0.0)
    calls = {
        "tokenized": lambda: timelines.tokenized("r", 9, 1.0),
        "decided": lambda: timelines.decided("r", decision(), 0, 2.0),
        "sent": lambda: timelines.sent("r", "w1", 3.0),
    }
    for station in stations:
        calls[station]()
    timelines.ended("r", "client_gone", 0, 4.0)
    spans = spans_of(timelines.get("r"), EngineShare(1.0, 1.0))
    assert [span.name for span in spans] == names
    assert spans[0].end_s == 4.0


def test_a_request_under_way_has_no_spans_yet():
    timelines = Timelines()
    timelines.received("r", "t", {}, 0.0)
    with pytest.raises(ValueError, match="r has not ended"):
        spans_of(timelines.get("r"))


def test_the_oldest_timelines_go_and_late_news_of_them_are_ignored():
    ends = []
    timelines = Timelines(ends.append, kept=2)
    for i in range(3):
        served(timelines, str(i))
    assert timelines.count == 2 and timelines.get("0") is None
    timelines.first_token("0", 1.0)
    timelines.ended("0", "done", 200, 1.0)
    timelines.ended("2", "done", 200, 99.0)
    assert [t.request_id for t in ends] == ["0", "1", "2"]
    assert timelines.get("2").ended_s == 12.0


def test_the_clients_trace_is_kept_and_no_other_header():
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    timeline = served(Timelines(), headers={"traceparent": parent, "cookie": "secret"})
    assert timeline.traceparent == parent
    assert "secret" not in repr(timeline)


@given(
    wait_s=st.floats(0, 100),
    load_s=st.floats(0, 200),
    compute_s=st.floats(0, 200),
    stream_s=st.floats(0, 10),
)
def test_spans_never_leave_their_parents(wait_s, load_s, compute_s, stream_s):
    timelines = Timelines()
    timelines.received("r", "t", {}, 0.0)
    timelines.tokenized("r", 1, 0.5)
    timelines.decided("r", decision(), 0, 0.75)
    timelines.sent("r", "w1", 1.0)
    timelines.first_token("r", 1.0 + wait_s)
    timelines.ended("r", "done", 200, 1.0 + wait_s + stream_s)
    spans = spans_of(timelines.get("r"), EngineShare(load_s, compute_s))
    parents = by_name(spans)
    for span in spans:
        assert span.start_s <= span.end_s + 1e-9
        if span.parent:
            parent = parents[span.parent]
            assert parent.start_s - 1e-9 <= span.start_s and span.end_s <= parent.end_s + 1e-9
    queue, load, prefill = (parents[name] for name in ("queue", "load", "prefill"))
    total_s = queue.seconds + load.seconds + prefill.seconds
    assert total_s == pytest.approx(wait_s, abs=1e-6)


@pytest.mark.parametrize("sent", ["0" * 32_000, "00-a-b-01", f"00-{'a' * 32}-{'b' * 16}-01-x"])
def test_a_traceparent_that_is_none_is_not_kept(sent):
    assert served(Timelines(), headers={"traceparent": sent}).traceparent == ""
