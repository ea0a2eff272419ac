"""Rollout modes and one request's account, through a real Envoy and decider."""

import asyncio
import json

import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kappa_router.tracing
from kappa.keys import digest_of
from kappa.protocol import Admission, Spent, WorkerReport
from kappa.settings.routing import ObservingSettings
from kappa_router.api.tenants import Tenants
from tests.router.patience import until
from tests.router.scripted import KEYS, code, event, get, post, words

pytestmark = pytest.mark.ray


async def account(here, request_id, key=None):
    return await get(here, f"/v1/decisions/{request_id}", key)


async def test_requests_account_says_where_its_time_went(serve):
    reported = asyncio.Event()

    async def slow(_worker):
        await reported.wait()
        yield [event("one")]
        yield [event("two")]

    _, live, here = await serve(slow)
    asking = asyncio.create_task(post(here, stream=True))
    await until(lambda: live.records)
    (record,) = live.records.values()
    request_id, there = record.decision.request_id, record.sent_as
    admitted, spent = Admission(there, 16, 32, 8), Spent(there, 0.05, 0.1)
    await asyncio.sleep(0.2)
    live.reported(WorkerReport(record.decision.worker, 1.0, prefilled=(there,), spent=(spent,),
                               admitted=(admitted,)))  # fmt: skip
    reported.set()
    await asking
    await here.idle()
    told = (await account(here, request_id)).json()
    assert told["request_id"] == request_id and told["end"] == "done"
    spans = {span["name"]: span for span in told["timeline"]["spans"]}
    assert list(spans) == [
        "decider", "tokenize", "decide", "first_token", "queue", "load", "prefill", "stream",
    ]  # fmt: skip
    assert spans["load"]["seconds"] == pytest.approx(0.05, abs=1e-6)
    assert spans["load"]["attributes"]["tokens"] == 32
    assert told["timeline"]["status"] == 200


async def test_refused_request_has_an_account_without_a_decision(serve, monkeypatch):
    monkeypatch.setattr("kappa_router.api.request_path._FIRST_WORKER_S", 0.01)
    _, _, here = await serve(workers=())
    headers = {"x-request-id": "refused"}
    assert code(await here.ask(headers=headers), 503) == "no_worker"
    told = (await account(here, "refused")).json()
    assert told["timeline"]["status"] == 503 and "node" not in told
    assert here.decider._telemetry.timeline("refused").end == "no_worker"
    assert [span["name"] for span in told["timeline"]["spans"]] == ["decider", "tokenize"]
    assert code(await account(here, "nobody"), 404) == "request_not_found"


async def test_account_of_another_tenant_is_not_had_by_its_id(serve):
    digests = {digest_of(KEYS[name]): name for name in ("alice", "bob")}
    tenants = Tenants(operators=frozenset()).with_digests(digests)
    here = await serve(tenants=tenants)
    headers = {"x-request-id": "job-1"}
    assert (await here.ask("alice", headers=headers)).status_code == 200
    await here.idle()
    for changes in ({"model": "none"}, {}):
        await here.ask("bob", headers=headers, **changes)
        assert (await account(here, "job-1", "sk-bob")).status_code == 404
    told = (await account(here, "job-1", "sk-alice")).json()
    assert told["tenant"] == "alice" and told["timeline"]["status"] == 200
    await here.idle()


# -- rollout ---------------------------------------------------------------------------------------


async def test_shadow_lets_ray_steer_and_records_ours(serve):
    engines, live, here = await serve(mode="shadow")
    for _ in range(24):  # To one alone once in 8 million times.
        assert (await post(here, stream=True)).status_code == 200
        await here.idle()
    records = list(live.records.values())
    assert [r.decision.worker for r in records] == engines.sent
    assert set(engines.sent) == {"a", "b"}, "two at random, both idle: both are drawn"
    assert all(r.steered == "ray" and r.shadow.present_worker == r.decision.worker for r in records)
    assert {r.decision.reason for r in records} == {"ray_rule"}
    text = (await get(here, "/metrics")).text
    assert 'kappa_rollout_requests_total{arm="ray"} 24.0' in text
    agreed = sum(r.shadow.agreed for r in records)
    assert f'kappa_shadow_decisions_total{{agreed="true"}} {float(agreed)}' in text
    told = (await account(here, records[-1].decision.request_id)).json()
    assert told["steered"] == "ray" and told["shadow"]["chosen_worker"] in ("a", "b")


