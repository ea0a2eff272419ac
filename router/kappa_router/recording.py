"""The router's log: every call with its time, as JSON lines, and the way back.

What a live router is given is written as it happens; replayed through a fresh `Router` the same
calls give the same decisions. That is how a routing bug is taken home, and how the tests hold live
and simulated wiring together. Pure: it makes and reads dictionaries, files are others'.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar, cast

import numpy as np

from kappa.protocol import Announcement, WorkerReport
from kappa_router.config import RouterConfig
from kappa_router.decision import Decision, NoWorkerError, RouteRequest
from kappa_router.index.kv_event_types import (
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from kappa_router.router import Router

Entry = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

_EVENTS: dict[str, type] = {
    cls.__name__: cls for cls in (BlocksStored, BlocksRemoved, TierCleared, WorkerReset, WorkerGone)
}
_REQUEST_FIELDS = tuple(n for n in RouteRequest.__dataclass_fields__ if n != "prefix_hashes")
# Calls that older logs have by another name.
_FORMERLY = {"void": "invalidate"}


def _noted(method: F) -> F:
    """`method`, which writes each of its calls; a `route` with its decision, if there is one."""
    call, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def noted(self: RecordedRouter, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        del given["self"]
        # Priced at the same moment, it is the same.
        kept = {name: given.pop(name) for name in ("explained",) if name in given}
        if "events" in given:
            given["events"] = list(given["events"])
        entry = {name: _FORMS[name][0](v) if name in _FORMS else v for name, v in given.items()}
        entry = {"call": call, **entry}
        if call == "route":
            entry["decided"] = {}
        try:
            answer = method(self, **given, **kept)
            if call == "route":
                entry["decided"] = decided(answer)
            return answer
        finally:
            self._write(entry)

    return cast(F, noted)


class RecordedRouter(Router):
    """A `Router` that hands each call, as a JSON-ready entry, to `write`.

    `explain` is written because a look-up keeps a prefix in the index, `backlogs_s` because it
    moves the forecasts' clocks.
    """

    def __init__(self, config: RouterConfig, write: Callable[[Entry], None]) -> None:
        super().__init__(config)
        self._write = write

    join = _noted(Router.join)
    leave = _noted(Router.leave)
    blocks = _noted(Router.blocks)
    report = _noted(Router.report)
    others = _noted(Router.others)
    invalidate = _noted(Router.invalidate)
    first_token = _noted(Router.first_token)
    tokens = _noted(Router.tokens)
    release = _noted(Router.release)
    route = _noted(Router.route)
    explain = _noted(Router.explain)
    backlogs_s = _noted(Router.backlogs_s)


_CALLS = {name for name, method in vars(RecordedRouter).items() if hasattr(method, "__wrapped__")}


def decided(decision: Decision) -> Entry:
    """The part of a decision in which equal decisions agree."""
    chosen, counts = decision.chosen, asdict(decision.chosen.counts)
    if not counts["disk_tokens"]:  # as logs have it that were written before there were disks
        del counts["disk_tokens"]
    return {
        "worker": chosen.worker,
        "reason": decision.reason,
        "counts": counts,
        "ttft_s": chosen.ttft_s,
        "others": {c.worker: c.ttft_s for c in decision.candidates},
    }


def replay(entries: Iterable[Mapping[str, Any]], router: Router) -> list[tuple[Any, Any]]:
    """Feed a log to a fresh router; returns (decided then, decided now) for every `route`.

    Raises:
        ValueError: an entry names a call that no router has.
    """
    pairs: list[tuple[Any, Any]] = []
    for entry in entries:
        given = dict(entry)
        call, then = given.pop("call"), given.pop("decided", None)
        call = _FORMERLY.get(call, call)
        if call not in _CALLS:
            raise ValueError(f"unknown call {call!r} in a router log")
        given = {name: _FORMS[name][1](v) if name in _FORMS else v for name, v in given.items()}
        try:
            answer = getattr(router, call)(**given)
        except NoWorkerError:
            answer = None
        if call == "route":
            pairs.append((then, {} if answer is None else decided(answer)))
    return pairs


# -- values that are not JSON by themselves, written and read -------------------------------------


def _request_out(request: RouteRequest) -> Entry:
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    tokens = None if request.token_ids is None else [int(t) for t in request.token_ids]
    return {**fields, "token_ids": tokens, "exclude": sorted(request.exclude)}


def _request_in(data: Mapping[str, Any]) -> RouteRequest:
    tokens = data["token_ids"]
    ids = None if tokens is None else np.asarray(tokens, dtype=np.int64)
    return RouteRequest(**{**data, "token_ids": ids, "exclude": frozenset(data["exclude"])})


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


# By the parameter's name: how it is written, how it is read.
_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "announcement": (Announcement.to_dict, Announcement.from_dict),
    "report": (WorkerReport.to_dict, WorkerReport.from_dict),
    "events": (lambda all: [_event_out(e) for e in all], lambda all: [_event_in(e) for e in all]),
    "request": (_request_out, _request_in),
}
