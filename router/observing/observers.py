"""Everything that looks on as requests pass through the ingress: their timelines, and their spans.

One per ingress replica. The path of requests tells it of each station
(`router.observing.observer`); what workers spent it takes from the live router's records. `GET
/v1/decisions/ID` asks it for one request's account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from kappa.settings.routing import ObservingSettings
from router.live.records import Record
from router.observing.observer import RequestObserver
from router.observing.spans import EngineShare, Timeline, Timelines, spans_of

log = structlog.get_logger(__name__)


class Guarded:
    """Passes all on to another observer; what that raises is logged and costs no request."""

    def __init__(self, observer: RequestObserver) -> None:
        self.received = _unfailing(observer.received)
        self.tokenized = _unfailing(observer.tokenized)
        self.decided = _unfailing(observer.decided)
        self.sent = _unfailing(observer.sent)
        self.first_token = _unfailing(observer.first_token)
        self.ended = _unfailing(observer.ended)


def _unfailing(call: Callable[..., None]) -> Callable[..., None]:
    def called(*args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            log.error("observer_failed", error=repr(error))

    return called


class Observing:
    """Timelines, and tracing where a collector is configured."""

    def __init__(
        self, settings: ObservingSettings, record_of: Callable[[str], Record | None]
    ) -> None:
        """`record_of`: the live router's record of a request, None if it has none."""
        self._record_of = record_of
        self._tracing = None
        if settings.otlp_endpoint is not None:
            # Half a second of imports that nobody needs without a collector.
            from router.observing.tracing import Tracing

            self._tracing = Tracing(settings, self.engine_share)
        self._timelines = Timelines(self._tracing.ended if self._tracing else None)
        self._guarded = Guarded(self._timelines)

    @property
    def observer(self) -> RequestObserver:
        """Who is to be told of the stations."""
        return self._guarded

    def tenant(self, request_id: str) -> str | None:
        """Whose request it was; None if it is not known (any more)."""
        timeline, record = self._timelines.get(request_id), self._record_of(request_id)
        if timeline is not None:
            return timeline.tenant
        return record.tenant if record is not None else None

    def account(self, request_id: str) -> dict[str, Any] | None:
        """A request's decision, outcome and timeline, JSON-ready; None if it is not known."""
        timeline, record = self._timelines.get(request_id), self._record_of(request_id)
        if timeline is None and record is None:
            return None
        told = record.to_dict() if record is not None else {"request_id": request_id}
        return {**told, "timeline": self._told(timeline) if timeline is not None else None}

    def engine_share(self, request_id: str) -> EngineShare | None:
        """What a request's worker says it spent; None if it has not said."""
        record = self._record_of(request_id)
        if record is None or record.spent is None:
            return None
        tokens = record.admitted
        return EngineShare(
            record.spent.load_s,
            record.spent.compute_s,
            tokens.device_tokens if tokens else 0,
            tokens.host_tokens if tokens else 0,
            tokens.new_tokens if tokens else 0,
            record.ttft_s,
        )

    def close(self) -> None:
        """Send what spans there are, and stop."""
        if self._tracing is not None:
            self._tracing.close()

    def _told(self, timeline: Timeline) -> dict[str, Any]:
        over = timeline.ended_s is not None
        spans = spans_of(timeline, self.engine_share(timeline.request_id)) if over else []
        return {
            "received_s": timeline.received_s,
            "ended_s": timeline.ended_s,
            "status": timeline.status,
            "end": timeline.end,
            "prompt_tokens": timeline.prompt_tokens,
            "spans": [span.to_dict() for span in spans],
        }
