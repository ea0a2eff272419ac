"""Bodies of every API as what an engine takes: read, checked, translated, held to a schema.

Each function is one step for `router.api.reading`, so that a large body is done with on a thread.
All raise ApiError 400.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError, WrapValidator
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from router.api import errors, messages
from router.api.errors import ApiError
from router.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, checked_chat, checked_completion


def _as_chat(value: Any, schema: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, ChatCompletionRequest) else schema(checked_chat(value))


def _as_completion(value: Any, schema: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, CompletionRequest) else schema(checked_completion(value))


ChatBody = Annotated[ChatCompletionRequest, WrapValidator(_as_chat)]
"""A chat's body, of which only what may go on reaches the schema; one that was made passes."""
CompletionBody = Annotated[CompletionRequest, WrapValidator(_as_completion)]
"""A completion's body, likewise."""
CHAT, COMPLETION = TypeAdapter(ChatBody), TypeAdapter(CompletionBody)
_CHECKED_CHAT, _CHECKED_COMPLETION = map(TypeAdapter, (ChatCompletionRequest, CompletionRequest))
_OF_CHATS, _OF_COMPLETIONS = CHAT_FIELDS.read, COMPLETION_FIELDS.read
_OF_MESSAGES = messages.FIELDS.read


def either(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    """A chat or a completion, by its own look."""
    data = errors.json_object(body, _OF_CHATS | _OF_COMPLETIONS)
    return validated(CHAT if "messages" in data else COMPLETION, data)


def counted_message(body: bytes) -> ChatCompletionRequest:
    """A message of which only the tokens are wanted, as a chat."""
    data = errors.json_object(body, _OF_MESSAGES)
    return validated(CHAT, messages.to_chat(data, counted=True))


def checked_as_chat(kept: dict[str, Any]) -> ChatCompletionRequest:
    """What `checked_chat` kept of a body, as a chat."""
    return validated(_CHECKED_CHAT, kept)


def checked_as_completion(kept: dict[str, Any]) -> CompletionRequest:
    """What `checked_completion` kept of a body, as a completion."""
    return validated(_CHECKED_COMPLETION, kept)


def validated(schema: TypeAdapter[Any], data: dict[str, Any]) -> Any:
    """A body by its schema; ApiError 400 for whatever the schema raises."""
    try:
        return schema.validate_python(data)
    except ApiError:
        raise
    except ValidationError as error:
        raise errors.validation_error(list(error.errors())) from None
    except Exception as error:
        raise errors.unreadable_body(error) from None


def as_engines_take_it(kind: str, body: Any, changes: dict[str, Any]) -> tuple[str, bytes]:
    """The path and the JSON by which a worker takes a body, with some fields set."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    fields = body.model_dump(mode="json", exclude_unset=True)
    fields["cache_salt"] = body.cache_salt
    known = {name: one for name, one in changes.items() if name in type(body).model_fields}
    return path, json.dumps({**fields, **known}).encode()
