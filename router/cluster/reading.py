"""Bodies as a decision needs them, and what a worker's gate is to change of the bytes that go on.

A body goes to its worker as its client sent it. What the allow-lists drop of it, and what they
change, is said beside it (`TO_DROP_HEADER`, `TO_BODY_HEADER`), so that no engine and no chat
template sees more than through an ingress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from router.api import bodies, errors, messages, responses
from router.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, checked_chat, checked_completion

Json = dict[str, Any]


class Changes(NamedTuple):
    """Of a body's top-level fields: those that get another value, and those that go."""

    sets: Mapping[str, Any]
    drops: tuple[str, ...]


class Taken(NamedTuple):
    """body: the request as Ray's schema of a chat or completion has it, whatever API it came by;
    kind: Ray's name of it."""

    body: Any
    kind: str
    changes: Changes


def _message(kept: Json) -> Any:
    return bodies.validated(bodies.CHAT, messages.to_chat(kept))


def _response(kept: Json) -> Any:
    return bodies.validated(bodies.CHAT, responses.to_chat(kept))


class _Api(NamedTuple):
    """fields: that are read; check: keeps what goes on of a body; make: its schema of what is
    kept."""

    fields: frozenset[str]
    kind: str
    check: Callable[[Json], Json]
    make: Callable[[Json], Any]


_APIS: Mapping[str, _Api] = {
    "/v1/chat/completions": _Api(CHAT_FIELDS.read, "chat", checked_chat, bodies.checked_as_chat),
    "/v1/completions": _Api(
        COMPLETION_FIELDS.read, "completions", checked_completion, bodies.checked_as_completion
    ),
    "/v1/messages": _Api(messages.FIELDS.read, "chat", messages.FIELDS.kept, _message),
    "/v1/responses": _Api(responses.FIELDS.read, "chat", responses.checked, _response),
}


def taken(path: str, body: bytes) -> Taken:
    """A request for one of `DECIDED`; raises ApiError 400."""
    api = _APIS[path]
    data = errors.json_object(body, api.fields)
    kept = {name: value for name, value in api.check(data).items() if value is not None}
    sets = {name: value for name, value in kept.items() if value != data[name]}
    return Taken(api.make(kept), api.kind, Changes(sets, tuple(data.keys() - kept.keys())))
