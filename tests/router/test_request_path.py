"""What a cluster's clients get when workers are missing, die, fail or stall, and when they leave.

The engines are scripts (fault injection); Envoy, decider, gates, routing and limits are real.
"""

import asyncio
import json
from dataclasses import replace

import pytest

import kappa_router.api.request_path
from kappa.protocol import EngineDiedError, TenantCharge, WorkerReport
from tests.router.building import tenants_of
from tests.router.patience import until
from tests.router.scripted import BODY, PATH, code, crowd, event, get, overload, post

pytestmark = pytest.mark.ray


async def test_stream_is_relayed_and_released(serve):
    engines, live, here = await serve()
    answer = await post(here, stream=True)
    assert answer.status_code == 200
    assert answer.text == event("one") + event("two") + event("three") + "data: [DONE]\n\n"
    assert answer.headers["x-kappa-node"] in ("a", "b")
    await here.idle()
    (record,) = live.records.values()
    assert (record.end, engines.closed) == ("done", 1)
    assert not here.decider._path.places and not live.router.flights


async def test_approximate_answers_are_for_workers_that_may_and_say_so(serve):
    engines, live, here = await serve()
    answer = await post(here, stream=True, approx="ok")
    assert code(answer, 400) == "approx_not_allowed"
    assert answer.json()["error"]["param"] == "x-kappa-approx"
    state = live.router.workers["b"]
    state.announcement = replace(
        state.announcement, engine="torch", load_plan={"planner": "auto", "approx": "ask"}
    )
    for _ in range(3):
        answer = await post(here, stream=True, approx="ok")
        assert (answer.status_code, answer.headers["x-kappa-approx"]) == (200, "ok")
    assert engines.sent == ["b"] * 3 and engines.told[-1]["kappa_approx"] == "ok"
    assert code(await post(here, approx="0.05"), 400) == "approx_not_allowed"
    # A client cannot set the mark itself, and who does not ask gets an exact answer.
    marked = await post(here, stream=True, vllm_xargs={"kappa_approx": "ok"})
    assert marked.status_code == 200 and "x-kappa-approx" not in marked.headers
    assert "kappa_approx" not in engines.told[-1]
    assert code(await post(here, approx="perhaps"), 400) == "invalid_value"
    await here.idle()


async def test_load_plan_without_planners_is_400_and_opens_no_breaker(serve):
    here = await serve()
    for _ in range(20):
        answer = await here.ask(headers={"x-kappa-plan": "load"})
        assert code(answer, 400) == "no_load_plans"
    states = [here.live.members.breakers.state(w, here.live.now_s()) for w in ("a", "b")]
    assert [(s.standing, s.failures) for s in states] == [("closed", 0)] * 2
    assert here.engines.sent == [] and here.live.router.reservations == 0


async def test_request_is_503_with_a_retry_time_without_workers(serve, monkeypatch):
    monkeypatch.setattr(kappa_router.api.request_path, "_FIRST_WORKER_S", 0.05)
    _, _, here = await serve(workers=())
    answer = await post(here)
    assert code(answer, 503) == "no_worker" and int(answer.headers["retry-after"]) >= 1
    await here.idle()


async def test_request_that_would_start_late_is_refused_by_admission(serve):
    engines, live, here = await serve(admission=True)
    assert (await post(here, stream=True)).status_code == 200
    await here.idle()
    reserved = overload(live)
    answer = await post(here)
    assert code(answer, 429) == "overloaded" and int(answer.headers["retry-after"]) >= 1
    assert live.router.reservations == reserved and len(engines.sent) == 1


async def test_engine_that_stalls_is_504(serve):
    async def script(_worker):
        await asyncio.sleep(600)
        yield

    _, _, here = await serve(script, request_timeout_s=0.05)
    assert code(await post(here), 504) == "timeout"
    await here.idle()


async def test_stream_that_breaks_ends_with_an_error_event(serve):
    async def script(_worker):
        yield [event("one")]
        raise RuntimeError("secret detail")

    _, _, here = await serve(script)
    answer = await post(here, stream=True)
    first, *_, error, done = [e for e in answer.text.split("\n\n") if e]
    assert (first, done) == (event("one").strip(), "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert "secret" not in answer.text
    await here.idle()


async def test_admissions_stop_at_the_limit_however_they_arrive(serve):
    gate = asyncio.Event()

    async def script(_worker):
        await gate.wait()
        yield [event("late")]

    _, _, here = await serve(script)
    posts = [asyncio.create_task(post(here, stream=True)) for _ in range(20)]
    await until(lambda: sum(task.done() for task in posts) >= 12)
    gate.set()
    answers = [await task for task in posts]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) - len(refused) == 8, "max_queue"
    for answer in refused:
        assert code(answer, 429) == "queue_full" and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    await here.idle()


