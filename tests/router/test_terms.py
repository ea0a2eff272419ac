"""A request's terms in the whole cluster: its tenant's cache, tokens and share, its deadline.

Engines are scripts; Envoy, decider and gates are real.
"""

import asyncio
import json
import threading

import pytest

from kappa.incremental_tokenizer import SegmentCache
from kappa_router.api import request_path
from kappa_router.api.metadata import DEADLINE_HEADER as DEADLINE
from kappa_router.api.render import SHORT_BYTES
from kappa_router.api.request import cache_salt
from kappa_router.api.tenants import Allowance, Tenant
from kappa_router.decision import RouteRequest
from kappa_router.index.prefix_hash import salt_of
from kappa_router.live.decision_records import DecisionRecord
from tests.router.building import tenants_of
from tests.router.patience import until
from tests.router.scripted import BODY, KEYS, OWN, PATH, ROUTE, TEXTS, code, event, words

pytestmark = pytest.mark.ray

SECOND_S = 20
# Milliseconds in which a busy machine gets a request to its engine.
REACHED = "1500"


@pytest.fixture
def cluster(serve):
    """Makes scripted clusters with a cache for each tenant."""
    return lambda script=words, tenants=OWN, **more: serve(script, tenants=tenants, **more)


async def never(_worker):
    await asyncio.Event().wait()
    yield


def of(tenant):
    return {"authorization": f"Bearer {KEYS[tenant]}"}


# -- caches, decisions ---------------------------------------------------------------------------


async def test_prompts_are_salted_by_tenant_and_own_salt(cluster):
    here = await cluster()
    asked = [("alice", None), ("bob", None), ("alice", "mine"), (None, None)]
    for tenant, own in asked:
        assert (await here.ask(tenant, cache_salt=own)).status_code == 200
    sent = [body.cache_salt for body in here.engines.bodies]
    assert len(set(sent)) == 4
    assert sent == [cache_salt(Tenant(t or "default", own_cache=True), own) for t, own in asked]


async def test_shared_cache_leaves_the_clients_salt_as_it_is(cluster):
    here = await cluster(tenants=tenants_of({"sk-alice": "alice"}))
    for own in (None, "mine"):
        await here.ask("alice", cache_salt=own)
    assert [body.cache_salt for body in here.engines.bodies] == [None, "mine"]


async def test_router_looks_up_under_the_salt_the_engine_gets(cluster):
    here, asked = await cluster(), []
    route, explain = here.live.route, here.live.explain
    here.live.route = lambda r, *a, **k: asked.append(r.salt) or route(r, *a, **k)
    here.live.explain = lambda r, *a, **k: asked.append(r.salt) or explain(r, *a, **k)
    await here.ask("alice")
    await here.ask("bob")
    await here.ask("bob", path=ROUTE)
    sent = [salt_of(body.cache_salt) for body in here.engines.bodies]
    assert asked == [*sent, sent[1]] and len(set(sent)) == 2


async def test_newest_own_decisions_alone_are_written_out(cluster, monkeypatch):
    written = []
    to_dict = DecisionRecord.to_dict
    monkeypatch.setattr(DecisionRecord, "to_dict", lambda r: written.append(r.tenant) or to_dict(r))
    monkeypatch.setattr("kappa_router.api.status.MOST_DECISIONS", 3)
    here = await cluster()

    async def seen(tenant, limit):
        written.clear()
        params = {"limit": limit}
        answer = await here.client.get("/v1/decisions", headers=of(tenant), params=params)
        return [row["request_id"] for row in answer.json()["decisions"]], list(written)

    for i in range(4):
        for tenant in ("alice", "bob"):
            await here.ask(tenant, headers={"x-request-id": f"{tenant}-{i}"})
            await here.idle()
    alice = ["alice-1", "alice-2", "alice-3"]
    assert await seen("alice", 2) == (alice[-2:], ["alice"] * 2)
    assert await seen("alice", 10**30) == (alice, ["alice"] * 3)
    assert await seen("ops", 3) == (["bob-2", "alice-3", "bob-3"], ["bob", "alice", "bob"])
    assert len((await seen("ops", 10**30))[0]) == 8
    for nothing in (0, -1):
        assert await seen("ops", nothing) == ([], [])


