"""A cluster's workers before a decider: what a request carries, and how it ends."""

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from kappa.protocol import (
    ENDPOINT_HEADER,
    GIVE_UP_PATH,
    GPU_S_KEY,
    PLAN_KEY,
    REQUEST_ID_KEY,
    TENANT_KEY,
    TO_BODY_HEADER,
    TO_DROP_HEADER,
    TO_SECRET_HEADER,
    TO_SHOW_HEADER,
)
from kappa.settings.engine import TransferSettings
from kappa_router.api.app import Access, Door
from kappa_router.api.metadata import PLAN_HEADER
from kappa_router.cluster.scene import ClusterScene
from kappa_router.gateway.authz import Go, Inquiry, Refuse
from kappa_router.gateway.decider import Decider
from kappa_router.gateway.events import StreamEnd
from kappa_router.gateway.scene import DeciderRule
from kappa_router.gateway.spec import GatewaySpec
from tests.router.gateway.door import Scripted
from tests.router.patience import until
from tests.router.scripted import BODY, KEYS, OWN, announcement
from tests.router.test_failover import SOON, breaker, report, reporting

pytestmark = pytest.mark.ray

CHAT = "/v1/chat/completions"


def ports(**engines):
    return {
        name: announcement(name, http=f"10.0.0.{1 + i}:80", engine=engine)
        for i, (name, engine) in enumerate(engines.items())
    }


@pytest.fixture
async def deciding(serve, tmp_path):
    made = []

    async def make(workers=None, tenants=None, **changes):
        own = {} if tenants is None else {"tenants": tenants}
        here = await serve(workers=workers or ports(a="vllm", b="vllm"), **own, **changes)
        path = here.decider._path
        spec = GatewaySpec(tmp_path, "127.0.0.1", 1, (CHAT,), ())
        scene = ClusterScene(path, TransferSettings(), spec, "secret")
        made.append(scene)
        scene.take({one.worker: one for one in await scene._found()})
        door = Door(Access(**own))
        decider = Decider(scene, door, DeciderRule(foreign=False))

        async def ask(body=None, tenant="", path=CHAT, request_id="r", **headers):
            key = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
            raw = json.dumps({**BODY, **(body or {})}).encode()
            given = {"x-request-id": request_id, **key, **headers}
            return await decider.decide(Inquiry("POST", path, given, raw))

        return SimpleNamespace(
            ask=ask, scene=scene, live=here.live, path=path, flights=decider.flights,
            telemetry=here.decider._telemetry, decider=decider,
        )  # fmt: skip

    yield make
    for scene in made:
        await scene.ports.close()


def sets(go):
    assert isinstance(go, Go), go
    return json.loads(go.upstream[TO_BODY_HEADER])


async def test_request_carries_what_its_engine_must_know(deciding):
    here = await deciding(tenants=OWN)
    go = await here.ask({"user": "u", "metadata": {"a": "b"}, "cache_salt": "s"}, "alice")
    put = sets(go)
    chosen = here.live.records["r"].decision.worker
    assert go.upstream[ENDPOINT_HEADER].split(",")[0] == here.scene.address(chosen)
    assert put["vllm_xargs"][TENANT_KEY] == "alice" and GPU_S_KEY in put["vllm_xargs"]
    assert here.live.records.own(put["vllm_xargs"][REQUEST_ID_KEY]) == "r"
    assert put["cache_salt"] not in ("s", "") and "kv_transfer_params" not in put
    assert go.upstream[TO_DROP_HEADER] == "metadata"
    assert json.loads(go.upstream[TO_SHOW_HEADER])["x-kappa-node"] == chosen
    assert "x-kappa-node" not in go.client


async def test_own_engine_gets_the_load_plan_that_is_asked_for(deciding):
    here = await deciding(ports(a="torch"))
    assert PLAN_KEY not in sets(await here.ask())["vllm_xargs"]
    planned = sets(await here.ask(request_id="s", **{PLAN_HEADER: "kv"}))
    assert planned["vllm_xargs"][PLAN_KEY] == "kv"


async def test_request_is_refused_when_its_changes_are_too_long(deciding, monkeypatch):
    here = await deciding()
    monkeypatch.setattr("kappa_router.cluster.scene._MOST_SET_BYTES", 400)
    said = [{"role": "user", "content": "x" * 800, "unknown": True}]
    verdict = await here.ask({"messages": said})
    assert isinstance(verdict, Refuse) and verdict.status == 400
    assert json.loads(verdict.body)["error"]["param"] == "messages"
    assert not here.live.router.flights and not len(here.decider._places)


