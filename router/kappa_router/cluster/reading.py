"""Bodies as a decision needs them, and what a worker's gate is to change of the bytes that go on.

A body goes to its worker as its client sent it. Fields that the allow-lists drop or change are
named beside it (`TO_DROP_HEADER`, `TO_BODY_HEADER`), so that no engine and no chat template sees
more than the allow-lists let through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kappa_router.api import errors, messages, responses
from kappa_router.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, checked_chat, checked_completion
from kappa_router.api.request_body import RequestBody

Json = dict[str, Any]


class Changes(NamedTuple):
    """Top-level fields of a body that get another value, and those that are dropped."""

    sets: Mapping[str, Any]
    drops: tuple[str, ...]


class Taken(NamedTuple):
    """A body as it was read."""

    # As a chat or a completion, whichever API it came by.
    body: RequestBody
    changes: Changes


def _message(kept: Json) -> RequestBody:
    return RequestBody.chat(checked_chat(messages.to_chat(kept)))


def _response(kept: Json) -> RequestBody:
    return RequestBody.chat(checked_chat(responses.to_chat(kept)))


class _Api(NamedTuple):
    """An API's way to read a body."""

    # That are read.
    fields: frozenset[str]
    # Keeps the fields that go on.
    check: Callable[[Json], Json]
    # Makes a body of these.
    make: Callable[[Json], RequestBody]


_APIS: Mapping[str, _Api] = {
    "/v1/chat/completions": _Api(CHAT_FIELDS.read, checked_chat, RequestBody.chat),
    "/v1/completions": _Api(COMPLETION_FIELDS.read, checked_completion, RequestBody.completion),
    "/v1/messages": _Api(messages.FIELDS.read, messages.checked, _message),
    "/v1/responses": _Api(responses.FIELDS.read, responses.checked, _response),
}


def taken(path: str, body: bytes) -> Taken:
    """A request for one of `DECIDED_PATHS`; raises ApiError 400."""
    api = _APIS[path]
    data = errors.json_object(body, api.fields)
    kept = api.check(data)
    sets = {name: value for name, value in kept.items() if value != data[name]}
    return Taken(api.make(kept), Changes(sets, tuple(data.keys() - kept.keys())))


def either(body: bytes) -> RequestBody:
    """A chat or a completion, by its own look, that is only explained; raises ApiError 400."""
    data = errors.json_object(body, CHAT_FIELDS.read | COMPLETION_FIELDS.read)
    api = "/v1/chat/completions" if "messages" in data else "/v1/completions"
    return _APIS[api].make(_APIS[api].check(data))


def counted_message(body: bytes) -> RequestBody:
    """A message of which only the tokens are wanted, as a chat; raises ApiError 400."""
    data = errors.json_object(body, messages.FIELDS.read)
    return _message(messages.checked(data, counted=True))