async def test_route_shows_others_load_to_operators_only(cluster):
    here = await cluster()
    shown = {}
    for tenant in ("alice", "ops"):
        shown[tenant] = (await here.ask(tenant, path=ROUTE)).json()["candidates"]
    hidden = {"worker", "in_flight", "queue_s", "harm_s"}
    assert len(shown["alice"]) == len(shown["ops"]) == 2
    for own, all_of_it in zip(shown["alice"], shown["ops"], strict=True):
        assert set(all_of_it) - set(own) == hidden and own["ttft_s"] == all_of_it["ttft_s"]


# -- what a minute allows ------------------------------------------------------------------------

A_MINUTE = 200
# The tiny tokenizer makes a token or more of each word.
LONG = {"messages": [{"role": "user", "content": "hello " * 120}], "max_tokens": 4}


@pytest.fixture
def limited(serve):
    """Makes scripted clusters where each tenant has A_MINUTE tokens a minute."""
    access = {"default_allowance": Allowance(tokens_per_minute=A_MINUTE)}
    return lambda script=words, **more: serve(script, access=access, **more)


async def left(here):
    """Tokens that a small request finds left, itself taken off."""
    await here.idle()
    here.engines.script = words
    return int((await here.ask()).headers["x-ratelimit-remaining-tokens"])


async def test_requests_are_counted_and_refused_by_their_minute(cluster):
    here = await cluster(access={"allowances": {"alice": Allowance(requests_per_minute=2)}})
    assert (await here.client.get("/v1/decisions", headers=of("alice"))).status_code == 200
    assert (await here.ask("alice")).status_code == 200
    assert code(await here.ask("alice"), 429) == "rate_limit_exceeded"
    assert (await here.client.get("/v1/decisions", headers=of("alice"))).status_code == 429
    samples = (await here.client.get("/metrics")).text
    line = 'kappa_tenant_requests_total{outcome="rate_limit_exceeded",tenant="alice"} 2.0'
    assert line in samples


async def test_tokens_are_reserved_before_and_settled_after(cluster):
    here = await cluster(access={"allowances": {"alice": Allowance(tokens_per_minute=900)}})
    first = await here.ask("alice", max_tokens=400)
    await here.idle()
    second = await here.ask("alice", max_tokens=400)
    during, after = (int(a.headers["x-ratelimit-remaining-tokens"]) for a in (first, second))
    # Of four hundred tokens three were generated; the prompt has seven and was read twice.
    assert 480 <= during <= 500
    assert during - 20 <= after <= during + 200, "a minute gives back 15 tokens a second"
    over = await here.ask("alice", max_tokens=893)
    assert code(over, 429) == "rate_limit_exceeded" and int(over.headers["retry-after"]) >= 1
    assert code(await here.ask("alice", max_tokens=950), 400) == "request_over_limit"
    await here.idle()
    assert len(here.engines.sent) == 2


async def test_prompts_and_answers_that_are_asked_for_all_count(limited):
    here, kind = await limited(), {"content-type": "application/json"}

    async def chunks(asked):
        yield json.dumps(asked).encode()

    for path, asked in (
        (PATH, {**BODY, "max_tokens": 60, "n": 4}),
        (TEXTS, {"model": "m", "prompt": ["a", "b", "c", "d"], "max_tokens": 60}),
        (TEXTS, {"model": "m", "prompt": [[1, 2], [3, 4]], "n": 2, "max_tokens": 60}),
        (TEXTS, {"model": "m", "prompt": ["hello " * 400, "b"], "max_tokens": 1}),
    ):
        whole = await here.client.post(path, json=asked)
        chunked = await here.client.post(path, content=chunks(asked), headers=kind)
        assert "content-length" not in chunked.request.headers
        assert code(whole, 400) == code(chunked, 400) == "request_over_limit"
    assert here.engines.sent == [] and here.live.router.reservations == 0


async def test_client_that_hangs_up_pays_for_its_computed_prompt(limited):
    here = await limited(never)
    asking = asyncio.create_task(here.ask(**LONG))
    await until(lambda: here.engines.sent)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await left(here) < A_MINUTE - 60


async def test_client_past_its_deadline_pays_for_its_prompt(limited):
    here = await limited(never)
    late = await here.ask(**LONG, stream=False, headers={DEADLINE: REACHED})
    assert code(late, 504) == "deadline_exceeded" and len(here.engines.sent) == 1
    assert await left(here) < A_MINUTE - 60


async def test_request_that_an_engine_failed_pays_nothing(limited):
    async def fails(_worker):
        raise RuntimeError("broken")
        yield

    here = await limited(fails)
    assert (await here.ask(**LONG)).status_code == 503
    assert await left(here) > A_MINUTE - 40


# -- deadlines -----------------------------------------------------------------------------------


