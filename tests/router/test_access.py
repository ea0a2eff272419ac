"""What stands before every endpoint, over a real ASGI round trip: sizes, roles, limits, keys."""

import asyncio
import os

import httpx
import pytest
from fastapi import Request
from starlette.responses import StreamingResponse

from kappa.keys import digest_of, hashed
from router.access.limits import Allowance
from router.access.middleware import Access, lease_of
from router.access.tenants import Tenants
from router.errors import queue_full
from router.ingress.app import body_accepted, make_app, may_see, request_id_of

PATH = "/v1/chat/completions"
ALICE, OPS = {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer sk-ops"}


def digests(by_key):
    return {digest_of(key): name for key, name in by_key.items()}


def tenants():
    by_digest = digests({"sk-alice": "alice", "sk-ops": "ops"})
    return Tenants.of_digests(by_digest, {}, refuse=True, operators=frozenset({"ops"}))


def client_of(access):
    app = make_app(access)

    @app.post(PATH)
    async def ask(request: Request):
        body_accepted(request)
        what = (await request.body()).decode()
        lease = lease_of(request)
        if what == "busy":
            raise queue_full(3, 1.5)
        if what == "crash":
            raise RuntimeError("the prompt says: swordfish")
        if what.startswith("tokens"):
            lease.reserve(int(what.split()[1]), 0, 0.0)
        if what == "stream":

            async def parts():
                for part in "abc":
                    await asyncio.sleep(0)
                    yield part

            return StreamingResponse(parts())
        return {"id": request_id_of(request), "sees_bob": may_see(request, "bob")}

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


async def test_a_tenant_sees_its_own_and_an_operator_all():
    _, client = client_of(Access(tenants()))
    assert (await client.post(PATH, headers=ALICE)).json()["sees_bob"] is False
    assert (await client.post(PATH, headers=OPS)).json()["sees_bob"] is True


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
    table = Tenants.of_digests(digests({"sk-alice": "alice"}), {}, refuse=True, fixed=frozenset())
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
    assert "request_crashed" in told and "RuntimeError" in told and "test_access.py" in told
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