async def test_shadow_takes_the_shorter_queue_of_the_two(serve):
    gate = asyncio.Event()

    async def held(_worker):
        await gate.wait()
        yield [event("one")]

    engines, _, here = await serve(held, mode="shadow")
    asked = [asyncio.create_task(post(here, stream=True)) for _ in range(6)]
    await until(lambda: len(engines.sent) == 6)
    assert sorted(engines.sent.count(worker) for worker in ("a", "b")) == [3, 3]
    gate.set()
    await asyncio.gather(*asked)


async def test_canary_keeps_each_conversation_in_its_arm(serve):
    _, live, here = await serve(mode="canary:50")
    for turn in range(3):
        for name in range(12):
            await post(here, stream=True, user=f"u{name}", max_tokens=4 + turn)
    by_conversation = {}
    for number, record in enumerate(live.records.values()):
        by_conversation.setdefault(number % 12, set()).add(record.steered)
    assert all(len(arms) == 1 for arms in by_conversation.values())
    assert {"kappa", "ray"} == set.union(*by_conversation.values())
    assert all((r.shadow is not None) == (r.steered == "ray") for r in live.records.values())


# -- traces, metrics, logs -------------------------------------------------------------------------


class Unreached(InMemorySpanExporter):
    """The client of a collector that cannot be reached."""

    def export(self, spans):
        raise OSError("no route to host")


@pytest.mark.parametrize("kind", [InMemorySpanExporter, Unreached])
async def test_request_is_answered_and_traced_if_a_collector_is_there(serve, monkeypatch, kind):
    exporter = kind()
    monkeypatch.setattr(kappa_router.tracing, "_exporter", lambda _: exporter)
    seen = ObservingSettings(otlp_endpoint="http://127.0.0.1:9")
    _, _, here = await serve(observing=seen)
    tracing = here.decider._telemetry.on_end.__self__
    tracing._settle_s = 0.0
    assert (await post(here, stream=True)).status_code == 200
    await here.idle()
    await asyncio.sleep(0.05)
    tracing.close()
    got = exporter.get_finished_spans()
    if kind is not Unreached:
        assert {"decider", "tokenize", "decide"} <= {span.name for span in got}
        assert len({span.context.trace_id for span in got}) == 1


async def test_requests_are_served_without_metrics_and_request_log(serve):
    seen = ObservingSettings(metrics=False, request_log=False)
    with structlog.testing.capture_logs() as lines:
        _, _, here = await serve(words, observing=seen)
        assert (await post(here, stream=True)).status_code == 200
        assert (await get(here, "/metrics")).content == b""
        await here.idle()
    assert not [line for line in lines if line["event"] == "request_done"]


async def test_log_lines_on_a_requests_way_carry_its_id(serve, monkeypatch):
    async def broken(_worker):
        raise RuntimeError("engine down")
        yield

    async def tokens(*_):
        raise ValueError("a template of its own")

    _, _, here = await serve(broken)
    monkeypatch.setattr(here.decider._path.tokenizing, "tokens", tokens)
    merge = structlog.contextvars.merge_contextvars
    with structlog.testing.capture_logs(processors=[merge]) as lines:
        await post(here)
        await here.idle()
    told = [line for line in lines if line["event"] in ("not_tokenized", "request_crashed")]
    assert {line["event"] for line in told} == {"not_tokenized", "request_crashed"}, lines
    assert all(line["request_id"] for line in told), json.dumps(lines, default=repr)