async def test_deadline_that_can_be_met_changes_nothing(cluster):
    answer = await (await cluster()).ask(headers={DEADLINE: "60000"})
    assert answer.status_code == 200 and "[DONE]" in answer.text


async def test_malformed_deadline_is_400_and_reaches_no_engine(cluster):
    here = await cluster()
    for value in ("0", "soon", "-1", "1.5"):
        answer = await here.ask(headers={DEADLINE: value})
        assert code(answer, 400) == "invalid_value"
        assert answer.json()["error"]["param"] == DEADLINE
    assert here.engines.sent == []


async def test_request_predicted_too_late_is_refused_at_once(cluster):
    here = await cluster()
    # 500 tokens one after another, at a worker's predicted pace of a millisecond and more.
    answer = await here.ask(stream=False, max_tokens=500, headers={DEADLINE: "90"})
    assert code(answer, 429) == "deadline_unmeetable" and int(answer.headers["retry-after"]) >= 1
    assert here.engines.sent == [] and here.live.router.reservations == 0


async def test_late_worker_is_bypassed_for_one_in_time(cluster, monkeypatch):
    here = await cluster()
    soonest = here.live.explain(RouteRequest("asked")).worker
    monkeypatch.setattr(request_path, "late_workers", lambda *_, **__: frozenset({soonest}))
    for headers in ({}, {DEADLINE: "60000"}):
        assert (await here.ask(headers=headers)).status_code == 200
        await here.idle()
    assert here.engines.sent[0] == soonest != here.engines.sent[1]


@pytest.mark.parametrize("streamed", [True, False])
async def test_request_past_its_deadline_is_dropped_in_its_engine(cluster, streamed):
    here = await cluster(never)
    async with asyncio.timeout(SECOND_S):
        answer = await here.ask(stream=streamed, headers={DEADLINE: REACHED})
    assert code(answer, 504) == "deadline_exceeded"
    # That its connection ends is what makes the engine abort.
    await until(lambda: here.engines.closed == 1)
    await here.idle()
    assert len(here.engines.sent) == 1
    (record,) = here.live.records.values()
    assert record.end == "deadline"


async def test_stream_past_its_first_token_outlives_its_deadline(cluster):
    async def slow(_worker):
        yield [event("one")]
        await asyncio.sleep(1.6)
        yield [event("two")]

    answer = await (await cluster(slow)).ask(headers={DEADLINE: REACHED})
    assert answer.status_code == 200 and "two" in answer.text and "[DONE]" in answer.text


async def test_request_late_while_tokenized_reaches_no_engine(cluster, monkeypatch):
    here = await cluster()
    tokens = here.decider._path.tokenizing.tokens

    async def late(*given):
        await asyncio.sleep(0.1)
        return await tokens(*given)

    monkeypatch.setattr(here.decider._path.tokenizing, "tokens", late)
    assert code(await here.ask(headers={DEADLINE: "50"}), 504) == "deadline_exceeded"
    assert here.engines.sent == [] and here.live.router.reservations == 0


# -- what one tenant sends does not keep another's small request from its answer ------------------

FLOOD = [{"role": "user", "content": "a " * SHORT_BYTES}]


class Blocked:
    """The decider's tokenizers, which encode nothing until they are let; begun: how often they were
    called; here: of these, in the decider itself, for short texts."""

    def __init__(self, here, monkeypatch):
        self.begun, self.here, self.let = 0, 0, threading.Event()
        tokenizing = here.decider._path.tokenizing
        (renderer,) = tokenizing._renderers.values()
        self._encode = renderer.tokenizer.encode
        monkeypatch.setattr(renderer.tokenizer, "encode", self._encode_here)
        renderer.tokenizer._incremental.cache = SegmentCache()  # other tests sent the same texts
        # Else what cannot fit is refused by its bytes, before anything is encoded.
        monkeypatch.setattr(renderer.tokenizer, "longest_token_bytes", None)
        for process in tokenizing._processes:
            monkeypatch.setattr(process, "encode", self._wait)

    def _encode_here(self, texts):
        self.here += 1
        return self._wait(texts)

    def _wait(self, texts, source=""):
        self.begun += 1
        assert self.let.wait(30)
        return self._encode(texts)


