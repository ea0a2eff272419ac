"""The application around the ingress: limits, ids and errors, over a real ASGI round trip."""

import json

import httpx
import pytest
from fastapi import Request
from pydantic import BaseModel, field_validator

from router.errors import queue_full
from router.http_app import body_accepted, make_app, request_id_of

LIMIT = 2048


class Question(BaseModel):
    text: str
    count: int = 1

    @field_validator("count", mode="before")
    @classmethod
    def _picky(cls, value):
        if value == "crash":
            raise TypeError("no such count")
        return value


@pytest.fixture
async def client():
    app = make_app(LIMIT)

    @app.post("/v1/chat/completions")
    async def ask(question: Question, request: Request):
        body_accepted(request)
        if question.text == "boom":
            raise RuntimeError("secret detail")
        if question.text == "busy":
            raise queue_full(3, 1.5)
        return {"id": request_id_of(request), "size": len(question.text)}

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


PATH = "/v1/chat/completions"


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_request_gets_an_id_or_keeps_its_own(client):
    first, second = [(await client.post(PATH, json={"text": "x"})).json()["id"] for _ in "ab"]
    assert first and second and first != second
    given = await client.post(PATH, json={"text": "x"}, headers={"X-Request-ID": "mine"})
    assert given.json()["id"] == "mine"


async def test_a_declared_body_over_the_limit_is_refused(client):
    answer = await client.post(PATH, json={"text": "x" * LIMIT})
    error = error_of(answer, 413)
    assert error["code"] == "body_too_large" and str(LIMIT) in error["message"]


async def test_an_undeclared_body_over_the_limit_is_refused(client):
    async def pieces():
        for _ in range(10):
            yield b"x" * (LIMIT // 4)

    assert error_of(await client.post(PATH, content=pieces()), 413)["code"] == "body_too_large"


async def test_a_body_of_exactly_the_limit_passes_whole_or_in_pieces(client):
    text = json.dumps({"text": "x" * (LIMIT - len(json.dumps({"text": ""})))}).encode()
    assert len(text) == LIMIT

    async def pieces():
        for i in range(0, LIMIT, 100):
            yield text[i : i + 100]

    headers = {"content-type": "application/json"}
    for content in (text, pieces()):
        answer = await client.post(PATH, content=content, headers=headers)
        assert answer.status_code == 200, answer.text


async def test_a_wrong_declaration_does_not_help(client):
    answer = await client.post(
        PATH, content=b"x" * (LIMIT + 1), headers={"content-length": "not a number"}
    )
    error_of(answer, 413)


async def test_faults_of_the_schema_are_400(client):
    error = error_of(await client.post(PATH, json={"text": 5}), 400)
    assert (error["param"], error["code"]) == ("text", "invalid_value")
    headers = {"content-type": "application/json"}
    error = error_of(await client.post(PATH, content=b"{", headers=headers), 400)
    assert error["code"] == "invalid_json"


async def test_a_schema_that_crashes_is_400(client):
    error = error_of(await client.post(PATH, json={"text": "x", "count": "crash"}), 400)
    assert error["code"] == "invalid_value" and "no such count" in error["message"]


async def test_our_own_crash_is_500_without_details(client):
    error = error_of(await client.post(PATH, json={"text": "boom"}), 500)
    assert error["code"] == "internal" and "secret" not in error["message"]


async def test_errors_keep_their_headers(client):
    answer = await client.post(PATH, json={"text": "busy"})
    assert error_of(answer, 429)["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "2"


async def test_unknown_paths_and_methods_have_the_same_shape(client):
    error_of(await client.get("/nothing"), 404)
    error_of(await client.get(PATH), 405)
