"""The HTTP face: Ray Serve LLM's OpenAI ingress, with one decision per request taken here.

What happens to a chat or completion is `router.api.request_path`'s; the live router is made by
`router.api.start`. Ray's own ingress does model look-up.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from kappa.logging import configure
from router.api import bodies, messages, responses
from router.api.app import Access, inbound_of, make_app
from router.api.blocks import RewordedStream, Wording, reworded
from router.api.bodies import ChatBody, CompletionBody, posted
from router.api.cluster_face import ClusterFace, PoolHandles
from router.api.reading import prepare, read
from router.api.render import PromptRenderer
from router.api.request import model_of
from router.api.start import IngressSettings
from router.page.mount import add_page


class KappaIngress(ClusterFace, OpenAiIngress):
    """The endpoints of OpenAI and Anthropic, `GET /v1/nodes`, `GET /v1/tenants`, `POST /v1/route`,
    `GET /v1/decisions`, `GET /v1/decisions/ID`, `GET /metrics`."""

    def __init__(self, pools: dict[str, Any], *, kappa: IngressSettings) -> None:
        seen = kappa.observing
        configure(seen.log_format, seen.log_file, kappa.log_level)
        self._pools = PoolHandles(pools)
        # Ray's ingress knows one deployment for each model; it never delivers.
        cards = {
            name: ModelCard(
                id=name, object="model", owned_by="kappa-serve", permission=[],
                metadata={"model_id": model.name},
            )
            for model in kappa.models
            for name in (model.name, *model.adapters)
        }  # fmt: skip
        super().__init__(dict.fromkeys(cards, self._pools.all()[0]), cards)
        self._wire(kappa, {m.name: PromptRenderer(m.tokenizer_source) for m in kappa.models})
        prepare()

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """OpenAI chat completions, streamed or not."""
        return await self._path.serve(body, "chat", request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """OpenAI completions, streamed or not."""
        return await self._path.serve(body, "completions", request)

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages, streamed or not."""
        chat = await read(await request.body(), bodies.message)
        answer = messages.MessageAnswer(inbound_of(request).request_id)
        return await self._as_chat(chat, request, answer)

    async def responses(self, request: Request) -> Response:
        """OpenAI's responses, streamed or not."""
        kept, chat = await read(await request.body(), bodies.response)
        made = responses.ResponseAnswer(inbound_of(request).request_id, kept, time.time())
        return await self._as_chat(chat, request, made)

    async def _as_chat(self, chat: Any, request: Request, wording: Wording) -> Response:
        """Answer a chat, whatever it was made of, in another API's words."""
        answer = await self._path.serve(chat, "chat", request)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = _reworded(answer.body_iterator, RewordedStream(wording))
            return answer
        content = json.dumps(reworded(json.loads(bytes(answer.body)), wording))
        shown = {name: answer.headers[name] for name in answer.headers if name.startswith("x-")}
        return Response(content, headers=shown, media_type="application/json")

    async def model_data(self, model: str) -> Any:
        """One model's card, or 404."""
        model_of(self._path.models, model)
        return await super().model_data(model)


async def _reworded(chat: AsyncIterable[Any], stream: RewordedStream) -> AsyncIterator[str]:
    async for packet in chat:
        if made := stream.feed(packet):
            yield made


ROUTES: dict[str, Callable[[FastAPI], Any]] = {
    "models": lambda a: a.get("/v1/models"),
    "model_data": lambda a: a.get("/v1/models/{model:path}"),
    "chat": posted("/v1/chat/completions", bodies.chat),
    "completions": posted("/v1/completions", bodies.completion),
    "responses": lambda a: a.post("/v1/responses"),
    "messages": lambda a: a.post("/v1/messages"),
    "count_tokens": lambda a: a.post("/v1/messages/count_tokens"),
    "nodes": lambda a: a.get("/v1/nodes"),
    "tenants": lambda a: a.get("/v1/tenants"),
    "profile": lambda a: a.post("/v1/nodes/profile"),
    "route": lambda a: a.post("/v1/route"),
    "decisions": lambda a: a.get("/v1/decisions"),
    "decision": lambda a: a.get("/v1/decisions/{request_id:path}"),
    "metrics": lambda a: a.get("/metrics", response_class=PlainTextResponse),
    "ready": lambda a: a.get("/ready"),
}
"""Every endpoint by the method that answers it: how it is added to an application."""


def make_ingress(access: Access | None = None) -> type:
    """The ingress class with its routes, ready for `serve.deployment`."""
    app: FastAPI = make_app(access)
    add_page(app)
    ingress: type = make_fastapi_ingress(KappaIngress, endpoint_map=ROUTES, app=app)
    return ingress
