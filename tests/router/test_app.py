"""What stands before every endpoint, and errors: over a real ASGI round trip."""

import asyncio
import json
import os
import re
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from kappa.keys import digest_of, hashed
from kappa_router.api.app import OPERATOR_PATHS, Access, Door, make_app
from kappa_router.api.errors import QUEUE_FULL
from kappa_router.api.request import inbound_of
from kappa_router.api.tenants import Allowance, Tenants
from kappa_router.page.mount import add_page
from tests.router.building import tenants_of

LIMIT = 2048
PATH = "/v1/chat/completions"
ALICE, OPS = {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer sk-ops"}
TENANTS = tenants_of(
    {"sk-alice": "alice", "sk-ops": "ops"}, {"alice": 2.0}, refuse=True,
    operators=frozenset({"ops"}),
)  # fmt: skip
OPEN = tenants_of({"sk-alice": "alice"}, {"alice": 2.0})


class Question(BaseModel):
    text: str = "x"
    count: int = 1


async def answer_to(question: Question, request: Request):
    inbound = inbound_of(request)
    if question.text == "busy":
        raise QUEUE_FULL(limit=3, retry_after_s=1.5)
    if question.text == "crash":
        raise RuntimeError("the prompt says: swordfish")
    if question.text.startswith("tokens"):
        inbound.lease.reserve(int(question.text.split()[1]), 0, 0.0)
    if question.text == "stream":

        async def parts():
            for part in "abc":
                await asyncio.sleep(0)
                yield part

        return StreamingResponse(parts())
    tenant = inbound.tenant
    return {"id": inbound.request_id, "tenant": tenant.name, "weight": tenant.weight}


@pytest.fixture
async def client_of():
    """Makes clients of an application with some routes, by what `Access` is given."""
    made = []

    def make(*args, endpoint=answer_to, address=("127.0.0.1", 1), app=None, **options):
        if app is None:
            app = make_app(door := Door(Access(*args, **options)))
            app.state.door = door
            app.post(PATH)(endpoint)
            for path in ("/v1/nodes", "/v1/tenants", "/metrics", "/ready", "/v1/models"):
                app.get(path)(lambda: "ok")
            app.post("/v1/nodes/profile")(lambda: "ok")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=address)
        made.append(httpx.AsyncClient(transport=transport, base_url="http://test"))
        made[-1].app = app
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


@pytest.fixture
def client(client_of):
    return client_of(max_body_bytes=LIMIT)


def ask(client, text="x", headers=None, **more):
    return client.post(PATH, json={"text": text, **more}, headers=headers)


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def code(answer, status):
    return error_of(answer, status)["code"]


# -- bodies, schemas, errors -----------------------------------------------------------------------


async def test_request_keeps_its_id_only_if_it_is_fit_for_a_log(client):
    first, second = [(await ask(client)).json()["id"] for _ in "ab"]
    assert first and second and first != second
    assert (await ask(client, headers={"X-Request-ID": "mine"})).json()["id"] == "mine"
    for given in ("x" * 129, "a b", "a\u00e9", "<script>", ""):
        headers = [(b"x-request-id", given.encode("latin-1"))]
        made = (await ask(client, headers=headers)).json()["id"]
        assert made and made != given and made.isalnum()


async def in_chunks(body, size=100):
    for i in range(0, len(body), size):
        yield body[i : i + size]


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_passes_up_to_exactly_the_limit(client, chunked):
    text = json.dumps({"text": "x" * (LIMIT - len(json.dumps({"text": ""})))}).encode()
    assert len(text) == LIMIT
    headers = {"content-type": "application/json"}
    for body, status in ((text, 200), (text + b" ", 413)):
        content = in_chunks(body) if chunked else body
        answer = await client.post(PATH, content=content, headers=headers)
        assert answer.status_code == status, answer.text
    error = error_of(answer, 413)
    assert error["code"] == "body_too_large" and str(LIMIT) in error["message"]


@pytest.mark.parametrize("declared", ["not a number", "²", "١", "9" * 5000, "-1", ""])
async def test_declared_length_helps_no_body_and_crashes_nothing(client, declared):
    headers = [(b"content-length", declared.encode()), (b"content-type", b"application/json")]
    answer = await client.post(PATH, content=b"{}", headers=headers)
    assert answer.status_code == (413 if declared[:1] == "9" else 200)
    error_of(await client.post(PATH, content=b"x" * (LIMIT + 1), headers=headers), 413)


async def test_faults_of_the_schema_are_400(client):
    error = error_of(await client.post(PATH, json={"text": 5}), 400)
    assert (error["param"], error["code"]) == ("body.text", "invalid_value")


async def test_crash_is_500_and_logged_without_what_it_quotes(client, capsys):
    answer = await ask(client, "crash")
    assert code(answer, 500) == "internal"
    printed = "".join(capsys.readouterr())
    assert "request_crashed" in printed and "RuntimeError" in printed and "test_app.py" in printed
    assert "swordfish" not in printed + answer.text


