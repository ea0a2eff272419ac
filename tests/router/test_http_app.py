"""The application around the ingress: limits, ids and errors, over a real ASGI round trip."""

import json

import httpx
import pytest
from fastapi import Request
from pydantic import BaseModel, field_validator

from router.access.middleware import Access
from router.access.tenants import Tenants
from router.errors import queue_full
from router.ingress.app import body_accepted, make_app, request_id_of, tenant_of

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
    app = make_app(Access(max_body_bytes=LIMIT))

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


def keyed(**options):
    """An application with alice's key, a route that names the tenant, and an open one."""
    tenants = Tenants.of({"sk-alice": "alice"}, {"alice": 2.0}, **options)
    app = make_app(Access(tenants, max_body_bytes=LIMIT))

    @app.post("/v1/chat/completions")
    async def ask(question: Question, request: Request):
        tenant = tenant_of(request)
        if question.text == "busy":
            raise queue_full(3, 1.5)
        return {"tenant": tenant.name, "weight": tenant.weight}

    for path in ("/ready", "/metrics", "/v1/models"):
        app.get(path)(lambda: "ok")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return app, httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-alice"},
        {"Authorization": "bearer sk-alice"},
        {"x-api-key": "sk-alice"},
        {"authorization": "Bearer none", "x-api-key": "sk-alice"},
    ],
)
@pytest.mark.parametrize("refuse", [True, False])
async def test_a_known_key_names_the_tenant(headers, refuse):
    _, client = keyed(refuse=refuse)
    answer = await client.post(PATH, json={"text": "x"}, headers=headers)
    assert answer.json() == {"tenant": "alice", "weight": 2.0}


WRONG = [{}, {"authorization": "Bearer sk-alic"}, {"x-api-key": "sk-hush"},
         {"authorization": "Basic sk-alice"}]  # fmt: skip


@pytest.mark.parametrize("headers", WRONG)
async def test_without_a_known_key_it_is_the_default_tenant(headers):
    _, client = keyed()
    answer = await client.post(PATH, json={"text": "x"}, headers=headers)
    assert answer.json() == {"tenant": "default", "weight": 1.0}


@pytest.mark.parametrize("headers", WRONG)
async def test_without_a_known_key_it_is_401_where_so_configured(headers, capsys):
    app, client = keyed(refuse=True)
    answer = await client.post(PATH, json={"text": "x"}, headers=headers)
    error = error_of(answer, 401)
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert app.state.keys_refused == 1
    told = answer.text + "".join(capsys.readouterr())
    assert "sk-" not in told


async def test_a_refused_body_is_not_even_read():
    _, client = keyed(refuse=True)
    error_of(await client.post(PATH, content=b"x" * (2 * LIMIT)), 401)


async def test_probes_and_scrapers_need_no_key_and_all_else_does():
    _, client = keyed(refuse=True)
    for path in ("/ready", "/metrics"):
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/models", "/nothing", "/openapi.json", "/ready/x"):
        error_of(await client.get(path), 401)
    headers = {"authorization": "Bearer sk-alice"}
    assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_refusal_is_logged_with_its_tenant(capsys):
    _, client = keyed()
    headers = {"authorization": "Bearer sk-alice"}
    await client.post(PATH, json={"text": "busy"}, headers=headers)
    logged = "".join(capsys.readouterr())
    assert "alice" in logged and "queue_full" in logged and "sk-alice" not in logged
