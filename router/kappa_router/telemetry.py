"""The spans of a request's time, of the moments that the decider notes. Pure.

What passed between sending a request and its first token is split by what its worker reported it
spent: those seconds are measured, but not when they were, so their places within the wait are
derived and say so. Read by `kappa why` through `GET /v1/decisions/ID`, and by `router.tracing`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kappa.protocol import Admission, Spent
from kappa_router.decision import Decision
from kappa_router.live.decision_records import DecisionRecord

KEPT = 4096
"""Timelines in memory, as many as decisions."""

# As W3C's Trace Context has it: version, trace, span, flags. Anything else is not carried on, and
# must not be kept, however long it is.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool


@dataclass(slots=True)
class TimedAttempt:
    """One worker that was tried, and sent the request as it was chosen; seconds since the epoch."""

    worker: str
    node: str
    reason: str
    decided_s: float
    # None: it answered nothing.
    first_token_s: float | None = None


@dataclass(slots=True)
class RequestTimeline:
    """A request's moments, in seconds since the epoch; None where it did not get."""

    request_id: str
    tenant: str
    received_s: float
    # The W3C header that the client sent; empty without a valid one.
    traceparent: str = ""
    tokenized_s: float | None = None
    # None: its prompt could not be rendered.
    prompt_tokens: int | None = None
    # The model or adapter that it asks for, and whether as a chat.
    model: str = ""
    chat: bool = True
    # The bound on generated tokens; 0: none.
    max_tokens: int = 0
    attempts: list[TimedAttempt] = field(default_factory=list)
    ended_s: float | None = None
    # `done`, `error`, `client_gone`, `worker_died`, or the code of the refusal.
    end: str = ""
    # The answer's; 0 if the client had left.
    status: int = 0

    def tokenized(self, prompt_tokens: int | None, now_s: float) -> None:
        """Its prompt was rendered; None if it could not be."""
        self.tokenized_s, self.prompt_tokens = now_s, prompt_tokens

    def decided(self, decision: Decision, now_s: float) -> None:
        node = decision.chosen.node.name
        self.attempts.append(TimedAttempt(decision.worker, node, decision.reason, now_s))

    def first_item(self, now_s: float) -> None:
        if self.attempts:
            self.attempts[-1].first_token_s = now_s


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's time, in seconds since the epoch."""

    name: str
    start_s: float
    end_s: float
    # The name of the span that it lies in; empty for the outermost.
    parent: str = "decider"
    # Its length is measured, its place is not.
    derived: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Telemetry:
    """The last requests' timelines, and with the live router's records their accounts.

    record_of: the live router's record of a request, None if it has none. `on_end` is handed each
    timeline that ended; it returns at once and raises nothing.
    """

    def __init__(self, record_of: Callable[[str], DecisionRecord | None], kept: int = KEPT) -> None:
        self._record_of, self._kept = record_of, kept
        self.on_end: Callable[[RequestTimeline], None] | None = None
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timelines)

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """A request's timeline; None if it is not known any more."""
        return self._timelines.get(request_id)

    def begin(
        self, request_id: str, tenant: str, now_s: float, traceparent: str = ""
    ) -> RequestTimeline:
        """A request's body was accepted; a later one of the same id takes its place."""
        carried = traceparent.strip()
        parent = carried if _TRACEPARENT.fullmatch(carried) else ""
        timeline = RequestTimeline(request_id, tenant, now_s, parent)
        self._timelines[request_id] = timeline
        self._timelines.move_to_end(request_id)
        while len(self._timelines) > self._kept:
            self._timelines.popitem(last=False)
        return timeline

    def end(self, timeline: RequestTimeline, end: str, status: int, now_s: float) -> None:
        """A request is over; only the first call counts."""
        if timeline.ended_s is not None:
            return
        timeline.ended_s, timeline.end, timeline.status = now_s, end, status
        if self.on_end is not None:
            self.on_end(timeline)

    def tenant(self, request_id: str) -> str | None:
        """The tenant of a request; None if it is not known (any more)."""
        known = self._timelines.get(request_id) or self._record_of(request_id)
        return None if known is None else known.tenant

    def account(self, request_id: str) -> dict[str, Any] | None:
        """A request's decision, outcome and timeline, JSON-ready; None if it is not known."""
        timeline, record = self._timelines.get(request_id), self._record_of(request_id)
        if timeline is None and record is None:
            return None
        outcome = record.to_dict() if record is not None else {"request_id": request_id}
        if timeline is None:
            return {**outcome, "timeline": None}
        over = timeline.ended_s is not None
        spans = spans_of(timeline, record) if over else []
        shown = ("received_s", "ended_s", "status", "end", "prompt_tokens")
        moments = {name: getattr(timeline, name) for name in shown}
        moments["spans"] = [{**asdict(span), "seconds": span.seconds} for span in spans]
        return {**outcome, "timeline": moments}


