"""What stands before every endpoint, and errors: over a real ASGI round trip."""

import asyncio
import json
import os

import httpx
import pytest
from fastapi import Request
from pydantic import BaseModel, field_validator
from starlette.responses import StreamingResponse

from kappa.keys import digest_of, hashed
from router.api.app import Access, inbound_of, make_app
from router.api.errors import QUEUE_FULL
from router.api.tenants import Allowance, Tenants
from tests.router.building import tenants_of

# -- bodies, schemas, keys ---------------------------------------------------------------------


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
        inbound_of(request).accepted = True
        if question.text == "boom":
            raise RuntimeError("secret detail")
        if question.text == "busy":
            raise QUEUE_FULL(limit=3, retry_after_s=1.5)
        return {"id": inbound_of(request).request_id, "size": len(question.text)}

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
    tenants = tenants_of({"sk-alice": "alice"}, {"alice": 2.0}, **options)
    app = make_app(Access(tenants, max_body_bytes=LIMIT))

    @app.post("/v1/chat/completions")
    async def ask(question: Question, request: Request):
        tenant = inbound_of(request).tenant
        if question.text == "busy":
            raise QUEUE_FULL(limit=3, retry_after_s=1.5)
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


# -- sizes, roles, limits ----------------------------------------------------------------------


