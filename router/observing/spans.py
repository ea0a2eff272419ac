"""Where a request's time went: its stations at the ingress, turned into spans. Pure.

`Timelines` observes requests on their way (`router.observing.observer`) and keeps the last of them.
What passed between sending a request and its first token is split by what its worker reported it
spent: those seconds are measured, but not when they were, so their places within the wait are
derived and say so. Read by `kappa why` through `GET /v1/decisions/ID`, and by
`router.observing.tracing`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.decision import Decision

KEPT = 4096
"""Timelines in memory, as many as decisions."""

_CARRIED = "traceparent"
# As W3C's Trace Context has it: version, trace, span, flags. Anything else is not carried on, and
# must not be kept, however long it is.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool


@dataclass(slots=True)
class Attempt:
    """One worker that was tried. Seconds since the epoch; None: it did not get there."""

    worker: str
    node: str
    reason: str
    decided_s: float
    sent_s: float | None = None
    first_token_s: float | None = None


@dataclass(slots=True)
class Timeline:
    """A request's stations, in seconds since the epoch; None where it did not get.

    traceparent: the W3C header that the client sent, empty without a valid one. end: as the
    observer's; status: what the client was answered, 0 if it had left.
    """

    request_id: str
    tenant: str
    received_s: float
    traceparent: str = ""
    tokenized_s: float | None = None
    prompt_tokens: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    ended_s: float | None = None
    end: str = ""
    status: int = 0

    @property
    def first_token_s(self) -> float | None:
        """When its first item came back from a worker."""
        return self.attempts[-1].first_token_s if self.attempts else None


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What a request's worker says it spent before the first token, in real seconds, and the
    prompt's tokens by source.

    ttft_s: from the decision to its first token, where the worker said so; an answer that is not
    streamed comes back later, as a whole.
    """

    load_s: float
    compute_s: float
    device_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's time, in seconds since the epoch.

    parent: name of the span that it lies in, empty for the outermost. derived: how long is
    measured, when exactly is not.
    """

    name: str
    start_s: float
    end_s: float
    parent: str = ""
    derived: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name, "start_s": self.start_s, "end_s": self.end_s,
            "seconds": self.seconds, "parent": self.parent, "derived": self.derived,
            "attributes": dict(self.attributes),
        }  # fmt: skip


class Timelines:
    """The last requests' timelines, kept by the path of requests (a `RequestObserver`)."""

    def __init__(self, on_end: Callable[[Timeline], None] | None = None, kept: int = KEPT) -> None:
        """`on_end` is handed each timeline that ended; it returns at once."""
        if kept < 1:
            raise ValueError(f"kept is {kept}: keep at least one timeline")
        self._on_end, self._kept = on_end, kept
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    @property
    def count(self) -> int:
        """Timelines that are kept."""
        return len(self._timelines)

    def get(self, request_id: str) -> Timeline | None:
        """A request's timeline; None if it is not known any more."""
        return self._timelines.get(request_id)

    def received(
        self, request_id: str, tenant: str, headers: Mapping[str, str], now_s: float
    ) -> None:
        """See `router.observing.observer`."""
        carried = headers.get(_CARRIED, "").strip()
        parent = carried if _TRACEPARENT.fullmatch(carried) else ""
        self._timelines[request_id] = Timeline(request_id, tenant, now_s, parent)
        self._timelines.move_to_end(request_id)
        while len(self._timelines) > self._kept:
            self._timelines.popitem(last=False)

    def tokenized(self, request_id: str, prompt_tokens: int | None, now_s: float) -> None:
        """See `router.observing.observer`."""
        known = self._timelines.get(request_id)
        if known is not None:
            known.tokenized_s, known.prompt_tokens = now_s, prompt_tokens

    def decided(self, request_id: str, decision: Decision, attempt: int, now_s: float) -> None:
        """See `router.observing.observer`."""
        known = self._timelines.get(request_id)
        if known is not None:
            node = decision.chosen.node.name
            known.attempts.append(Attempt(decision.worker, node, decision.reason, now_s))

    def sent(self, request_id: str, worker: str, now_s: float) -> None:
        """See `router.observing.observer`."""
        known = self._timelines.get(request_id)
        if known is not None and known.attempts:
            known.attempts[-1].sent_s = now_s

    def first_token(self, request_id: str, now_s: float) -> None:
        """See `router.observing.observer`."""
        known = self._timelines.get(request_id)
        if known is not None and known.attempts:
            known.attempts[-1].first_token_s = now_s

    def ended(self, request_id: str, end: str, status: int, now_s: float) -> None:
        """See `router.observing.observer`."""
        known = self._timelines.get(request_id)
        if known is not None and known.ended_s is None:
            known.ended_s, known.end, known.status = now_s, end, status
            if self._on_end is not None:
                self._on_end(known)


