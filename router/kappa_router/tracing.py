"""Requests' timelines as OpenTelemetry spans, sent to a collector by OTLP.

A request's spans are made once it has ended, a moment later so that its worker's report is there;
on its way nothing happens. The SDK's batches are bounded and sent by a thread of their own: with
the collector down or slow, spans are dropped and one warning a minute says so. The client's
`traceparent` is continued, and decides whether a request is traced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kappa.logging import RateLimit
from kappa.settings.routing import ObservingSettings
from kappa_router.live.decision_records import DecisionRecord
from kappa_router.telemetry import RequestTimeline, spans_of

log = structlog.get_logger(__name__)

_SETTLE_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_NS = 1_000_000_000
_ONCE_A_MINUTE = RateLimit()


class Tracing:
    """Turns timelines that ended into spans and sends them; call `close` at the end.

    record_of: what became of a request at its worker, looked up `settle_s` after the request's end.
    exporter: instead of the one that the settings name.
    """

    def __init__(
        self,
        settings: ObservingSettings,
        record_of: Callable[[str], DecisionRecord | None],
        exporter: SpanExporter | None = None,
        settle_s: float = _SETTLE_S,
    ) -> None:
        self._record_of, self._settle_s = record_of, settle_s
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.trace_share)),
            resource=Resource.create({"service.name": settings.service_name}),
            shutdown_on_exit=False,
        )
        self._exporter = exporter or _exporter(settings)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=8192,
                max_export_batch_size=512,
                schedule_delay_millis=1000,
            )
        )
        self._tracer = self._provider.get_tracer("kappa-serve")
        self._later: set[asyncio.TimerHandle] = set()

    def ended(self, timeline: RequestTimeline) -> None:
        """A request ended; its spans follow in a moment."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._export(timeline)
            return
        handle: asyncio.TimerHandle

        def export() -> None:
            self._later.discard(handle)
            self._export(timeline)

        handle = loop.call_later(self._settle_s, export)
        self._later.add(handle)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Send the queued spans, and stop; those not taken within `timeout_s` are lost."""
        for handle in self._later:
            handle.cancel()
        self._later.clear()
        # The SDK's own time limits do not cover an exporter that tries again and again.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()

    def _export(self, timeline: RequestTimeline) -> None:
        try:
            self._emit(timeline)
        except Exception as error:
            # A trace is never worth a request.
            log.warning("spans_not_made", request_id=timeline.request_id, error=repr(error))

    def _emit(self, timeline: RequestTimeline) -> None:
        carrier = {"traceparent": timeline.traceparent} if timeline.traceparent else {}
        outside = TraceContextTextMapPropagator().extract(carrier)
        contexts: dict[str, Any] = {"": outside}
        opened = []
        for span in spans_of(timeline, self._record_of(timeline.request_id)):
            made = self._tracer.start_span(
                span.name,
                context=contexts[span.parent],
                kind=trace.SpanKind.INTERNAL if span.parent else trace.SpanKind.SERVER,
                attributes={**span.attributes, **({"kappa.derived": True} if span.derived else {})},
                start_time=int(span.start_s * _NS),
            )
            contexts[span.name] = trace.set_span_in_context(made, outside)
            opened.append((made, span))
        if timeline.status >= 500:
            opened[0][0].set_status(trace.StatusCode.ERROR, timeline.end)
        for made, span in reversed(opened):
            made.end(end_time=int(span.end_s * _NS))


def _exporter(settings: ObservingSettings) -> SpanExporter:
    """The exporter that the settings name; its complaints are thinned out."""
    url = settings.otlp_endpoint
    assert url is not None
    exporter: SpanExporter
    if settings.otlp_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        insecure = url.startswith("http://")
        exporter = grpc.OTLPSpanExporter(url, insecure=insecure, timeout=_EXPORT_TIMEOUT_S)
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        address = f"{url.removesuffix('/v1/traces')}/v1/traces"
        exporter = http.OTLPSpanExporter(address, timeout=_EXPORT_TIMEOUT_S)
    # After the imports, and on each logger: a filter of a parent is not consulted for those below.
    noisy = ("opentelemetry.exporter", "opentelemetry.sdk", "urllib3.connectionpool")
    for name in [*noisy, *logging.Logger.manager.loggerDict]:
        if any(name == parent or name.startswith(f"{parent}.") for parent in noisy):
            logging.getLogger(name).addFilter(_ONCE_A_MINUTE)
    return exporter