@pytest.fixture
def blocked(monkeypatch):
    # Tiny bodies never wait: the event loop itself tokenizes them.
    monkeypatch.setattr("kappa_router.api.render._TINY_BYTES", 0)
    made = []

    def make(here):
        made.append(Blocked(here, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.let.set()


async def test_tenant_that_fills_the_queue_leaves_others_their_share(cluster):
    gate = asyncio.Event()

    async def script(_worker):
        yield [event("x")]
        await gate.wait()

    here = await cluster(script, max_queue=4)
    tasks = [asyncio.create_task(here.ask("alice")) for _ in range(4)]
    await until(lambda: here.live.router.reservations == 4)
    assert code(await here.ask("alice"), 429) == "queue_full"
    # Of two active tenants each has a share of 4 / 2.
    tasks += [asyncio.create_task(here.ask("bob")) for _ in range(2)]
    await until(lambda: here.live.router.reservations == 6)
    assert code(await here.ask("bob"), 429) == "queue_full"
    gate.set()
    assert [a.status_code for a in await asyncio.gather(*tasks)] == [200] * 6
    await here.idle()
    assert (await here.ask("alice")).status_code == 200


async def test_tokenizing_counts_for_max_queue(cluster, blocked):
    here = await cluster(max_queue=1)
    tokenizers = blocked(here)
    tasks = [asyncio.create_task(here.ask())]
    await until(lambda: tokenizers.begun == 1)
    tasks.append(asyncio.create_task(here.ask(path=ROUTE)))
    await until(lambda: len(here.decider._path.places) == 1)
    for path in (PATH, ROUTE):
        assert code(await here.ask(path=path), 429) == "queue_full"
    tokenizers.let.set()
    assert [a.status_code for a in await asyncio.gather(*tasks)] == [200, 200]
    await here.idle()
    assert len(here.decider._path.places) == 0 and (await here.ask()).status_code == 200


async def test_small_request_waits_for_no_other_tenants_long_prompts(cluster, blocked):
    here = await cluster()
    tokenizers = blocked(here)
    flood = [asyncio.create_task(here.ask("alice", messages=FLOOD)) for _ in range(3)]
    await until(lambda: tokenizers.begun > 0)
    assert tokenizers.here == 0
    small = asyncio.create_task(here.ask("bob"))
    # Its own lane has begun it while the long ones still run.
    await until(lambda: tokenizers.here == 1)
    assert not small.done() and not any(task.done() for task in flood)
    tokenizers.let.set()
    assert (await small).status_code == 200
    for answer in await asyncio.gather(*flood):
        assert code(answer, 400) == "context_length_exceeded"


@pytest.mark.parametrize("path", [PATH, ROUTE])
@pytest.mark.parametrize("waiting", [0, 1])
async def test_deadline_is_kept_while_tokenizing_is_busy(cluster, blocked, path, waiting):
    here = await cluster()
    tokenizers = blocked(here)
    others = [asyncio.create_task(here.ask("alice")) for _ in range(waiting)]
    await until(lambda: tokenizers.begun == waiting)
    late = await here.ask("bob", path=path, headers={DEADLINE: "50"})
    assert code(late, 504) == "deadline_exceeded"
    assert not any(task.done() for task in others)
    tokenizers.let.set()
    assert [a.status_code for a in await asyncio.gather(*others)] == [200] * waiting
    await here.idle()
    assert len(here.decider._path.places) == 0


async def test_waiting_to_be_tokenized_has_a_bound_without_a_deadline(cluster, blocked):
    here = await cluster(request_timeout_s=0.05)
    blocked(here)
    answer = await here.ask("bob")
    assert code(answer, 504) == "timeout" and "not tokenized" in answer.text


# -- logs ----------------------------------------------------------------------------------------


async def test_prompt_text_is_never_logged(cluster, capsys):
    secret = "swordfish"

    async def fails(_worker):
        raise ValueError(f"cannot embed {secret}")
        yield

    here = await cluster(fails)
    prompt = {"messages": [{"role": "user", "content": secret}]}
    answers = [
        await here.ask(**{**prompt, **changes})
        for changes in (
            {}, {"model": secret}, {"max_tokens": secret}, {"n": secret},
            {"messages": [{"role": secret, "content": secret}]}, {"max_tokens": 10**6},
            {"logit_bias": {secret: "x"}}, {"response_format": {"type": secret}},
            {"path": TEXTS, "prompt": secret, "messages": 0}, {"headers": {DEADLINE: secret}},
            {"headers": {"x-request-id": f"<{secret}>"}},
        )
    ]  # fmt: skip
    answers.append(await here.client.post(PATH, content=f"{{{secret}".encode()))
    assert all(answer.status_code >= 400 for answer in answers)
    printed = "".join(capsys.readouterr())
    assert "request_refused" in printed and "request_crashed" in printed and secret not in printed
