"""`kappa route` over real sockets: what is passed on, decided, retried, refused."""

from __future__ import annotations

from tests.router.front.conftest import chat, routing, until
from tests.router.front.offering import FakeServer, serving, stream_of


async def test_a_stream_comes_through_byte_for_byte():
    async with serving(FakeServer(), FakeServer()) as servers, routing(*servers) as front:
        answer = await front.http.post("/v1/chat/completions", json=chat(stream=True))
        assert answer.status == 200
        assert await answer.read() == stream_of(servers[0])
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-kappa-node"] in ("h100-pcie5", "gh200-c2c")
        await until(lambda: not front.front.live.router.flights)


async def test_the_server_gets_the_body_as_it_was_sent():
    async with serving(FakeServer()) as servers, routing(*servers) as front:
        body = b'{ "model":"llama-3.1-8b",  "prompt": "x\\u00e9" , "n":1}'
        answer = await front.http.post("/v1/completions?a=b%20c", data=body)
        assert (await answer.json())["path"] == "/v1/completions"
        method, target, headers, seen = servers[0].seen[-1]
        assert (method, target, seen) == ("POST", "/v1/completions?a=b%20c", body)
        assert headers["x-request-id"] == answer.headers["x-request-id"]
