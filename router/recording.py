"""The router's log: every call with its time, as JSON lines, and the way back.

What a live router is given is written as it happens; replayed through a fresh `Router` the same
calls give the same decisions. That is how a routing bug is taken home, and how the tests hold live
and simulated wiring together. Pure: it makes and reads dictionaries, files are others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from kappa.protocol import Announcement, WorkerReport
from router.decision import Decision, NoWorkerError, RouteRequest
from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from router.router import Router, RouterConfig

Entry = dict[str, Any]

_EVENTS: dict[str, type] = {
    cls.__name__: cls for cls in (BlocksStored, BlocksRemoved, TierCleared, WorkerReset, WorkerGone)
}
_REQUEST_FIELDS = (
    "request_id", "max_tokens", "salt", "exclude", "retry", "handed_tokens", "prompt_tokens",
)  # fmt: skip


class RecordedRouter(Router):
    """A `Router` that hands each call, as a JSON-ready entry, to `write` before it obeys.

    `explain` is written because a look-up keeps a prefix in the index, `backlogs_s` because it
    moves the forecasts' clocks.
    """

    def __init__(self, config: RouterConfig, write: Callable[[Entry], None]) -> None:
        super().__init__(config)
        self._write = write

    def _note(self, call: str, **arguments: Any) -> None:
        self._write({"call": call, **arguments})

    def join(self, announcement: Announcement, now_s: float) -> None:
        self._note("join", now_s=now_s, announcement=announcement.to_dict())
        super().join(announcement, now_s)

    def leave(self, worker: str) -> list[str]:
        self._note("leave", worker=worker)
        return super().leave(worker)

    def blocks(self, events: Iterable[KVEvent]) -> None:
        events = list(events)
        self._note("blocks", events=[_event_out(event) for event in events])
        super().blocks(events)

    def report(self, report: WorkerReport, now_s: float) -> None:
        self._note("report", now_s=now_s, report=report.to_dict())
        super().report(report, now_s)

    def invalidate(self, worker: str, now_s: float) -> None:
        self._note("void", now_s=now_s, worker=worker)
        super().invalidate(worker, now_s)

    def first_token(self, request_id: str, now_s: float) -> float | None:
        self._note("first_token", now_s=now_s, request_id=request_id)
        return super().first_token(request_id, now_s)

    def tokens(self, request_id: str, count: int) -> None:
        self._note("tokens", request_id=request_id, count=count)
        super().tokens(request_id, count)

    def release(self, request_id: str, now_s: float, *, complete: bool = True) -> bool:
        self._note("release", now_s=now_s, request_id=request_id, complete=complete)
        return super().release(request_id, now_s, complete=complete)

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """As `Router.route`, written with what it decided (no worker: an empty outcome)."""
        entry = {"now_s": now_s, "request": _request_out(request)}
        try:
            decision = super().route(request, now_s)
        except NoWorkerError:
            self._note("route", **entry, decided={})
            raise
        self._note("route", **entry, decided=decided(decision))
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        self._note("explain", now_s=now_s, request=_request_out(request))
        return super().explain(request, now_s)

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        self._note("backlogs_s", now_s=now_s)
        return super().backlogs_s(now_s)


def decided(decision: Decision) -> Entry:
    """What two equal decisions have in common."""
    chosen = decision.chosen
    return {
        "worker": chosen.worker,
        "reason": decision.reason,
        "counts": asdict(chosen.counts),
        "ttft_s": chosen.ttft_s,
        "others": {c.worker: c.ttft_s for c in decision.candidates},
    }


def replay(entries: Iterable[Mapping[str, Any]], router: Router) -> list[tuple[Any, Any]]:
    """Feed a log to a fresh router; returns (decided then, decided now) for every `route`."""
    pairs: list[tuple[Any, Any]] = []
    for entry in entries:
        answer = _apply(entry, router)
        if entry["call"] == "route":
            pairs.append((entry["decided"], answer))
    return pairs


def _apply(entry: Mapping[str, Any], router: Router) -> Any:
    call = {"void": "invalidate"}.get(entry["call"], entry["call"])
    if call not in _CALLS:
        raise ValueError(f"unknown call {call!r} in a router log")
    arguments = {
        name: _READ[name](value) if name in _READ else value
        for name, value in entry.items()
        if name not in ("call", "decided")
    }
    try:
        answer = getattr(router, call)(**arguments)
    except NoWorkerError:
        return {}
    return decided(answer) if call == "route" else None


def _request_out(request: RouteRequest) -> Entry:
    tokens = request.token_ids
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    return {
        **fields,
        "token_ids": None if tokens is None else [int(t) for t in tokens],
        "exclude": sorted(request.exclude),
    }


def _request_in(data: Mapping[str, Any]) -> RouteRequest:
    fields = {name: data[name] for name in _REQUEST_FIELDS if name in data}
    tokens = data["token_ids"]
    ids = None if tokens is None else np.asarray(tokens, dtype=np.int64)
    return RouteRequest(**{**fields, "token_ids": ids, "exclude": frozenset(data["exclude"])})


def _event_out(event: KVEvent) -> Entry:
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    if isinstance(event, BlocksStored):
        fields["token_ids"] = [int(t) for t in event.token_ids]
        fields["parent_engine_hash"] = _hash_out(event.parent_engine_hash)
    if isinstance(event, BlocksStored | BlocksRemoved):
        fields["engine_hashes"] = [_hash_out(h) for h in event.engine_hashes]
    return {"type": type(event).__name__, **fields}


def _event_in(data: Mapping[str, Any]) -> KVEvent:
    fields = {key: value for key, value in data.items() if key != "type"}
    if "token_ids" in fields:
        fields["token_ids"] = np.asarray(fields["token_ids"], dtype=np.int64)
        fields["parent_engine_hash"] = _hash_in(fields["parent_engine_hash"])
    if "engine_hashes" in fields:
        fields["engine_hashes"] = tuple(_hash_in(h) for h in fields["engine_hashes"])
    event: KVEvent = _EVENTS[data["type"]](**fields)
    return event


def _hash_out(value: int | bytes | None) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _hash_in(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


_CALLS = {
    "join", "leave", "blocks", "report", "invalidate", "first_token", "tokens", "release", "route",
    "explain", "backlogs_s",
}  # fmt: skip
# Entries name their call's parameters; these are not JSON by themselves.
_READ: dict[str, Callable[[Any], Any]] = {
    "announcement": Announcement.from_dict,
    "report": WorkerReport.from_dict,
    "events": lambda events: [_event_in(event) for event in events],
    "request": _request_in,
}