def spans_of(timeline: RequestTimeline, record: DecisionRecord | None = None) -> list[Span]:
    """The spans of a request that has ended, outermost first, then in order of time; record: what
    its worker reported.

    Raises:
        ValueError: it has not ended.
    """
    t = timeline
    if t.ended_s is None:
        raise ValueError(f"request {t.request_id} has not ended: its spans are not known")
    about: dict[str, Value] = {
        "kappa.request_id": t.request_id, "kappa.tenant": t.tenant, "kappa.end": t.end,
        "http.response.status_code": t.status, "kappa.attempts": len(t.attempts),
        **_gen_ai(t, record),
    }  # fmt: skip
    found = [Span("decider", t.received_s, t.ended_s, "", attributes=about)]

    def add(name: str, start_s: float, end_s: float, attributes: Mapping[str, Value]) -> None:
        found.append(Span(name, start_s, max(end_s, start_s), attributes=dict(attributes)))

    if t.tokenized_s is None:
        return found
    tokens = {} if t.prompt_tokens is None else {"tokens": t.prompt_tokens}
    add("tokenize", t.received_s, t.tokenized_s, tokens)
    since_s = t.tokenized_s
    for i, attempt in enumerate(t.attempts):
        last = i + 1 == len(t.attempts)
        over_s = t.ended_s if last else t.attempts[i + 1].decided_s
        where: dict[str, Value] = {
            "kappa.node": attempt.node,
            "kappa.worker": attempt.worker,
            "kappa.reason": attempt.reason,
        }
        # The next attempt's decision begins where this one was given up.
        decided_s = min(attempt.decided_s, over_s)
        add("decide", min(since_s, decided_s), decided_s, where)
        since_s = over_s
        if attempt.first_token_s is None:
            add("given_up", decided_s, over_s, where)
            continue
        first_token_s = attempt.first_token_s
        spent = record.spent if record is not None and last else None
        if record is not None and spent is not None and record.ttft_s is not None:
            # As the worker reported: an answer that is not streamed comes back later, as a whole.
            first_token_s = min(attempt.decided_s + record.ttft_s, first_token_s)
        add("first_token", decided_s, first_token_s, where)
        if record is not None and spent is not None:
            found += _engine_spans(decided_s, first_token_s, spent, record.admitted)
        if last:
            add("stream", first_token_s, t.ended_s, {})
    return found


def _gen_ai(t: RequestTimeline, record: DecisionRecord | None) -> dict[str, Value]:
    """Attributes by OpenTelemetry's conventions for generative AI, as far as they are known; of the
    cached tokens those of each tier, for which it has no names."""
    told: dict[str, Value | None] = {
        "gen_ai.provider.name": "kappa-serve",
        "gen_ai.operation.name": "chat" if t.chat else "text_completion",
        "gen_ai.request.model": t.model or None,
        "gen_ai.request.max_tokens": t.max_tokens or None,
        "gen_ai.usage.input_tokens": t.prompt_tokens,
        "error.type": t.end if t.status >= 400 else None,
    }
    if record is not None:
        told["gen_ai.usage.output_tokens"] = record.generated_tokens
        if (found := record.admitted) is not None:
            cached = found.device_tokens + found.host_tokens
            told |= {
                "gen_ai.usage.input_tokens": cached + found.new_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached,
                "kappa.cache_read.device_tokens": found.device_tokens,
                "kappa.cache_read.host_tokens": found.host_tokens - found.disk_tokens,
                "kappa.cache_read.disk_tokens": found.disk_tokens,
            }
    return {name: value for name, value in told.items() if value is not None}


def _engine_spans(
    sent_s: float, first_token_s: float, spent: Spent, found: Admission | None
) -> list[Span]:
    """Queue, load and prefill, one after the other: a load that overlaps others' steps is shown
    before its own prompt's."""
    wait_s = max(first_token_s - sent_s, 0.0)
    spent_s = spent.load_s + spent.compute_s
    # Two clocks and shared steps: what was spent cannot be more than what passed.
    scale = min(wait_s / spent_s, 1.0) if spent_s > 0 else 1.0
    load_from_s = first_token_s - spent_s * scale
    prefill_from_s = first_token_s - spent.compute_s * scale
    device, loaded, computed = (
        (found.device_tokens, found.host_tokens, found.new_tokens) if found else (0, 0, 0)
    )
    return [
        Span("queue", sent_s, load_from_s, "first_token", True),
        Span("load", load_from_s, prefill_from_s, "first_token", True, {"tokens": loaded}),
        Span(
            "prefill",
            prefill_from_s,
            first_token_s,
            "first_token",
            True,
            {"tokens": computed, "device_tokens": device},
        ),
    ]
