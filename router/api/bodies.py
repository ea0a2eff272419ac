"""Bodies of requests that are only explained or counted: read, checked, translated.

Each function is one step for `router.api.reading`, so that a large body is done with on a thread.
All raise ApiError 400, for what the field lists of an API refuse.
"""

from __future__ import annotations

from router.api import errors, messages
from router.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, checked_chat, checked_completion
from router.api.request_body import RequestBody

_OF_CHATS, _OF_COMPLETIONS = CHAT_FIELDS.read, COMPLETION_FIELDS.read


def either(body: bytes) -> RequestBody:
    """A chat or a completion, by its own look."""
    data = errors.json_object(body, _OF_CHATS | _OF_COMPLETIONS)
    if "messages" in data:
        return RequestBody.chat(checked_chat(data))
    return RequestBody.completion(checked_completion(data))


def counted_message(body: bytes) -> RequestBody:
    """A message of which only the tokens are wanted, as a chat."""
    data = errors.json_object(body, messages.FIELDS.read)
    return RequestBody.chat(checked_chat(messages.to_chat(data, counted=True)))
