"""Spans over the wire to a collector of ours; and collectors that are down, slow or rude."""

import asyncio
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kappa.settings.routing import ObservingSettings
from kappa_router.telemetry import Telemetry
from kappa_router.tracing import Tracing
from tests.router.patience import PATIENCE_S, until
from tests.router.timelines import reported, served

RECORD = reported(0.25, 0.5, 10, 320, 64)


@contextmanager
def collector(answer=200, delay_s=0.0):
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            time.sleep(delay_s)
            self.send_response(answer)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def noting(tracing):
    telemetry = Telemetry(lambda _: None)
    telemetry.on_end = tracing.ended
    return telemetry


def remembered(**settings):
    exporter = InMemorySpanExporter()
    tracing = Tracing(ObservingSettings(**settings), lambda _: RECORD, exporter)
    return tracing, noting(tracing), exporter


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
def test_collector_gets_the_request_as_one_trace(suffix):
    with collector() as (url, got):
        settings = ObservingSettings(otlp_endpoint=url + suffix, service_name="mine")
        tracing = Tracing(settings, lambda _: RECORD)
        served(noting(tracing))
        tracing.close()
    assert {path for path, _ in got} == {"/v1/traces"}
    resource = got[0][1].resource_spans[0]
    assert {a.key: a.value.string_value for a in resource.resource.attributes}[
        "service.name"
    ] == "mine"
    spans = {s.name: s for _, r in got for s in r.resource_spans[0].scope_spans[0].spans}
    assert set(spans) == {
        "decider", "tokenize", "decide", "first_token", "queue", "load", "prefill", "stream",
    }  # fmt: skip
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["load"].parent_span_id == spans["first_token"].span_id
    assert spans["decide"].parent_span_id == spans["decider"].span_id
    assert not spans["decider"].parent_span_id
    lasted = spans["load"].end_time_unix_nano - spans["load"].start_time_unix_nano
    assert lasted == pytest.approx(0.25e9, abs=1e3)


def test_clients_trace_goes_on():
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tracing, timelines, exporter = remembered(trace_share=0.0)
    served(timelines, "sampled", traceparent=parent)
    served(timelines, "without a parent")
    served(timelines, "unsampled", traceparent=parent[:-1] + "0")
    served(timelines, "nonsense", traceparent="x" * 300)
    tracing.close()
    roots = [s for s in exporter.get_finished_spans() if s.name == "decider"]
    assert [s.attributes["kappa.request_id"] for s in roots] == ["sampled"]
    assert f"{roots[0].context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{roots[0].parent.span_id:016x}" == "b7ad6b7169203331"


def test_share_of_the_requests_is_traced():
    tracing, timelines, exporter = remembered(trace_share=0.25)
    for i in range(400):
        served(timelines, str(i))
    tracing.close()
    traced = sum(span.name == "decider" for span in exporter.get_finished_spans())
    assert 50 < traced < 150


def test_failed_request_is_an_error_span():
    tracing, timelines, exporter = remembered()
    served(timelines, end=("engine_error", 502))
    tracing.close()
    (root,) = [s for s in exporter.get_finished_spans() if s.name == "decider"]
    assert not root.status.is_ok and root.status.description == "engine_error"


def test_spans_wait_for_the_workers_report_off_the_path():
    exporter, words = InMemorySpanExporter(), {}

    async def run():
        tracing = Tracing(ObservingSettings(), words.get, exporter, settle_s=0.01)
        served(noting(tracing))
        assert not exporter.get_finished_spans()
        words["r"] = RECORD
        await asyncio.sleep(0.05)
        tracing.close()

    asyncio.run(run())
    assert "load" in {span.name for span in exporter.get_finished_spans()}


def test_request_that_ended_as_the_decider_stops_is_let_go():
    exporter = InMemorySpanExporter()

    async def run():
        tracing = Tracing(ObservingSettings(), lambda _: None, exporter, settle_s=30.0)
        served(noting(tracing))
        tracing.close()

    asyncio.run(run())
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_end_and_close_is_bounded_without_a_collector(protocol, caplog):
    settings = ObservingSettings(otlp_endpoint="http://127.0.0.1:9", otlp_protocol=protocol)
    before = set(threading.enumerate())
    tracing = Tracing(settings, lambda _: RECORD)
    timelines = noting(tracing)
    for i in range(3000):  # more than the queue holds
        served(timelines, str(i))
    assert timelines.timeline("2999").end == "done"
    tracing.close(timeout_s=0.2)
    spans = [t for t in threading.enumerate() if t.name == "spans" and t not in before]
    for thread in spans:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in spans)
    complaints = [r for r in caplog.records if r.name.startswith("opentelemetry.exporter")]
    assert len(complaints) <= 1


def test_collector_that_refuses_or_sleeps_costs_spans_only():
    with collector(answer=503, delay_s=0.05) as (url, got):
        tracing = Tracing(ObservingSettings(otlp_endpoint=url), lambda _: RECORD)
        timelines = noting(tracing)
        served(timelines)
        asyncio.run(until(lambda: got))  # The exporter tries again meanwhile.
        tracing.close(timeout_s=0.2)
        assert timelines.timeline("r").end == "done"


def test_unreadable_record_is_no_error_of_its_request():
    exporter = InMemorySpanExporter()

    def broken(_):
        raise KeyError("gone")

    tracing = Tracing(ObservingSettings(), broken, exporter)
    timelines = noting(tracing)
    served(timelines)
    tracing.close()
    assert timelines.timeline("r").end == "done" and not exporter.get_finished_spans()