async def test_errors_keep_their_headers_and_shape(client):
    answer = await ask(client, "busy")
    assert error_of(answer, 429)["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "2"
    error_of(await client.get("/nothing"), 404)
    error_of(await client.get(PATH), 405)


# -- keys and roles --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        ALICE,
        {"Authorization": "bearer sk-alice"},
        {"x-api-key": "sk-alice"},
        {"authorization": "Bearer none", "x-api-key": "sk-alice"},
    ],
)
@pytest.mark.parametrize("tenants", [OPEN, TENANTS])
async def test_known_key_names_the_tenant(client_of, headers, tenants):
    told = (await ask(client_of(tenants), headers=headers)).json()
    assert (told["tenant"], told["weight"]) == ("alice", 2.0)


async def test_unknown_key_is_the_default_tenant_or_401(client_of, capsys):
    client, closed = client_of(OPEN), client_of(TENANTS)
    wrong = [{}, {"authorization": "Bearer sk-alic"}, {"x-api-key": "sk-hush"},
             {"authorization": "Basic sk-alice"}]  # fmt: skip
    for i, headers in enumerate(wrong):
        told = (await ask(client, headers=headers)).json()
        assert (told["tenant"], told["weight"]) == ("default", 1.0)
        answer = await ask(closed, headers=headers)
        error = error_of(answer, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert closed.app.state.door.keys_refused == i + 1
        assert "sk-" not in answer.text + "".join(capsys.readouterr())


async def test_refused_body_is_not_even_read(client_of):
    content = b"x" * (2 * LIMIT)
    error_of(await client_of(TENANTS, max_body_bytes=LIMIT).post(PATH, content=content), 401)


async def test_probes_and_scrapers_need_no_key_and_all_else_does(client_of):
    client = client_of(TENANTS)
    for path in ("/ready", "/metrics"):
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/models", "/nothing", "/openapi.json", "/ready/x"):
        error_of(await client.get(path), 401)
    assert (await client.get("/v1/models", headers=ALICE)).status_code == 200


@pytest.mark.parametrize("path", ["//", "/ready/", "/health/", "/metrics/", "/ready//"])
async def test_path_like_an_open_one_needs_a_key_and_counts(client_of, path):
    client = client_of(TENANTS, limit_all=True, allowances={"alice": Allowance(9)})
    url = httpx.URL("http://test", raw_path=path.encode())
    assert code(await client.post(url), 401) == "invalid_api_key"
    answer = await client.post(url, headers=ALICE)
    if path == "/metrics/":
        assert code(answer, 403) == "operator_only"
    else:
        assert answer.headers["x-ratelimit-remaining-requests"] == "8"


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics"])
async def test_open_paths_take_no_body(client_of, path):
    client = client_of(TENANTS)
    for content in (b"x", in_chunks(b"x" * 1000)):
        assert (await client.post(path, content=content)).status_code == 413
    assert (await client.post(path)).status_code != 413


async def test_refusal_is_logged_with_its_tenant(client_of, capsys):
    await ask(client_of(OPEN), "busy", headers=ALICE)
    printed = "".join(capsys.readouterr())
    assert "alice" in printed and "queue_full" in printed and "sk-alice" not in printed


async def test_operator_paths_are_for_operators_alone(client_of, capsys):
    client, free = client_of(TENANTS), client_of()
    for method, path in (
        ("GET", "/v1/nodes"), ("GET", "/v1/tenants"), ("POST", "/v1/nodes/profile"),
        ("GET", "/v1/nodes/"), ("HEAD", "/v1/tenants"),
    ):  # fmt: skip
        answer = await client.request(method, path, headers=ALICE)
        assert answer.status_code == 403
        assert method == "HEAD" or code(answer, 403) == "operator_only"
        assert "alice" in "".join(capsys.readouterr()), "the key's tenant"
        assert (await client.request(method, path, headers=OPS)).status_code != 403
        # Without keys everybody is an operator.
        assert (await free.request(method, path)).status_code not in (401, 403)


async def test_metrics_can_be_kept_for_operators(client_of):
    client = client_of(TENANTS, open_metrics=False)
    assert code(await client.get("/metrics"), 401) == "invalid_api_key"
    assert code(await client.get("/metrics", headers=ALICE), 403) == "operator_only"
    assert (await client.get("/metrics", headers=OPS)).status_code == 200
    assert (await client.get("/ready")).status_code == 200


async def test_removed_key_is_refused_without_a_restart(client_of, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"{hashed('sk-alice')}: alice\n")
    table = Tenants(refuse=True).with_digests({digest_of("sk-alice"): "alice"}, fixed=())
    client = client_of(table, keys_file=str(path), keys_check_s=1e-9)
    assert (await ask(client, headers=ALICE)).status_code == 200
    path.write_text(f"{hashed('sk-ops')}: ops\n")
    os.utime(path, (1.0, 1.0))  # not a moment ago
    assert code(await ask(client, headers=ALICE), 401) == "invalid_api_key"
    assert (await ask(client, headers=OPS)).status_code == 200


# -- sizes and limits ------------------------------------------------------------------------------


async def test_limited_tenant_learns_what_is_left_and_when_to_retry(client_of):
    client = client_of(default_allowance=Allowance(2, 1000))
    first = await ask(client, "tokens 100")
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    busy = await ask(client, "busy")
    assert busy.status_code == 429 and busy.headers["x-ratelimit-remaining-requests"] == "0"
    over = await ask(client)
    assert code(over, 429) == "rate_limit_exceeded"
    assert 1 <= int(over.headers["retry-after"]) <= 30
    assert over.headers["x-ratelimit-reset-requests"].endswith("s")
    assert client.app.state.door.refused["default", "rate_limit_exceeded"] == 1
    for path in ("/v1/models", "/metrics", "/ready", "/v1/nodes"):
        answer = await client.get(path)
        assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_body_counts_as_several_requests(client_of, chunked):
    client = client_of(default_allowance=Allowance(5))
    for size, status, left in ((0, 200, "4"), (2 << 20, 200, "1"), (2 << 20, 429, "1")):
        body = json.dumps({"text": "x" * size}).encode()
        headers = {"content-type": "application/json"}
        content = in_chunks(body, 1 << 16) if chunked else body
        answer = await client.post(PATH, content=content, headers=headers)
        assert answer.status_code == status
        left = "0" if chunked and status == 429 else left  # The one that it came as.
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    assert client.app.state.door.refused["default", "rate_limit_exceeded"] == 1


async def test_refused_tenant_costs_its_neighbour_nothing(client_of):
    client = client_of(TENANTS, allowances={"alice": Allowance(1)})
    statuses = [(await ask(client, headers=ALICE)).status_code for _ in range(3)]
    assert statuses == [200, 429, 429]
    assert (await ask(client, headers=OPS)).status_code == 200


async def test_request_is_over_when_its_answer_is_however_it_ends(client_of):
    client = client_of(default_allowance=Allowance(concurrent=1))
    for text in ("x", "busy", "crash", "stream"):
        assert (await ask(client, text)).status_code in (200, 429, 500)
        assert (await ask(client)).status_code == 200


async def test_requests_above_the_concurrency_are_refused_at_once(client_of):
    gate = asyncio.Event()

    async def wait():
        await gate.wait()
        return "ok"

    client = client_of(default_allowance=Allowance(concurrent=2), endpoint=wait)
    posts = [asyncio.create_task(client.post(PATH)) for _ in range(5)]
    async with asyncio.timeout(20):
        while sum(task.done() for task in posts) < 3:
            await asyncio.sleep(0.01)
        gate.set()
        statuses = [(await task).status_code for task in posts]
    assert sorted(statuses) == [200, 200, 429, 429, 429]


@pytest.mark.parametrize(
    ("tenants", "limit", "who"), [(TENANTS, 2, "tenant alice"), (Tenants(), 1, "this address")]
)
async def test_stalled_bodies_of_a_tenant_leave_others_their_share(client_of, tenants, limit, who):
    first = client_of(tenants, max_outstanding_bodies=limit)
    # Without keys they are told apart by their address.
    other = client_of(app=first.app, address=("10.0.0.2", 1))
    gate, begun = asyncio.Event(), []

    async def slow():
        begun.append(True)
        yield b'{"text":'
        await gate.wait()
        yield b'"x"}'

    headers = {**ALICE, "content-type": "application/json"}
    async with asyncio.timeout(20):
        trickling = [
            asyncio.create_task(first.post(PATH, content=slow(), headers=headers))
            for _ in range(limit)
        ]
        while len(begun) < limit:
            await asyncio.sleep(0)
        refused = await ask(first, headers=ALICE)
        assert code(refused, 429) == "bodies_outstanding" and who in refused.text
        assert (await ask(other, headers=OPS)).status_code == 200
        assert (await first.get("/v1/models", headers=ALICE)).status_code == 200
        gate.set()
        assert [(await task).status_code for task in trickling] == [200] * limit
        assert (await ask(first, headers=ALICE)).status_code == 200


# -- docs/security.md names every endpoint with who may use it -------------------------------------


@pytest.mark.ray
def test_security_document_names_exactly_the_endpoints():
    from kappa.protocol import DECIDED_PATHS
    from kappa_router.cluster.paths import own_paths
    from kappa_router.cluster.replica import OWN

    document = Path(__file__).parents[2] / "docs" / "security.md"
    rows = document.read_text().split("## Endpoints")[1].split("\n## ")[0].splitlines()
    documented = {
        endpoint: row.split("|")[2].strip()
        for row in rows
        if row.startswith("| `")
        for endpoint in re.findall(r"`(GET|POST) ([^`]+)`", row.split("|")[1])
    }
    app = make_app(Door(Access()))
    add_page(app)
    for route in OWN.values():
        route(app)(lambda: None)
    served = {
        (method, re.sub(r":path}", "}", route.path))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    assert set(documented) == served | {("POST", path) for path in DECIDED_PATHS}
    # Envoy knows them all.
    assert {re.sub(r"{.*", "", route.path) for route in app.routes} == set(own_paths(()))
    guarded = {path for (_, path), who in documented.items() if who == "operators"}
    # `kappa route` alone has a journal, and peers.
    assert guarded == set(OPERATOR_PATHS) - {"/v1/journal", "/v1/in_flight"}