ALICE, OPS = {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer sk-ops"}


def digests(by_key):
    return {digest_of(key): name for key, name in by_key.items()}


def tenants():
    by_digest = digests({"sk-alice": "alice", "sk-ops": "ops"})
    return Tenants(refuse=True, operators=frozenset({"ops"})).with_digests(by_digest)


def client_of(access):
    app = make_app(access)

    @app.post(PATH)
    async def ask(request: Request):
        inbound = inbound_of(request)
        inbound.accepted = True
        what = (await request.body()).decode()
        if what == "busy":
            raise QUEUE_FULL(limit=3, retry_after_s=1.5)
        if what == "crash":
            raise RuntimeError("the prompt says: swordfish")
        if what.startswith("tokens"):
            inbound.lease.reserve(int(what.split()[1]), 0, 0.0)
        if what == "stream":

            async def parts():
                for part in "abc":
                    await asyncio.sleep(0)
                    yield part

            return StreamingResponse(parts())
        return {"id": inbound.request_id}

    for path in ("/v1/nodes", "/v1/tenants", "/metrics", "/ready", "/v1/models"):
        app.get(path)(lambda: "ok")
    app.post("/v1/nodes/profile")(lambda: "ok")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return app, httpx.AsyncClient(transport=transport, base_url="http://test")


def code(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["code"]


async def test_more_headers_than_the_limit_are_refused_before_the_key_is_looked_at():
    _, client = client_of(Access(tenants(), max_headers=20))
    many = [(f"x-{i}", "v") for i in range(21)]
    assert code(await client.post(PATH, headers=many), 431) == "headers_too_large"
    assert (await client.post(PATH, headers={**ALICE, **dict(many[:10])})).status_code == 200


async def test_longer_headers_than_the_limit_are_refused():
    _, client = client_of(Access(max_header_bytes=4096))
    answer = await client.post(PATH, headers={"x-long": "v" * 4096})
    assert code(answer, 431) == "headers_too_large" and "4096" in answer.text
    assert (await client.post(PATH, headers={"x-long": "v" * 3000})).status_code == 200


@pytest.mark.parametrize("given", ["x" * 129, "a b", "a\u00e9", "<script>", ""])
async def test_an_id_that_is_not_fit_for_a_log_is_replaced(given):
    _, client = client_of(Access())
    headers = [(b"x-request-id", given.encode("latin-1"))]
    made = (await client.post(PATH, headers=headers)).json()["id"]
    assert made and made != given and made.isalnum()


async def test_a_body_that_does_not_come_is_given_up():
    _, client = client_of(Access(body_timeout_s=0.05))

    async def never():
        yield b"half"
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        assert code(await client.post(PATH, content=never()), 408) == "body_too_slow"


@pytest.mark.parametrize("declared", ["²", "١", "9" * 5000, "-1", ""])
async def test_no_declared_length_whatsoever_crashes(declared):
    _, client = client_of(Access(max_body_bytes=1024))
    headers = [(b"content-length", declared.encode("utf-8"))]
    answer = await client.post(PATH, content=b"x", headers=headers)
    assert answer.status_code in (200, 413)


GUARDED = [("GET", "/v1/nodes"), ("GET", "/v1/tenants"), ("POST", "/v1/nodes/profile"),
           ("GET", "/v1/nodes/"), ("HEAD", "/v1/tenants")]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_what_concerns_the_whole_cluster_is_for_operators(method, path):
    _, client = client_of(Access(tenants()))
    answer = await client.request(method, path, headers=ALICE)
    assert answer.status_code == 403
    assert method == "HEAD" or code(answer, 403) == "operator_only"
    assert (await client.request(method, path, headers=OPS)).status_code != 403


async def test_without_keys_everybody_is_an_operator():
    _, client = client_of(Access())
    for method, path in GUARDED[:3]:
        assert (await client.request(method, path)).status_code == 200


async def test_metrics_can_be_kept_for_operators():
    _, client = client_of(Access(tenants(), open_metrics=False))
    assert code(await client.get("/metrics"), 401) == "invalid_api_key"
    assert code(await client.get("/metrics", headers=ALICE), 403) == "operator_only"
    assert (await client.get("/metrics", headers=OPS)).status_code == 200
    assert (await client.get("/ready")).status_code == 200


async def test_a_limited_tenant_is_told_what_is_left_and_when_to_come_back():
    app, client = client_of(Access(default_allowance=Allowance(2, 1000)))
    first = await client.post(PATH, content="tokens 100")
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    busy = await client.post(PATH, content="busy")
    assert busy.status_code == 429 and busy.headers["x-ratelimit-remaining-requests"] == "0"
    over = await client.post(PATH)
    assert code(over, 429) == "rate_limit_exceeded"
    assert 1 <= int(over.headers["retry-after"]) <= 30
    assert over.headers["x-ratelimit-reset-requests"].endswith("s")
    assert app.state.refused["default", "rate_limit_exceeded"] == 1


async def test_looking_at_models_and_metrics_is_not_counted():
    _, client = client_of(Access(default_allowance=Allowance(1)))
    for path in ("/v1/models", "/metrics", "/ready", "/v1/nodes"):
        for _ in range(3):
            answer = await client.get(path)
            assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers


async def test_a_refused_tenant_costs_its_neighbour_nothing():
    access = Access(tenants(), allowances={"alice": Allowance(1)})
    _, client = client_of(access)
    statuses = [(await client.post(PATH, headers=ALICE)).status_code for _ in range(3)]
    assert statuses == [200, 429, 429]
    assert (await client.post(PATH, headers=OPS)).status_code == 200


@pytest.mark.parametrize("what", ["", "busy", "crash", "stream"])
async def test_a_request_is_over_when_its_answer_is_however_it_ends(what):
    _, client = client_of(Access(default_allowance=Allowance(concurrent=1)))
    for _ in range(3):
        assert (await client.post(PATH, content=what)).status_code in (200, 429, 500)
    assert (await client.post(PATH)).status_code == 200


async def test_more_at_a_time_than_allowed_are_refused_at_once():
    gate = asyncio.Event()
    app = make_app(Access(default_allowance=Allowance(concurrent=2)))

    @app.post(PATH)
    async def ask():
        await gate.wait()
        return "ok"

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        posts = [asyncio.create_task(client.post(PATH)) for _ in range(5)]
        async with asyncio.timeout(20):
            while sum(task.done() for task in posts) < 3:
                await asyncio.sleep(0.01)
            gate.set()
            statuses = [(await task).status_code for task in posts]
    assert sorted(statuses) == [200, 200, 429, 429, 429]


async def test_a_key_that_is_taken_out_of_the_file_is_refused_without_a_restart(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"{hashed('sk-alice')}: alice\n")
    table = Tenants(refuse=True).with_digests(digests({"sk-alice": "alice"}), fixed=())
    _, client = client_of(Access(table, keys_file=str(path), keys_check_s=1e-9))
    assert (await client.post(PATH, headers=ALICE)).status_code == 200
    path.write_text(f"{hashed('sk-ops')}: ops\n")
    os.utime(path, (1.0, 1.0))  # not a moment ago
    assert code(await client.post(PATH, headers=ALICE), 401) == "invalid_api_key"
    assert (await client.post(PATH, headers=OPS)).status_code == 200


async def test_a_crash_is_logged_by_place_and_not_by_what_it_quotes(capsys):
    _, client = client_of(Access())
    assert code(await client.post(PATH, content="crash"), 500) == "internal"
    told = "".join(capsys.readouterr())
    assert "request_crashed" in told and "RuntimeError" in told and "test_app.py" in told
    assert "swordfish" not in told


async def test_a_tenant_whose_bodies_do_not_come_leaves_others_their_share():
    _, client = client_of(Access(tenants(), max_outstanding_bodies=2))
    gate, begun = asyncio.Event(), []

    async def slow():
        begun.append(True)
        yield b"half"
        await gate.wait()

    async with asyncio.timeout(20):
        trickling = [
            asyncio.create_task(client.post(PATH, content=slow(), headers=ALICE)) for _ in range(2)
        ]
        while len(begun) < 2:
            await asyncio.sleep(0)
        refused = await client.post(PATH, content=b"x", headers=ALICE)
        assert code(refused, 429) == "bodies_outstanding" and "tenant alice" in refused.text
        assert (await client.post(PATH, content=b"x", headers=OPS)).status_code == 200
        assert (await client.get("/v1/models", headers=ALICE)).status_code == 200
        gate.set()
        assert [(await task).status_code for task in trickling] == [200, 200]
        assert (await client.post(PATH, content=b"x", headers=ALICE)).status_code == 200


async def test_without_keys_bodies_are_counted_by_address():
    app, first = client_of(Access(max_outstanding_bodies=1))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("10.0.0.2", 1))
    second = httpx.AsyncClient(transport=transport, base_url="http://test")
    gate, begun = asyncio.Event(), asyncio.Event()

    async def slow():
        begun.set()
        yield b"half"
        await gate.wait()

    async with asyncio.timeout(20):
        trickling = asyncio.create_task(first.post(PATH, content=slow()))
        await begun.wait()
        refused = await first.post(PATH, content=b"x")
        assert code(refused, 429) == "bodies_outstanding" and "this address" in refused.text
        assert (await second.post(PATH, content=b"x")).status_code == 200
        gate.set()
        assert (await trickling).status_code == 200
