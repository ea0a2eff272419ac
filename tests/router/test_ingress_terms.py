"""A request's terms through the whole ingress: its tenant's cache and tokens, its own deadline.

Ray's delivery is replaced by a script, as in test_ingress; everything else is real.
"""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

import router.live.live_router
from kappa.keys import digest_of
from router.api.app import Access, make_app
from router.api.auth import Tenant, Tenants
from router.api.constraints import cache_salt
from router.api.limits import Allowance
from router.api.render import PromptRenderer
from router.index.prefix_hash import salt_of
from router.live.records import DecisionRecord
from router.live.replica_registry import ReplicaRegistry
from tests.router.scripted import BODY, PATH, Scripted, announcement, event, overload
from workers.tiny_model import make_tiny_model

pytestmark = pytest.mark.ray

KEYS = {"alice": "sk-alice", "bob": "sk-bob", "ops": "sk-ops"}
OWN = Tenants(own_caches=True, operators=frozenset({"ops"})).with_digests(
    {digest_of(key): name for name, key in KEYS.items()}
)
DEADLINE = "x-kappa-deadline-ms"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return PromptRenderer(str(make_tiny_model(folder, ["hello world " * 20])))


class Salted(Scripted):
    """Keeps the bodies as engines would get them."""

    async def _call(self, body, method, headers):
        self.bodies = [*getattr(self, "bodies", []), body.model_copy(deep=True)]
        async for item in super()._call(body, method, headers):
            yield item


@pytest.fixture
def cluster(renderer, monkeypatch):
    """`async with cluster(script, ...) as (ingress, live, client)`."""

    @asynccontextmanager
    async def made(script, tenants=OWN, workers=("a", "b"), access=None, **changes):
        registry = ReplicaRegistry()
        monkeypatch.setattr(router.live.live_router, "REGISTRY", registry)
        ingress = Salted(renderer, script, tenants=tenants, **changes)
        app = make_app(Access(tenants, **(access or {})))
        app.post(PATH)(ingress.chat)
        app.post("/v1/completions")(ingress.completions)
        app.post("/v1/route")(ingress.route)
        app.get("/v1/decisions")(ingress.decisions)
        app.get("/metrics")(ingress.metrics)
        live = ingress._live()
        registry.publish("d", {worker: announcement(worker) for worker in workers})
        async with asyncio.timeout(30):
            while len(live.router.workers) < len(workers):
                await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield SimpleNamespace(ingress=ingress, live=live, client=client)
        registry.publish("d", {})
        await ingress._start.close()

    return made


async def words(_worker):
    yield [event("one")]
    yield [event("two"), event("three")]


async def never(_worker):
    await asyncio.Event().wait()
    yield


def ask(here, tenant="alice", path=PATH, headers=None, **changes):
    key = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
    return here.client.post(
        path, json={"stream": True, **BODY, **changes}, headers={**key, **(headers or {})}
    )