def spans_of(timeline: Timeline, engine: EngineShare | None = None) -> list[Span]:
    """The spans of a request that has ended, outermost first, then in order of time.

    Raises:
        ValueError: it has not ended.
    """
    if timeline.ended_s is None:
        raise ValueError(f"request {timeline.request_id} has not ended: its spans are not known")
    t = timeline
    about: dict[str, Value] = {
        "kappa.request_id": t.request_id, "kappa.tenant": t.tenant, "kappa.end": t.end,
        "http.response.status_code": t.status, "kappa.attempts": len(t.attempts),
    }  # fmt: skip
    assert t.ended_s is not None
    found = [Span("ingress", t.received_s, t.ended_s, attributes=about)]
    if t.tokenized_s is None:
        return found
    tokens: dict[str, Value] = {} if t.prompt_tokens is None else {"tokens": t.prompt_tokens}
    found.append(_span("tokenize", t.received_s, t.tokenized_s, tokens))
    since_s = t.tokenized_s
    for i, attempt in enumerate(t.attempts):
        last = i + 1 == len(t.attempts)
        over_s = t.ended_s if last else t.attempts[i + 1].decided_s
        found += _attempt(attempt, since_s, over_s, engine if last else None)
        since_s = over_s
    if t.attempts and t.first_token_s is not None:
        found.append(_span("stream", _first_token_s(t.attempts[-1], engine), t.ended_s))
    return found


def _attempt(
    attempt: Attempt, since_s: float, over_s: float, engine: EngineShare | None
) -> list[Span]:
    """Spans of one worker's turn: what was decided, and the wait for its first token."""
    where: dict[str, Value] = {
        "kappa.node": attempt.node, "kappa.worker": attempt.worker, "kappa.reason": attempt.reason
    }  # fmt: skip
    # The next attempt's decision begins where this one was given up.
    decided_s = min(attempt.decided_s, over_s)
    found = [_span("decide", min(since_s, decided_s), decided_s, where)]
    if attempt.sent_s is None:
        return found
    if attempt.first_token_s is None:
        return [*found, _span("given_up", attempt.sent_s, over_s, where)]
    first_token_s = _first_token_s(attempt, engine)
    found.append(_span("first_token", attempt.sent_s, first_token_s, where))
    if engine is not None:
        found += _engine_spans(attempt.sent_s, first_token_s, engine)
    return found


def _first_token_s(attempt: Attempt, engine: EngineShare | None) -> float:
    """When its first token came: as the worker said, at the latest with its first item."""
    assert attempt.first_token_s is not None
    if engine is None or engine.ttft_s is None:
        return attempt.first_token_s
    told_s = attempt.decided_s + engine.ttft_s
    return min(max(told_s, attempt.sent_s or told_s), attempt.first_token_s)


def _engine_spans(sent_s: float, first_token_s: float, engine: EngineShare) -> list[Span]:
    """Queue, load and prefill, one after the other: a load that overlaps others' steps is shown
    before its own prompt's."""
    wait_s = max(first_token_s - sent_s, 0.0)
    spent_s = engine.load_s + engine.compute_s
    # Two clocks and shared steps: what was spent cannot be more than what passed.
    scale = min(wait_s / spent_s, 1.0) if spent_s > 0 else 1.0
    load_from_s = first_token_s - spent_s * scale
    prefill_from_s = first_token_s - engine.compute_s * scale

    def span(name: str, start_s: float, end_s: float, tokens: Mapping[str, Value]) -> Span:
        return Span(name, start_s, end_s, "first_token", True, tokens)

    return [
        span("queue", sent_s, load_from_s, {}),
        span("load", load_from_s, prefill_from_s, {"tokens": engine.cached_tokens}),
        span(
            "prefill", prefill_from_s, first_token_s,
            {"tokens": engine.new_tokens, "device_tokens": engine.device_tokens},
        ),
    ]  # fmt: skip


def _span(
    name: str, start_s: float, end_s: float, attributes: Mapping[str, Value] | None = None
) -> Span:
    return Span(name, start_s, max(end_s, start_s), "ingress", False, dict(attributes or {}))
