"""Bodies of every API as what an engine takes: read, checked, translated, held to a schema.

Each function is one step for `router.api.reading`, so that a large body is done with on a thread.
All raise ApiError 400.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError, WrapValidator
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.responses import Response

from router.api import errors, messages, responses
from router.api.errors import ApiError
from router.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, checked_chat, checked_completion
from router.api.reading import read

Make = Callable[[bytes], Any]


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
_OF_MESSAGES, _OF_RESPONSES = messages.FIELDS.read, responses.FIELDS.read


def chat(body: bytes) -> ChatCompletionRequest:
    """A chat."""
    return validated(CHAT, errors.json_object(body, _OF_CHATS))


def completion(body: bytes) -> CompletionRequest:
    """A completion."""
    return validated(COMPLETION, errors.json_object(body, _OF_COMPLETIONS))


def either(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    """A chat or a completion, by its own look."""
    data = errors.json_object(body, _OF_CHATS | _OF_COMPLETIONS)
    return validated(CHAT if "messages" in data else COMPLETION, data)


def message(body: bytes) -> ChatCompletionRequest:
    """A message of Anthropic's API, as a chat."""
    data = errors.json_object(body, _OF_MESSAGES)
    return validated(CHAT, messages.to_chat(data))


def counted_message(body: bytes) -> ChatCompletionRequest:
    """A message of which only the tokens are wanted, as a chat."""
    data = errors.json_object(body, _OF_MESSAGES)
    return validated(CHAT, messages.to_chat(data, counted=True))


def response(body: bytes) -> tuple[dict[str, Any], ChatCompletionRequest]:
    """The fields of a Responses body that are served, and the body as a chat."""
    kept = responses.checked(errors.json_object(body, _OF_RESPONSES))
    return kept, validated(CHAT, responses.to_chat(kept))


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


# -- where FastAPI reads them -----------------------------------------------------------------


def posted(path: str, make: Make) -> Callable[[FastAPI], Callable[[Any], Any]]:
    """As `lambda app: app.post(path)`; `make` makes the endpoint's body, which is only declared to
    FastAPI: that would parse and validate it on the event loop."""

    class Posted(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_made(request: Request) -> Response:
                return await handle(_Made(request, make))

            return handle_made

    def route(app: FastAPI) -> Callable[[Any], Any]:
        def add(endpoint: Any) -> Any:
            app.router.add_api_route(path, endpoint, methods=["POST"], route_class_override=Posted)
            return endpoint

        return add

    return route


class _Made(Request):
    """A request whose JSON is what `make` makes of its body."""

    def __init__(self, request: Request, make: Make) -> None:
        super().__init__(request.scope, request.receive)
        self._make = make

    async def json(self) -> Any:
        return await read(await self.body(), self._make)