async def test_request_that_ends_leaves_nothing_but_its_record(deciding):
    here = await deciding()
    await here.ask()
    assert len(here.live.router.flights) == 1
    record = here.live.records["r"]
    worker, sent = record.decision.worker, record.sent_as
    here.flights.ended(StreamEnd("r", 200, upstream=here.scene.address(worker), sent_bytes=600))
    assert here.live.router.flights
    # The log was sooner than the worker's report, which has its first token, too.
    report(here.live, worker, prefilled=(sent,), finished=(sent,), generated={sent: 7})
    assert not here.live.router.flights and here.live.records["r"].end == "done"
    assert here.live.records["r"].ttft_s is not None
    timeline = here.telemetry.timeline("r")
    assert (timeline.end, timeline.status) == ("done", 200)
    assert timeline.attempts[-1].first_token_s is not None


async def test_workers_that_envoy_does_not_know_are_not_chosen(deciding):
    here = await deciding()
    del here.scene.endpoints["a"]
    for number in range(4):
        go = await here.ask(request_id=f"r{number}")
        assert go.upstream[ENDPOINT_HEADER] == "10.0.0.2:80"


async def test_worker_of_a_hung_engine_is_not_chosen(deciding):
    patient = SOON.model_copy(update={"longest_pause_s": 1000.0})
    here = await deciding(failover=patient)
    await here.ask()
    hung = here.live.records["r"].decision.worker
    async with reporting(here.live, "ab", lambda _: 7):
        await until(lambda: breaker(here.live, hung).why == "stalled")
        for number in range(4):
            await here.ask(request_id=f"r{number}")
            assert here.live.records[f"r{number}"].decision.worker != hung
            here.live.first_token(f"r{number}")


async def test_engine_with_nothing_to_begin_is_not_hung(deciding):
    here = await deciding(failover=SOON)
    await here.ask()
    here.live.first_token("r")
    async with reporting(here.live, "ab", lambda _: 7):
        await asyncio.sleep(2 * SOON.stall_after_s)
        assert all(breaker(here.live, worker).standing == "closed" for worker in "ab")


async def test_hung_engine_that_streams_is_told_to_give_up(deciding):
    async with AsyncExitStack() as stack:
        gates = {name: Scripted() for name in "ab"}
        for gate in gates.values():
            stack.push_async_callback(gate.close)
            await gate.listen()
        ours = {
            name: announcement(name, http=f"127.0.0.1:{gate.port}") for name, gate in gates.items()
        }
        here = await deciding(ours, failover=SOON, stale_after_s=1.0)
        await here.ask()
        here.live.first_token("r")
        gate = gates[here.live.records["r"].decision.worker]
        await stack.enter_async_context(reporting(here.live, "ab", lambda _: 7, running=1))
        await until(lambda: gate.heard)
        told = gate.heard[0]
        assert (told.method, told.target) == ("POST", GIVE_UP_PATH)
        assert told.headers[TO_SECRET_HEADER] == "secret"


async def test_second_attempt_is_sent_what_its_own_worker_must_know(deciding, monkeypatch):
    here = await deciding(ports(a="torch", b="torch"))

    async def lives(worker):
        return True

    monkeypatch.setattr(here.scene, "lives", lives)
    first = sets(await here.ask())["vllm_xargs"]
    worker = here.live.records["r"].decision.worker
    failed = StreamEnd("r", 503, upstream=here.scene.address(worker))
    here.flights.failed(failed)
    go = await here.flights.again("r", 2)
    second = sets(go)["vllm_xargs"]
    assert here.live.records["r"].decision.worker != worker
    assert second[REQUEST_ID_KEY] != first[REQUEST_ID_KEY]
    assert here.live.records.own(second[REQUEST_ID_KEY]) == "r"


async def test_worker_that_refuses_connections_is_dead(deciding):
    here = await deciding({"a": announcement("a", http="127.0.0.1:1")})
    assert not await here.scene.lives("a")


async def test_second_attempt_after_the_deadline_is_refused(deciding, monkeypatch):
    here = await deciding()
    go = await here.ask(**{"x-kappa-deadline-ms": "60000"})
    assert isinstance(go, Go)
    request = here.flights._aloft["r"].request
    object.__setattr__(request.api.deadline, "allowed_s", -1.0)

    async def lives(worker):
        return True

    monkeypatch.setattr(here.scene, "lives", lives)
    worker = here.live.records["r"].decision.worker
    here.flights.failed(StreamEnd("r", 504, upstream=here.scene.address(worker)))
    verdict = await here.flights.again("r", 2)
    assert isinstance(verdict, Refuse) and verdict.status == 504


async def test_usage_has_the_tokens_that_a_worker_reports(deciding):
    here = await deciding()
    go = await here.ask({"stream": True})
    here.live.records["r"].generated_tokens = 7
    at = go.upstream[ENDPOINT_HEADER].split(",")[0]
    flight = here.flights._aloft["r"]
    here.flights.ended(StreamEnd("r", 200, upstream=at, sent_bytes=20_000))
    assert flight.used.generated_tokens == 7
