"""Spans of a request: contiguous, within each other, and split by what the worker reported."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as genai

from kappa_router.telemetry import Telemetry, spans_of
from tests.router import timelines
from tests.router.timelines import decision, reported


def kept(most=10):
    return Telemetry(lambda _: None, most)


def served(telemetry=None, *given, **more):
    return timelines.served(kept() if telemetry is None else telemetry, *given, **more)


def by_name(spans):
    return {span.name: span for span in spans}


def test_served_request_is_split_into_its_stages():
    spans = by_name(spans_of(served(), reported(0.5, 0.3, 64, 320, 116)))
    assert list(spans) == [
        "decider", "tokenize", "decide", "first_token", "queue", "load", "prefill", "stream",
    ]  # fmt: skip
    seconds = {name: round(span.seconds, 6) for name, span in spans.items()}
    assert seconds == {
        "decider": 2.0, "tokenize": 0.1, "decide": 0.03, "first_token": 1.0,
        "queue": 0.2, "load": 0.5, "prefill": 0.3, "stream": 0.87,
    }  # fmt: skip
    assert spans["load"].attributes == {"tokens": 320}
    assert spans["tokenize"].attributes == {"tokens": 500}
    assert spans["queue"].parent == "first_token" and spans["first_token"].parent == "decider"
    assert [name for name, span in spans.items() if span.derived] == ["queue", "load", "prefill"]
    assert spans["decider"].attributes["kappa.tenant"] == "alice"
    assert spans["decide"].attributes["kappa.node"] == "pcie"


def test_outermost_span_has_names_of_the_genai_conventions():
    timeline = served()
    timeline.model, timeline.chat, timeline.max_tokens = "m", False, 64
    about = by_name(spans_of(timeline, reported(0.5, 0.3, 64, 320, 116, disk=128)))["decider"]
    found = {k: v for k, v in about.attributes.items() if k.startswith(("gen_ai.", "kappa.cache"))}
    assert found == {
        genai.GEN_AI_PROVIDER_NAME: "kappa-serve", genai.GEN_AI_OPERATION_NAME: "text_completion",
        genai.GEN_AI_REQUEST_MODEL: "m", genai.GEN_AI_REQUEST_MAX_TOKENS: 64,
        genai.GEN_AI_USAGE_INPUT_TOKENS: 500, genai.GEN_AI_USAGE_OUTPUT_TOKENS: 7,
        genai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 384,
        "kappa.cache_read.device_tokens": 64, "kappa.cache_read.host_tokens": 192,
        "kappa.cache_read.disk_tokens": 128,
    }  # fmt: skip
    refused = by_name(spans_of(served(end=("overloaded", 429))))["decider"].attributes
    assert refused["error.type"] == "overloaded" and refused["gen_ai.usage.input_tokens"] == 500
    assert "gen_ai.usage.output_tokens" not in refused and "gen_ai.request.model" not in refused


def test_unstreamed_answer_had_its_first_token_before_its_end():
    spans = by_name(spans_of(served(), reported(0.1, 0.1, ttft_s=0.4)))
    assert spans["first_token"].end_s == pytest.approx(10.53)
    assert spans["queue"].seconds == pytest.approx(0.2)
    assert spans["stream"].start_s == spans["prefill"].end_s == spans["first_token"].end_s
    late = by_name(spans_of(served(), reported(0.1, 0.1, ttft_s=99.0)))
    assert late["first_token"].end_s == 11.13, "no later than what came back"
    early = by_name(spans_of(served(), reported(0.1, 0.1, ttft_s=0.0)))
    assert early["first_token"].seconds == 0.0


def test_wait_is_one_span_without_a_report():
    names = [span.name for span in spans_of(served())]
    assert names == ["decider", "tokenize", "decide", "first_token", "stream"]


def test_spent_seconds_show_without_tokens_before_admission():
    spent = SimpleNamespace(load_s=0.5, compute_s=0.3)
    record = SimpleNamespace(spent=spent, admitted=None, ttft_s=0.9, generated_tokens=None)
    spans = by_name(spans_of(served(), record))
    assert spans["prefill"].seconds == pytest.approx(0.3)
    assert spans["prefill"].attributes == {"tokens": 0, "device_tokens": 0}


def test_worker_that_died_shows_as_given_up_before_the_next():
    telemetry = kept()
    timeline = telemetry.begin("r", "t", 0.0)
    timeline.tokenized(None, 0.1)
    timeline.decided(decision("w1"), 0.3)
    timeline.decided(decision("w2", "c2c"), 1.3)
    timeline.first_item(2.0)
    telemetry.end(timeline, "done", 200, 2.5)
    spans = spans_of(timeline, reported(0.1, 0.2))
    assert [s.name for s in spans] == [
        "decider", "tokenize", "decide", "given_up", "decide", "first_token",
        "queue", "load", "prefill", "stream",
    ]  # fmt: skip
    given_up = by_name(spans)["given_up"]
    assert (given_up.start_s, given_up.end_s) == (0.3, 1.3)
    assert given_up.attributes["kappa.worker"] == "w1"
    assert by_name(spans)["first_token"].attributes["kappa.worker"] == "w2"


@pytest.mark.parametrize(
    ("events", "names"),
    [
        ([], ["decider"]),
        (["tokenized"], ["decider", "tokenize"]),
        (["tokenized", "decided"], ["decider", "tokenize", "decide", "given_up"]),
    ],
)
def test_request_has_the_spans_that_it_reached(events, names):
    telemetry = kept()
    timeline = telemetry.begin("r", "t", 0.0)
    calls = {
        "tokenized": lambda: timeline.tokenized(9, 1.0),
        "decided": lambda: timeline.decided(decision(), 2.0),
    }
    for event in events:
        calls[event]()
    telemetry.end(timeline, "client_gone", 0, 4.0)
    spans = spans_of(timeline, reported(1.0, 1.0))
    assert [span.name for span in spans] == names
    assert spans[0].end_s == 4.0


def test_request_under_way_has_no_spans_yet():
    with pytest.raises(ValueError, match="r has not ended"):
        spans_of(kept().begin("r", "t", 0.0))


def test_oldest_timelines_go_and_an_id_has_its_latest():
    ends, telemetry = [], kept(2)
    telemetry.on_end = ends.append
    for i in range(3):
        served(telemetry, str(i))
    assert len(telemetry) == 2 and telemetry.timeline("0") is None
    assert [t.request_id for t in ends] == ["0", "1", "2"]
    again = served(telemetry, "1")
    served(telemetry, "3")
    assert telemetry.timeline("1") is again and telemetry.timeline("2") is None
    assert telemetry.tenant("1") == "alice" and telemetry.tenant("2") is None


def test_first_end_of_a_request_alone_counts():
    ends, telemetry = [], kept()
    telemetry.on_end = ends.append
    timeline = served(telemetry)
    telemetry.end(timeline, "error", 500, 13.0)
    assert ends == [timeline] and (timeline.end, timeline.status) == ("done", 200)


def test_clients_trace_is_kept():
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert served(traceparent=f" {parent} ").traceparent == parent


@given(
    wait_s=st.floats(0, 100),
    load_s=st.floats(0, 200),
    compute_s=st.floats(0, 200),
    stream_s=st.floats(0, 10),
)
def test_spans_never_leave_their_parents(wait_s, load_s, compute_s, stream_s):
    telemetry = kept()
    timeline = telemetry.begin("r", "t", 0.0)
    timeline.tokenized(1, 0.5)
    timeline.decided(decision(), 1.0)
    timeline.first_item(1.0 + wait_s)
    telemetry.end(timeline, "done", 200, 1.0 + wait_s + stream_s)
    spans = spans_of(timeline, reported(load_s, compute_s))
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
def test_malformed_traceparent_is_not_kept(sent):
    assert served(traceparent=sent).traceparent == ""
