"""A server that speaks OpenAI's API as much as `kappa route` needs, and fails as it is bidden."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class FakeServer:
    """What it answers; all may be changed while it runs. seen: requests as they came; gone: how
    many of them their client left; hold: nothing is answered while it is not set."""

    model: str = "llama-3.1-8b"
    root: str = ""
    tokens: int = 4
    ttft_s: float = 0.0
    cached: int | None = None
    status: int = 200
    healthy: int = 200
    models_body: bytes | None = None
    metrics: str = ""
    die_after: int | None = None
    tells_usage: bool = True
    seen: list = field(default_factory=list)
    gone: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    port: int = 0

    def __post_init__(self):
        self.hold.set()
        self._runner = None

    def app(self):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    async def start(self):
        self._runner = web.AppRunner(self.app(), shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self):
        await self._runner.cleanup()

    async def _health(self, request):
        return web.Response(status=self.healthy)

    async def _models(self, request):
        if self.models_body is not None:
            return web.Response(body=self.models_body)
        card = {"id": self.model, "object": "model", "root": self.root or self.model}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request):
        return web.Response(text=self.metrics) if self.metrics else web.Response(status=404)

    async def _any(self, request):
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.method, request.path_qs, headers, body))
        if request.path == "/server_info":
            return web.json_response({"version": "0.5.9", "max_total_num_tokens": 4096})
        if request.path == "/version":
            return web.Response(status=404)
        if request.path == "/tokenize":
            return web.json_response({"tokens": list(json.loads(body)["prompt"].encode())})
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone += 1
            raise

    async def _answer(self, request, body):
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        await self.hold.wait()
        data = json.loads(body) if body.startswith(b"{") else {}
        usage = {"prompt_tokens": 100, "completion_tokens": self.tokens, "total_tokens": 104}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        if self.ttft_s:
            await asyncio.sleep(self.ttft_s)
        if not isinstance(data, dict) or not data.get("stream"):
            return web.json_response({"path": request.path, "usage": usage})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for i in range(self.tokens):
            if self.die_after == i:
                request.transport.abort()
                return answer
            await answer.write(_event({"choices": [{"delta": {"content": f"t{i} "}}]}))
            await self.hold.wait()
        if self.tells_usage:
            await answer.write(_event({"choices": [], "usage": usage}))
        await answer.write(b"data: [DONE]\n\n")
        return answer


def _event(data):
    return f"data: {json.dumps(data)}\n\n".encode()


def stream_of(server):
    """The bytes that a streamed answer of the server has."""
    usage = {"prompt_tokens": 100, "completion_tokens": server.tokens, "total_tokens": 104}
    if server.cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": server.cached}
    events = [{"choices": [{"delta": {"content": f"t{i} "}}]} for i in range(server.tokens)]
    events.append({"choices": [], "usage": usage})
    return b"".join(map(_event, events)) + b"data: [DONE]\n\n"


@asynccontextmanager
async def serving(*servers):
    """The servers, started."""
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()