def code(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["code"]


async def test_every_tenants_prompts_are_salted_by_its_name_and_its_own_salt(cluster):
    async with cluster(words) as here:
        for tenant, own in (("alice", None), ("bob", None), ("alice", "mine"), (None, None)):
            answer = await ask(here, tenant, cache_salt=own)
            assert answer.status_code == 200
        sent = [body.cache_salt for body in here.ingress.bodies]
    tenants = [Tenant(name, own_cache=True) for name in ("alice", "bob", "alice", "default")]
    own = (None, None, "mine", None)
    assert sent == [cache_salt(t, o) for t, o in zip(tenants, own, strict=True)]
    assert len(set(sent)) == 4


async def test_a_shared_cache_leaves_the_clients_salt_as_it_is(cluster):
    shared = Tenants.of({"sk-alice": "alice"}, {})
    async with cluster(words, tenants=shared) as here:
        for own in (None, "mine"):
            await ask(here, cache_salt=own)
        assert [body.cache_salt for body in here.ingress.bodies] == [None, "mine"]


async def test_the_router_looks_for_prefixes_under_the_salt_that_the_engine_gets(cluster):
    asked = []
    async with cluster(words) as here:
        route, explain = here.live.route, here.live.explain
        here.live.route = lambda r, *a, **k: asked.append(r.salt) or route(r, *a, **k)
        here.live.explain = lambda r, *a, **k: asked.append(r.salt) or explain(r, *a, **k)
        await ask(here, "alice")
        await ask(here, "bob")
        await ask(here, "bob", path="/v1/route", stream=False)
        sent = [salt_of(body.cache_salt) for body in here.ingress.bodies]
    assert asked == [*sent, sent[1]] and len(set(sent)) == 2


async def test_decisions_of_others_are_an_operators_to_see(cluster):
    async with cluster(words) as here:
        for tenant in ("alice", "bob"):
            await ask(here, tenant)
        seen = {}
        for tenant, key in KEYS.items():
            headers = {"authorization": f"Bearer {key}"}
            answer = await here.client.get("/v1/decisions", headers=headers)
            seen[tenant] = [row["tenant"] for row in answer.json()["decisions"]]
    assert seen == {"alice": ["alice"], "bob": ["bob"], "ops": ["alice", "bob"]}


async def test_only_the_newest_decisions_that_are_wanted_are_written_out(cluster, monkeypatch):
    written = []
    to_dict = DecisionRecord.to_dict
    monkeypatch.setattr(DecisionRecord, "to_dict", lambda r: written.append(r.tenant) or to_dict(r))
    monkeypatch.setattr("router.api.endpoints._MOST_DECISIONS", 3)

    async def seen(here, tenant, limit):
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        answer = await here.client.get("/v1/decisions", headers=headers, params={"limit": limit})
        ids = [row["request_id"] for row in answer.json()["decisions"]]
        told, written[:] = list(written), []
        return ids, told

    async with cluster(words) as here:
        for i in range(4):
            for tenant in ("alice", "bob"):
                await ask(here, tenant, headers={"x-request-id": f"{tenant}-{i}"})
        written.clear()
        alice = ["alice-1", "alice-2", "alice-3"]
        assert await seen(here, "alice", 2) == (alice[-2:], ["alice"] * 2)
        assert await seen(here, "alice", 10**30) == (alice, ["alice"] * 3)
        assert await seen(here, "ops", 3) == (
            ["bob-2", "alice-3", "bob-3"],
            ["bob", "alice", "bob"],
        )
        assert len((await seen(here, "ops", 10**30))[0]) == 8
        for nothing in (0, -1):
            assert await seen(here, "ops", nothing) == ([], [])


async def test_decisions_count_against_a_tenants_requests(cluster):
    access = {"allowances": {"alice": Allowance(requests_per_minute=2)}}
    async with cluster(words, access=access) as here:
        headers = {"authorization": f"Bearer {KEYS['alice']}"}
        answers = [await here.client.get("/v1/decisions", headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


async def test_a_route_shows_what_workers_do_for_others_to_operators_only(cluster):
    async with cluster(words) as here:
        told = {
            tenant: (await ask(here, tenant, path="/v1/route", stream=False)).json()["candidates"]
            for tenant in ("alice", "ops")
        }
    hidden = {"worker", "in_flight", "queue_s", "harm_s"}
    assert len(told["alice"]) == len(told["ops"]) == 2
    for own, all_of_it in zip(told["alice"], told["ops"], strict=True):
        assert set(all_of_it) - set(own) == hidden and own["ttft_s"] == all_of_it["ttft_s"]


async def test_tokens_are_reserved_before_and_settled_after(cluster):
    access = {"allowances": {"alice": Allowance(tokens_per_minute=900)}}
    async with cluster(words, access=access) as here:
        first = await ask(here, max_tokens=400)
        during = int(first.headers["x-ratelimit-remaining-tokens"])
        second = await ask(here, max_tokens=400)
        after = int(second.headers["x-ratelimit-remaining-tokens"])
        # Of four hundred tokens three were generated; the prompt has seven and was read twice.
        assert 480 <= during <= 500
        assert during - 20 <= after <= during + 200, "a minute gives back 15 tokens a second"
        over = await ask(here, max_tokens=893)
        assert code(over, 429) == "rate_limit_exceeded"
        assert int(over.headers["retry-after"]) >= 1
        never_fits = await ask(here, max_tokens=950)
        assert code(never_fits, 400) == "request_over_limit"
        assert len(here.ingress.sent) == 2 and here.live.router.reservations == 0
        samples = (await here.client.get("/metrics")).text
    line = 'kappa_tenant_requests_total{outcome="rate_limit_exceeded",tenant="alice"} 1.0'
    assert line in samples


async def test_requests_over_the_limit_are_counted_where_they_are_refused(cluster):
    access = {"allowances": {"alice": Allowance(requests_per_minute=1)}}
    async with cluster(words, access=access) as here:
        assert (await ask(here)).status_code == 200
        assert code(await ask(here), 429) == "rate_limit_exceeded"
        samples = (await here.client.get("/metrics")).text
    line = 'kappa_tenant_requests_total{outcome="rate_limit_exceeded",tenant="alice"} 1.0'
    assert line in samples


async def test_a_deadline_that_can_be_met_changes_nothing(cluster):
    async with cluster(words) as here:
        answer = await ask(here, headers={DEADLINE: "60000"})
        assert answer.status_code == 200 and "[DONE]" in answer.text


@pytest.mark.parametrize("value", ["0", "soon", "-1", "1.5"])
async def test_a_deadline_that_is_none_is_400_and_reaches_nobody(cluster, value):
    async with cluster(words) as here:
        answer = await ask(here, headers={DEADLINE: value})
        assert code(answer, 400) == "invalid_value"
        assert answer.json()["error"]["param"] == DEADLINE
        assert here.ingress.sent == []


async def test_what_is_predicted_too_late_is_refused_before_it_waits(cluster):
    async with cluster(words) as here:
        # 500 tokens one after another, at a worker's predicted pace of a millisecond and more.
        answer = await ask(here, stream=False, max_tokens=500, headers={DEADLINE: "90"})
        assert code(answer, 429) == "deadline_unmeetable"
        assert int(answer.headers["retry-after"]) >= 1
        assert here.ingress.sent == [] and here.live.router.reservations == 0


async def test_a_worker_that_would_be_late_is_passed_over_for_one_that_is_not(cluster):
    async with cluster(never) as here:
        # A long prompt keeps the first worker busy: its queue alone exceeds the deadline.
        posts = []
        first = asyncio.create_task(ask(here, messages=[{"role": "user", "content": "a " * 400}]))
        posts.append(first)
        async with asyncio.timeout(20):
            while not here.ingress.sent:
                await asyncio.sleep(0.01)
        busy = here.ingress.sent[0]
        second = await ask(here, headers={DEADLINE: "300"})
        assert code(second, 504) == "deadline_exceeded"
        assert here.ingress.sent[1] != busy
        for task in posts:
            task.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


@pytest.mark.parametrize("streamed", [True, False])
async def test_one_that_waits_in_an_engine_past_its_deadline_is_dropped_there(cluster, streamed):
    async with cluster(never) as here:
        async with asyncio.timeout(20):
            # Long enough for a busy machine to get it there.
            answer = await ask(here, stream=streamed, headers={DEADLINE: "2000"})
        assert code(answer, 504) == "deadline_exceeded"
        # Closing the stream is what tells Ray, and Ray the engine, to abort.
        assert here.ingress.closed == len(here.ingress.sent) == 1
        assert here.live.router.reservations == 0
        (record,) = here.live.records.values()
        assert record.end == "deadline"


async def test_past_its_first_token_a_stream_is_not_cut_by_its_deadline(cluster):
    async def slow(_worker):
        yield [event("one")]
        await asyncio.sleep(0.5)
        yield [event("two")]

    async with cluster(slow) as here:
        answer = await ask(here, headers={DEADLINE: "400"})
        assert answer.status_code == 200 and "two" in answer.text and "[DONE]" in answer.text


async def test_what_passes_while_it_is_tokenized_never_reaches_an_engine(cluster):
    async with cluster(words) as here:
        path, tokenized = here.ingress._path, here.ingress._path._tokenized

        async def late(request):
            await asyncio.sleep(0.1)
            return await tokenized(request)

        path._tokenized = late
        answer = await ask(here, headers={DEADLINE: "50"})
        assert code(answer, 504) == "deadline_exceeded"
        assert here.ingress.sent == [] and here.live.router.reservations == 0


async def test_no_text_of_a_prompt_is_logged_whatever_becomes_of_the_request(cluster, capsys):
    secret = "swordfish"

    async def fails(_worker):
        raise ValueError(f"cannot embed {secret}")
        yield

    prompt = {"messages": [{"role": "user", "content": secret}]}
    async with cluster(fails) as here:
        statuses = [
            (await ask(here, **prompt)).status_code,
            (await ask(here, **prompt, model=secret)).status_code,
            (await ask(here, **prompt, max_tokens=secret)).status_code,
            (await ask(here, messages=[{"role": secret, "content": secret}])).status_code,
            (await ask(here, **prompt, n=secret)).status_code,
            (await ask(here, **prompt, logit_bias={secret: "x"})).status_code,
            (await ask(here, **prompt, response_format={"type": secret})).status_code,
            (await ask(here, **prompt, max_tokens=10**6)).status_code,
            (await ask(here, path="/v1/completions", prompt=secret, messages=0)).status_code,
            (await here.client.post(PATH, content=f"{{{secret}".encode())).status_code,
            (await ask(here, **prompt, headers={DEADLINE: secret})).status_code,
            (await ask(here, **prompt, headers={"x-request-id": f"<{secret}>"})).status_code,
        ]
    told = "".join(capsys.readouterr())
    assert all(status >= 400 for status in statuses)
    assert "request_refused" in told and "engine_error" in told
    assert secret not in told


async def test_an_overloaded_cluster_says_so_early_and_when_to_come_back(cluster):
    async with cluster(words, admission=True) as here:
        overload(here.live)
        answer = await ask(here)
        assert code(answer, 429) == "overloaded" and int(answer.headers["retry-after"]) >= 1
        assert here.ingress.sent == []