@pytest.mark.parametrize("leaves_after", [0, 1, 2])
async def test_client_that_leaves_frees_its_reservation(serve, leaves_after):
    async def script(_worker):
        if not leaves_after:
            await asyncio.Event().wait()
        for number in range(100_000):
            yield [event(str(number))]
            await asyncio.sleep(0.001)

    engines, live, here = await serve(script)
    asking = here.client.stream("POST", PATH, json=BODY | {"stream": True})
    if leaves_after:
        async with asking as answer:
            parts = answer.aiter_bytes()
            for _ in range(leaves_after):
                await anext(parts)
    else:
        waiting = asyncio.create_task(post(here, stream=True))
        await until(lambda: engines.sent)
        waiting.cancel()
    await here.idle()
    await until(lambda: engines.closed == 1)
    (record,) = live.records.values()
    assert (record.end, len(engines.sent)) == ("client_gone", 1)


# -- tenants ---------------------------------------------------------------------------------------

TENANTS = tenants_of({"sk-alice": "alice", "sk-bob": "bob"}, {"alice": 2.0})


async def test_engine_gets_the_tenant_and_never_the_key(serve):
    engines, live, here = await serve(tenants=TENANTS)
    forged = {"kappa_tenant": "root", "kappa_charges": "{}", "mine": 1}
    assert (await post(here, "sk-alice", stream=True, vllm_xargs=forged)).status_code == 200
    (sent,), (headers,) = engines.told, engines.headers
    assert (sent["kappa_tenant"], sent["kappa_weight"]) == ("alice", 2.0) and "mine" not in sent
    assert sent["kappa_device_tokens"] == sent["kappa_host_tokens"] == 0
    assert "kappa_charges" not in sent and "authorization" not in headers
    (record,) = live.records.values()
    assert record.to_dict()["tenant"] == "alice"
    await post(here, stream=True)
    assert (engines.told[1]["kappa_tenant"], engines.told[1]["kappa_weight"]) == ("default", 1.0)


async def test_worker_is_sent_what_tenants_were_charged_elsewhere(serve):
    async def script(_worker):
        if len(engines.sent) == 1:
            raise EngineDiedError("gone")
        yield [event("x")]

    engines, live, here = await serve(script, tenants=TENANTS)
    for worker, seconds in (("a", 1.0), ("b", 2.0)):
        charge = TenantCharge("alice", seconds, 0.5, 0.0)
        live.reported(WorkerReport(worker, 1.0, charges=(charge,)))
    crowd(live)
    answer = await post(here, "sk-alice", stream=True)
    assert answer.status_code == 200, answer.text
    others = {"a": {"alice": [2.0, 0.5, 0.0]}, "b": {"alice": [1.0, 0.5, 0.0]}}
    sent = [json.loads(metadata["kappa_charges"]) for metadata in engines.told]
    assert sent == [others[worker] for worker in engines.sent] and len(set(engines.sent)) == 2


async def test_unknown_keys_are_refused_counted_and_cost_nothing(serve):
    engines, _, here = await serve(tenants=tenants_of({"sk-alice": "alice"}, refuse=True))
    assert code(await post(here, "sk-hush"), 401) == "invalid_api_key"
    assert (await post(here, "sk-alice", stream=True)).status_code == 200
    assert (await post(here, "sk-alice", model="gpt-x")).status_code == 404
    await here.idle()
    assert len(engines.sent) == 1
    samples = (await get(here, "/metrics")).text
    for tenant, outcome in (
        ("unknown", "invalid_api_key"), ("alice", "answered"), ("alice", "model_not_found"),
    ):  # fmt: skip
        line = f'kappa_tenant_requests_total{{outcome="{outcome}",tenant="{tenant}"}} 1.0'
        assert line in samples


async def test_tenants_are_shown_with_weight_charge_and_share(serve):
    _, live, here = await serve(tenants=TENANTS)
    live.reported(WorkerReport("a", 1.0, charges=(TenantCharge("bob", 1.0, 1.0, 0.0),)))
    live.reported(WorkerReport("b", 1.0, charges=(TenantCharge("alice", 3.0, 0.0, 0.0),)))
    rows = {row["tenant"]: row for row in (await get(here, "/v1/tenants")).json()["tenants"]}
    weights = {name: row["weight"] for name, row in rows.items()}
    assert weights == {"alice": 2.0, "bob": 1.0, "default": 1.0}
    assert rows["alice"]["share"] == {"vram": 0.75, "gpu": 0.0, "link": 0.0}
    samples = (await get(here, "/metrics")).text
    assert 'kappa_tenant_charge_seconds_total{resource="vram",tenant="alice"} 3.0' in samples


async def test_request_goes_to_a_device_that_it_fits_or_is_refused(serve):
    engines, live, here = await serve(device_blocks=(9, 21))  # 128 and 320 tokens
    answer = await post(here, max_tokens=400)
    assert code(answer, 400) == "footprint_too_large" and "has 20" in answer.text
    assert engines.sent == [] and live.router.reservations == 0
    for _ in range(3):
        assert (await post(here, max_tokens=200, stream=True)).status_code == 200
    assert engines.sent == ["b", "b", "b"]
